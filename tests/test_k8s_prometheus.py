"""Rules and dashboards over simulated series: Prometheus gives the twin's own numbers, alerts fire when meant."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from bisect import bisect_left
from collections import defaultdict

import pytest
import yaml

from real.manifest_lint.objects import Manifest
from real.manifest_lint.queries import names
from real.manifests_numbers import numbers_of
from real.manifests_predict import Prediction, predict
from real.manifests_rules import groups
from real.manifests_setup import Setup
from tests.k8s import ROOT, kubectl
from tests.runs import document, run, stream
from tests.tools import free_port, prometheus
from twin.clock import PS
from twin.cluster.promql import bucket_quantile
from twin.report.metric_names import LATENCY_BUCKETS, TTFT_BUCKETS
from twin.report.openmetrics import write_openmetrics
from twin.scenario import load_scenario

START = 1767225600
STEP = 15
"""Seconds between two samples."""
MIXED = {"ONLINE": 0.6, "BATCH": 0.4}
OBJECTIVES = {"ONLINE": {"ttft_p99": 1.0, "e2e_p95": 10.0}}
PODS = {str(i): f"small-{i}-00000" for i in range(4)}


def source(traffic, **sections):
    """A small service whose metrics are sampled as often as Prometheus scrapes."""
    return document(
        policy="tiered",
        objectives=OBJECTIVES,
        traffic=traffic,
        run={"seed": 1, "sample_period": STEP},
        **sections,
    )


def mixed(rate, duration, **keys):
    return stream(
        300, 60, arrivals={"process": "poisson", "rate": rate}, duration=duration, requests=None,
        tiers=MIXED, output_tokens={"uniform": [1, 120]}, **keys,
    )  # fmt: skip


@pytest.fixture(scope="module")
def calm():
    """Twenty minutes of light load on two replicas, and ten without any."""
    busy = mixed(6, 1200)
    last = mixed(6, 1) | {
        "arrivals": {"process": "batch", "at": ["00:30"], "size": 1},
        "duration": None,
    }
    return run(source([busy, last], cluster={"replicas": 2}), observe=True)


@pytest.fixture(scope="module")
def overloaded():
    """A replica that gets more than it can take, and has few KV blocks."""
    busy = mixed(8, 900) | {"output_tokens": {"uniform": [100, 300]}}
    engine = {"num_gpu_blocks_override": 260, "max_num_seqs": 16}
    document = source([busy], engine=engine)
    document["run"]["until"] = 900
    return run(document, observe=True)


def setup_for(result, predicted=None):
    scenario = result.scenario
    return Setup(scenario, numbers_of(scenario, 0.0), predicted or Prediction())


def exported(result, folder):
    """The history with the labels that a scrape in the cluster adds."""
    path = folder / "history.om"
    write_openmetrics(path, result, START)
    text = path.read_text()
    for engine, pod in PODS.items():
        text = re.sub(
            rf'\{{(model_name="[^"]+",engine="{engine}")',
            rf'{{namespace="inference",pod="{pod}",\1',
            text,
        )
    path.write_text(text)
    return path


# --- a real Prometheus that has the history -------------------------------------------------------


class Server:
    """Answers queries about a run."""

    def __init__(self, result, folder):
        binary, promtool = prometheus()
        history = exported(result, folder)
        subprocess.run(
            [promtool, "tsdb", "create-blocks-from", "openmetrics", history, folder / "data"],
            check=True,
            capture_output=True,
        )
        (folder / "prometheus.yml").write_text("")
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        self._process = subprocess.Popen(
            [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}", "--storage.tsdb.retention.time=100y"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{self._url}/-/ready", timeout=1)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)

    def ask(self, query, at_s):
        """{labels without name: value} at a second of the run."""
        arguments = urllib.parse.urlencode({"query": query, "time": START + at_s})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{arguments}", timeout=20) as answer:
            found = json.load(answer)["data"]["result"]
        return {
            tuple(sorted((k, v) for k, v in each["metric"].items() if k != "__name__")): float(
                each["value"][1]
            )
            for each in found
        }

    def close(self):
        self._process.terminate()
        self._process.wait(timeout=20)


@pytest.fixture(scope="module")
def server(calm, tmp_path_factory):
    there = Server(calm, tmp_path_factory.mktemp("calm"))
    yield there
    there.close()


@pytest.fixture(scope="module")
def expressions(calm):
    """Record -> [(labels, expression)]"""
    found = defaultdict(list)
    for group in groups(setup_for(calm, Prediction(0.0, {"ONLINE": 0.25}))):
        for rule in group["rules"]:
            if "record" in rule:
                found[rule["record"]].append((rule["labels"], rule["expr"]))
    return found


def counts(durations, bounds):
    """Cumulative counts of a histogram."""
    own = [0] * (len(bounds) + 1)
    for seconds in durations:
        own[bisect_left(bounds, seconds)] += 1
    total, found = 0, []
    for number in own:
        total += number
        found.append(float(total))
    return found


@pytest.mark.parametrize("at_s", [300, 600, 1005, 1200])
def test_recording_rules_give_the_figures_of_the_records(server, calm, expressions, at_s):
    """Over the five minutes before, from the twin's own records and not from its exported series."""
    from_ps, to_ps = (at_s - 300) * PS, at_s * PS
    records = list(calm.records)
    for tier in MIXED:
        mine = [r for r in records if r.tier == tier]
        ttft = [
            (r.first_token_ps - r.arrival_ps) / PS
            for r in mine
            if from_ps < r.first_token_ps <= to_ps
        ]
        e2e = [(r.finish_ps - r.arrival_ps) / PS for r in mine if from_ps < r.finish_ps <= to_ps]
        assert len(ttft) > 300
        for name, durations, bounds in (
            ("tier:ttft_seconds:p99_5m", ttft, TTFT_BUCKETS),
            ("tier:e2e_seconds:p99_5m", e2e, LATENCY_BUCKETS),
        ):
            [(_, expr)] = expressions[name]
            found = server.ask(expr, at_s)[(("tier", tier),)]
            assert found == pytest.approx(
                bucket_quantile(0.99, bounds, counts(durations, bounds)), rel=1e-6
            )
        [(_, expr)] = expressions["tier:requests_ended:rate5m"]
        rate = server.ask(expr, at_s)[(("tier", tier),)]
        assert rate == pytest.approx(len(e2e) / 300, rel=1e-6)
        inside = [r for r in mine if r.arrival_ps <= to_ps < r.finish_ps]
        running = [r for r in inside if r.first_scheduled_ps <= to_ps]
        for name, wanted in (("running", len(running)), ("waiting", len(inside) - len(running))):
            [(_, expr)] = expressions[f"tier:requests_{name}:sum"]
            # A step that is planned and has not begun counts as one or the other.
            assert server.ask(expr, at_s)[(("tier", tier),)] == pytest.approx(wanted, abs=2)


def test_the_burn_of_a_budget_is_that_of_the_records(server, calm, expressions):
    mine = [r for r in calm.records if r.tier == "ONLINE"]
    for labels, expr in expressions["tier:slo_burn:rate30m"]:
        assert labels["tier"] == "ONLINE"
        # The last sample lies after the end of the traffic; nothing came in the ten minutes before it.
        found = server.ask(expr, 1800)[()]
        if labels["objective"] == "ttft":
            bad = [r for r in mine if (r.first_token_ps - r.arrival_ps) / PS > 1.0]
            assert found == pytest.approx(len(bad) / len(mine) / 0.01, abs=0.02)
        else:
            bad = [r for r in mine if (r.finish_ps - r.arrival_ps) / PS > 10.0]
            assert found == pytest.approx(len(bad) / len(mine) / 0.05, abs=0.02)


def _dashboards():
    for name in ("operations", "tiers"):
        board = json.loads((ROOT / "k8s" / "dashboards" / f"{name}.json").read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield name, panel["title"], target["expr"]


PANELS = list(_dashboards())


def filled(expr, expressions):
    """A panel's query with its variables, and with recorded series spelt out."""
    expr = expr.replace("$namespace", "inference").replace("$service", "small")
    for name, rules in expressions.items():
        spelt = " or ".join(f"label_replace({e}, 'service', 'small', '', '')" for _, e in rules)
        expr = re.sub(rf'{re.escape(name)}\{{service="small"\}}', lambda _, s=spelt: f"({s})", expr)
    return expr


@pytest.mark.parametrize("panel", PANELS, ids=lambda p: f"{p[0]}: {p[1]}")
def test_a_panel_shows_what_the_twin_exports(server, expressions, panel):
    """Under load a value; idle no value rather than NaN (prometheus/prometheus#4264)."""
    board, title, expr = panel
    manifest = Manifest({"kind": "Dashboard", "metadata": {"name": board}}, board)
    assert not [str(f) for f in names(manifest, (), expr)]
    query = filled(expr, expressions)
    assert "$" not in query
    assert "tier:" not in query
    if "haproxy_" in query:
        assert server.ask(query, 900) == {}
        return
    busy, idle = server.ask(query, 900), server.ask(query, 1700)
    assert busy, query
    assert all(value == value for value in (*busy.values(), *idle.values())), title


def test_the_numbers_of_a_panel_are_those_of_the_records(server, calm):
    wanted = {
        "Replicas that answer": {"": 2.0},
        "Tokens per second": None,
        "Requests that ended": None,
    }
    asked = {title: expr for _, title, expr in PANELS if title in wanted}
    for title, expr in asked.items():
        query = filled(expr, {})
        found = server.ask(query, 900)
        if title == "Replicas that answer":
            assert list(found.values()) == [2.0]
        elif title == "Requests that ended":
            ended = [r for r in calm.records if 600 * PS < r.finish_ps <= 900 * PS]
            assert sum(found.values()) == pytest.approx(len(ended) / 300, rel=1e-6)
        else:
            firsts = [r for r in calm.records if 600 * PS < r.first_token_ps <= 900 * PS]
            generated = 0
            for r in calm.records:
                token_ps = r.first_token_ps
                generated += 600 * PS < token_ps <= 900 * PS
                for gap_ps in r.itl_ps:
                    token_ps += gap_ps
                    generated += 600 * PS < token_ps <= 900 * PS
            sums = {round(value * 300) for value in found.values()}
            assert sums <= {sum(r.prompt_tokens for r in firsts), generated}


# --- promtool's unit tests ------------------------------------------------------------------------

NAMES = re.compile(r"(?:vllm|twin):[\w:]+")


def input_series(result, folder, rules):
    """The twin's series that the rules read, one value every STEP seconds."""
    wanted = {
        name for group in rules for rule in group["rules"] for name in NAMES.findall(rule["expr"])
    }
    values = defaultdict(dict)
    for line in exported(result, folder).read_text().splitlines():
        if line.startswith("#"):
            continue
        series, value, stamp = line.rsplit(" ", 2)
        at_s = float(stamp) - START
        if series.partition("{")[0] in wanted and at_s % STEP == 0:
            values[series][round(at_s)] = value
    assert values
    last = max(max(points) for points in values.values())
    return [
        {"series": series, "values": " ".join(points.get(t, "_") for t in range(0, last + 1, STEP))}
        for series, points in values.items()
    ]


def promtool_test(folder, rules, series, tests):
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": rules}))
    body = {"interval": f"{STEP}s", "input_series": series} | tests
    text = {"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": [body]}
    (folder / "test.yml").write_text(yaml.safe_dump(text))
    _, tool = prometheus()
    return subprocess.run(
        [tool, "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True
    )


def alerts(folder, rules, series, at_s):
    """Names and labels of the alerts that fire at a second, as promtool finds them."""
    known = sorted({rule["alert"] for group in rules for rule in group["rules"] if "alert" in rule})
    # Nothing is expected, so that each alert that fires is told.
    tests = {
        "alert_rule_test": [
            {"eval_time": f"{at_s}s", "alertname": name, "exp_alerts": []} for name in known
        ]
    }
    told = promtool_test(folder, rules, series, tests)
    text = told.stdout + told.stderr
    assert "panic" not in text
    assert told.returncode == 0 or "alertname" in text, text
    return {
        name: labels
        for name, labels in re.findall(r"alertname: ?(\w+),.*?got:\[(.*?)\n\s*\]", text, re.S)
        if labels.strip()
    }


@pytest.fixture(scope="module")
def predicted(calm):
    return predict(calm.scenario)


def test_recorded_series_are_the_same_under_promtool(calm, predicted, tmp_path):
    """Each recording rule gives a value for every tier it is about, and that of the records for TTFT."""
    rules = groups(setup_for(calm, predicted))
    series = input_series(calm, tmp_path, rules)
    from_ps, to_ps = 600 * PS, 900 * PS
    checks = []
    for tier in MIXED:
        mine = [r for r in calm.records if r.tier == tier and from_ps < r.first_token_ps <= to_ps]
        ttft = [(r.first_token_ps - r.arrival_ps) / PS for r in mine]
        value = bucket_quantile(0.99, TTFT_BUCKETS, counts(ttft, TTFT_BUCKETS))
        labels = f'{{service="small", tier="{tier}"}}'
        checks.append(
            {
                "expr": f"round(tier:ttft_seconds:p99_5m{labels} * 100000)",
                "eval_time": "900s",
                "exp_samples": [{"labels": labels, "value": round(value * 100000)}],
            }
        )
        predicted_s = float(f"{predicted.ttft_p99_s[tier]:.6g}")
        checks.append(
            {
                "expr": f"tier:ttft_seconds:p99_predicted{labels}",
                "eval_time": "900s",
                "exp_samples": [
                    {"labels": f"tier:ttft_seconds:p99_predicted{labels}", "value": predicted_s}
                ],
            }
        )
    recorded = {rule["record"] for rule in rules[0]["rules"]}
    for name in sorted(recorded):
        checks.append(
            {
                "expr": f"count(count by (service) ({name}))",
                "eval_time": "900s",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
        )
    told = promtool_test(tmp_path, rules, series, {"promql_expr_test": checks})
    assert told.returncode == 0, told.stdout + told.stderr


def test_nothing_fires_in_a_calm_run_nor_when_nobody_asks(calm, predicted, tmp_path):
    """prometheus/prometheus#4264: ten idle minutes; ratios are NaN, rules ignore them."""
    rules = groups(setup_for(calm, predicted))
    series = input_series(calm, tmp_path, rules)
    for at_s in (900, 1500, 1770):
        assert alerts(tmp_path, rules, series, at_s) == {}, at_s


def test_each_alert_fires_where_it_should(overloaded, predicted, tmp_path):
    rules = groups(setup_for(overloaded, predicted))
    series = input_series(overloaded, tmp_path, rules)
    # A failure of the policy is the one thing that the twin does not do.
    failed = 'twin:policy_errors_total{namespace="inference",pod="small-0-00000",model_name="m",engine="0"}'
    count = 900 // STEP + 1
    series.append({"series": failed, "values": f"0x{count - 10} 1x8"})
    found = alerts(tmp_path, rules, series, 900)
    assert set(found) == {
        "SloBurnFast", "KvPressure", "PreemptionStorm", "QueueGrows", "PolicyFailed",
    }  # fmt: skip
    # A warning of six hours holds for a quarter of an hour, drift for half of one: longer than the run.
    patient = [
        rule | {"for": "1m"} for rule in rules[1]["rules"] if rule.get("for") in ("15m", "30m")
    ]
    sooner = [rules[0], {"name": "patient", "rules": patient}]
    assert {"SloBurnSlow", "PredictionDrift"} == set(alerts(tmp_path, sooner, series, 900))


def test_an_alert_tells_which_tier(overloaded, predicted, tmp_path):
    rules = groups(setup_for(overloaded, predicted))
    found = alerts(tmp_path, rules, input_series(overloaded, tmp_path, rules), 900)
    assert 'tier="ONLINE"' in found["SloBurnFast"]
    assert 'pod="small-0-00000"' in found["PreemptionStorm"]
    assert "preemptions for each request" in found["PreemptionStorm"]


def test_rules_of_a_stock_server_read_vllms_own_series():
    scenario = load_scenario(document(policy="vllm-fcfs", objectives=OBJECTIVES))
    text = json.dumps(groups(Setup(scenario, numbers_of(scenario, 0.0), Prediction())))
    assert "twin:" not in text
    assert "vllm:time_to_first_token_seconds_bucket" in text


def test_dashboards_are_valid_and_built_by_kustomize():
    built = subprocess.run(
        [kubectl(), "kustomize", str(ROOT / "k8s" / "dashboards")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    maps = list(yaml.safe_load_all(built.stdout))
    assert {m["kind"] for m in maps} == {"ConfigMap"}
    for each in maps:
        [board] = [json.loads(text) for text in each["data"].values()]
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        assert all(
            panel["fieldConfig"]["defaults"]["noValue"] == "no data" for panel in board["panels"]
        )
        spots = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
        assert len(set(spots)) == len(spots)


@pytest.mark.parametrize("folder", ["base", "overlays/docs-70b", "overlays/cpu-kind"])
def test_shipped_rules_are_read_by_promtool(folder, tmp_path):
    rule = yaml.safe_load((ROOT / "k8s" / folder / "rules.yaml").read_text())
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(rule["spec"]))
    told = subprocess.run([prometheus()[1], "check", "rules", path], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
