"""The metrics written under vLLM's names exist in the installed vLLM, of the same kind and with the same buckets."""

import ast
import inspect

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")

from vllm.v1.metrics import buckets, loggers

from twin.report.metric_names import VLLM, one_two_five

pytestmark = pytest.mark.vllm

KINDS = {"_gauge_cls": "gauge", "_counter_cls": "counter", "_histogram_cls": "histogram"}
FAMILIES = {
    "vllm:time_to_first_token_seconds": "time_to_first_token",
    "vllm:inter_token_latency_seconds": "inter_token_latency",
    "vllm:request_time_per_output_token_seconds": "inter_token_latency",
    "vllm:request_num_preemptions": "request_num_preemptions",
}


def theirs():
    """Name -> kind of every metric that vLLM's logger for Prometheus makes."""
    found = {"vllm:cache_config_info": "gauge"}
    for node in ast.walk(ast.parse(inspect.getsource(loggers))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names = [
                k.value.value
                for k in node.keywords
                if k.arg == "name" and isinstance(k.value, ast.Constant)
            ]
            if names and node.func.attr in KINDS:
                found[names[0]] = KINDS[node.func.attr]
    return found


@pytest.mark.parametrize("metric", VLLM, ids=lambda metric: metric.name)
def test_a_metric_is_vllm_s(metric):
    assert theirs()[metric.name] == metric.kind
    if metric.kind != "histogram":
        return
    if metric.name.endswith("_seconds") or metric.name in FAMILIES:
        family = FAMILIES.get(metric.name, "request_latency")
        assert metric.buckets == tuple(buckets.histogram_buckets(family))
    else:
        for max_model_len in (8192, 131072):
            expected = buckets.histogram_buckets("request_tokens", max_model_len)
            assert one_two_five(max_model_len) == tuple(expected)
