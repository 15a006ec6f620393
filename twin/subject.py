"""What is run, as far as the twin's errors depend on it, and how wrong such a run may be."""

from dataclasses import replace

from twin.scenario import Scenario
from twin.step_time.shipped import stored_kv_dtype
from twin.step_time.trust import Subject, Trust, foreign_to, nearest, origin_of


def subject_of(scenario: Scenario, load: str) -> Subject:
    """The subject of a run whose load is `load` (light or queued)."""
    hardware, origin = scenario.hardware, scenario.hardware.profile.provenance
    return Subject(
        model=origin.model,
        params=scenario.model.params,
        gpu=hardware.gpu.name,
        tensor_parallel_size=hardware.tensor_parallel_size,
        dtype=hardware.dtype,
        kv_cache_dtype=stored_kv_dtype(scenario.document["engine"]["kv_cache_dtype"]),
        max_num_batched_tokens=scenario.engine.max_num_batched_tokens,
        policy=scenario.policy_name,
        origin=origin_of(origin.source),
        load=load,
    )


def trust_of(scenario: Scenario, load: str) -> Trust:
    """The errors of the nearest set-up that was measured, and its distance.

    Step times fitted to one's own server have the error of their fit instead; step times of another model, GPU, number
    of GPUs or type than the scenario's are "not validated".
    """
    hardware, origin = scenario.hardware, scenario.hardware.profile.provenance
    foreign = foreign_to(
        origin,
        scenario.model,
        hardware.gpu.name,
        hardware.tensor_parallel_size,
        hardware.dtype,
        scenario.document["engine"]["kv_cache_dtype"],
    )
    subject = subject_of(scenario, load)
    found = replace(nearest(subject, hardware.validated), foreign=foreign)
    own = subject.origin == "fit" and not foreign
    return replace(found, calibration=origin.fit_error) if own else found
