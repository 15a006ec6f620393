"""The prefix cache in runs: blocks that follow each other in one text are one object, and no block has a number.

It answers what `BlockPool` answers. Blocks are let go last block first and handed out oldest first, so a run loses its
end first, and how far it reaches is its whole state. Blocks without content always lead the free queue, so they are
a number.

A *line* is one or more segments of content after given others: the place in which blocks of equal keys lie. Whoever
has its first segment goes through all of it; where texts part, a line is cut in two. Block i of a text lies in the
line in which its last token does.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

ENDLESS = 1 << 60


class Line:
    """Segments of content behind the ones before them."""

    __slots__ = ("contents", "number", "parent", "paths", "runs", "starts", "users", "writer")

    def __init__(
        self, number: int, parent: "Line | None", starts: list[int], contents: list[int]
    ) -> None:
        self.number = number
        self.parent = parent
        self.starts = starts
        """Of each segment, in tokens."""
        self.contents = contents
        self.paths: dict[Path, None] = {}
        """Of the requests that go through it."""
        self.runs: list[Run] = []
        """Present, in the order in which they became findable."""
        self.users = 0
        """Requests and lines behind it, and one if there are runs."""
        self.writer: Any = None
        """The request whose reply its last segment is, while it is in the engine."""

    @property
    def key(self) -> tuple[int, int, int]:
        """What nobody but those who go through it has."""
        before = 0 if self.parent is None else self.parent.number
        return before, self.starts[0], self.contents[0]

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

    def __init__(
        self, line: Line, start: int, stop: int, refs: int, queue: "Run | None" = None
    ) -> None:
        self.line = line
        self.start = start
        self.stop = stop
        self.refs = refs
        self.rest: Run | None = None
        """What was cut off its end while somebody held it."""
        # In the free queue; out of it, both are the end of the queue, so that no run refers to itself.
        self.before: Run = queue or self
        self.after: Run = self.before


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
        for i, stop in enumerate(self.stops):
            if block < stop:
                return self.lines[i]
        raise AssertionError("the reply has no end")

    def parts(self, start: int, stop: int) -> list[tuple[Line, int, int]]:
        """Blocks from `start` to before `stop` by line."""
        found = []
        for i, end in enumerate(self.stops):
            if start < end:
                end = min(end, stop)
                found.append((self.lines[i], start, end))
                if end == stop:
                    break
                start = end
        return found


class CountPool:
    """Usable blocks without content: how many are free is all there is to know."""

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self.num_free = num_blocks - 1
        self.caching = False

    @property
    def num_cached_free(self) -> int:
        """Free blocks that are findable."""
        return 0

    def take(self, count: int) -> None:
        """Hand out `count` blocks."""
        self.num_free -= count

    def give(self, count: int) -> None:
        """Take back `count` blocks without content."""
        self.num_free += count


class RunPool(CountPool):
    """Usable blocks: held, findable though free, or blank."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self.caching = True
        self._blank = num_blocks - 1
        self._size = block_size
        self._lines: dict[tuple[int, int, int], Line] = {}
        self.before_other: Callable[[Any, Any], None] = lambda writer, other: None
        """Told of the request whose reply a line is before another one makes blocks of that line findable."""
        self._numbers = 0
        self._queue = Run(
            Line(0, None, [], []), 0, 0, 0
        )  # before the first and after the last free run

    @property
    def num_cached_free(self) -> int:
        return self.num_free - self._blank

    # --- content --------------------------------------------------------------------------

    def path(self, prompt: Sequence[tuple[int, int]], reply: int, owner: Any) -> Path:
        """Where the blocks of a new request belong. `forget` ends it."""
        starts, contents, end = [], [], 0
        for content, tokens in prompt:
            if tokens:
                starts.append(end)
                contents.append(content)
                end += tokens
        starts.append(end)
        contents.append(reply)
        path = Path([], [], owner)
        line: Line | None = None
        at = 0
        while at < len(starts):
            line = self._line(line, starts, contents, at)
            at += len(line.starts)
            path.lines.append(line)
            path.stops.append(starts[at] // self._size if at < len(starts) else ENDLESS)
            line.paths[path] = None
            line.users += 1
        path.lines[-1].writer = owner
        return path

    def forget(self, path: Path) -> None:
        """The request has gone."""
        path.lines[-1].writer = None
        for line in reversed(path.lines):
            del line.paths[path]
            self._leave(line)

    def _line(self, parent: Line | None, starts: list[int], contents: list[int], at: int) -> Line:
        """The line behind `parent` that begins with segment number `at`, as far as it holds the same ones as these."""
        key = (0 if parent is None else parent.number, starts[at], contents[at])
        line = self._lines.get(key)
        if line is None:
            line = self._add_line(parent, starts[at:], contents[at:])
            if parent is not None:
                parent.users += 1
            return line
        own_starts, own_contents, most = line.starts, line.contents, len(starts) - at
        alike = 1
        while (
            alike < len(own_starts)
            and alike < most
            and own_starts[alike] == starts[at + alike]
            and own_contents[alike] == contents[at + alike]
        ):
            alike += 1
        return line if alike == len(own_starts) else self._part(line, alike)

    def _add_line(self, parent: Line | None, starts: list[int], contents: list[int]) -> Line:
        self._numbers += 1
        line = Line(self._numbers, parent, starts, contents)
        self._lines[line.key] = line
        return line

    def _part(self, line: Line, segments: int) -> Line:
        """The first segments of a line become one of their own, which is returned; the rest stays what is behind it."""
        front = self._add_line(line.parent, line.starts[:segments], line.contents[:segments])
        line.starts, line.contents = line.starts[segments:], line.contents[segments:]
        line.parent = front
        self._lines[line.key] = line
        stop = line.starts[0] // self._size
        for path in line.paths:
            place = path.lines.index(line)
            path.lines.insert(place, front)
            path.stops.insert(place, stop)
        front.paths = dict(line.paths)
        front.users = 1 + len(front.paths)
        if line.runs:
            for run in [*line.runs]:
                if run.start < stop < run.stop:
                    self._cut(run, stop)
            front.runs = [run for run in line.runs if run.stop <= stop]
            line.runs = [run for run in line.runs if run.stop > stop]
            for run in front.runs:
                run.line = front
            front.users += bool(front.runs)
            line.users -= not line.runs
        return front

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
        for i, line in enumerate(path.lines):
            stop = min(path.stops[i], most)
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

    def give(self, count: int) -> None:
        self.num_free += count
        self._blank += count

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
                run = Run(line, start, stop, 1, self._queue)
                if not line.runs:
                    line.users += 1
                line.runs.append(run)
                path.held.append([run, stop])
        path.published = blocks

    def release(self, path: Path, num_blocks: int) -> None:
        """A request lets go of all its `num_blocks` blocks."""
        self.give(num_blocks - path.published)
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
        part = Run(run.line, at, run.stop, run.refs, self._queue)
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

    def _unlink(self, run: Run) -> None:
        run.before.after, run.after.before = run.after, run.before
        run.before = run.after = self._queue

    def _remove(self, run: Run) -> None:
        line = run.line
        line.runs.remove(run)
        if not line.runs:
            self._leave(line)
