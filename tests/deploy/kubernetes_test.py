# SPDX-License-Identifier: Apache-2.0
"""deploy/kubernetes, rendered by the real kubectl: valid by the schemas of an old and a new Kubernetes, and
consistent (support/kubernetes.py). The server is started with the rendered settings and asked what the probes ask;
Envoy runs the rendered configuration. There is no cluster here: what one does with the documents is not tested.
"""
import contextlib
import copy
import re
import subprocess
import urllib.error

import grpc
import kubernetes_validate
import pytest
import yaml

from attend_client import Client, RawLayout
from support.kubernetes import (KUBERNETES, container, documents, envoy, find, hook, image_settings, number, ports,
                                problems, program, replica_of, settings, workloads)
from support.servers import BIN, ROOT, Process, Server, eventually, free_ports, get, golden_model

OVERLAYS = ("cpu", "cuda")
VERSIONS = ("1.29", "1.37")
MIB = 1 << 20


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_parts_fit_together(overlay):
    assert problems(documents(overlay)) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("kubernetes", VERSIONS)
def test_documents_are_valid(overlay, kubernetes):
    for doc in documents(overlay):
        kubernetes_validate.validate(doc, kubernetes, strict=True)


def test_a_misspelt_key_is_found():
    server = find(documents("cpu"), "StatefulSet", "attend")
    server["spec"]["minReadySecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(server, VERSIONS[-1], strict=True)


# (kind, name, path in spec or data, value or None to remove it, what must be said)
BREAKS = [
    ("Service", "attend", "selector/component", "proxy", "selects the pods of 0"),
    ("Service", "attend", "selector/component", None, "selects the pods of 2"),
    ("Service", "attend-headless", "ports/0/targetPort", "http", "no container port http"),
    ("Service", "attend-headless", "publishNotReadyAddresses", None, "forgets draining"),
    ("Service", "attend-headless", "clusterIP", None, "not headless"),
    ("StatefulSet", "attend", "serviceName", "attend-peers", "attend-peers is referred to"),
    ("StatefulSet", "attend", "selector/matchLabels/component", "balancer", "selects other pods"),
    ("StatefulSet", "attend", "template/metadata/labels/component", "x", "selects other pods"),
    ("StatefulSet", "attend", "pod/topologySpreadConstraints/0/labelSelector/matchLabels/component", None,
     "selects other pods"),
    ("StatefulSet", "attend", "replicas", 3, "replicas set"),
    ("StatefulSet", "attend", "minReadySeconds", 30, "before the balancer finds"),
    ("StatefulSet", "attend", "pod/terminationGracePeriodSeconds", 125, "grace period"),
    ("StatefulSet", "attend", "pod/automountServiceAccountToken", None, "pod not confined"),
    ("StatefulSet", "attend", "pod/enableServiceLinks", None, "Services' names become"),
    ("StatefulSet", "attend", "pod/securityContext/runAsUser", 1000, "runs as 1000"),
    ("StatefulSet", "attend", "pod/volumes/0/persistentVolumeClaim/claimName", "m", "Claim m is referred"),
    ("StatefulSet", "attend", "pod/volumes/0/name", "m", "not its volumes"),
    ("StatefulSet", "attend", "pod/serviceAccountName", "a", "ServiceAccount a is referred"),
    ("StatefulSet", "attend", "container/envFrom/0/configMapRef/name", "a", "ConfigMap a is ref"),
    ("StatefulSet", "attend", "container/env/0/valueFrom/fieldRef/fieldPath", "spec.nodeName",
     "not the pod's name"),
    ("StatefulSet", "attend", "container/image", "attend:latest", "image attend:latest"),
    ("StatefulSet", "attend", "container/ports/0/containerPort", 50052, "container port grpc 50052"),
    ("StatefulSet", "attend", "container/ports/1/name", "http", "container port metrics None"),
    ("StatefulSet", "attend", "container/livenessProbe/grpc/port", 50052, "livenessProbe asks"),
    ("StatefulSet", "attend", "container/readinessProbe/grpc/port", 9464, "not on the gRPC port"),
    ("StatefulSet", "attend", "container/readinessProbe/failureThreshold", 3, "found not ready later"),
    ("StatefulSet", "attend", "container/securityContext/readOnlyRootFilesystem", None, "container n"),
    ("StatefulSet", "attend", "container/volumeMounts/0/readOnly", None, "writable volume"),
    ("StatefulSet", "attend", "container/resources/limits/memory", "4Gi", "requests are not"),
    ("StatefulSet", "attend", "container/resources/limits/GPU", "1", "1 GPUs for cpu"),
    ("StatefulSet", "attend", "container/lifecycle", {"preStop": {"exec": {"command": [
        "sleep 15"]}}}, "grace period"),
    ("ConfigMap", "attend-server", "ATTEND_MODEL", "bert=/bert", "bert=/bert is not in the volume"),
    ("ConfigMap", "attend-server", "ATTEND_DRAIN_LIMITS", "9", "ATTEND_DRAIN_LIMITS is no flag"),
    ("ConfigMap", "attend-server", "ATTEND_DRAIN_LIMIT", "60", "may take 60 s"),
    ("ConfigMap", "attend-server", "ATTEND_DRAIN_DELAY", None, "served for 0 s"),
    ("ConfigMap", "attend-server", "ATTEND_DEADLINE_MS", "90000", "calls last 90 s"),
    ("ConfigMap", "attend-server", "ATTEND_LISTEN", "127.0.0.1:50051", "ATTEND_LISTEN=127.0.0.1"),
    ("ConfigMap", "attend-server", "ATTEND_METRICS_LISTEN", "0.0.0.0:9465", "ATTEND_METRICS_LISTEN=0.0.0.0:9465"),
    ("ConfigMap", "attend-server", "ATTEND_BATCH_TOKENS", "512", "batches of 512"),
    ("ConfigMap", "attend-server", "ATTEND_DEVICE", "cuda", "0 GPUs for cuda"),
    ("ConfigMap", "attend-server", "ATTEND_SESSION_TTL_SECONDS", "3600", "sooner than idle sessions"),
    ("PodDisruptionBudget", "attend", "maxUnavailable", 3, "never met"),
    ("PodDisruptionBudget", "attend", "selector/matchLabels/component", "at", "pods of 0 workloads"),
    ("HorizontalPodAutoscaler", "attend", "scaleTargetRef/kind", "Deployment", "Deployment attend is referred"),
    ("HorizontalPodAutoscaler", "attend", "maxReplicas", 9, "attend-8"),
    ("HorizontalPodAutoscaler", "attend", "metrics/0/pods/target/averageValue", "70", "no target for KV"),
    ("HorizontalPodAutoscaler", "attend", "metrics/1/pods/metric/name", "attend_queue", "queue target"),
    ("NetworkPolicy", "attend", "podSelector/matchLabels/component", "server", "cover every pod"),
    ("NetworkPolicy", "attend", "ingress/1/ports/0/port", "http", "admits"),
    ("Deployment", "attend-balancer", "replicas", 1, "never met"),
    ("Deployment", "attend-balancer", "pod/terminationGracePeriodSeconds", 60, "preStop 65 s"),
    ("Deployment", "attend-balancer", "container/lifecycle/preStop/exec/command/2",
     "sleep 65", "another port than"),
    ("Deployment", "attend-balancer", "container/image", "envoyproxy/envoy:v1.0.0", "tested with"),
    ("Deployment", "attend-balancer", "container/ports/0/containerPort", 50051, "envoy: listens on"),
    ("Deployment", "attend-balancer", "container/readinessProbe/tcpSocket/port", "x", "asks port x"),
]


def change(doc, path, value):
    """Sets, or removes, what `path` names in the document's spec or data; some words
    are short for longer ways."""
    short = {"pod": ("template", "spec"), "container": ("template", "spec", "containers", 0),
             "GPU": ("nvidia.com/gpu",), "component": ("app.kubernetes.io/component",)}
    at = doc["spec"] if "spec" in doc else doc["data"]
    *way, last = [step for word in path.split("/")
                  for step in short.get(word, (int(word) if word.isdigit() else word,))]
    for word in way:
        at = at[word]
    if value is None:
        del at[last]
    else:
        at[last] = value


@pytest.mark.parametrize("kind, name, path, value, said", BREAKS, ids=[one[-1] for one in BREAKS])
def test_every_break_is_found(kind, name, path, value, said):
    docs = documents("cpu")
    change(find(docs, kind, name), path, value)
    assert said in "\n".join(problems(docs))


def test_envoy_configurations_may_differ_in_endpoints_only():
    docs = documents("cpu")
    data = find(docs, "ConfigMap", "attend-balancer")["data"]
    data["envoy.yaml"] = data["envoy.yaml"].replace("num_retries: 3", "num_retries: 4")
    assert "more than endpoints and their names" in "\n".join(problems(docs))


def serving(address, service):
    """Whether grpc.health.v1 says SERVING, asked as a probe of Kubernetes asks; errors are raised."""
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        request = b"\x0a" + bytes([len(service)]) + service.encode()  # HealthCheckRequest
        return check(request, timeout=10, wait_for_ready=True) == b"\x08\x01"  # SERVING


@contextlib.contextmanager
def configured_server(directory, docs):
    """attend-server with the environment of its container. Flags win over it: ports, threads, device and
    checkpoint of this machine, and a cache of 64 MiB. Yields the process, its gRPC and its HTTP address.
    """
    names = {*image_settings(), *find(docs, "ConfigMap", "attend-server")["data"]}
    environment = {name: value for name, value in settings(docs).items() if name in names}
    model = environment["ATTEND_MODEL"].partition("=")[0]
    command = [BIN / "attend-server", "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--kv_bytes=64MiB",
               "--threads=2", "--replica_id=attend-0", "--device=cpu", golden_model("bert", model)]
    with Process(command, directory / "server.log", env=environment) as server:
        listening = server.wait_for_log(r'"listening".*?"grpc":"([^"]+)".*?"http":"([^"]+)"')
        server.wait_for_log('"serving"')
        yield server, listening[1], listening[2]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_server_takes_the_settings_and_answers_the_probes(overlay, tmp_path):
    docs = documents(overlay)
    pod_container = container(find(docs, "StatefulSet", "attend"))
    with configured_server(tmp_path, docs) as (server, address, http):
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert serving(address, pod_container[name]["grpc"]["service"]), name
        # What the server adds up must fit with the cache it would have, and a quarter more for larger checkpoints.
        plan = {name: MIB * int(size) for name, size in re.findall(
            r'"(\w+)":"(\d+) MiB"', re.search(r'"memory".*', server.log())[0])}
        if settings(docs)["ATTEND_DEVICE"] == "cuda":
            # The cache is the GPU's. Pinned are two batches of 4 messages and 2 responses of 80 MiB and an eighth, or
            # of 8192 rows of wide layers: 128 KiB of a 4096 wide one.
            total = plan["queue"] + 2 * 9 / 8 * max(6 * 80 * MIB, 8192 * 128 * 1024)
        else:
            total = plan["total"] + number(settings(docs)["ATTEND_KV_BYTES"]) - 64 * MIB
        assert total * 1.25 < number(pod_container["resources"]["limits"]["memory"])
        series = re.findall(r"^(\w+)", get(f"http://{http}/metrics"), re.MULTILINE)
        for metric in find(docs, "HorizontalPodAutoscaler", "attend")["spec"]["metrics"]:
            assert metric["pods"]["metric"]["name"] in series
        # While it drains, the kubelet must take it out and must not kill it.
        server.signal()
        eventually(lambda: not serving(address, pod_container["readinessProbe"]["grpc"]["service"]))
        assert serving(address, pod_container["livenessProbe"]["grpc"]["service"])


def test_autoscaler_gets_its_series_from_prometheus(tmp_path):
    """The jobs for a cluster, with a static list of our pods' ports in place of the cluster's (Debian's Prometheus
    can't ask one), and the adapter's query as the adapter completes it."""
    docs = documents("cpu")
    [rule] = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]
    names = [metric["pods"]["metric"]["name"]
             for metric in find(docs, "HorizontalPodAutoscaler", "attend")["spec"]["metrics"]]
    assert set(re.search(r'__name__=~"(.*?)"', rule["seriesQuery"])[1].split("|")) == set(names)
    configured = (ROOT / "deploy" / "prometheus" / "prometheus-kubernetes.yml").read_text()
    jobs = yaml.safe_load(configured)["scrape_configs"]
    [port] = free_ports(1)
    with Server(tmp_path) as server:
        pods = [{"targets": [server.http], "labels": meta(workload, f"{workload['metadata']['name']}-0", name)}
                for workload in workloads(docs) for name in ports(workload)]
        for job in jobs:
            job.pop("kubernetes_sd_configs")
            job["static_configs"] = pods
        config = tmp_path / "prometheus.yml"
        config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        with Process(["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data",
                      f"--web.listen-address=127.0.0.1:{port}"], tmp_path / "prometheus.log") as prometheus:
            prometheus.wait_for_log("ready to receive web requests")
            for name in names:
                query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod").replace(
                    "<<.LabelMatchers>>", 'namespace="prod",pod=~"attend-0|attend-1"')
                eventually(lambda query=query: '{pod="attend-0"} => 0' in ask(port, query), what=query)
            # Each job finds one port of one workload.
            eventually(lambda: ask(port, "count by (job) (up)").count("=> 1 ") == len(jobs))


def ask(port, query):
    return subprocess.run(["promtool", "query", "instant", f"http://127.0.0.1:{port}", query], check=True,
                          stdout=subprocess.PIPE, text=True, timeout=30).stdout


def meta(workload, pod, port):
    """The labels by which a cluster's Prometheus finds this port."""
    prefix = "__meta_kubernetes_"
    labels = {f"{prefix}pod_label_{re.sub('[^a-z]', '_', name)}": value
              for name, value in workload["spec"]["template"]["metadata"]["labels"].items()}
    return {**labels, f"{prefix}pod_name": pod, f"{prefix}namespace": "prod",
            f"{prefix}pod_container_port_name": port}


def test_envoy_routes_sessions_and_leaves_without_a_failed_call(tmp_path):
    """The rendered configuration with this machine's addresses, and the preStop hook without its pause."""
    docs = documents("cpu")
    config = envoy(docs)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(tmp_path, golden_model("llama"), replica=f"attend-{i}"))
                   for i in range(3)]
        port, admin = free_ports(2)
        config["admin"]["address"]["socket_address"]["port_value"] = admin
        config["static_resources"]["listeners"][0]["address"]["socket_address"] = {
            "address": "127.0.0.1", "port_value": port}
        addresses = {server.replica: server.address.rsplit(":", 1) for server in servers}
        for cluster in config["static_resources"]["clusters"]:
            for group in cluster["load_assignment"]["endpoints"]:
                group["lb_endpoints"] = [copy.deepcopy(one) for one in group["lb_endpoints"][:len(servers)]]
                for one in group["lb_endpoints"]:
                    host, at = addresses[replica_of(one)]
                    one["endpoint"]["address"]["socket_address"] = {"address": host, "port_value": int(at)}
        path = tmp_path / "envoy.yaml"
        path.write_text(yaml.safe_dump(config))
        command = container(find(docs, "Deployment", "attend-balancer"))["command"]
        command = [str(path) if word == "/etc/envoy/envoy.yaml" else word for word in command]
        balancer = stack.enter_context(Process([program(command[0]), *command[1:]], tmp_path / "envoy.log"))
        balancer.wait_for_log("starting main dispatch loop")
        eventually(lambda: get(f"http://127.0.0.1:{admin}/clusters").count("health_flags::healthy") == 6)
        client = stack.enter_context(Client(f"127.0.0.1:{port}", timeout=30, attempts=1))
        sessions = []

        def on_every_replica():
            sessions.append(client.open_session(raw=RawLayout(layers=1, q_heads=1, kv_heads=1, head_dim=4)))
            return {session.replica for session in sessions} == set(addresses)
        eventually(on_every_replica)
        for _ in range(3):
            for session in sessions:
                assert session.info().replica == session.replica
        pause = hook(docs).replace("/9901", f"/{admin}").replace("sleep 65", "sleep 0")
        subprocess.run(["bash", "-c", pause], check=True, timeout=30)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(f"http://127.0.0.1:{admin}/ready")
        drained = r"downstream_cx_drain_close: [1-9]"  # connections asked to end
        eventually(lambda: client.server_info() and re.search(drained, get(f"http://127.0.0.1:{admin}/stats")))
        for session in sessions:
            session.close()
