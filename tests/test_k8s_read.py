"""`twin-real manifests --check`: files of every kind, also such as cannot be read, and many of them."""

import subprocess
import sys
import time

import pytest
from kubernetes_validate import utils

from real.cli_manifests_read import read
from real.manifest_lint import schemas
from real.manifest_lint.check import lint
from tests.k8s import ROOT, kubectl
from twin.errors import InputError

BROKEN_PDB = """\
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: a}
spec: {maxUnavailables: 1, selector: {matchLabels: {a: b}}}
"""


def check(path):
    """(status, lines) of the command."""
    run = subprocess.run(
        [sys.executable, "-m", "real", "manifests", "--check", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in run.stderr
    return run.returncode, (run.stdout if run.stdout else run.stderr).splitlines()


HELM = "it is a template of Helm: check what `helm template` makes of its chart"
UNREAD = {
    "bracket": ("a: [1\nb: {{", 2, "not readable as YAML", "until it is read"),
    "key written twice": (
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nmetadata: {name: b}\n",
        4,
        "metadata: written twice, first on line 3",
        "keep one",
    ),
    "template": ("kind: Pod\nmetadata:\n  name: {{ .Release.Name }}\n{{- end }}\n", 4, "not readable as YAML", HELM),
    "template that is YAML": ("kind: Pod\nmetadata:\n  name: {{ .Release.Name }}\n", 3, "a key must be text", HELM),
    "aliases of aliases": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join(9 * ['*' + p])}]\n" for p, n in zip("abcdef", "bcdefg", strict=True)),
        1,
        "more than 100000 values, each alias counted as what it stands for",
        "write fewer aliases, or several files",
    ),
    "tag": ("a: !!python/object:os.system {}\n", 1, "the tag", "write a plain value"),
    "no text": (None, 1, "not text in UTF-8", "a manifest is a YAML file"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_a_file_that_cannot_be_read_is_a_finding_beside_those_of_the_others(tmp_path, case):
    text, line, message, fix = UNREAD[case]
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"\xff\xfe\x00" if text is None else text.encode())
    (tmp_path / "good.yaml").write_text(BROKEN_PDB)
    result = read(tmp_path)
    (told,) = result.found
    assert (told.kind, told.rule, told.place) == ("fault", "yaml", f"{bad}:{line}")
    assert message in told.message
    assert fix in told.fix
    assert "\n" not in str(told)
    others = lint(result.manifests)
    assert [f.message for f in others if f.rule == "schema"] == [
        "spec.maxUnavailables: unknown field"
    ]
    bad.rename(tmp_path / "bad.txt")
    assert not read(tmp_path).found


def test_what_is_told_of_the_others_and_the_status(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "good.yaml").write_text(BROKEN_PDB)
    status, lines = check(tmp_path)
    assert status == 1
    assert [line.rpartition(" [")[2] for line in lines[:-1]] == ["yaml]", "schema]"]
    assert lines[-1].startswith("2 faults")


def test_where_nothing_at_all_can_be_read_the_command_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [")
    (tmp_path / "b.yaml").write_text("a: 1\na: 2\n")
    status, lines = check(tmp_path)
    assert status == 2
    assert [f"{tmp_path}/a.yaml:1: " in lines[0], f"{tmp_path}/b.yaml:2: " in lines[1]] == [
        True,
        True,
    ]


def test_a_chart_is_to_be_rendered_first(tmp_path):
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: x\nversion: 1.0.0\n")
    (tmp_path / "values.yaml").write_text("replicas: 1\n")
    (tmp_path / "templates").mkdir()
    for folder in (tmp_path, tmp_path / "templates"):
        with pytest.raises(InputError, match=rf"`helm template {tmp_path} > rendered.yaml`"):
            read(folder)


def test_braces_in_the_texts_of_alerts_are_no_template(tmp_path):
    text = "a: '{{ $labels.tier }}: {{ $value }}'\nb: [\n"
    (tmp_path / "a.yaml").write_text(text.replace("$", ""))
    (tmp_path / "good.yaml").write_text(BROKEN_PDB)
    assert "until it is read" in read(tmp_path).found[0].fix


def test_json_is_read_with_its_lines_and_other_json_left_alone(tmp_path):
    (tmp_path / "dashboard.json").write_text('{"title": "x", "panels": []}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "pdb.json").write_text(
        '{\n\t"apiVersion": "policy/v1",\n\t"kind": "PodDisruptionBudget",\n\t"metadata": {"name": "a"},\n'
        '\t"spec": {\n\t\t"maxUnavailables": 1\n\t}\n}\n'
    )
    found = lint(read(tmp_path).manifests)
    assert {f.place for f in found if f.rule == "schema"} == {f"{tmp_path}/pdb.json:6"}
    (tmp_path / "pdb.json").write_text("{")
    with pytest.raises(InputError, match=r"pdb\.json:1: not readable as JSON"):
        read(tmp_path)


def test_an_overlay_whose_file_has_no_suffix_is_built(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECTL", kubectl())
    base, overlay = tmp_path / "base", tmp_path / "overlay"
    for folder in (base, overlay):
        folder.mkdir()
    (base / "pdb.yaml").write_text(BROKEN_PDB)
    (base / "kustomization.yaml").write_text("kind: Kustomization\nresources: [pdb.yaml]\n")
    (overlay / "Kustomization").write_text("kind: Kustomization\nresources: [../base]\n")
    assert [m.kind for m in read(overlay).manifests] == ["PodDisruptionBudget"]


def test_a_folder_with_dashboards_only_holds_no_object(tmp_path):
    (tmp_path / "dashboard.json").write_text('{"title": "x"}')
    with pytest.raises(InputError, match="holds no Kubernetes object"):
        read(tmp_path)


def test_schemas_are_read_once_whatever_the_number_of_objects(tmp_path, monkeypatch):
    """2,100 lines; reading the schemas for each object made that six seconds."""
    text = "".join(
        f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: c{i}}}\ndata:\n  a: 'b'\n  b: c\n---\n"
        for i in range(300)
    )
    (tmp_path / "many.yaml").write_text(text)
    read_files, own = [], utils.schema_contents
    monkeypatch.setattr(
        utils, "schema_contents", lambda file, version: read_files.append(file) or own(file, version)
    )  # fmt: skip
    schemas.validator_of.cache_clear()
    schemas._definitions.cache_clear()
    begin = time.process_time()
    assert lint(read(tmp_path).manifests) == []
    assert time.process_time() - begin < 5
    assert sorted(file.rpartition("/")[2] for file in read_files) == [
        "_definitions.json",
        "configmap-v1.json",
    ]


@pytest.mark.parametrize("kind", ["../../x", "a/b", "\0", "Pod\n", ""])
def test_a_kind_is_no_path_to_other_files(kind):
    assert schemas.validator_of("v1", kind) is None
