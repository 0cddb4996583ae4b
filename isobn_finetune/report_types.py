"""What a report holds: cells of the table, averages, differences, and the runs behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

from isobn_finetune.published import Published
from isobn_finetune.report_runs import Run

POINTS = 100.0
"""Scores are fractions in run folders and points in a report."""


@dataclass
class Summary:
    """Scores over seeds, in points; the standard deviation is that of a sample (n-1), ``None`` for one seed."""

    median: float | None
    std: float | None
    mean: float | None


@dataclass
class Cell:
    """One norm on one task: the runs of its setting, over seeds.

    Attributes:
        runs: All runs of the setting, in order of their seeds.
        setting: What its setting is, in words, where settings differ; empty where they do not.
        settings: Setting to the median of its scores, in points, ``None`` where it has none.
        budget_curve: Expected best median after 1, 2, ... settings; empty where there was one.
        steps_to_final: Median over seeds of the steps to 95% of the final score.
    """

    model: str
    task: str
    norm: str
    metric: str
    runs: list[Run]
    setting: str
    settings: dict[str, float | None]
    best: Summary
    last: Summary
    budget_curve: list[float]
    steps_to_final: float | None
    ev3_before: float | None
    ev3_after: float | None

    @property
    def scored(self) -> dict[int, Run]:
        """Seed to run, for those with a score."""
        return {run.seed: run for run in self.runs if run.score is not None}

    def count(self, status: str) -> int:
        """Runs of this status, or ``collapsed`` ones."""
        if status == "collapsed":
            return sum(run.collapsed for run in self.runs)
        return sum(run.status == status for run in self.runs)


@dataclass
class Difference:
    """One norm against another, on a task or on the average over tasks; all in points.

    Attributes:
        task: Name, or ``average``.
        seeds: Those that both norms have a score for.
        difference: Mean over these seeds.
        low, high: 95% multi-bootstrap interval; ``None`` for fewer than two seeds.
        detectable: What this design would find with 80% power.
        p: Exact paired permutation test over seeds.
        smallest_p: The smallest that this number of seeds can give.
        p_holm: Corrected over the tasks of this pair.
        correlation: Of the two norms' scores over seeds.
        examples: Dev rows that were resampled; 0: seeds alone, as predictions are missing or of other rows.
        verdict: ``better``, ``worse``, ``equivalent`` or ``cannot tell``.
    """

    task: str
    seeds: list[int]
    difference: float
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    p: float = 1.0
    smallest_p: float = 1.0
    p_holm: float = 1.0
    correlation: float | None = None
    examples: int = 0
    verdict: str = "cannot tell"


@dataclass
class Comparison:
    """One norm against another over all tasks.

    Attributes:
        average: ``None`` for a single task.
        wilcoxon_p: Signed-rank test over tasks, with the smallest that so many tasks can give, and Holm-corrected
            over the pairs of norms of this model.
    """

    model: str
    norm: str
    reference: str
    tasks: list[Difference]
    average: Difference | None
    wilcoxon_p: float | None = None
    wilcoxon_smallest_p: float | None = None
    wilcoxon_p_holm: float | None = None
    sentence: str = ""


@dataclass
class Average:
    """A norm's average over the tasks of its model; ``None`` values where it lacks one of them."""

    model: str
    norm: str
    tasks: int
    best: Summary
    last: Summary


@dataclass
class Report:
    """All that the report shows."""

    models: list[str]
    tasks: list[str]
    cells: list[Cell]
    averages: list[Average]
    comparisons: list[Comparison]
    published: list[Published]
    runs: list[Run]
    problems: list[str]
    notes: list[str] = field(default_factory=list)

    def norms(self, model: str) -> list[str]:
        """Norms of a model, in order."""
        return list(dict.fromkeys(cell.norm for cell in self.cells if cell.model == model))

    def cell(self, model: str, task: str, norm: str) -> Cell | None:
        """The cell, if there are such runs."""
        found = (c for c in self.cells if (c.model, c.task, c.norm) == (model, task, norm))
        return next(found, None)

    def average(self, model: str, norm: str) -> Average:
        """The average of a norm."""
        return next(a for a in self.averages if (a.model, a.norm) == (model, norm))

    @property
    def odd_runs(self) -> list[Run]:
        """Runs that collapsed, diverged, failed or are not over."""
        return [run for run in self.runs if run.collapsed or run.status != "finished" or run.score is None]
