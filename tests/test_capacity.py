"""The rough capacity of a replica, beside what a simulated one serves when its queue never empties."""

import pytest

from tests.runs import document, run
from twin.capacity import busiest, replica_cost, traffic_warnings
from twin.clock import PS
from twin.scenario import load_scenario
from twin.workload.load import Cost, Load

ENGINE = {
    "max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 16_384,
    "num_gpu_blocks_override": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "output", "engine"),
    [
        (1155, 211, {}),
        (2048, 28, {}),
        (100, 400, {}),
        (12_000, 340, {}),
        (1155, 211, {"max_num_seqs": 16, "max_num_batched_tokens": 2048}),
        (4000, 1000, {"num_gpu_blocks_override": 6000}),
    ],
)
def test_the_rate_of_a_saturated_replica(prompt, output, engine):
    crowd = {
        "arrivals": {"process": "poisson", "rate": 1000},
        "prompt_tokens": {"uniform": [prompt // 2, 3 * prompt // 2]},
        "output_tokens": {"uniform": [output // 2, 3 * output // 2]},
        "requests": 1200,
    }
    scenario = document(engine=ENGINE | engine, traffic=[crowd])
    cost = replica_cost(load_scenario(scenario), prompt, output)
    rate = 1 / (cost.prompt_token_s * prompt + cost.output_token_s * output)
    finished = sorted(record.finish_ps for record in run(scenario).records)
    early, late = 200, 900
    served = (late - early) / ((finished[late] - finished[early]) / PS)
    assert rate == pytest.approx(served, rel=0.12)


def test_the_busiest_part_is_the_one_with_most_work():
    load, cost = Load(), Cost(0.001, 0.01)
    for second in range(700):
        many = second in range(300, 360)
        load.add(second * PS, 100 if many else 5, 60 if second < 60 else 1)
    share, part = busiest(load, cost)
    assert share == pytest.approx((60 * 5 * 0.001 + 60 * 60 * 0.01) / 60)
    assert (part.from_s, part.to_s) == (0, 60)


def test_nothing_is_said_of_traffic_made_up_or_too_short():
    scenario, load = load_scenario(document()), Load()
    assert traffic_warnings(scenario, None) == ()
    for i in range(99):
        load.add(i * PS, 1, 1)
    assert traffic_warnings(scenario, load) == ()
    load.add(100 * PS, 1, 1)
    (warning,) = traffic_warnings(scenario, load)
    assert warning.startswith("even the busiest 10 s ask for 0%")
