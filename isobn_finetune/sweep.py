"""Many runs into one folder: tasks x norms x seeds x anything, resumable at any moment."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from isobn_finetune.config import flatten, load_yaml
from isobn_finetune.data import DEMO, HUB, find_files
from isobn_finetune.errors import ConfigError
from isobn_finetune.hub import resolve_model
from isobn_finetune.launchers import Pool
from isobn_finetune.live_view import View, create_view
from isobn_finetune.run_folder import HARMLESS, RunFolder, write_text
from isobn_finetune.sweep_config import PlannedRun, SweepConfig, create_sweep, expand
from isobn_finetune.sweep_run import PRIVATE, FineTune, RunState, execute, read_state

logger = logging.getLogger(__name__)

SWEEP_FILE = "sweep.yaml"


@dataclass
class Sweep:
    """A sweep and where each of its runs stands.

    Attributes:
        config: The sweep file.
        folder: Where its runs lie.
        runs: In the order in which they are done.
        states: Path of a run to its state.
    """

    config: SweepConfig
    folder: Path
    runs: list[PlannedRun]
    states: dict[str, RunState] = field(default_factory=dict)

    def refresh(self) -> None:
        """Reads the states anew."""
        self.states = {run.path: read_state(RunFolder(str(run.config.output_dir))) for run in self.runs}

    def count(self, status: str) -> int:
        """How many runs have this status."""
        return sum(state.status == status for state in self.states.values())

    @property
    def bad(self) -> list[PlannedRun]:
        """Runs that are over and have no result."""
        return [run for run in self.runs if self.states[run.path].is_bad]

    def pending(self, retry_failed: bool = False) -> list[PlannedRun]:
        """Runs that are to be done."""
        states = self.states
        return [r for r in self.runs if not states[r.path].is_over or (retry_failed and states[r.path].is_bad)]

    def estimate_seconds(self, pending: Iterable[PlannedRun], jobs: int = 1) -> float | None:
        """How long runs will take, by finished ones of the same task and model; ``None`` while none is finished."""
        known: dict[tuple[str, str], list[float]] = {}
        for run in self.runs:
            state = self.states[run.path]
            if state.status == "finished" and state.seconds:
                known.setdefault((run.config.task, run.model), []).append(state.seconds)
        if not known:
            return None
        anywhere = fmean(fmean(seconds) for seconds in known.values())
        means = {place: fmean(seconds) for place, seconds in known.items()}
        return sum(means.get((run.config.task, run.model), anywhere) for run in pending) / jobs


def plan_sweep(config: SweepConfig, output_dir: str | Path) -> Sweep:
    """Lists a sweep's runs with their states. Writes nothing.

    Raises:
        ConfigError: The config of a run is wrong, or the folder holds something else.
    """
    folder = Path(output_dir)
    sweep = Sweep(config, folder, expand(config, folder))
    RunFolder(folder).check_usable()
    _check_folder(sweep)
    sweep.refresh()
    return sweep


def run_sweep(
    sweep: Sweep,
    *,
    jobs: int = 1,
    retry_failed: bool = False,
    fine_tune: FineTune | None = None,
    view: Callable[[Sweep, int, int], View] = create_view,
) -> None:
    """Does what is left of a sweep. A run that fails is recorded and stops no other.

    Two sweeps at once on the same folder share the runs: each run is done by whichever comes first.

    Args:
        sweep: From `plan_sweep`; its states are kept up to date.
        jobs: Processes. 1: the runs are done in this one.
        retry_failed: Start failed runs afresh.
        fine_tune: Does the work, for ``jobs`` 1; ``None``: `training.fine_tune`.
        view: Shows where the sweep stands: live on a terminal, plain lines elsewhere.

    Raises:
        ConfigError: A model or data folder is missing; nothing was started.
        InterruptedRunError: A signal came; started again, the sweep goes on.
    """
    pending = sweep.pending(retry_failed)
    if fine_tune is None:
        _check_inputs(pending)
    start_folder(sweep)
    jobs = max(1, min(jobs, len(pending)))
    with view(sweep, len(pending), jobs) as shown:
        if jobs == 1:
            _run_here(sweep, pending, retry_failed, fine_tune, shown)
        else:
            Pool(sweep.folder, jobs, retry_failed).run(pending, sweep.states, shown)
    if all(state.is_over for state in sweep.states.values()):
        shutil.rmtree(sweep.folder / PRIVATE / "tokens", ignore_errors=True)


def start_folder(sweep: Sweep) -> None:
    """Makes the sweep's folder and writes its ``sweep.yaml``.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        values = _unite(sweep)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        write_text(sweep.folder / SWEEP_FILE, f"# Written by `isobn-finetune sweep`: what the runs here are.\n{text}")
    except OSError as error:
        raise ConfigError(
            f"{sweep.folder}: cannot write here ({error.strerror}); choose another --output-dir"
        ) from None


def _run_here(
    sweep: Sweep, pending: list[PlannedRun], retry_failed: bool, fine_tune: FineTune | None, view: View
) -> None:
    later: list[PlannedRun] = []
    for wait, runs in ((False, pending), (True, later)):
        for run in runs:
            view.begin(run)
            state = execute(run, sweep.folder, retry_failed, fine_tune, wait)
            if state.status == "busy":
                later.append(run)
            view.end(run, state)


def _check_inputs(pending: Iterable[PlannedRun]) -> None:
    """Finds missing models and data folders before anything is started."""
    models = {run.config.model.name for run in pending if not run.sources}
    for name in sorted(models):
        resolve_model(name)
    for task, source in sorted({(run.config.task, run.config.data.source) for run in pending}):
        if source not in (HUB, DEMO):
            spec = next(run.config.spec for run in pending if run.config.task == task)
            find_files(spec, source, spec.splits, {"train", spec.selection_split})


def _check_folder(sweep: Sweep) -> None:
    """Refuses a folder with another sweep's or another run's files."""
    file = sweep.folder / SWEEP_FILE
    if file.is_file():
        differences = _differences(create_sweep(load_yaml(file), str(file)), sweep.config)
        if differences:
            raise ConfigError(
                f"{sweep.folder} holds another sweep: {'; '.join(differences)}. Choose another --output-dir; "
                "only values of the lists may be added or left out"
            )
    elif RunFolder(sweep.folder).is_occupied():
        raise ConfigError(f"{sweep.folder} is the folder of a single run; choose another --output-dir")
    for run in sweep.runs:
        folder = RunFolder(str(run.config.output_dir))
        lines = _run_differences(run, folder)
        if lines:
            raise ConfigError(
                f"{folder.path} holds another run: {'; '.join(lines[:4])}. Choose another --output-dir, or remove it"
            )


def _differences(here: SweepConfig, asked: SweepConfig) -> list[str]:
    old, new = flatten(here.base), flatten(asked.base)
    lines = [
        f"base.{key}: {old.get(key)} here, {new.get(key)} asked for"
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key) and key not in HARMLESS
    ]
    if here.kind != asked.kind or set(here.axes) != set(asked.axes):
        lines.append(
            f"{here.kind} over {', '.join(here.axes)} here, {asked.kind} over {', '.join(asked.axes)} asked for"
        )
    if here.init_from != asked.init_from:
        lines.append("another init_from")
    return lines


def _run_differences(run: PlannedRun, folder: RunFolder) -> list[str]:
    if not folder.config.is_file():
        return []
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast; a sweep has hundreds of these
        here = flatten(yaml.load(folder.config.read_text(encoding="utf-8"), Loader=loader))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return ["its config.yaml cannot be read"]
    asked = flatten(run.config.model_dump())
    ignored = {*HARMLESS, "model.name"} if run.sources else set(HARMLESS)
    changed = [key for key in asked if here.get(key) != asked[key] and key not in ignored]
    if not changed:
        return []
    # Keys that an older version did not know have their defaults: the slower, full comparison decides.
    return [line for line in folder.differences(run.config, everything=True) if line.partition(":")[0] not in ignored]


def _unite(sweep: Sweep) -> dict[str, Any]:
    """The sweep with what earlier calls have put into its folder, so that the file names all that lies there."""
    values = sweep.config.dump()
    file = sweep.folder / SWEEP_FILE
    if not file.is_file():
        return values
    here = create_sweep(load_yaml(file), str(file))
    kind, axes = sweep.config.kind, sweep.config.axes
    if kind == "grid":
        values[kind] = {key: [*here.axes[key], *(v for v in axes[key] if v not in here.axes[key])] for key in axes}
    else:
        rows = list(zip(*(here.axes[key] for key in axes), strict=True))
        rows += [row for row in zip(*axes.values(), strict=True) if row not in rows]
        values[kind] = {key: list(column) for key, column in zip(axes, zip(*rows, strict=True), strict=True)}
    return values
