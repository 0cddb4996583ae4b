"""A sweep file: what its runs have in common, and the lists of values over which they differ."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from isobn_finetune.config import (
    NORM_CONFIGS,
    RunConfig,
    Section,
    create_run_config,
    expand_shorthands,
    load_yaml,
    merge,
    nest,
    slugify,
)
from isobn_finetune.errors import ConfigError
from isobn_finetune.tasks import get_task, nearest

SWEEP_KEYS = ("base", "grid", "zip", "init_from", "slurm")
PLACES = ("task", "model", "model.name", "norm", "norm.name", "seed", "data", "data.source")
"""Axes that say what is compared; over the others a sweep searches, and the report takes the best on the dev set."""


class SlurmConfig(Section):
    """What one run asks of a Slurm cluster."""

    partition: str | None = Field(None, description="null: the cluster's default")
    time: str | int = Field(240, description="limit of one run: minutes, or hours:minutes:seconds")
    gpus: int = Field(1, ge=0, description="GPUs a run; 0 for none")
    cpus: int = Field(4, ge=1, description="CPU cores a run")
    memory: str = Field("16G", description="of one run")
    max_parallel: int = Field(64, ge=1, description="runs of the job array at once")


@dataclass
class SweepConfig:
    """A checked sweep file.

    Attributes:
        base: Nested values that all runs share.
        kind: ``grid``: every combination of the axes; ``zip``: their first values, their second values, ...
        axes: Config key to its values.
        init_from: Task to the task from whose best model it starts.
        slurm: For ``--launcher slurm``.
        where: Name of the file, for messages.
    """

    base: dict[str, Any]
    kind: str
    axes: dict[str, list[Any]]
    init_from: dict[str, str] = field(default_factory=dict)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    where: str = ""

    @property
    def searched(self) -> list[str]:
        """Axes over which the sweep searches."""
        return [key for key in self.axes if key not in PLACES]

    def dump(self) -> dict[str, Any]:
        """The values of a sweep file that says the same."""
        values: dict[str, Any] = {"base": self.base, self.kind: self.axes}
        if self.init_from:
            values["init_from"] = self.init_from
        return {**values, "slurm": self.slurm.model_dump()}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        path: Its folder inside the sweep's.
        config: What it does; ``output_dir`` is filled in.
        model: Name of its model's folder in the sweep.
        norm: Name of the norm with the options that tell it from others of that name.
        setting: Searched key to its value here.
        sources: Paths of the runs of which the best model is where this one starts; empty: from ``config.model``.
    """

    path: str
    config: RunConfig
    model: str
    norm: str
    setting: dict[str, Any]
    sources: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Short name for lists."""
        options = "".join(f", {key.rpartition('.')[2]} {format_value(value)}" for key, value in self.setting.items())
        return f"{self.config.task} {self.norm}{options}, seed {self.config.seed}"


def is_sweep(values: Mapping[str, Any]) -> bool:
    """True where the values of a config file are those of a sweep."""
    return any(key in values for key in SWEEP_KEYS)


def load_sweep(path: Path, assignments: Iterable[tuple[str, Any]] = ()) -> SweepConfig:
    """Reads a sweep file.

    Args:
        path: YAML file.
        assignments: Keys and values laid over it. A key that the sweep varies takes the value alone, or the list.

    Raises:
        ConfigError: It cannot be read, or its keys or lists are wrong.
    """
    return create_sweep(load_yaml(path), str(path), assignments)


def create_sweep(
    values: Mapping[str, Any], where: str = "", assignments: Iterable[tuple[str, Any]] = ()
) -> SweepConfig:
    """Checks the values of a sweep file; see `load_sweep`."""
    prefix = f"{where}: " if where else ""
    if values and not is_sweep(values):
        raise ConfigError(
            f"{prefix}no sweep file, which has base: and grid: or zip:, but perhaps the config of a single run; use "
            "isobn-finetune run"
        )
    for key in values:
        if key not in SWEEP_KEYS:
            raise ConfigError(
                f"{prefix}unknown key '{key}'. A sweep file has {', '.join(SWEEP_KEYS)}.{nearest(key, SWEEP_KEYS)}"
            )
    kinds = [kind for kind in ("grid", "zip") if kind in values]
    if len(kinds) != 1:
        raise ConfigError(f"{prefix}a sweep file has either 'grid:' or 'zip:', found {' and '.join(kinds) or 'none'}")
    parts = {key: values.get(key) or {} for key in ("base", kinds[0], "init_from", "slurm")}
    for key, part in parts.items():
        if not isinstance(part, Mapping):
            raise ConfigError(f"{prefix}{key}: expected keys and values, found '{part}'")
    base, axes = dict(parts["base"]), dict(parts[kinds[0]])
    slurm = dict(parts["slurm"])
    for key, value in assignments:
        if key.startswith("slurm."):
            slurm[key.removeprefix("slurm.")] = value
        elif (axis := _find_axis(key, axes)) is not None:
            length = len(axes[axis]) if kinds[0] == "zip" and isinstance(axes[axis], list) else 1
            axes[axis] = value if isinstance(value, list) else [value] * length
        else:
            base = merge(base, nest(key, value))
    if "output_dir" in base or "output_dir" in axes:
        raise ConfigError(f"{prefix}output_dir: the folders of a sweep's runs follow from --output-dir; leave it out")
    _check_axes(prefix, kinds[0], axes)
    return SweepConfig(
        base=expand_shorthands(base),
        kind=kinds[0],
        axes=axes,
        init_from=_check_init_from(prefix, parts["init_from"]),
        slurm=_check_slurm(prefix, slurm),
        where=where,
    )


def expand(sweep: SweepConfig, output_dir: str | Path) -> list[PlannedRun]:
    """Lists the runs, seed by seed; within a seed, a task from which others start comes before them.

    Raises:
        ConfigError: The config of a run is wrong, two runs would have the same folder, or a run has nothing to
            start from.
    """
    runs: list[PlannedRun] = []
    folders: set[str] = set()
    for combination in _combinations(sweep):
        run = _plan(sweep, combination, Path(output_dir))
        if run.path in folders:
            raise ConfigError(
                f"{_prefix(sweep)}two runs have the same folder, {run.path}: a value stands twice in a list, or two "
                "models have the same name"
            )
        folders.add(run.path)
        runs.append(run)
    runs = [_with_sources(sweep, run, runs) for run in runs]
    seeds = {seed: index for index, seed in enumerate(dict.fromkeys(run.config.seed for run in runs))}
    return sorted(runs, key=lambda run: (seeds[run.config.seed], _depth(sweep, run.config.task)))


def _prefix(sweep: SweepConfig) -> str:
    return f"{sweep.where}: " if sweep.where else ""


def _find_axis(key: str, axes: Mapping[str, Any]) -> str | None:
    """The axis that a key means: ``model`` and ``model.name`` are one, so are ``norm`` and ``norm.name``."""
    short = key.removesuffix(".name")
    return next((axis for axis in (key, short, f"{short}.name") if axis in axes), None)


def _check_axes(prefix: str, kind: str, axes: Mapping[str, Any]) -> None:
    if not axes:
        raise ConfigError(f"{prefix}{kind}: names no key to vary; give at least one, such as seed: [1, 2, 3]")
    for key, values in axes.items():
        if not isinstance(key, str):
            raise ConfigError(f"{prefix}{kind}.{key}: expected the name of a config key, such as train.learning_rate")
        if not isinstance(values, list):
            raise ConfigError(f"{prefix}{kind}.{key}: expected a list of values, found '{values}'")
        if not values:
            raise ConfigError(f"{prefix}{kind}.{key}: the list is empty, so there would be no run; give it a value")
    lengths = {key: len(values) for key, values in axes.items()}
    if kind == "zip" and len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise ConfigError(f"{prefix}zip: the lists must be of equal length: {shown}")


def _check_init_from(prefix: str, init_from: Mapping[str, Any]) -> dict[str, str]:
    checked = {}
    for task, source in init_from.items():
        try:
            checked[get_task(task).name] = get_task(source).name
        except ConfigError as error:
            raise ConfigError(f"{prefix}init_from: {error}") from None
    for task in checked:
        seen, current = [task], task
        while (current := checked.get(current, "")) != "":
            if current in seen:
                raise ConfigError(f"{prefix}init_from: goes round in a circle: {' from '.join([*seen, current])}")
            seen.append(current)
    return checked


def _check_slurm(prefix: str, values: Mapping[str, Any]) -> SlurmConfig:
    try:
        return SlurmConfig.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"][:1])
        hint = nearest(key, SlurmConfig.model_fields) if problem["type"] == "extra_forbidden" else ""
        raise ConfigError(
            f"{prefix}slurm.{key}: {problem['msg'].lower()}, found '{problem['input']}'. "
            f"Known: {', '.join(SlurmConfig.model_fields)}.{hint}"
        ) from None


def _combinations(sweep: SweepConfig) -> Iterator[dict[str, Any]]:
    if sweep.kind == "zip":
        for row in zip(*sweep.axes.values(), strict=True):
            yield dict(zip(sweep.axes, row, strict=True))
        return
    used = set()
    for row in itertools.product(*(enumerate(values) for values in sweep.axes.values())):
        combination = {}
        repeated = False
        for key, (index, value) in zip(sweep.axes, row, strict=True):
            if _applies(sweep, key, {name: pair[1] for name, pair in zip(sweep.axes, row, strict=True)}):
                combination[key] = value
                used.add(key)
            else:  # a norm without this option is run once, not once for each value
                repeated |= index > 0
        if not repeated:
            yield combination
    for key in sweep.axes:
        if key not in used:
            raise ConfigError(f"{_prefix(sweep)}grid.{key}: no norm of this sweep has this option")


def _applies(sweep: SweepConfig, key: str, combination: Mapping[str, Any]) -> bool:
    """False for an option of a norm in a run whose norm is one without it."""
    section, _, option = key.partition(".")
    owners = [name for name, config in NORM_CONFIGS.items() if option in config.model_fields]
    if section != "norm" or option == "name" or not owners:
        return True
    given = expand_shorthands({"norm": combination["norm"]})["norm"] if "norm" in combination else {}
    names = [combination.get("norm.name")]
    names += [norm.get("name") for norm in (given, sweep.base.get("norm")) if isinstance(norm, Mapping)]
    name = next((name for name in names if name is not None), "isobn")
    return name in owners or not isinstance(name, str) or name not in NORM_CONFIGS


def _plan(sweep: SweepConfig, combination: dict[str, Any], output_dir: Path) -> PlannedRun:
    values: dict[str, Any] = sweep.base
    for key, value in combination.items():
        values = merge(values, nest(key, value))
    config = create_run_config(values, sweep.where)
    norm = _name_norm(config, combination.get("norm"))
    # As checked, so that 1e-5, which YAML takes for text, and 0.00001 are one value.
    setting: dict[str, Any] = {}
    for key in sweep.searched:
        value = combination.get(key)
        keys = [f"{key}.{inner}" for inner in value] if isinstance(value, Mapping) else [key]
        setting |= {inner: _get(config, inner) for inner in keys if key in combination}
    model = slugify(config.model.name)
    model_options = combination.get("model")
    options = dict(setting)
    if isinstance(model_options, Mapping):
        options |= {f"model.{key}": value for key, value in model_options.items() if key != "name"}
    if "data" in combination or "data.source" in combination:
        options["data.source"] = slugify(config.data.source)
    folder = _shorten("-".join([norm, *(f"{_last(key, options)}={format_value(v)}" for key, v in options.items())]))
    path = f"{model}/{config.task}/{folder}/seed_{config.seed}"
    config = config.model_copy(update={"output_dir": str(output_dir / path)})
    return PlannedRun(path=path, config=config, model=model, norm=norm, setting=setting)


def _get(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part)
    return value.model_dump() if isinstance(value, Section) else value


def _name_norm(config: RunConfig, given: Any) -> str:
    options = [key for key in given if key != "name"] if isinstance(given, Mapping) else []
    return "-".join([config.norm.name, *(f"{key}={format_value(getattr(config.norm, key))}" for key in options)])


def _last(key: str, keys: Iterable[str]) -> str:
    """The last part of a dotted key, where no other key ends alike."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in keys) > 1 else last


def format_value(value: Any) -> str:
    """A config value as a part of a folder's name."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return re.sub(r"[^\w.+-]+", "_", str(value)).strip("_.") or "value"


def _shorten(name: str, limit: int = 120) -> str:
    """Keeps a folder's name within what file systems allow, and names that differ apart."""
    if len(name) <= limit:
        return name
    return f"{name[: limit - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _depth(sweep: SweepConfig, task: str) -> int:
    depth = 0
    while task in sweep.init_from:
        task, depth = sweep.init_from[task], depth + 1
    return depth


def _with_sources(sweep: SweepConfig, run: PlannedRun, runs: list[PlannedRun]) -> PlannedRun:
    source = sweep.init_from.get(run.config.task)
    if source is None:
        return run
    place = (source, run.model, run.norm, run.config.seed)
    sources = tuple(
        other.path for other in runs if (other.config.task, other.model, other.norm, other.config.seed) == place
    )
    if not sources:
        raise ConfigError(
            f"{_prefix(sweep)}init_from: {run.config.task} starts from {source}, and the sweep has no run of {source} "
            f"with model {run.model}, norm {run.norm} and seed {run.config.seed}"
        )
    return PlannedRun(run.path, run.config, run.model, run.norm, run.setting, sources)
