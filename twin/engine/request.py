"""A request inside the engine: what vLLM's `Request` knows of it."""

from collections.abc import Hashable
from enum import Enum
from typing import Any

from twin.scheduling import Job


class Status(Enum):
    """Where a request is in the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class EngineRequest:
    """Counters of one request, in vLLM's names.

    `output_tokens` is where the model ends the text (None: never); `max_tokens` is already cut to
    max_model_len - num_prompt_tokens. `job` is what the scheduling policy sees of it; without a policy there is none.
    """

    __slots__ = (
        "arrival",
        "base",
        "blocks",
        "end_plan",
        "first_plan",
        "high_water",
        "is_member",
        "job",
        "join_plan",
        "keys",
        "max_tokens",
        "num_blocks",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_output_tokens",
        "num_tokens",
        "output_tokens",
        "prefix_hit_tokens",
        "priority",
        "recomputed_tokens",
        "rid",
        "run_number",
        "seq",
        "status",
        "work_plan",
    )

    def __init__(
        self,
        rid: Hashable,
        seq: int,
        arrival: float,
        num_prompt_tokens: int,
        max_tokens: int,
        output_tokens: int | None,
        keys: Any,
        priority: int = 0,
        job: Job | None = None,
    ) -> None:
        self.rid = rid
        self.seq = seq
        self.arrival = arrival
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.output_tokens = output_tokens
        self.keys = keys
        self.priority = priority
        if job is not None:
            self.job = job
        self.num_tokens = num_prompt_tokens  # prompt and known output
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0  # sampled by steps whose result is not known yet
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0  # in flight since before a preemption
        self.num_preemptions = 0
        self.num_hashed_blocks = 0
        self.blocks: list[int] = []
        self.num_blocks = 0
        self.status = Status.WAITING
        self.high_water = 0  # most tokens that were ever computed at once
        self.recomputed_tokens = 0
        self.run_number = 0  # of its admission, counted over the engine
        # While it is one of `Decodes`, whose docstring says what these are; its counters above are then out of date.
        self.is_member = False
        self.base = 0
        self.join_plan = 0
        self.end_plan = 0
        self.work_plan = 0  # the first plan in which it goes on as a member
        self.first_plan = 0  # the plan of the first token that its record does not have yet
        self.prefix_hit_tokens: int | None = None  # at first admission, if the cache was asked

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_prefill_chunk(self) -> bool:
        """Whether the tokens scheduled so far leave known ones to compute, so that nothing is sampled."""
        return self.num_computed_tokens < self.num_tokens + self.num_output_placeholders
