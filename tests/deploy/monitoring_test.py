# SPDX-License-Identifier: Apache-2.0
"""deploy/prometheus and deploy/grafana against the real thing: Prometheus scrapes two loaded servers, and every
expression of the dashboard, the rules and the alerts must return data. Alerts themselves are tried by promtool
(alerts_promtool.yml). No Grafana is needed: what it would do with a dashboard (variables, labels of legends) is
done here.
"""
import collections
import json
import math
import pathlib
import re
import subprocess
import urllib.parse

import pytest
import yaml

from support.contract import generated_modules
from support.servers import PATIENCE, ROOT, Process, Server, eventually, free_ports, get, golden_model
from support.varied_load import MOMENTARY, REQUEST_TOKENS, Caller, Load

PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "attend.json").read_text())
RULES = [rule for name in ("rules.yml", "alerts.yml")
         for group in yaml.safe_load((PROMETHEUS / name).read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = [rule["record"] for rule in RULES if "record" in rule]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
# Series that stay 0 in a healthy run, and why.
ZERO = {
    "attend_padding_tokens_total": "the CPU engine pads nothing",
    "attend_launched_after_deadline_total": "must stay 0",
}


def run(*command):
    """Output of a command that must succeed."""
    ran = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


# ---- Load ----

@pytest.fixture(scope="module", name="pb")
def messages(tmp_path_factory):
    """The messages of attend.proto: all of the contract can be sent, wrong requests too."""
    return generated_modules(tmp_path_factory.mktemp("proto"))[0]


@pytest.fixture(scope="module", name="servers")
def two_servers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("servers")
    flags = [golden_model("llama_gqa4", "gqa"), golden_model("bert"), "--kv_bytes=1MiB", "--threads=1",
             f"--request_tokens={REQUEST_TOKENS}", f"--queue_tokens={REQUEST_TOKENS}"]
    with Server(directory, *flags, replica="a") as first, Server(directory, *flags, replica="b") as second:
        yield [first, second]


@pytest.fixture(scope="module", name="load")
def running_load(pb, servers):
    load = Load([Caller(pb, server) for server in servers])
    yield load
    load.over.set()
    load.pool.shutdown()


# ---- Prometheus ----

class Prometheus(Process):
    """A shipped configuration, with other targets and a scrape every second."""

    def __init__(self, directory, static_configs, name="prometheus.yml"):
        config = yaml.safe_load((PROMETHEUS / name).read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / rules) for rules in config["rule_files"]]
        for job in config["scrape_configs"]:
            job.pop("kubernetes_sd_configs", None)
            job["static_configs"] = static_configs
        path = directory / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        super().__init__(["prometheus", f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}",
                          f"--web.listen-address={self.address}", "--log.level=warn"],
                         directory / "prometheus.log")

    def api(self, path, **parameters):
        body = json.loads(get(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters, True)}"))
        assert body["status"] == "success", body
        return body["data"]

    def answers(self):
        try:
            return get(f"http://{self.address}/-/ready")
        except OSError:
            return False

    def query(self, expression):
        """(labels, value) of an instant query; values that are no number are left out."""
        data = self.api("query", query=expression)
        samples = [data["result"]] if data["resultType"] == "scalar" else [one["value"] for one in data["result"]]
        labels = [{}] if data["resultType"] == "scalar" else [one["metric"] for one in data["result"]]
        found = [(label, float(value)) for label, (_, value) in zip(labels, samples)]
        return [(label, value) for label, value in found if not math.isnan(value)]

    def value(self, expression):
        """The only value, or None."""
        found = self.query(expression)
        assert len(found) <= 1, expression
        return found[0][1] if found else None

    def alerts(self):
        """(name, instance) of those that are pending or firing."""
        return {(alert["labels"]["alertname"], alert["labels"].get("instance"))
                for alert in self.api("alerts")["alerts"]}


@pytest.fixture(scope="module", name="prometheus")
def running_prometheus(tmp_path_factory, servers):
    with Prometheus(tmp_path_factory.mktemp("prometheus"),
                    [{"targets": [server.http for server in servers]}]) as prometheus:
        eventually(prometheus.answers)
        eventually(lambda: prometheus.value('sum(up{job=~"attend.*"})') == 4, what="both jobs of two replicas up")
        yield prometheus


# ---- What the files say ----

def filled_in(expression):
    """An expression as Grafana would send it, with the variables' defaults and windows that fit this test."""
    values = {"__rate_interval": "10s", "__interval": "1s", "job": "attend", "instance": ".*", "model": ".*",
              "batch_limit": VARIABLES["batch_limit"]["current"]["value"]}

    def value(match):
        return values[match[1] or match[2]]
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, expression)


def panel_expressions():
    """(panel's title, target, expression)."""
    return [(panel["title"], target, filled_in(target["expr"])) for panel in PANELS for target in panel["targets"]]


def sides(expression):
    """The parts of an alert's expression without comparisons: an alert that is silent has none of its own data."""
    parts = re.split(r"\b(?:and|or)\b(?:\s+on\s*\([^)]*\))?", expression)
    return [re.split(r"\s(?:==|>|<)\s", re.sub(r"^absent\((.*)\)$", r"\1", part.strip()))[0] for part in parts]


def names(expression):
    """The series an expression reads."""
    bare = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\b(?:\w+:)?(?:attend|process)_\w+(?::\w+)?", bare))


def used_names(rules):
    """The series that these rules or the dashboard read."""
    expressions = [rule["expr"] for rule in rules] + [text for _, _, text in panel_expressions()]
    return set().union(*(names(text) for text in expressions))


def families(page):
    """Type by name of the families of a /metrics page."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


# ---- Tests without load ----

def test_promtool_accepts_the_configuration_and_rules():
    run("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    run("promtool", "check", "rules", PROMETHEUS / "rules.yml", PROMETHEUS / "alerts.yml")


def test_alerts_fire_and_stay_silent_as_described():
    cases = pathlib.Path(__file__).with_name("alerts_promtool.yml")
    run("promtool", "test", "rules", cases)
    text = cases.read_text()
    for alert in ALERTS:
        fires = rf"alertname: {alert['alert']}\n.*\n +exp_alerts:\n"
        assert re.search(fires, text), f"{alert['alert']} never fires"
        assert f"alertname: {alert['alert']}, eval_time" in text, f"{alert['alert']} is never silent"
    for record in RECORDED:
        if not any(record in rule["expr"] for rule in ALERTS):
            assert f"expr: {record}\n" in text, f"{record} has no test"


def test_alerts_have_severity_text_and_a_runbook():
    readme = (ROOT / "README.md").read_text()
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning"), alert
        assert alert["annotations"]["summary"] and alert["annotations"]["description"], alert
        assert alert["annotations"]["runbook_url"] == f"README.md#{alert['alert'].lower()}"
        assert re.search(rf"^### {alert['alert']}$", readme, re.MULTILINE), f"no heading for {alert['alert']}"


def test_pods_are_found_by_label_and_port(tmp_path):
    """Debian's Prometheus can't ask Kubernetes: the relabelling is given targets as discovery would find them."""
    pods = [("attend-0", "attend", "metrics"), ("attend-0", "attend", "grpc"), ("web-0", "web", "metrics")]
    static_configs = [
        {"targets": [f"127.0.0.{i}:1"],
         "labels": {"__meta_kubernetes_pod_label_app_kubernetes_io_name": app, "__meta_kubernetes_pod_name": pod,
                    "__meta_kubernetes_namespace": "prod", "__meta_kubernetes_pod_container_port_name": port}}
        for i, (pod, app, port) in enumerate(pods, 1)]
    with Prometheus(tmp_path, static_configs, "prometheus-kubernetes.yml") as prometheus:
        eventually(prometheus.answers)
        targets = eventually(lambda: prometheus.api("targets", state="active")["activeTargets"])
    labels = {"instance": "attend-0", "pod": "attend-0", "namespace": "prod"}
    assert sorted((target["scrapeUrl"], target["labels"]) for target in targets) == [
        ("http://127.0.0.1:1/metrics", {"job": "attend", **labels}),
        ("http://127.0.0.1:1/readyz", {"job": "attend-ready", **labels})]


def test_the_two_configurations_differ_in_discovery_only():
    local, cluster = (yaml.safe_load((PROMETHEUS / name).read_text())
                      for name in ("prometheus.yml", "prometheus-kubernetes.yml"))
    for config in (local, cluster):
        for job in config["scrape_configs"]:
            for key in ("static_configs", "kubernetes_sd_configs", "relabel_configs"):
                job.pop(key, None)
    assert local == cluster


def test_panels_have_their_own_place_id_and_text():
    assert DASHBOARD["uid"] == "attend" and isinstance(DASHBOARD["schemaVersion"], int)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] and place["x"] + place["w"] <= 24, panel["title"]
        for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"])
                     for y in range(place["y"], place["y"] + place["h"])):
            assert cell not in taken, f"{panel['title']} covers {taken.get(cell)}"
            taken[cell] = panel["title"]
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat", "heatmap", "table"), panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs), panel["title"]
        if panel["type"] != "table":
            assert "unit" in json.dumps(panel), panel["title"]


def test_variables_are_used_and_all_of_them_exist():
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__interval", "__all"}
    assert used == set(VARIABLES)


def test_every_recorded_series_is_used():
    used = used_names(ALERTS)
    assert set(RECORDED) <= used
    assert {name for name in used if ":" in name} <= set(RECORDED)


# ---- Tests under load ----

def test_every_expression_returns_data(prometheus, load):
    expressions = {text: f"panel '{title}'" for title, _, text in panel_expressions()}
    for rule in RULES:
        name = rule.get("record") or rule["alert"]
        for text in sides(rule["expr"]) if "alert" in rule else (rule["expr"], rule["record"]):
            expressions[text] = name
    waiting = dict(expressions)

    def all_returned():
        load.check()
        for text in list(waiting):
            if prometheus.query(text):
                del waiting[text]
        return not waiting
    try:
        eventually(all_returned)
    except AssertionError:
        pytest.fail("no data:\n" + "\n".join(f"{where}: {text}" for text, where in waiting.items()))
    assert len(expressions) > 60
    for group in prometheus.api("rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok" and not rule.get("lastError"), rule


def test_legends_name_labels_that_are_there(prometheus, load):
    for title, target, text in panel_expressions():
        wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        for labels, _ in eventually(lambda text=text: prometheus.query(text), what=text):
            assert wanted <= set(labels), f"{title}: {labels}"
    load.check()


def test_variables_find_models_and_replicas(prometheus, servers):
    found = {}
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            found[name] = {one[label] for one in prometheus.api("series", **{"match[]": filled_in(series)})}
    assert found == {"job": {"attend"}, "instance": {server.http for server in servers},
                     "model": {"gqa", "bert", "raw", "none"}}


def test_every_series_is_shown_or_alerted_on(servers):
    page = families(servers[0].page())
    used = used_names(RULES)
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in page else name
            for name in used if ":" not in name}
    assert bare == set(page)


def test_promtool_accepts_the_page(servers):
    page = subprocess.run(["promtool", "check", "metrics"], input=servers[0].page(), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False)
    assert page.returncode == 0 and not page.stdout, page.stdout


# The load ends here: from now on the numbers stand still.

def test_prometheus_has_exactly_what_clients_were_told(prometheus, load, servers):
    load.stop()
    for caller, server in zip(load.callers, servers):
        here = f'job="attend",instance="{server.http}"'

        def by(series, *labels, here=here):
            return {tuple(sample[label] for label in labels): value
                    for sample, value in prometheus.query(f"{series}{{{here}}} > 0")}
        told = collections.Counter()
        for (method, code), count in caller.answers.items():
            told["other" if method == "NoMethod" else method, code] += count
        eventually(lambda by=by, told=told: by("attend_requests_total", "method", "code") == told,
                   what=f"{told} in Prometheus")
        started = by("attend_requests_started_total", "method")
        assert started == {(method,): sum(count for (one, _), count in told.items() if one == method)
                           for method, _ in told}
        refused = {(reason,): count for reason, count in caller.reasons.items() if reason != "CANCELLED"}
        assert by("attend_rejected_total", "reason") == refused
        for method in {method for method, _ in told}:
            durations = prometheus.query(f'sum(attend_request_seconds_count{{{here},method="{method}"}})')
            assert durations[0][1] == started[method,]


def test_every_series_moved(prometheus, load, servers):
    """Nothing on the page is always 0, except what must be: by family, and by the labels that work has."""
    for name, kind in families(servers[0].page()).items():
        series = f"{name}_sum" if kind == "histogram" else name
        largest = prometheus.value(f"max(max_over_time({series}[10m]))")
        if name not in MOMENTARY:
            assert (largest == 0) == (name in ZERO), f"{name}: {largest}"
    for series in [*(f'attend_phase_seconds_sum{{phase="{phase}"}}'
                     for phase in ("receive", "queue", "project", "attend", "output", "send")),
                   *(f'attend_tokens_total{{model="{model}",kind="prefill"}}' for model in ("gqa", "bert", "raw")),
                   'attend_tokens_total{model="gqa",kind="decode"}', 'attend_cancelled_total{stage="run"}',
                   'attend_sessions_ended_total{reason="closed"}', 'attend_sessions_ended_total{reason="expired"}',
                   'attend_kv_capacity_tokens{model="gqa"}']:
        assert prometheus.value(f"min({series})") > 0, series
    reasons = {labels["reason"] for labels, _ in prometheus.query("attend_rejected_total")}
    unseen = {labels["reason"] for labels, _ in prometheus.query("sum by (reason) (attend_rejected_total) == 0")}
    assert unseen == {"STARTING", "DRAINING", "SESSION_EVICTED", "CONTEXT_CONFLICT"} & reasons


def test_nothing_is_left_when_the_load_is_over(prometheus, load):
    for series in ("attend_queue_requests", "attend_queue_tokens", "attend_running_requests", "attend_streams",
                   "attend_sessions", "attend_kv_utilization_ratio",
                   "sum(attend_requests_started_total) - sum(attend_requests_total)"):
        eventually(lambda series=series: {value for _, value in prometheus.query(series)} == {0}, what=series)


def test_a_draining_replica_is_not_ready_and_an_ended_one_is_down(tmp_path, pb):
    with Server(tmp_path, golden_model("llama_gqa4", "gqa"), "--drain_limit=600", replica="c") as server, \
            Prometheus(tmp_path, [{"targets": [server.http]}]) as prometheus:
        eventually(prometheus.answers)
        eventually(lambda: prometheus.value('sum(up{job=~"attend.*"})') == 2)
        caller = Caller(pb, server)
        caller.call("OpenSession", pb.OpenSessionRequest(model="gqa"))  # the drain waits for it
        server.signal()
        eventually(lambda: prometheus.alerts() == {("AttendNotReady", server.http)})
        caller.call("OpenSession", pb.OpenSessionRequest(model="gqa"), "UNAVAILABLE")
        assert caller.reasons == {"DRAINING": 1}
        assert server.total("attend_rejected_total", reason="DRAINING") == 1
        server.child.kill()
        eventually(lambda: prometheus.alerts() == {("AttendDown", server.http)})
