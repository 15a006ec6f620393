"""Time that does not end: what is beyond the instants a run can keep is refused by name, never in a traceback."""

import json

import pytest

from tests.runs import at_once, document, flat_profile, run, stream
from twin.clock import PS
from twin.errors import InputError
from twin.simulation import LONGEST_PS

DAY_PS = 86_400 * PS
FAR = {"process": "constant", "rate": 1e-6}
MODES = pytest.mark.parametrize("mode", ["fast", "stepped"])


def test_the_longest_time_fits_into_the_records_with_days_to_spare():
    assert LONGEST_PS + 5 * DAY_PS < 2**63


@MODES
def test_a_request_due_too_late_is_named(mode):
    source = document(traffic=[stream(), stream(arrivals=FAR)], run={"engine_mode": mode})
    with pytest.raises(
        InputError, match=r"^traffic\.1, request \d+ is due at [89],\d{3},\d{3} s; .*\(100 days\)"
    ):
        run(source)


@MODES
def test_a_trace_in_another_unit_is_named_by_its_line(mode, tmp_path):
    path = tmp_path / "us.jsonl"
    rows = [
        {"timestamp": i * 10**9, "input_length": 9, "output_length": 2, "hash_ids": [i]}
        for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = document(traffic=[{"trace": str(path)}], run={"engine_mode": mode})
    with pytest.raises(InputError, match=r"traffic\.0, line 10 is due at 9,000,000 s; .* unit"):
        run(source)
    assert len(run(source, "traffic.0.speedup=1000").records) == 12


@MODES
def test_a_later_turn_due_too_late_is_named(mode):
    talk = stream(sessions={"turns": 3, "think_time": 6e6}, requests=6)
    source = document(traffic=[talk], run={"engine_mode": mode})
    with pytest.raises(InputError, match=r"traffic\.0, session 0, turn 2 is due at 12,000,0"):
        run(source)


@MODES
def test_steps_that_last_too_long_are_refused(mode, tmp_path):
    profile = flat_profile(tmp_path, DAY_PS)
    source = document(
        hardware={"step_time": profile}, traffic=[at_once(10, 200)], run={"engine_mode": mode}
    )
    run(source, "run.until=9e5")
    with pytest.raises(InputError, match=r"the replicas would go on beyond 8,640,000 s"):
        run(source)


@MODES
def test_an_end_far_away_hurts_nobody_if_nothing_happens_until_then(mode):
    source = document(run={"engine_mode": mode, "until": 1e9})
    assert run(source, observe=True).simulated_ps == 10**9 * PS
    before = document(traffic=[stream(arrivals=FAR)], run={"engine_mode": mode, "until": 8.5e6})
    assert 0 < len(run(before).records) < 40
