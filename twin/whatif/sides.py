"""One side of a comparison: what a figure was over its replications, and in which of them nobody was served."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twin.whatif.figures import Figures, is_lost


@dataclass(frozen=True, slots=True)
class Side:
    """One figure of one side, over its replications."""

    value: float | None
    """Mean over the replications that have a value."""
    lost: int
    """Replications in which requests came and none got so far that the figure could be told."""
    served: int
    """Replications that have a value and are not lost."""

    @property
    def is_gone(self) -> bool:
        """Whether requests came and nothing was ever served."""
        return self.lost > 0 and self.served == 0

    def met(self, limit: float | None) -> bool | None:
        """Whether an objective is kept on average; never where a replication is lost. None with nothing to judge."""
        if limit is None or (self.value is None and not self.lost):
            return None
        return not self.lost and self.value is not None and self.value <= limit


def side_of(rows: Sequence[Figures], name: str) -> Side:
    """One figure over the replications of a side."""
    gone = [is_lost(row, name) for row in rows]
    values = [row.get(name) for row in rows]
    known = [value for value in values if value is not None]
    served = sum(v is not None and not g for v, g in zip(values, gone, strict=True))
    return Side(math.fsum(known) / len(known) if known else None, sum(gone), served)
