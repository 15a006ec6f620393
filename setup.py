"""Compiles the modules that a simulation spends its time in; everything else about the package is in pyproject.toml.

mypyc makes C of them, a C compiler makes extension modules of that, and Python prefers those to the sources, which are
installed beside them. Results are the same to the byte; a run takes a fraction of the time.

TWIN_PURE_PYTHON in the environment: 1 = compile nothing, and build a wheel for every platform; 0 = stop if it cannot be
compiled as asked for; not set = compile where mypyc and a compiler are at hand. An editable installation is never
compiled: what was compiled would hide later changes. TWIN_OPTIMIZE is the compiler's level, 0 to 3 (3).

TWIN_TRAIN=1: with gcc, compile twice, the second time for what the first, which counts, did in scripts/train.py. It is
faster still. What the twin itself needs must be installed (`pip install --no-build-isolation`).
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

COMPILED = (
    "twin/agenda.py",
    "twin/clock.py",
    "twin/scheduling/entry.py",
    "twin/scheduling/estimators.py",
    "twin/scheduling/fair.py",
    "twin/scheduling/hold.py",
    "twin/scheduling/job.py",
    "twin/scheduling/orders.py",
    "twin/scheduling/planning.py",
    "twin/scheduling/policy.py",
    "twin/scheduling/ready.py",
    "twin/scheduling/statistics.py",
    "twin/step_time/model.py",
    "twin/workload/arrivals.py",
    "twin/workload/load.py",
    "twin/workload/request.py",
    "twin/workload/source.py",
    "twin/workload/streams.py",
    "twin/workload/synthetic.py",
    "twin/workload/trace.py",
    "twin/workload/formats/azure.py",
    "twin/workload/formats/hashed.py",
    "twin/workload/formats/lines.py",
    "twin/workload/formats/values.py",
    "twin/metrics/engine_time.py",
    "twin/metrics/estimated_wait.py",
    "twin/metrics/record_table.py",
    "twin/metrics/records.py",
    "twin/metrics/token_times.py",
    "twin/engine/blocks.py",
    "twin/engine/config.py",
    "twin/engine/core.py",
    "twin/engine/decodes.py",
    "twin/engine/fast_core.py",
    "twin/engine/fast_replica.py",
    "twin/engine/jump.py",
    "twin/engine/life.py",
    "twin/engine/meter.py",
    "twin/engine/queues.py",
    "twin/engine/replica.py",
    "twin/engine/request.py",
    "twin/engine/run_core.py",
    "twin/engine/runs.py",
    "twin/cluster/clients.py",
    "twin/cluster/gateway.py",
    "twin/cluster/router.py",
    "twin/cluster/timer.py",
    "twin/simulation.py",
)
BUILDS = {"bdist_wheel", "build", "build_ext", "install"}
"""Commands that make something to be installed; others read the sources only."""


class Compile(build_ext):
    """Builds the extension modules, or leaves them out if they cannot be built and need not be."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if os.environ.get("TWIN_PURE_PYTHON") == "0":
                raise
            print(f"vllm-twin is installed as pure Python: {error}", file=sys.stderr)
            for path in map(Path, self.get_outputs()):
                path.unlink(missing_ok=True)

    def build_extensions(self) -> None:
        """Compile, with TWIN_TRAIN for what the twin does most."""
        if os.environ.get("TWIN_TRAIN", "") in ("", "0"):
            super().build_extensions()
            return
        try:
            self._flagged(["-fprofile-generate", "-fprofile-update=single"], ["-fprofile-generate"])
            self._train()
            use = ["-fprofile-use", "-fprofile-partial-training", "-Wno-missing-profile"]
            self._flagged(use, [])
        except (CompileError, LinkError, subprocess.CalledProcessError) as error:
            if os.environ.get("TWIN_PURE_PYTHON") == "0":
                raise
            print(f"vllm-twin is compiled without training: {error}", file=sys.stderr)
            self._flagged([], [])

    def _train(self) -> None:
        root = Path(__file__).absolute().parent
        paths = [str(Path(self.build_lib).absolute()), str(root), os.environ.get("PYTHONPATH", "")]
        subprocess.run(
            [sys.executable, str(root / "scripts" / "train.py")],
            check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def _flagged(self, compiling: list[str], linking: list[str]) -> None:
        """Compile everything with more flags."""
        before = [(e, e.extra_compile_args, e.extra_link_args) for e in self.extensions]
        for extension, compile_args, link_args in before:
            extension.extra_compile_args = [*compile_args, *compiling]
            extension.extra_link_args = [*link_args, *linking]
        self.force = True
        try:
            super().build_extensions()
        finally:
            for extension, compile_args, link_args in before:
                extension.extra_compile_args, extension.extra_link_args = compile_args, link_args


def extensions() -> list[Extension]:
    """What is to be built; nothing where that is not wanted or mypyc is missing."""
    wish = os.environ.get("TWIN_PURE_PYTHON", "")
    if wish == "1" or not BUILDS & set(sys.argv):
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        if wish == "0":
            raise
        print("vllm-twin is installed as pure Python: there is no mypyc", file=sys.stderr)
        return []
    # What is imported may be missing where this is built; mypy --strict has checked it elsewhere.
    options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    level = os.environ.get("TWIN_OPTIMIZE", "3")
    try:
        found: list[Extension] = mypycify([*options, *COMPILED], opt_level=level, debug_level="0")
    except SystemExit:  # it has said why
        if wish == "0":
            raise
        return []
    if sys.platform == "linux":
        for extension in found:  # what a module calls in itself cannot be replaced from outside
            # Not in place: they share one list.
            compiling, linking = extension.extra_compile_args, extension.extra_link_args
            extension.extra_compile_args = [*compiling, "-fno-semantic-interposition"]
            extension.extra_link_args = [*linking, "-Wl,-Bsymbolic"]
    return found


setup(ext_modules=extensions(), cmdclass={"build_ext": Compile})
