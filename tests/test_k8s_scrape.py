"""A real Prometheus scrapes a real vLLM server with the plug-in, as the rendered PodMonitor has it scrape."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from real.calls import Call
from real.manifests_numbers import numbers_of
from real.manifests_predict import Prediction
from real.manifests_rules import groups
from real.manifests_scrape import pod_monitor
from real.manifests_setup import Setup
from real.server import WARM_UP_PROMPTS
from tests.test_real_live import SCENARIO, Live
from tests.tools import free_port, prometheus
from twin.cluster.vllm_arguments import ARGUMENTS, METRICS, VARIABLES, takes
from twin.scenario import load_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

COUNTS = {"ONLINE": 5, "BATCH": 3, "OFFLINE": 2}
SEEN = COUNTS | {"ONLINE": COUNTS["ONLINE"] + len(WARM_UP_PROMPTS)}
"""With those that warm the server up."""


@pytest.fixture(scope="module")
def setup():
    scenario = load_scenario(SCENARIO)
    predicted = Prediction(0.0, {"ONLINE": 0.1})
    return Setup(scenario, numbers_of(scenario, 0.0), predicted, tiny=True)


@pytest.fixture(scope="module")
def scraped(setup, tmp_path_factory):
    """Asks a Prometheus that has scraped a server after requests of every tier."""
    folder = tmp_path_factory.mktemp("scrape")
    server = Live(folder)
    endpoint = pod_monitor(setup)["spec"]["podMetricsEndpoints"][0]
    # What the operator makes of the PodMonitor; the labels are those of a pod.
    relabel = [
        {
            "source_labels": r["sourceLabels"],
            "regex": r["regex"],
            "replacement": r["replacement"],
            "target_label": r["targetLabel"],
        }
        for r in endpoint["metricRelabelings"]
    ]
    labels = {"namespace": setup.namespace, "pod": f"{setup.name}-7d9-x2v4z"}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": "pods",
                "metrics_path": endpoint["path"],
                "static_configs": [{"targets": [f"127.0.0.1:{server.port}"], "labels": labels}],
                "metric_relabel_configs": relabel,
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "rules.yml").write_text(
        yaml.safe_dump({"groups": groups(setup)}).replace("interval: 30s", "interval: 1s")
    )
    address = f"127.0.0.1:{free_port()}"
    binary, _ = prometheus()
    process = None

    def ask(query):
        arguments = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(
            f"http://{address}/api/v1/query?{arguments}", timeout=10
        ) as answer:
            found = json.load(answer)["data"]["result"]
        return {
            tuple(sorted((k, v) for k, v in e["metric"].items())): float(e["value"][1])
            for e in found
        }

    try:
        server.wait()
        process = subprocess.Popen(
            [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}"],
            stdout=subprocess.DEVNULL, stderr=(folder / "prometheus.log").open("w"),
        )  # fmt: skip
        until = time.monotonic() + 30
        while True:  # the first scrape lies before the requests, so that there is a rate
            try:
                if ask("up == 1"):
                    break
            except (urllib.error.URLError, OSError):
                pass
            assert time.monotonic() < until, (folder / "prometheus.log").read_text()
            time.sleep(0.2)
        calls = [
            Call(0.0, "hello", 4, stream=False, body={"vllm_xargs": {"tier": tier}})
            for tier, count in COUNTS.items()
            for _ in range(count)
        ]
        replies = server.play(*calls)
        assert len(replies) == sum(COUNTS.values())
        until = time.monotonic() + 30
        while sum(ask("twin:requests_total").values()) < sum(SEEN.values()) or not ask(
            "tier:requests_ended:rate5m > 0"
        ):
            assert time.monotonic() < until, ask("twin:requests_total")
            time.sleep(0.3)
        yield ask
    finally:
        if process is not None:
            process.terminate()
            process.wait(20)
        server.stop()


def test_names_have_their_colon(scraped):
    names = {dict(labels)["__name__"] for labels in scraped('{__name__=~".+"}')}
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "twin:requests_total"} <= names
    assert not [name for name in names if name.startswith(("vllm_", "twin_"))]


def test_each_tier_has_its_figures(scraped):
    done = scraped('sum by (tier) (twin:requests_total{outcome="completed"})')
    assert {dict(labels)["tier"]: value for labels, value in done.items()} == SEEN
    first = scraped("sum by (tier) (twin:time_to_first_token_seconds_count)")
    assert {dict(labels)["tier"]: value for labels, value in first.items()} == SEEN
    assert sum(scraped("vllm:request_success_total").values()) == sum(SEEN.values())


def test_the_rendered_rules_answer_by_tier(scraped, setup):
    for record in (
        "tier:ttft_seconds:p99_5m",
        "tier:e2e_seconds:p99_5m",
        "tier:queue_seconds:p99_5m",
    ):
        found = {dict(labels)["tier"]: value for labels, value in scraped(record).items()}
        assert set(found) == set(COUNTS)
        assert all(0 < value < 60 for value in found.values()), found
    running = scraped("tier:requests_running:sum")
    assert set(running.values()) == {0.0}
    [(labels, value)] = scraped("tier:ttft_seconds:p99_predicted").items()
    assert (dict(labels)["tier"], value) == ("ONLINE", 0.1)


def test_the_running_policy_is_that_of_the_scenario(scraped, setup):
    [(labels, _)] = scraped("twin:policy_info").items()
    assert dict(labels)["policy_fingerprint"] == setup.scenario.policy_fingerprint


def test_the_lists_of_what_vllm_has_are_those_of_the_installed_one():
    """Arguments, environment variables and metrics that `twin-real manifests --check` goes by."""
    import vllm.envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    there = {o[2:] for a in parser._actions for o in a.option_strings if o.startswith("--")}
    version = vllm.__version__
    assert not [name for name in there if not takes(name, version)]
    assert not [name for name in ARGUMENTS[version] if name not in there]
    variables = {name for name in vllm.envs.environment_variables if name.startswith("VLLM_")}
    assert variables <= VARIABLES
    sources = Path(vllm.__file__).parent.rglob("*.py")
    found = {
        name for path in sources for name in re.findall(r'"(vllm:[a-z_0-9]+)"', path.read_text(errors="ignore"))
    }  # fmt: skip
    prefixes = {"vllm:diffusion", "vllm:spec_decode"}
    assert found - prefixes <= METRICS
