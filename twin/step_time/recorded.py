"""What recorded forward passes of a server come to: steps for a fit, and how well a fit on a third tells the rest.

The rows are those of aiconfigurator's recordings of vLLM: one a step, with the batch's composition. They give sums
over the requests of a step; where a step has several prompts these are taken to be equally long.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twin.errors import InputError
from twin.step_time.fit import KINDS, Step, StepFit, fit_steps, mape, misbooked, third

TOKEN_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
RUN = 15
"""Consecutive steps that are fitted, or tested, together."""


@dataclass(frozen=True)
class HeldOut:
    """A fit on a third of a recording, and its errors on the other two."""

    fit: StepFit
    fitted: Mapping[str, int]
    """Steps in the fit, by kind."""
    tested: Mapping[str, float]
    """Mean absolute relative error on the steps that were not, by kind."""
    tested_steps: Mapping[str, int]
    left_out: tuple[str, ...]
    """Names of steps in neither, whose time was booked in the step before."""
    fitted_names: tuple[str, ...]


def steps_of(rows: Sequence[Mapping[str, str]], where: str) -> list[Step]:
    """The steps in the order of `counter_id`. Raises InputError, with the row, for what is no number."""
    found = []
    for number, row in enumerate(rows, 2):
        try:
            prompts = int(row["ctx_requests"])
            new, cached = int(row["ctx_tokens"]), int(row["ctx_kv_tokens"])
            decodes = int(row["decode_requests"])
            seconds = float(row["latency_ms"]) / 1e3
            if not 0 < seconds < math.inf:
                raise ValueError(
                    f"latency_ms is {row['latency_ms']}; it must be above 0 and finite"
                )
            each = new / max(prompts, 1)
            found.append(
                (
                    int(row["counter_id"]),
                    Step(
                        tokens=new + decodes,
                        decodes=decodes,
                        context=int(row["decode_kv_tokens"]),
                        pairs=new * cached / max(prompts, 1) + new * (each + 1) / 2,
                        seconds=seconds,
                        seqs=prompts + decodes,
                        name=f"counter_id {row['counter_id']}",
                    ),
                )
            )
        except (KeyError, ValueError) as error:
            raise InputError(f"{where}, line {number}: no recorded step: {error}") from None
    return [step for _, step in sorted(found, key=lambda pair: pair[0])]


def held_out(steps: Sequence[Step], run: int = RUN) -> HeldOut:
    """Fit on every third run of consecutive steps, each kind counting equally; test on the rest.

    Steps whose time was booked in the one before (twin.step_time.fit.misbooked) are in neither and named.
    """
    chosen = third(len(steps), run)

    def fit_to(kept: Callable[[Step], bool]) -> StepFit:
        fitted = [step for step, use in zip(steps, chosen, strict=True) if use and kept(step)]
        return fit_steps(fitted, TOKEN_KNOTS, balance_kinds=True)

    # Times that are off by orders of magnitude bend a fit, so the one that finds them leaves out what lies far from it.
    rough = fit_to(lambda step: True)
    for _ in range(5):
        rough = fit_to(partial(_is_near, rough))
    out = {step.name for step in misbooked(rough, steps)}
    fit = fit_to(lambda step: step.name not in out)
    pairs = [(step, use) for step, use in zip(steps, chosen, strict=True) if step.name not in out]
    tested = [step for step, use in pairs if not use]
    fitted = [step for step, use in pairs if use]
    return HeldOut(
        fit=fit,
        fitted={kind: sum(step.kind == kind for step in fitted) for kind in KINDS},
        tested=mape(fit, tested),
        tested_steps={kind: sum(step.kind == kind for step in tested) for kind in KINDS},
        left_out=tuple(step.name for step in steps if step.name in out),
        fitted_names=tuple(step.name for step in fitted),
    )


def _is_near(fit: StepFit, step: Step) -> bool:
    """Whether a step's time lies within a factor of 1.5 of what the fit says."""
    return 1 / 1.5 < fit.seconds(step) / step.seconds < 1.5
