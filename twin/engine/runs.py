"""The prefix cache in runs: blocks that follow each other in one text are one object, and no block has a number.

It answers what `BlockPool` answers. Blocks are let go last block first and handed out oldest first, so a run loses its
end first, and how far it reaches is its whole state. Blocks without content always lead the free queue, so they are
a number.

A *line* is one segment of content after given others, or the reply after a prompt: the place in which blocks of equal
keys lie. Block i of a prompt lies in the line in which its last token does.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

ENDLESS = 1 << 60


class Line:
    """A segment of content behind the ones before it."""

    __slots__ = ("key", "number", "parent", "runs", "users", "writer")

    def __init__(self, number: int, key: tuple[int, int, int], parent: "Line | None") -> None:
        self.number = number
        self.key = key
        self.parent = parent
        self.runs: list[Run] = []
        """Present, in the order in which they became findable."""
        self.users = 0
        """Runs, requests and lines behind it."""
        self.writer: Any = None
        """The request whose reply this is, while it is in the engine."""

    def find(self, at: int, stop: int) -> "tuple[Run, int] | None":
        """What has been findable longest at block `at`, and up to which block that holds; None if nothing is there."""
        for run in self.runs:
            if run.start <= at < run.stop:
                return run, min(stop, run.stop)
            if at < run.start < stop:
                stop = run.start
        return None

    def covers_any(self, start: int, stop: int) -> bool:
        """Whether any block from `start` to before `stop` is findable."""
        return any(run.start < stop and start < run.stop for run in self.runs)


class Run:
    """Blocks `start` to before `stop` of a line, all held by the same requests."""

    __slots__ = ("after", "before", "line", "refs", "rest", "start", "stop")

    def __init__(self, line: Line, start: int, stop: int, refs: int) -> None:
        self.line = line
        self.start = start
        self.stop = stop
        self.refs = refs
        self.rest: Run | None = None
        """What was cut off its end while somebody held it."""
        self.before: Run = self  # in the free queue
        self.after: Run = self


Piece = tuple[Run, int, int]
"""Blocks from one to before another number of a run."""


class Hit(Sequence[Piece]):
    """A prefix that is present: `len` in blocks."""

    __slots__ = ("_length", "pieces")

    def __init__(self, pieces: list[Piece], length: int) -> None:
        self.pieces = pieces
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self.pieces[index]


class Path:
    """The lines of one request: `lines[i]` holds the blocks before number `stops[i]` that no earlier one does."""

    __slots__ = ("held", "lines", "owner", "published", "stops")

    def __init__(self, lines: list[Line], stops: list[int], owner: Any) -> None:
        self.owner = owner
        """The request."""
        self.lines = lines
        self.stops = stops
        self.held: list[list[Any]] = []
        """[first run, stop]: findable blocks that the request holds, in order."""
        self.published = 0
        """Blocks that the request holds and that are findable: its first ones."""

    def line_at(self, block: int) -> Line:
        """The line of a block."""
        for line, stop in zip(self.lines, self.stops, strict=True):
            if block < stop:
                return line
        raise AssertionError("the reply has no end")

    def parts(self, start: int, stop: int) -> Iterator[tuple[Line, int, int]]:
        """Blocks from `start` to before `stop` by line."""
        for line, end in zip(self.lines, self.stops, strict=True):
            if start < end:
                end = min(end, stop)
                yield line, start, end
                start = end
                if start == stop:
                    return


class RunPool:
    """Usable blocks: held, findable though free, or blank."""

    caching = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_usable = num_blocks - 1
        self.num_free = num_blocks - 1
        self._blank = num_blocks - 1
        self._size = block_size
        self._lines: dict[tuple[int, int, int], Line] = {}
        self.before_other: Callable[[Any, Any], None] = lambda writer, other: None
        """Told of the request whose reply a line is before another one makes blocks of that line findable."""
        self._numbers = 0
        self._queue = Run(
            Line(0, (0, 0, 0), None), 0, 0, 0
        )  # before the first and after the last free run

    @property
    def num_cached_free(self) -> int:
        """Free blocks that are findable."""
        return self.num_free - self._blank

    # --- content --------------------------------------------------------------------------

    def path(self, prompt: Sequence[tuple[int, int]], reply: int, owner: Any) -> Path:
        """Where the blocks of a new request belong. `forget` ends it."""
        lines, stops = [], []
        line: Line | None = None
        end, size = 0, self._size
        for content, tokens in prompt:
            if tokens:
                line = self._line(line, end, content)
                end += tokens
                lines.append(line)
                stops.append(end // size)
        line = self._line(line, end, reply)
        line.writer = owner
        lines.append(line)
        stops.append(ENDLESS)
        for line in lines:
            line.users += 1
        return Path(lines, stops, owner)

    def forget(self, path: Path) -> None:
        """The request has gone."""
        path.lines[-1].writer = None
        for line in reversed(path.lines):
            self._leave(line)

    def _line(self, parent: Line | None, start: int, content: int) -> Line:
        key = (0 if parent is None else parent.number, start, content)
        line = self._lines.get(key)
        if line is None:
            self._numbers += 1
            self._lines[key] = line = Line(self._numbers, key, parent)
            if parent is not None:
                parent.users += 1
        return line

    def _leave(self, line: Line | None) -> None:
        while line is not None:
            line.users -= 1
            if line.users:
                return
            del self._lines[line.key]
            line = line.parent

    # --- what is there --------------------------------------------------------------------

    def find(self, path: Path, most: int) -> Hit:
        """The longest prefix present, of the first `most` blocks of a path."""
        pieces: list[Piece] = []
        at = 0
        for line, stop in zip(path.lines, path.stops, strict=True):
            stop = min(stop, most)
            while at < stop:
                found = line.find(at, stop)
                if found is None:
                    return Hit(pieces, at)
                pieces.append((found[0], at, found[1]))
                at = found[1]
        return Hit(pieces, at)

    @staticmethod
    def count_unreferenced(hit: Hit) -> int:
        """How many blocks of a hit are free."""
        return sum(stop - start for run, start, stop in hit.pieces if run.refs == 0)

    def count_sole(self, path: Path, num_blocks: int) -> int:
        """How many of the `num_blocks` blocks of a request would become free if it let go of them."""
        sole = sum(run.stop - run.start for run in self._held(path) if run.refs == 1)
        return sole + num_blocks - path.published

    def free_runs(self) -> list[Run]:
        """Free runs in the order in which they are used up, each from its end."""
        runs, run = [], self._queue.after
        while run is not self._queue:
            runs.append(run)
            run = run.after
        return runs

    # --- changes --------------------------------------------------------------------------

    def touch(self, path: Path, hit: Hit) -> None:
        """A request holds what it hit, and nothing else yet."""
        path.held = []
        path.published = len(hit)
        # Several pieces may be of one run, of which a cut leaves the front.
        for run, start, stop in reversed(hit.pieces):
            run = self._cut_out(run, start, stop)
            if run.refs == 0:
                self._unlink(run)
                self.num_free -= stop - start
            run.refs += 1
            path.held.append([run, stop])
        path.held.reverse()

    def take(self, count: int) -> None:
        """Hand out `count` blocks; what was in them is no longer findable."""
        self.num_free -= count
        if count <= self._blank:
            self._blank -= count
            return
        count -= self._blank
        self._blank = 0
        while count:
            run = self._queue.after
            length = run.stop - run.start
            if length > count:
                run.stop -= count
                return
            count -= length
            self._unlink(run)
            self._remove(run)

    def publish(self, path: Path, blocks: int) -> None:
        """The first `blocks` blocks of a request are full and become findable."""
        for line, start, stop in path.parts(path.published, blocks):
            if line.writer is not None and line.writer is not path.owner:
                self.before_other(line.writer, path.owner)
            last = self._last(path)
            if (
                last is not None
                and last.line is line
                and last.stop == start
                and last.refs == 1
                and (len(line.runs) == 1 or not line.covers_any(start, stop))
            ):
                last.stop = stop
                path.held[-1][1] = stop
            else:
                run = Run(line, start, stop, 1)
                if not line.runs:
                    line.users += 1
                line.runs.append(run)
                path.held.append([run, stop])
        path.published = blocks

    def release(self, path: Path, num_blocks: int) -> None:
        """A request lets go of all its `num_blocks` blocks."""
        self.num_free += num_blocks - path.published
        self._blank += num_blocks - path.published
        last = self._queue.before
        for run in reversed(list(self._held(path))):
            run.refs -= 1
            if run.refs == 0:
                run.rest = None
                self.num_free += run.stop - run.start
                last.after, run.before = run, last
                last = run
        last.after, self._queue.before = self._queue, last
        path.held = []
        path.published = 0

    # --- runs -----------------------------------------------------------------------------

    @staticmethod
    def _held(path: Path) -> Iterator[Run]:
        for run, stop in path.held:
            yield run
            while run.stop < stop:
                run = run.rest
                yield run

    @staticmethod
    def _last(path: Path) -> Run | None:
        """The run at the end of what a request holds."""
        if not path.held:
            return None
        run: Run = path.held[-1][0]
        while run.rest is not None and run.stop < path.held[-1][1]:
            run = run.rest
        return run

    def _cut_out(self, run: Run, start: int, stop: int) -> Run:
        """The blocks `start` to before `stop` of a run as a run of their own; the rest stays where it is."""
        if run.start < start:
            run = self._cut(run, start)
        if stop < run.stop:
            self._cut(run, stop)
        return run

    def _cut(self, run: Run, at: int) -> Run:
        """Cut a run in two; returns the later part. Free ones stay at their place, the end in front."""
        part = Run(run.line, at, run.stop, run.refs)
        run.stop = at
        runs = run.line.runs
        runs.insert(runs.index(run) + 1, part)
        if run.refs:
            part.rest, run.rest = run.rest, part
        else:
            part.before, part.after = run.before, run
            run.before.after = part
            run.before = part
        return part

    @staticmethod
    def _unlink(run: Run) -> None:
        run.before.after, run.after.before = run.after, run.before
        run.before = run.after = run

    def _remove(self, run: Run) -> None:
        line = run.line
        line.runs.remove(run)
        if not line.runs:
            self._leave(line)


class CountPool:
    """Blocks without content: how many are free is all there is to know."""

    caching = False
    num_cached_free = 0

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self.num_free = num_blocks - 1

    @staticmethod
    def count_unreferenced(hit: Sequence[object]) -> int:
        """How many blocks of a hit are free: there are no hits."""
        return 0

    def take(self, count: int) -> None:
        """Hand out `count` blocks."""
        self.num_free -= count

    def release(self, num_blocks: int) -> None:
        """Take back `num_blocks` blocks."""
        self.num_free += num_blocks
