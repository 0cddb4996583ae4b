"""What a sweep shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isobn_finetune.run_folder import RunFolder
from isobn_finetune.sweep_config import PlannedRun
from isobn_finetune.sweep_run import RunState

if TYPE_CHECKING:
    from rich.console import Group

    from isobn_finetune.sweep import Sweep

logger = logging.getLogger(__name__)


class PlainView:
    """One line a run that is over.

    Args:
        sweep: What is shown; its states are kept up to date here.
        total: Runs to be done.
        jobs: Processes.
    """

    def __init__(self, sweep: Sweep, total: int, jobs: int) -> None:
        self.sweep = sweep
        self.total = total
        self.jobs = jobs
        self.done = 0
        self.running: dict[str, tuple[PlannedRun, float]] = {}

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def begin(self, run: PlannedRun) -> None:
        """A run starts."""
        self.running[run.path] = (run, time.monotonic())
        self.sweep.states[run.path] = RunState("running")

    def end(self, run: PlannedRun, state: RunState) -> None:
        """A run is over, or was left."""
        _, started = self.running.pop(run.path)
        self.sweep.states[run.path] = state
        if state.is_over:
            self.done += 1
            self.report(run, state, time.monotonic() - started)

    def report(self, run: PlannedRun, state: RunState, seconds: float) -> None:
        """Says what a run came to."""
        left = self.seconds_left()
        logger.info(
            "[%d/%d] %s: %s (%s)%s",
            self.done,
            self.total,
            run.title,
            format_state(state),
            format_seconds(seconds),
            f"; about {format_seconds(left)} left" if left else "",
        )

    def seconds_left(self) -> float | None:
        """Estimate for what waits and what runs."""
        waiting = [run for run in self.sweep.runs if not self.sweep.states[run.path].is_over]
        whole = self.sweep.estimate_seconds(waiting, self.jobs)
        if whole is None:
            return None
        spent = sum(time.monotonic() - started for _, started in self.running.values()) / self.jobs
        return max(0.0, whole - spent)


View = PlainView
"""Any view has these methods."""


class LiveView(PlainView):
    """A table on the terminal, drawn anew each second: what runs and how far it is, what is done, the time left."""

    SHOWN = 8

    def __enter__(self) -> LiveView:
        from rich.console import Console
        from rich.live import Live

        self.recent: list[tuple[PlannedRun, RunState]] = []
        self.live = Live(
            get_renderable=self.render,
            console=Console(file=sys.stderr),
            refresh_per_second=1,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.__exit__(*error)

    def report(self, run: PlannedRun, state: RunState, seconds: float) -> None:
        """Keeps it for the table."""
        self.recent = [*self.recent, (run, state)][-self.SHOWN :]

    def render(self) -> Group:
        """Draws the table. Called from a thread of its own."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=False, box=None, padding=(0, 2, 0, 0))
        for title in ("run", "state", "step", "score so far", "time"):
            table.add_column(title, justify="left" if title in ("run", "state") else "right")
        for run, state in list(self.recent):
            style = "red" if state.is_bad else "dim"
            table.add_row(Text(run.title), format_state(state), "", "", format_seconds(state.seconds), style=style)
        for run, started in list(self.running.values()):
            step, score = read_progress(RunFolder(str(run.config.output_dir)))
            table.add_row(Text(run.title), "running", step, score, format_seconds(time.monotonic() - started))
        left = self.seconds_left()
        bad = len([run for run in self.sweep.runs if self.sweep.states[run.path].is_bad])
        waiting = self.total - self.done - len(self.running)
        done = f"{self.sweep.count('finished')} of {len(self.sweep.runs)} runs finished"
        line = f"{done}, {bad} failed, {waiting} waiting"
        if left is not None:
            line += f"; about {format_seconds(left)} left"
        return Group(table, Text(line, style="bold"))


def create_view(sweep: Sweep, total: int, jobs: int) -> PlainView:
    """The view that suits where standard error goes."""
    kind: Callable[..., PlainView] = LiveView if sys.stderr.isatty() else PlainView
    return kind(sweep, total, jobs)


def read_progress(folder: RunFolder) -> tuple[str, str]:
    """Last step and last score of a run that is under way, from its history; empty where there is none yet."""
    lines = folder.read_history()
    step = str(lines[-1].get("step", "")) if lines else ""
    for line in reversed(lines):
        values = list((line.get("metrics") or {}).values())
        if values and values[0] is not None:
            return step, f"{values[0]:.4f}"
    return step, ""


def format_state(state: RunState) -> str:
    """``0.5812``, or the status with its reason."""
    if state.status == "finished":
        return "score undefined" if state.score is None else f"{state.score:.4f}"
    return f"{state.status}: {state.reason}" if state.reason else state.status


def format_seconds(seconds: float | None) -> str:
    """``3 min 12 s``, ``2 h 5 min``, ``1 d 3 h``."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
