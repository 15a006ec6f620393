"""The files of sweeps and searches: a journal that outlives kill -9, one Parquet, the page, what all rests on."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from twin.errors import InputError
from twin.scenario import Scenario, load_scenario
from twin.whatif.axes import Axis, Range
from twin.whatif.optimize import Search
from twin.whatif.runs import NO_MEMORY
from twin.whatif.sweep import Plan, Row, table_of

JOURNAL, PLAN, TABLE, PAGE = "runs.jsonl", "sweep.json", "sweep.parquet", "sweep.html"


def basis_of(scenario: Scenario, axes: Sequence[Axis | Range]) -> dict[str, str]:
    """What the figures of a scenario and its variations rest on besides what is written in them.

    The contents of the files that they name (traces, profiles, models; those named by values of a key, too) by their
    hashes, and the sources and tables of the twin itself. Raises InputError for a file that cannot be read.
    """
    values = [value for axis in axes if isinstance(axis, Axis) for value in axis.values]
    named = [Path(os.path.expanduser(text)) for value in values for text in _texts(value)]
    named += [path / "config.json" for path in named]
    own = Path(__file__).parents[1]
    found = {"twin": _digest(sorted([*own.rglob("*.py"), *own.rglob("*.json")]))}
    # Its own file may change in its comments; what it says is in the plan.
    kept = load_scenario(scenario.to_dict()).files
    for path in sorted({*kept, *named}):
        try:
            is_file = path.is_file()
        except (OSError, ValueError):
            continue
        if is_file:
            found[str(path)] = _digest([path])
    return found


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value that could name a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _digest(paths: Sequence[Path]) -> str:
    told = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                told.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return told.hexdigest()[:16]


def check_basis(
    before: Mapping[str, str], scenario: Scenario, axes: Sequence[Axis | Range]
) -> None:
    """Raises InputError if a file was changed while runs read it, so that their rows are of two things."""
    changed = _changed(before, basis_of(scenario, axes))
    if changed:
        raise InputError(
            f"{changed} changed while this ran, so that some rows are of what it was before; run it again in another "
            "folder"
        )


def _changed(before: Any, now: Mapping[str, str]) -> str:
    """What of a basis is not as it was."""
    known: Mapping[str, str] = before if isinstance(before, Mapping) else {}
    names = [name for name in {**known, **now} if known.get(name) != now.get(name)]
    return ", ".join("the twin" if name == "twin" else name for name in names)


class FileJournal:
    """The rows of a sweep in `DIR/runs.jsonl`, one a line, each written to the disk before the next run is told of.

    Used as a context manager; the lock beside it keeps two sweeps out of one folder.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._rows: dict[int, Row] = {}
        self._file: TextIO | None = None

    def __enter__(self) -> "FileJournal":
        """Open it. Raises InputError for a folder that holds something else, or cannot be written."""
        try:
            self._open()
        except OSError as error:
            raise InputError(f"--out {self._folder}: {error.strerror or error}") from None
        return self

    def _open(self) -> None:
        if self._folder.is_file():
            raise InputError(f"--out {self._folder}: is a file; name a folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        known, journal = self._folder / PLAN, self._folder / JOURNAL
        mark = {"mark": self._plan.mark(), **self._plan.to_dict()}
        if known.exists():
            before = read_json(known)
            if not isinstance(before, dict) or before.get("mark") != mark["mark"]:
                raise InputError(
                    f"--out {self._folder}: holds another sweep ({_difference(before, mark)}); name another folder, "
                    "or repeat the command that began it to go on"
                )
        else:
            part = self._folder / f".{PLAN}.part"
            if any(path != part for path in self._folder.iterdir()):
                raise InputError(f"--out {self._folder}: the folder is not empty; name another")
            part.write_text(json.dumps(mark, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            part.replace(known)
        self._file = journal.open("a+", encoding="utf-8")
        self._lock()
        self._read(journal)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"--out {self._folder}: another sweep is writing here; wait for it, or name another folder"
            ) from None

    def _read(self, journal: Path) -> None:
        """What is there; a last line that was cut short is cut off."""
        data = journal.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(journal, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                found = json.loads(line)
                row = _row(found, self._plan.size)
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    f"{journal} line {number}: is no row of a sweep; delete that line to run it again"
                ) from None
            if row.error != NO_MEMORY:
                self._rows[row.number] = row

    def rows(self) -> dict[int, Row]:
        return dict(self._rows)

    def add(self, row: Row) -> None:
        assert self._file is not None, "the journal is open"
        if row.error == NO_MEMORY:
            # Not kept: the next time there may be more.
            self._rows[row.number] = row
            return
        found = {"number": row.number, "figures": row.figures, "error": row.error}
        try:
            self._file.write(json.dumps(found, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(f"--out {self._folder}: {error.strerror or error}") from None
        self._rows[row.number] = row

    def __exit__(self, *exception: object) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            # What could not be written before cannot be written now; that was told.
            if exception[0] is None:
                raise InputError(f"--out {self._folder}: {error.strerror or error}") from None


def _row(found: Any, size: int) -> Row:
    """A line of the journal. Raises ValueError, KeyError or TypeError for one that a sweep does not write."""
    number, figures, error = found["number"], found["figures"], found["error"]
    if type(number) is not int or not 0 <= number < size:
        raise ValueError("number")
    if not isinstance(error, str | None) or (figures is None) == (error is None):
        raise ValueError("error")
    if figures is not None:
        numbers = [value for value in dict(figures).values() if value is not None]
        if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers):
            raise ValueError("figures")
    return Row(number, figures, error)


def read_json(path: Path) -> Any:
    """What is in a JSON file. Raises InputError for one that is not readable as such."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise InputError(
            f"{path}: is not readable as JSON; delete the folder, or name another"
        ) from None


def _difference(before: Any, now: Mapping[str, Any]) -> str:
    """In what two plans differ."""
    if not isinstance(before, dict):
        return "its sweep.json is of something else"
    names = {"axes": "other values", "seeds": "other seeds", "scenario": "another scenario"}
    found = [words for key, words in names.items() if before.get(key) != now[key]]
    changed = _changed(before.get("basis"), now["basis"])
    if changed:
        found.append(
            f"other contents of {changed}".replace("contents of the twin", "version of the twin")
        )
    return ", ".join(found) or "of another version"


def write_table(folder: Path, plan: Plan, rows: Mapping[int, Row]) -> Path:
    """`sweep.parquet`: the rows by number. The same rows give the same bytes. Raises InputError where that fails."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name, values in table_of(plan, rows).items():
        columns[name] = _column(name, values)
    path, part = folder / TABLE, folder / f".{TABLE}.part"
    try:
        pq.write_table(pa.table(columns), part, compression="zstd")
        part.replace(path)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror or error}") from None
    return path


def _column(name: str, values: list[Any]) -> Any:
    import pyarrow as pa

    if name in ("point", "seed"):
        return pa.array(values, pa.int64())
    if name == "error":
        return pa.array(values, pa.string())
    if name == "saturated":
        return pa.array(values, pa.bool_())
    is_numeric = all(
        v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in values
    )
    if is_numeric:
        whole = all(v is None or isinstance(v, int) for v in values) and values
        return pa.array(values, pa.int64() if whole else pa.float64())
    return pa.array([None if v is None else _text(v) for v in values], pa.string())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_page(folder: Path, name: str, text: str) -> Path:
    """A text file that appears when it is complete. Raises InputError where that fails."""
    path, part = folder / name, folder / f".{name}.part"
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror or error}") from None
    return path


def make_folder(folder: Path) -> None:
    """A folder to write a search to. Raises InputError where there cannot be one, and where a sweep is."""
    if folder.is_file():
        raise InputError(f"--out {folder}: is a file; name a folder")
    if (folder / PLAN).exists():
        raise InputError(f"--out {folder}: holds a sweep; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror or error}") from None


def write_trials(folder: Path, search: Search, found: Mapping[str, Any]) -> Path:
    """`trials.parquet`: one row a configuration that a search tried. Raises InputError where that fails."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    trials = found["trials"]
    columns: dict[str, Any] = {}
    for i, axis in enumerate(search.axes):
        columns[axis.key] = _column(axis.key, [entry["point"][i] for entry in trials])
    for name in dict.fromkeys(name for entry in trials for name in entry["figures"]):
        values = [entry["figures"].get(name) for entry in trials]
        columns[name] = pa.array([None if v is None else float(v) for v in values], pa.float64())
    front = {entry["key"] for entry in found["front"]}
    columns["seeds"] = pa.array([entry["seeds"] for entry in trials], pa.int64())
    for name, flags in (
        ("stopped", [entry["stopped"] for entry in trials]),
        ("keeps_objectives", [entry["is_good"] for entry in trials]),
        ("front", [entry["key"] in front for entry in trials]),
    ):
        columns[name] = pa.array(flags, pa.bool_())
    columns["error"] = pa.array([entry["error"] for entry in trials], pa.string())
    path, part = folder / "trials.parquet", folder / ".trials.parquet.part"
    try:
        pq.write_table(pa.table(columns), part, compression="zstd")
        part.replace(path)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror or error}") from None
    return path
