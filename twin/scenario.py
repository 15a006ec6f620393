"""What is simulated: a scenario file, checked to the last key, as plain objects that the rest uses.

`load_scenario` reads the file and everything it points to: the catalogue's model and GPU, the step-time profile, the
first rows of the traces. Whatever cannot be right is refused here, with the place, the value, the bound and a way out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from twin import scenario_build as build
from twin import scenario_schema as schema
from twin.clock import to_ps
from twin.cluster.admission import AdmissionSpec
from twin.cluster.clients import ClientsSpec, Retries
from twin.cluster.fleet_spec import FleetSpec
from twin.cluster.router import Routing
from twin.engine.config import EngineConfig
from twin.errors import InputError
from twin.scenario_faults import Origin, check
from twin.scenario_fleet import fleet_of, fleet_warnings
from twin.scenario_gateway import admission_of, clients_of, routing_of
from twin.scenario_streams import stream_of
from twin.scenario_traffic import PresetStream
from twin.scenario_yaml import apply_override, parse, parse_all, plain_copy
from twin.scheduling import PolicyConfig, fingerprint
from twin.step_time.catalogue import (
    GPUS,
    MODELS,
    GpuSpec,
    ModelSpec,
    catalogue_name,
    find_gpu,
    find_model,
    parse_model,
)
from twin.step_time.memory import MemoryPlan, weight_bytes
from twin.step_time.model import StepTime
from twin.step_time.profiles import Profile, parse_profile
from twin.step_time.roofline import roofline
from twin.step_time.shipped import Subject, stored_dtype, stored_kv_dtype
from twin.step_time.shipped import find as find_profile
from twin.step_time.shipped import missing as missing_profile
from twin.step_time.trust import Regime, parse_regimes
from twin.workload.presets import Preset, parse_preset
from twin.workload.streams import Stream
from twin.workload.synthetic import SyntheticStream
from twin.workload.trace import TraceStream, rows_of


@dataclass(frozen=True)
class Hardware:
    """What one replica runs on."""

    gpu: GpuSpec
    tensor_parallel_size: int
    """GPUs of one replica."""
    dtype: str
    memory: MemoryPlan
    """How a GPU's memory is shared out; engine.num_gpu_blocks is its estimate unless the scenario overrides it."""
    profile: Profile
    """The step times and where they come from."""
    validated: tuple[Regime, ...] = field(compare=False, repr=False)
    """Set-ups that were measured, with the twin's errors on them."""


@dataclass(frozen=True)
class Cluster:
    """How many replicas there are and how requests are spread over them."""

    replicas: int
    """At the beginning."""
    routing: Routing
    admission: AdmissionSpec | None
    """What the gateway lets through; None = everything."""
    clients: ClientsSpec
    """What clients do whose request fails, and which of them leave by themselves."""
    fleet: FleetSpec | None
    """How they come and go; None = they are there from the beginning to the end."""
    price_per_gpu_hour: float | None

    @property
    def retries(self) -> Retries | None:
        """What clients do whose request fails, where their stream says nothing else; None = they do not ask again."""
        return self.clients.retries


@dataclass(frozen=True)
class Run:
    """What part of virtual time is simulated and measured."""

    seed: int
    until_ps: int | None
    """Where the run is cut; None = when the last request has ended."""
    warmup_ps: int
    """Arrivals before this instant are left out of the statistics."""
    sample_period_ps: int | None
    """Of metrics over time; None = chosen from the length of the run."""
    engine_mode: str
    """fast or stepped; the result is the same."""
    records: bool
    """Whether the record of every request is kept."""


@dataclass(frozen=True)
class Scenario:
    """Everything a run needs. Picklable; `load_scenario(scenario.to_dict())` gives an equal one."""

    name: str
    model: ModelSpec
    hardware: Hardware
    engine: EngineConfig
    step_time: StepTime
    """The profile's tables up to the engine's limits."""
    policy_name: str
    """A preset, a stock mode, or "custom"."""
    policy: PolicyConfig | None
    """None = unmodified vLLM with engine.scheduling_policy."""
    traffic: tuple[Stream, ...]
    cluster: Cluster
    objectives: Mapping[str, Mapping[str, float]]
    """Tier -> <metric>_<statistic> -> limit in seconds."""
    run: Run
    warnings: tuple[str, ...]
    """What is allowed but probably not meant."""
    document: Mapping[str, Any]
    """The file as data, with overrides and defaults filled in and paths resolved."""
    files: tuple[Path, ...] = field(compare=False)
    """What it was read from: its own file, traces, profiles and whatever else it names."""

    @property
    def policy_fingerprint(self) -> str:
        """Equal exactly when two hosts run the same policy; the stock modes are named."""
        return self.policy_name if self.policy is None else fingerprint(self.policy)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of tiers: the policy's in its order, then those that only the traffic has."""
        named = () if self.policy is None else (tier.name for tier in self.policy.tiers)
        asked = (tier for stream in self.traffic for tier in stream.clients.tiers)
        return tuple(name for name in dict.fromkeys((*named, *asked)) if name != "*")

    def to_dict(self) -> dict[str, Any]:
        """The scenario as the data of a file."""
        copy: dict[str, Any] = plain_copy(self.document)
        return copy


def load_scenario(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), seed: int | None = None
) -> Scenario:
    """The scenario in a YAML file, or in a mapping of the same form, with `key.key=value` overrides on top.

    `traffic:` may name a file with the streams. Paths inside a file are relative to it (to the working directory for a
    mapping). `seed` replaces run.seed. Raises
    InputError for a file that cannot be read, for what is not allowed in it, and for a scenario that cannot run.
    """
    if isinstance(source, Mapping):
        origin = Origin("scenario", Path(), {}, {})
        written: Any = plain_copy(source)
    else:
        written, lines = parse(_read_text(source), str(source))
        if not isinstance(written, dict):
            found = {type(None): "the file is empty", list: "found a list"}.get(
                type(written), "found text"
            )
            raise InputError(
                f"{source}: {found}; a scenario is a mapping with keys such as model: and traffic:"
            )
        origin = Origin(str(source), Path(source).parent, lines, {}, [Path(source)])
    _include_traffic(written, origin)
    _include_autoscaler(written, origin)
    _include_history(written, origin)
    for override in overrides:
        if override.startswith("policy.") and isinstance(written.get("policy"), str):
            written["policy"] = {"preset": written["policy"]}
        origin.override(apply_override(written, override), f"--set {override}")
        _include_traffic(written, origin)
        _include_autoscaler(written, origin)
        _include_history(written, origin)
    if seed is not None:
        origin.override(apply_override(written, f"run.seed={seed}"), f"--seed {seed}")
    document = check(written)
    if not isinstance(document, schema.Document):
        raise InputError("\n".join(origin.tell(*fault) for fault in document[:10]))
    return _build(document, origin)


def _include_traffic(written: dict[str, Any], origin: Origin) -> None:
    """Where `traffic:` names a file, put its streams there. Paths in it are relative to it."""
    name = written.get("traffic")
    if not isinstance(name, str):
        return
    path = origin.resolve(name, "traffic")
    with origin.placed("traffic", named=True):
        content, _ = parse(_read_text(path), str(path))
    streams = content.get("traffic") if isinstance(content, dict) else content
    if not isinstance(streams, list):
        origin.fail(("traffic",), f"{path} holds no list of streams, nor a key traffic with one")
    for stream in streams:
        for key in ("trace", "lengths_from"):
            if isinstance(stream, dict) and isinstance(stream.get(key), str):
                stream[key] = str(path.parent / Path(stream[key]).expanduser())
    written["traffic"] = streams
    origin.override(("traffic",), str(path))


AUTOSCALERS = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
"""Key of `cluster:` -> kind of the document that a file may hold for it."""


def _include_autoscaler(written: dict[str, Any], origin: Origin) -> None:
    """Where `cluster.hpa` or `cluster.keda` names a file, put the spec of the one such object in it there."""
    cluster = written.get("cluster")
    for key, kind in AUTOSCALERS.items():
        if not isinstance(cluster, dict) or not isinstance(cluster.get(key), str):
            continue
        name = cluster[key]
        path = origin.resolve(name, "cluster", key)
        with origin.placed("cluster", key, named=True):
            documents = parse_all(_read_text(path), str(path))
        found = [d for d in documents if isinstance(d, dict) and d.get("kind") == kind]
        if len(found) != 1:
            origin.fail(
                ("cluster", key), f"{path} holds {len(found)} objects of kind {kind}, not one"
            )
        cluster[key] = found[0].get("spec")
        origin.override(("cluster", key), str(path))


def _include_history(written: dict[str, Any], origin: Origin) -> None:
    """Where `cluster.prediction.history` names a file, put its rates there, one a line."""
    cluster = written.get("cluster")
    prediction = cluster.get("prediction") if isinstance(cluster, dict) else None
    if not isinstance(prediction, dict) or not isinstance(prediction.get("history"), str):
        return
    place = ("cluster", "prediction", "history")
    if not prediction["history"].strip():
        origin.fail(place, "is empty; write the name of a file, a list of rates, or remove it")
    path = origin.resolve(prediction["history"], *place)
    with origin.placed(*place, named=True):
        lines = _read_text(path).splitlines()
    rates = []
    for number, line in enumerate(lines, 1):
        try:
            rates.append(float(line))
        except ValueError:
            origin.fail(place, f"{path} line {number}: must be a rate a second, got {line[:40]!r}")
    prediction["history"] = rates
    origin.override(place, str(path))


def _build(document: schema.Document, origin: Origin) -> Scenario:
    model = _model(document.model, origin)
    gpu = _gpu(document.hardware, origin)
    max_model_len = build.model_len_of(document.engine, model, origin)
    policy_name, policy = build.policy_of(document.policy, max_model_len, origin)
    engine, memory = build.engine_of(document, model, gpu, max_model_len, policy_name, origin)
    profile = _profile(document, model, gpu, origin)
    with origin.placed("engine"):
        step_time = profile.compile(
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            async_scheduling=engine.async_scheduling,
            eager=document.engine.enforce_eager,
        )
    taken = build.tiers_taken(policy_name, policy)
    default_tier = (policy and policy.default_tier) or "ONLINE"
    traffic = tuple(
        stream_of(stream, i, taken, default_tier, origin, traffic_presets)
        for i, stream in enumerate(document.traffic)
    )
    for i, (stream, written) in enumerate(zip(traffic, document.traffic, strict=True)):
        key = "preset" if isinstance(written, PresetStream) else "prompt_tokens"
        _check_can_run(stream, i, key, engine.max_model_len, origin)
    routing = routing_of(document.cluster, document.run.seed, origin)
    build.check_objectives(document, traffic, origin)
    hardware = document.hardware
    fleet = fleet_of(
        document.cluster,
        model,
        hardware.tensor_parallel_size,
        weight_bytes(model, 1, hardware.dtype),
        document.engine.enforce_eager,
        document.run.seed,
        document.run.until is not None,
        origin,
    )
    if fleet is not None:
        build.check_most_blocks(engine.num_gpu_blocks, fleet.most_replicas, origin)
    warnings = build.warnings_of(document, policy_name, policy, traffic, profile, model, memory)
    told = () if fleet is None else fleet_warnings(fleet, document.cluster)
    return Scenario(
        name=document.name or Path(origin.name).stem,
        model=model,
        hardware=Hardware(
            gpu,
            document.hardware.tensor_parallel_size,
            document.hardware.dtype,
            memory,
            profile,
            validated_regimes(),
        ),
        engine=engine,
        step_time=step_time,
        policy_name=policy_name,
        policy=policy,
        traffic=traffic,
        cluster=Cluster(
            document.cluster.replicas,
            routing,
            admission_of(
                document.cluster, build.tiers_of(traffic), traffic, document.traffic, origin
            ),
            clients_of(document.cluster, document.traffic, document.run.seed),
            fleet,
            document.cluster.price_per_gpu_hour,
        ),
        objectives=document.objectives,
        run=_run(document.run, origin),
        warnings=(*warnings, *told),
        document=_resolved(document, origin),
        files=tuple(dict.fromkeys(origin.files)),
    )


def _run(run: schema.Run, origin: Origin) -> Run:
    until_ps = None if run.until is None else to_ps(run.until)
    warmup_ps = to_ps(run.warmup)
    if until_ps == 0:
        origin.fail(("run", "until"), f"must be >= 1e-12 (a picosecond), got {run.until:g}")
    if until_ps is not None and warmup_ps >= until_ps:
        origin.fail(("run", "warmup"), f"must be < run.until ({run.until:g}), got {run.warmup:g}")
    sample_period_ps = None if run.sample_period is None else to_ps(run.sample_period)
    return Run(run.seed, until_ps, warmup_ps, sample_period_ps, run.engine_mode, run.records)


def _resolved(document: schema.Document, origin: Origin) -> dict[str, Any]:
    """The document as plain data whose paths hold from the working directory."""
    data = document.model_dump(mode="json")
    data["name"] = document.name or Path(origin.name).stem
    if document.model not in MODELS:
        data["model"] = str(origin.resolve(document.model, "model"))
    if document.hardware.step_time not in (None, ROOFLINE):
        data["hardware"]["step_time"] = str(
            origin.resolve(document.hardware.step_time, "hardware", "step_time")
        )
    for i, stream in enumerate(data["traffic"]):
        for key in ("trace", "lengths_from"):
            if stream.get(key) is not None:
                stream[key] = str(origin.resolve(stream[key], "traffic", i, key))
    return data


def _check_can_run(
    stream: Stream, index: int, key: str, max_model_len: int, origin: Origin
) -> None:
    """Refuse a stream of which no request can ever run: every prompt fills the context or more."""
    if isinstance(stream, TraceStream):
        key, shortest = "trace", 0
        with origin.placed("traffic", index, "trace", named=True):
            for row in rows_of(stream):
                if row.prompt_tokens < max_model_len:
                    return
                shortest = min(shortest or row.prompt_tokens, row.prompt_tokens)
        what = f"the shortest prompt in {stream.path} has {shortest} tokens"
    else:
        shortest = stream.fewest_prompt_tokens
        if shortest < max_model_len:
            return
        what = f"every prompt has at least {shortest} tokens"
        if isinstance(stream, SyntheticStream) and shortest > stream.lengths.least:
            shared = shortest - stream.lengths.least
            what += f" ({shared} of the system prompt and shared text + {stream.lengths.least})"
    origin.fail(
        ("traffic", index, key),
        f"no request of this stream can ever run: {what}, engine.max_model_len is {max_model_len}, and at least one "
        "token must be left for the reply; raise max_model_len or shorten the prompts",
    )


def _model(name: str, origin: Origin) -> ModelSpec:
    folder = origin.resolve(name, "model")
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        origin.fail(
            ("model",),
            f"there is no folder {folder}; give one with a config.json, or a name of the catalogue",
        )
    if name in MODELS or not folder.is_dir():
        with origin.placed("model"):
            return find_model(name)
    config = _read_json(folder / "config.json", ("model",), origin)
    with origin.placed("model"):
        return parse_model(config, str(folder))


def read_model(name: str) -> ModelSpec:
    """The catalogue's model of that name, or that of a folder with a config.json. Raises InputError for neither."""
    return _model(name, Origin("model", Path(), {}, {}))


def _gpu(hardware: schema.Hardware, origin: Origin) -> GpuSpec:
    if isinstance(hardware.gpu, schema.Gpu):
        return GpuSpec(**hardware.gpu.model_dump())
    with origin.placed("hardware", "gpu"):
        return find_gpu(hardware.gpu)


ROOFLINE = "roofline"
"""What hardware.step_time says for times by arithmetic instead of a file."""


def _profile(document: schema.Document, model: ModelSpec, gpu: GpuSpec, origin: Origin) -> Profile:
    """The step-time profile: the file that the scenario names, the packaged one, or by roofline where there is none."""
    hardware, kv_cache_dtype = document.hardware, document.engine.kv_cache_dtype
    tp = hardware.tensor_parallel_size
    written = hardware.step_time
    if written is not None and written != ROOFLINE and written.strip().lower() == ROOFLINE:
        origin.fail(
            ("hardware", "step_time"), f"{written!r} is no file; did you mean {ROOFLINE!r}?"
        )
    if written is None and gpu != GPUS.get(gpu.name):
        origin.fail(
            ("hardware", "gpu"),
            f"{gpu.name} is given by figures, and built-in step times are of GPUs of the catalogue; set "
            "hardware.step_time: roofline (data sheets, not validated), or to a profile file of this GPU",
        )
    if hardware.step_time not in (None, ROOFLINE):
        path = origin.resolve(hardware.step_time, "hardware", "step_time")
        content = _read_json(path, ("hardware", "step_time"), origin)
        with origin.placed("hardware", "step_time"):
            return parse_profile(content, str(path))
    if hardware.step_time == ROOFLINE:
        with origin.placed("hardware"):
            return roofline(model, gpu, tp, hardware.dtype, kv_cache_dtype)
    wanted = Subject(
        catalogue_name(model), tp, stored_dtype(hardware.dtype), stored_kv_dtype(kv_cache_dtype)
    )
    found = next(
        (find_profile(packed, wanted, f"{gpu.name}.json") for packed in shipped_profiles(gpu.name)),
        None,
    )
    if found is None:
        with origin.placed("hardware"):
            raise missing_profile(shipped_profiles(*GPUS), gpu.name, wanted)
    return found


def shipped_profiles(*gpus: str) -> Iterator[Mapping[str, Any]]:
    """The step-time profiles of these GPUs that come with the twin, for twin.step_time.shipped."""
    for gpu in gpus:
        file = resources.files("twin.step_time") / "data" / f"{gpu}.json"
        if file.is_file():
            yield json.loads(file.read_text(encoding="utf-8"))


def validated_regimes() -> tuple[Regime, ...]:
    """The set-ups that `twin validate` held the twin against, as they come with it."""
    file = resources.files("twin.step_time") / "data" / "fidelity.json"
    return parse_regimes(json.loads(file.read_text(encoding="utf-8")), file.name)


def traffic_presets() -> dict[str, Preset]:
    """The packaged presets of traffic by name."""
    folder = resources.files("twin.workload") / "data"
    found = (
        parse_preset(json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".json")
    )
    return {preset.name: preset for preset in found}


LARGEST_FILE = 1 << 26
"""Bytes of a scenario or a step-time profile; both are small."""


def _read_bytes(path: Path) -> bytes:
    """What a regular file holds: a pipe would block, a device has no end. Raises OSError with a reason."""
    if path.exists() and not path.is_dir():
        if not path.is_file():
            raise OSError(None, "no regular file but a pipe or a device")
        if path.stat().st_size > LARGEST_FILE:
            raise OSError(None, f"larger than {LARGEST_FILE >> 20} MiB")
    return path.read_bytes()


def _read_text(path: str | Path) -> str:
    try:
        return _read_bytes(Path(path)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(
            f"{path}: not text in UTF-8 (byte 0x{byte:02x}); a scenario is a YAML file"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        name = str(path)
        shown = name if name and name.isprintable() else repr(name)
        raise InputError(f"{shown}: cannot be read: {reason}") from None


def _read_json(path: Path, key: tuple[str | int, ...], origin: Origin) -> Any:
    try:
        return json.loads(_read_bytes(path))
    except OSError as error:
        origin.fail(key, f"{path} cannot be read: {error.strerror or error}")
    except ValueError as error:
        origin.fail(key, f"{path} is not readable as JSON: {error}")
