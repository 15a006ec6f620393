"""Rules of the house that no linter knows: who may touch what, and what is shipped."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DECIDING = ("scheduling", "engine", "step_time", "cluster", "metrics")
"""Packages of twin that are handed everything they use."""


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, those not yet committed included."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    """The syntax tree of a module: of ours, read when this file was imported.

    Python 3.11 can fail to parse ("recursion depth mismatch") after hypothesis has met the recursion limit.
    """
    return _TREES.get(path) or ast.parse(path.read_text(encoding="utf-8"), str(path))


_TREES: dict[Path, ast.Module] = {}
_TREES = {path: parse(path) for name in ("twin", "real", "dashboard") for path in modules(name)}


def imported(tree: ast.Module) -> Iterator[str]:
    """Absolute names of imported modules; relative ones begin with their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every call; what stands before an attribute is `?` unless a name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        parts, target = [], node.func
        while isinstance(target, ast.Attribute):
            parts.append(target.attr)
            target = target.value
        parts.append(target.id if isinstance(target, ast.Name) else "?")
        yield node.lineno, ".".join(reversed(parts))


def file_calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Calls that open, read, write or make a file."""
    verbs = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir"}
    tables = re.compile(
        r"(np|numpy)\.(load|save|fromfile|genfromtxt|memmap)"
        r"|(pd|pandas)\.read_|\.to_(csv|parquet|json)$"
    )
    for line, name in calls(tree):
        if name.split(".")[-1] in verbs or tables.search(name):
            yield line, name


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Public functions and methods; True for a method of a class with bases."""
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield node, isinstance(owner, ast.ClassDef) and bool(owner.bases)


def test_public_functions_are_documented():
    """Once is enough: other implementations of a documented method need not say it again."""
    found = [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node, inherits)
        for package in ("twin", "real", "dashboard")
        for path in modules(package)
        for node, inherits in functions(parse(path))
    ]
    documented = {node.name for _, node, _ in found if ast.get_docstring(node)}
    assert not [
        place for place, node, inherits in found if not inherits and node.name not in documented
    ]


@pytest.mark.parametrize("package", ["twin", "real", "dashboard"])
def test_top_packages_import_nothing(package):
    body = parse(ROOT / package / "__init__.py").body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_scheduler_uses_the_standard_library_only():
    for path in modules("twin/scheduling"):
        for name in imported(parse(path)):
            top = name.split(".")[0]
            ours = name == "twin.scheduling" or name.startswith(("twin.scheduling.", "."))
            assert ours or top in sys.stdlib_module_names, f"{path}: {name}"
            assert not name.startswith(".."), f"{path}: {name}"


@pytest.mark.parametrize("package", DECIDING)
def test_deciding_code_is_handed_time_and_chance(package):
    for path in modules(f"twin/{package}"):
        tree = parse(path)
        names = {name.split(".")[0] for name in imported(tree)}
        assert not names & {"time", "datetime", "os", "secrets"}, path
        for line, name in calls(tree):
            shared = name.startswith(("random.", "np.random.", "numpy.random."))
            assert not shared or name == "random.Random", f"{path}:{line}: {name}"
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Global)], path


def test_files_are_opened_at_the_edge_only():
    edge = re.compile(
        r"twin/(scenario|workload/formats(/\w+)?|report/\w+|whatif/store|terminal|(\w+/)?cli(_\w+)?)\.py"
    )
    for path in modules("twin"):
        name = path.relative_to(ROOT).as_posix()
        if not edge.fullmatch(name):
            assert not list(file_calls(parse(path))), name


@pytest.mark.parametrize(
    "text", ["open('x')", "gzip.open(p)", "Path('x').read_text()", "np.load(f)", "t.to_csv(f)"]
)
def test_an_opened_file_is_seen(text):
    assert list(file_calls(ast.parse(text)))


def test_no_unfinished_marks_and_nothing_of_one_machine():
    unfinished = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error"])
    folders = "/(root|work|workspace|home/[a-z]|Users/[A-Za-z]|tmp/[a-z]|opt/[a-z])" + r"\b"
    hosts = r"pypi\.org|pythonhosted|npmjs|debian\.org"
    wrong = re.compile(rf"\b({unfinished})\b|(?<![\w.>]){folders}|{hosts}")
    for path in tracked():
        if path.name in ("LICENSE", Path(__file__).name) or path.suffix == ".png":
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        found = [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if wrong.search(line)
        ]
        assert not found


def test_third_party_data_is_named_in_one_place():
    place = "shared" + "/data"
    named = [p.name for p in tracked() if place.encode() in p.read_bytes()]
    assert named == ["Makefile"]


@pytest.mark.parametrize("module", ["twin", "real"])
def test_python_m_equals_the_script(module):
    script = f"from {module}.cli import main; main()"
    for options in (["--version"], ["--help"]):
        asked = [
            subprocess.run([sys.executable, *way, *options], cwd=ROOT, capture_output=True)
            for way in (["-m", module], ["-c", script])
        ]
        assert asked[0].returncode == asked[1].returncode == 0
        assert asked[0].stdout == asked[1].stdout != b""


def test_a_run_needs_the_base_dependencies_only():
    extras = PROJECT["project"]["optional-dependencies"]
    needed = {re.split("[^A-Za-z0-9_-]", line)[0] for line in PROJECT["project"]["dependencies"]}
    extra = {re.split("[^A-Za-z0-9_-]", line)[0] for lines in extras.values() for line in lines}
    blocked = {name.replace("-", "_") for name in extra - needed - {"setuptools"}} | {"vllm"}
    script = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split())); "
        "from twin.cli import main; main()"
    )
    command = [sys.executable, "-c", script, " ".join(blocked), "run", "examples/chat-8b.yaml"]
    options = ["--set", "traffic.0.requests=20", "--json"]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["totals"]["offered"] == 20
    assert {"pandas", "optuna", "streamlit", "aiohttp", "ray"} <= blocked


def test_packages_are_listed():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in ("twin", "real", "dashboard")
        for path in tracked(f"{package}/**/__init__.py", f"{package}/__init__.py")
    }
    assert listed == present


def test_wheel_holds_the_packages_and_the_kubernetes_files(tmp_path):
    source = tmp_path / "source"
    for path in tracked():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    pure = os.environ | {"TWIN_PURE_PYTHON": "1"}
    built = subprocess.run([*command, source], capture_output=True, text=True, env=pure)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    meta = {name for name in names if ".dist-info/" in name}

    shipped = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("twin/**", "real/**", "dashboard/**")
        for path in tracked(pattern)
        if path.suffix in (".py", ".json", ".css", ".js", ".typed")
    }
    manifests = {path.relative_to(ROOT).as_posix() for path in tracked("k8s")}
    data = {name for name in names if ".data/" in name}
    assert {name.partition(".data/data/share/vllm-twin/")[2] for name in data} == manifests
    assert names - meta - data == shipped
    assert {Path(name).name for name in meta} >= {"LICENSE", "NOTICE", "entry_points.txt"}
