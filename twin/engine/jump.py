"""When the boundaries between steps come: sums of arithmetic progressions, exactly, and none of them written down."""

Run = tuple[int, int, int]
"""(number of steps, duration of the first, growth from one to the next), picoseconds."""


class Piece:
    """Steps `before` + 1 to `last` of a jump, each taking `growth` longer than the one before it."""

    __slots__ = ("before", "first", "growth", "last", "start", "stop")

    def __init__(self, before: int, count: int, start: int, first: int, growth: int) -> None:
        self.before = before
        self.last = before + count
        self.start = start
        self.first = first
        self.growth = growth
        self.stop = start + count * first + growth * (count * (count - 1) // 2)
        """When the last one is over."""

    def end(self, step: int) -> int:
        """When `step`, or the one before them all, is over."""
        if step == self.last:
            return self.stop
        i = step - self.before
        return self.start + i * self.first + self.growth * (i * (i - 1) // 2) if i else self.start

    def sum_ends(self, step: int, stride: int, n: int) -> int:
        """The ends of `n` steps, every `stride`-th one from `step` on, added up."""
        i = step - self.before
        pairs = n * (n - 1) // 2
        grown = n * (i * (i - 1) // 2) + (stride * i + stride * (stride - 1) // 2) * pairs
        grown += stride * stride * (pairs * (n - 2) // 3)
        return n * self.start + (n * i + stride * pairs) * self.first + self.growth * grown


class Jump:
    """Steps one after another from an instant on. Step k, from 1 on, is over at `end(k)`; the first begins at
    `end(0)`.
    """

    __slots__ = ("_end", "_pieces", "steps")

    def __init__(self, start_ps: int) -> None:
        self.steps = 0
        self._end = start_ps
        self._pieces: list[Piece] = []

    def add(self, count: int, first_ps: int, growth_ps: int) -> None:
        """More steps, the first of which takes `first_ps`."""
        piece = Piece(self.steps, count, self._end, first_ps, growth_ps)
        self._pieces.append(piece)
        self.steps = piece.last
        self._end = piece.stop

    def end(self, step: int) -> int:
        """When `step` is over."""
        for piece in self._pieces:
            if step <= piece.last:
                return piece.end(step)
        raise IndexError(step)

    def find(self, instant_ps: int, least: int) -> int:
        """The earliest step from `least` on that is not over before an instant; the one after the last if all are."""
        for piece in self._pieces:
            low, high = max(least, piece.before + 1), piece.last
            if low <= high and piece.stop >= instant_ps:
                while low < high:
                    middle = (low + high) // 2
                    if piece.end(middle) < instant_ps:
                        low = middle + 1
                    else:
                        high = middle
                return low
        return self.steps + 1

    def sum_ends(self, first: int, last: int, stride: int = 1) -> int:
        """When every `stride`-th step from `first` to `last` is over, added up."""
        total = 0
        for piece in self._pieces:
            stop = min(piece.last, last)
            if first <= stop:
                n = (stop - first) // stride + 1
                total += piece.sum_ends(first, stride, n)
                first += n * stride
        return total

    def between(self, first: int, last: int) -> list[tuple[int, int, int, int]]:
        """The steps from `first` to `last` as (number, when the first begins, how long it takes, growth)."""
        found = []
        for piece in self._pieces:
            low, high = max(first, piece.before + 1), min(last, piece.last)
            if low <= high:
                done = low - 1 - piece.before
                duration = piece.first + done * piece.growth
                found.append((high - low + 1, piece.end(low - 1), duration, piece.growth))
        return found
