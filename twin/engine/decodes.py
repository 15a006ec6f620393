"""The running requests that compute one token in every step, none of them touched until something happens to it.

Plans are numbered. A member that joined after plan j has computed `base + n` tokens after plan n >= j, so contexts are
a sum that grows by the number of members, ends are plan numbers known at joining, and the plans in which a member
needs another block are those of one residue modulo the block size.
"""

import heapq

from twin.engine.request import EngineRequest


class Decodes:
    """Members, and what all of them together need in plan n."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.members: dict[EngineRequest, None] = {}
        self.ends: dict[int, list[EngineRequest]] = {}
        """Plan -> members, resting ones included, that get their last token from it."""
        self._end_heap: list[int] = []
        self.number = 0
        """Of members."""
        self.takers = [0] * block_size
        """Plan modulo block size -> members that need a block in it."""
        self.sum_base = 0
        """Of the members' bases."""
        self._resting_computed = 0

    def join(self, request: EngineRequest, plan: int, end: int) -> None:
        """`request` computes one token in each plan after `plan`; its last token comes from plan `end`."""
        request.is_member = True
        base = request.num_computed_tokens - plan
        request.base = base
        request.join_plan = plan
        request.end_plan = end
        self.members[request] = None
        self.number += 1
        if end in self.ends:
            self.ends[end].append(request)
        else:
            self.ends[end] = [request]
            heapq.heappush(self._end_heap, end)
        self.takers[(1 - base) % self._block_size] += 1
        self.sum_base += base

    def rest(self, request: EngineRequest) -> None:
        """`request` computes no more tokens but still holds its slot and blocks: its last token is on its way."""
        self._drop(request)
        self._resting_computed += request.base + request.end_plan

    def leave(self, request: EngineRequest) -> None:
        """`request` is none of ours any more."""
        if request in self.members:
            self._drop(request)
        else:
            self._resting_computed -= request.base + request.end_plan
        ending = self.ends[request.end_plan]
        if len(ending) > 1:
            ending.remove(request)
        else:
            del self.ends[request.end_plan]

    def _drop(self, request: EngineRequest) -> None:
        del self.members[request]
        self.number -= 1
        self.takers[(1 - request.base) % self._block_size] -= 1
        self.sum_base -= request.base

    def context(self, plan: int) -> int:
        """Keys attended to by all members together in plan `plan`."""
        return self.sum_base + plan * self.number

    def computed(self, plan: int) -> int:
        """Tokens that all members, resting ones included, have computed after plan `plan`."""
        return self.sum_base + plan * self.number + self._resting_computed

    def everybody(self) -> list[EngineRequest]:
        """Members and resting ones."""
        return [request for ending in self.ends.values() for request in ending]

    def first_end(self) -> int | None:
        """The earliest plan from which anybody gets the last token."""
        heap = self._end_heap
        while heap and heap[0] not in self.ends:
            heapq.heappop(heap)
        return heap[0] if heap else None

    # --- blocks ---------------------------------------------------------------------------

    def plans_within(self, plan: int, plans: int, free_blocks: int) -> int:
        """How many of the `plans` plans from `plan` on find the blocks they need among `free_blocks`."""
        size = self._block_size
        if self.number * -(-plans // size) <= free_blocks:
            return plans
        for k in range(plans):
            free_blocks -= self.takers[(plan + k) % size]
            if free_blocks < 0:
                return k
        return plans
