"""Names of metrics on a real server: what the exporter emits, what is documented, what a scraper makes of them."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from real.exporter import Exporter, State
from twin.report.metric_names import SERVER, TWIN, VLLM
from twin.scheduling import PRESETS, Policy, fingerprint

ROOT = Path(__file__).parents[1]
PLUG_IN = (ROOT / "docs" / "plug-in.md").read_text(encoding="utf-8")
DOCUMENTED = {metric.exposed: metric for metric in (*TWIN, *SERVER)}

# What Prometheus 2.42 and 3 ask for.
OLD = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
NEW = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"


def exporter(preset="tiered"):
    config = PRESETS[preset]
    return Exporter(config, fingerprint(config), preset, "0.32.0", "tiny", "0")


def busy(preset="tiered"):
    """An exporter that has met everything."""
    made, tiers = exporter(preset), [tier.name for tier in PRESETS[preset].tiers]
    for tier in tiers:
        made.first_token(tier, 0.02)
        made.completed(tier, 0.01, 0.5, 0.02)
        for reason in ("finished", "client", "error", "timeout:ttft", "timeout:total"):
            made.gone(tier, reason)
    made.bad_hint("tier")
    made.policy_failed()
    state = State(99, 40, 3)
    state.add(100, 128, 120, 99 * 16)
    made.write(0.0, Policy(PRESETS[preset], 2048).stats(), lambda: state)
    return made


def exposed(registry: CollectorRegistry, accept: str) -> str:
    encode, _ = choose_encoder(accept)
    return encode(registry).decode()


def families(made):
    text = exposed(made._registry, "text/plain")
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_emitted_is_what_is_documented(preset):
    found = families(busy(preset))
    for name, family in found.items():
        if name.endswith("_created"):  # not written by a server of several processes
            continue
        metric = next(m for m in DOCUMENTED.values() if m.name == name)
        assert family.type == metric.kind
        bounds = set()
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine", *metric.labels}
            bounds |= {float(sample.labels["le"])} if "le" in sample.labels else set()
        if metric.kind == "histogram":
            assert bounds == {*metric.buckets, float("inf")}
            assert name.endswith("_seconds")
    assert {metric.name for metric in SERVER} <= set(found)


def test_waits_below_0_3_seconds_are_told_apart():
    buckets = DOCUMENTED["twin:request_queue_time_seconds"].buckets
    assert sum(bound < 0.3 for bound in buckets) >= 8
    assert buckets[0] <= 0.001


def test_two_exporters_in_one_process_count_for_themselves():
    first, second = busy(), exporter()
    assert any(sample.value == 2 for sample in families(first)["twin:requests"].samples)
    assert all(sample.value == 0 for sample in families(second)["twin:requests"].samples)


def test_the_package_may_be_imported_twice():
    busy()
    module = importlib.reload(sys.modules["real.exporter"])
    config = PRESETS["fcfs"]
    again = module.Exporter(config, fingerprint(config), "fcfs", "0.32.0", "tiny", "0")
    assert all(sample.value == 0 for sample in families(again)["twin:requests"].samples)


def test_counters_follow_the_policy_and_never_fall():
    made, stats = exporter(), Policy(PRESETS["tiered"], 2048).stats()
    tier = stats["tiers"]["BATCH"]
    state = State(9, 9, 0)
    values = []
    for batches, size, wait in ((1, 2.0, 0.05), (3, 2.0, 0.04), (3, 2.0, 0.04), (4, 2.5, 0.03)):
        tier |= {"releases": {"time": batches}, "batch_size_mean": size, "batch_tokens_mean": 10.0}
        tier["batching_wait_mean_s"] = wait
        made.write(0.0, stats, lambda: state)
        [sample] = [
            s
            for s in families(made)["twin:released_requests"].samples
            if s.labels["tier"] == "BATCH" and s.name.endswith("_total")
        ]
        values.append(sample.value)
    assert values == [2, 6, 6, 10]


# --- between exporter and Prometheus --------------------------------------------------------------


def relabelled(names):
    """What the documented rule makes of scraped names."""
    [block] = [
        b for b in re.findall(r"```yaml\n(.*?)```", PLUG_IN, re.DOTALL) if "metric_relabel" in b
    ]
    rules = yaml.safe_load(block)["metric_relabel_configs"]
    result = set()
    for name in names:
        for rule in rules:
            assert (rule["source_labels"], rule["target_label"]) == (["__name__"], "__name__")
            match = re.fullmatch(rule["regex"], name)
            if match:
                name = re.sub(
                    r"\$(\d)", lambda group, match=match: match[int(group[1])], rule["replacement"]
                )
        result.add(name)
    return result


@pytest.mark.parametrize("accept", [OLD, NEW, "text/plain"])
def test_every_scraper_ends_with_the_documented_names(accept):
    """prometheus_client from 0.23 on writes vllm_ for vllm: to scrapers that ask for OpenMetrics without UTF-8."""
    text = exposed(busy()._registry, accept)
    names = set(re.findall(r"^(\w[\w:]*)(?:\{| )", text, re.MULTILINE))
    if accept == OLD:
        assert not any(":" in name for name in names), "the colon stays: is the rule still needed?"
    kept = {re.sub(r"_(bucket|sum|count)$", "", name) for name in relabelled(names)}
    assert {name for name in kept if not name.endswith("_created")} <= set(DOCUMENTED)
    assert {metric.exposed for metric in SERVER} <= kept


def test_the_rule_leaves_other_names_alone():
    names = {"process_cpu_seconds_total", "vllm:num_preemptions_total", "twin:requests_total", "up"}
    assert relabelled(names) == names
    assert relabelled({"vllm_kv_cache_usage_perc"}) == {"vllm:kv_cache_usage_perc"}


def test_every_name_in_documents_and_manifests_exists():
    known = {metric.exposed for metric in (*VLLM, *TWIN, *SERVER)}
    known |= {f"{name}{end}" for name in known for end in ("_bucket", "_sum", "_count")}
    known |= {metric.name for metric in (*VLLM, *TWIN, *SERVER)}
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("k8s/**/*"), ROOT / "README.md"]
    for path in files:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        used = set(re.findall(r"(?<![\w/])(?:vllm|twin):[a-z]\w+", text))
        unknown = {name for name in used - known if not name.endswith("_")} - OF_VLLM
        assert not unknown, path
        assert not re.findall(r"\bvllm_(?:num_requests|kv_cache|request_)\w+", text), path


OF_VLLM = {"vllm:admission_rejections_total", "vllm:iteration_tokens_total"}
"""vLLM's metrics that the twin does not write, and documents mention."""
