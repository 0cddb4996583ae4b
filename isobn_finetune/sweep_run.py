"""One run of a sweep: skipped, resumed, retried or started, by whichever process comes first."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from isobn_finetune.errors import ConfigError, DataError, InterruptedRunError, IsobnError
from isobn_finetune.run_folder import RunFolder
from isobn_finetune.sweep_config import PlannedRun

PRIVATE = ".sweep"
"""Folder inside the sweep's for what is not a result: locks, logs, token ids."""

FineTune = Callable[..., Any]
"""Has the signature of `training.fine_tune`."""


@dataclass
class RunState:
    """Where a run stands.

    Attributes:
        status: ``waiting``; ``begun``: killed or interrupted; ``running``; ``busy``: another process is on it;
            ``finished``, ``failed``, ``diverged``; ``damaged``: its ``result.json`` cannot be read.
        score: Of a finished run.
        seconds: Its training took.
        reason: Why it is not finished.
    """

    status: str
    score: float | None = None
    seconds: float | None = None
    reason: str | None = None

    @property
    def is_over(self) -> bool:
        """True where nothing is left to do, unless failed runs are retried."""
        return self.status in ("finished", "failed", "diverged", "damaged")

    @property
    def is_bad(self) -> bool:
        """True where the run is over and has no result."""
        return self.is_over and self.status != "finished"


def read_state(folder: RunFolder) -> RunState:
    """Reads where a run stands from its folder."""
    try:
        result = folder.read_result()
    except DataError as error:
        return RunState("damaged", reason=str(error).replace("--overwrite", "--retry-failed"))
    if result is None:
        return RunState("begun" if folder.is_occupied() else "waiting")
    seconds = (result.get("train") or {}).get("seconds")
    return RunState(result["status"], result.get("score"), seconds, result.get("reason"))


def execute(
    run: PlannedRun,
    sweep_dir: Path,
    retry_failed: bool = False,
    fine_tune: FineTune | None = None,
    wait: bool = False,
) -> RunState:
    """Does one run unless it is over, and records it where it fails.

    Args:
        run: What to do.
        sweep_dir: The sweep's folder.
        retry_failed: Start afresh where it failed before.
        fine_tune: Does the work; ``None``: `training.fine_tune` with shared token ids.
        wait: Wait for another process that is on this run; else the state is ``busy``.

    Raises:
        InterruptedRunError: A signal came; the run can be resumed.
    """
    if not all(read_state(RunFolder(sweep_dir / path)).is_over for path in run.sources):
        # Another process is on what this one starts from, or was killed on it: nothing to record against this run.
        return RunState("waiting" if wait else "busy", reason=f"{run.sources[0]} is not over")
    lock = FileLock(private_file(sweep_dir, run, "locks", ".lock"))
    try:
        with lock.acquire(timeout=-1 if wait else 0):
            state = read_state(RunFolder(str(run.config.output_dir)))
            if state.is_over and not (state.is_bad and retry_failed):
                return state
            with capture_output(private_file(sweep_dir, run, "logs", ".log")):
                return _do(run, sweep_dir, afresh=state.is_bad, fine_tune=fine_tune or create_fine_tune(sweep_dir))
    except Timeout:
        return RunState("busy")


def create_fine_tune(sweep_dir: Path) -> FineTune:
    """`training.fine_tune`, with token ids that the runs of the sweep share."""
    from functools import partial

    from isobn_finetune.shared_tokens import SharedTokens
    from isobn_finetune.training import fine_tune

    folder = sweep_dir / PRIVATE / "tokens"
    if folder not in _shared:
        _shared[folder] = SharedTokens(folder)
    return partial(fine_tune, encode_rows=_shared[folder])


_shared: dict[Path, Any] = {}


def _do(run: PlannedRun, sweep_dir: Path, afresh: bool, fine_tune: FineTune) -> RunState:
    folder = RunFolder(str(run.config.output_dir))
    if folder.path.exists() and not folder.is_occupied():
        for leftover in folder.path.glob(".*"):  # of a process killed before it wrote its first whole file
            leftover.unlink()
    started = time.perf_counter()
    try:
        config = run.config
        if run.sources:
            source = best_source(run, sweep_dir)
            model = config.model.model_copy(update={"name": str(source.resolve())})
            config = config.model_copy(update={"model": model})
        fine_tune(config, resume=not afresh, overwrite=afresh)
    except (InterruptedRunError, KeyboardInterrupt):
        raise
    except Exception as error:
        return _record_failure(run, folder, error, time.perf_counter() - started)
    return read_state(folder)


def best_source(run: PlannedRun, sweep_dir: Path) -> Path:
    """The run with the best score among those from which this one may start.

    Raises:
        DataError: None of them is finished.
    """
    scores = {}
    for path in run.sources:
        state = read_state(RunFolder(sweep_dir / path))
        if state.status == "finished" and state.score is not None:
            scores[path] = state.score
    if not scores:
        raise DataError(f"starts from {run.sources[0]}, which has not finished")
    return sweep_dir / max(scores, key=lambda path: scores[path])


def _record_failure(run: PlannedRun, folder: RunFolder, error: Exception, seconds: float) -> RunState:
    """Writes ``result.json`` where the run did not come to write it itself."""
    from isobn_finetune.results import RunResult, explain_failure, write_result_if_possible

    if folder.result.is_file():
        return read_state(folder)
    reason = explain_failure(error)
    if isinstance(error, ConfigError) and folder.is_occupied():  # the run here is another one: leave it alone
        return RunState("failed", reason=reason)
    config = run.config
    spent, data = {"seconds": round(seconds, 3)}, {"source": config.data.source}
    result = RunResult.begin(config, folder.path, train=spent, data=data, reason=reason)
    if not folder.config.exists():
        with contextlib.suppress(IsobnError):
            folder.start(config)
    write_result_if_possible(folder, result)
    return RunState("failed", reason=reason)


def private_file(sweep_dir: Path, run: PlannedRun, kind: str, suffix: str) -> Path:
    """``DIR/.sweep/<kind>/<run><suffix>``; its folder is made."""
    path = sweep_dir / PRIVATE / kind / (run.path.replace("/", "__") + suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def capture_output(path: Path) -> Iterator[None]:
    """What the run says goes into a log, so that the sweep's own lines stand alone."""
    logger = logging.getLogger("isobn_finetune")
    with path.open("a", encoding="utf-8", buffering=1) as file:
        handler = None if logger.handlers else logging.StreamHandler(file)  # the command line's own follows stderr
        if handler is not None:
            logger.addHandler(handler)
        # No more than this, so that signals and terminals stay as they are.
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                yield
            finally:
                if handler is not None:
                    logger.removeHandler(handler)
