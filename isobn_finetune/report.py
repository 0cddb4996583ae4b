"""From run folders to a report: tables, intervals and verdicts. Computes; the renderers show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from isobn_finetune import significance
from isobn_finetune.config import NORM_CONFIGS
from isobn_finetune.published import find_published
from isobn_finetune.report_comparison import compare_norms
from isobn_finetune.report_notes import create_notes
from isobn_finetune.report_runs import Run, load_runs
from isobn_finetune.report_types import POINTS, Average, Cell, Report, Summary
from isobn_finetune.sweep_config import format_value
from isobn_finetune.tasks import TASKS

FINAL_SHARE = 0.95
"""Share of its final score that a run must reach to count as converged."""


def create_report(folders: Iterable[str | Path]) -> Report:
    """Reads run folders and computes the report.

    Raises:
        ConfigError: There is no such folder, or no run in it.
    """
    runs, problems = load_runs([Path(folder) for folder in folders])
    runs, notes = _drop_copies(runs)
    cells = _create_cells(runs)
    models = sorted({cell.model for cell in cells})
    report = Report(
        models=models,
        tasks=sorted({cell.task for cell in cells}, key=_task_order),
        cells=cells,
        averages=[],
        comparisons=[],
        published=[row for model in models for row in find_published(model)],
        runs=runs,
        problems=problems,
        notes=notes,
    )
    for model in models:
        report.averages += [_average(report, model, norm) for norm in report.norms(model)]
        report.comparisons += compare_norms(report, model)
    report.notes += create_notes(report)
    return report


def summarize(scores: Sequence[float]) -> Summary:
    """Median, sample standard deviation and mean of fractions, in points."""
    points = [POINTS * score for score in scores]
    if not points:
        return Summary(None, None, None)
    return Summary(median(points), stdev(points) if len(points) > 1 else None, fmean(points))


def _task_order(task: str) -> tuple[int, str]:
    known = list(TASKS)
    return (known.index(task) if task in known else len(known), task)


def _norm_order(norm: str) -> tuple[int, str]:
    return (list(NORM_CONFIGS).index(norm.partition(" ")[0]), norm)


def _drop_copies(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Keeps one run of each model, task, norm, setting and seed."""
    kept: dict[str, Run] = {}
    notes = []
    for run in runs:
        key = json.dumps([run.model, run.task, run.norm, run.seed, run.setting], sort_keys=True, default=str)
        if key not in kept:
            kept[key] = run
            continue
        other, first = run, kept[key]
        if first.status != "finished" and run.status == "finished":
            kept[key], other = run, first
        notes.append(f"{other.path} repeats {kept[key].path} (same settings and seed) and is left out.")
    return list(kept.values()), notes


def _create_cells(runs: list[Run]) -> list[Cell]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.model, run.task), []).append(run)
    cells = []
    for model, task in sorted(groups, key=lambda place: (place[0], _task_order(place[1]))):
        group = groups[model, task]
        varied = _varied_keys(group)
        norms = sorted({run.norm for run in group}, key=_norm_order)
        cells += [_create_cell([run for run in group if run.norm == norm], varied) for norm in norms]
    return cells


def _varied_keys(runs: Sequence[Run]) -> list[str]:
    """Keys over which runs of one task differ: what was searched."""
    keys = dict.fromkeys(key for run in runs for key in run.setting)
    values = {key: {json.dumps(run.setting[key], sort_keys=True) for run in runs if key in run.setting} for key in keys}
    return [key for key in keys if len(values[key]) > 1]


def _create_cell(runs: list[Run], varied: Sequence[str]) -> Cell:
    settings: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        given = [f"{key.rpartition('.')[2]} {format_value(run.setting[key])}" for key in varied if key in run.setting]
        settings.setdefault(", ".join(given), []).append(run)
    medians = {name: summarize(_scores(group)).median for name, group in settings.items()}
    chosen = max(settings, key=lambda name: _rank(settings[name]))
    best = settings[chosen]
    finished = [run for run in best if run.status == "finished"]
    known = [value for value in medians.values() if value is not None]
    return Cell(
        model=runs[0].model,
        task=runs[0].task,
        norm=runs[0].norm,
        metric=next((run.metric for run in runs if run.metric), ""),
        runs=best,
        setting=chosen,
        settings=medians,
        best=summarize(_scores(best)),
        last=summarize([run.last_score for run in best if run.last_score is not None]),
        budget_curve=significance.expected_maximum(known) if len(medians) > 1 and known else [],
        steps_to_final=_median(steps_to_final(run) for run in finished),
        ev3_before=_median(run.ev3[0] for run in finished),
        ev3_after=_median(run.ev3[1] for run in finished),
    )


def _scores(runs: Iterable[Run]) -> list[float]:
    return [run.score for run in runs if run.score is not None]


def _rank(runs: Sequence[Run]) -> tuple[float, int]:
    """How good a setting is: the dev median, where a run that failed or diverged counts as the worst."""
    scores = [run.score if run.score is not None else -1.0 for run in runs if run.status != "unfinished"]
    return (median(scores) if scores else -2.0, len(scores))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def steps_to_final(run: Run) -> float | None:
    """Step of the first evaluation with 95% of the last one's score; ``None`` where that score is not above 0."""
    scores = [(evaluation.step, evaluation.score) for evaluation in run.evaluations if evaluation.score is not None]
    if not scores or scores[-1][1] <= 0:
        return None
    return next(step for step, score in scores if score >= FINAL_SHARE * scores[-1][1])


def _average(report: Report, model: str, norm: str) -> Average:
    """Over all tasks of the model: the mean of the medians; the spread of the seeds' averages."""
    tasks = [task for task in report.tasks if any(c.model == model and c.task == task for c in report.cells)]
    found = [report.cell(model, task, norm) for task in tasks]
    cells = [cell for cell in found if cell is not None and cell.best.median is not None]
    nothing = Summary(None, None, None)
    if len(cells) < len(tasks):
        return Average(model, norm, len(cells), nothing, nothing)
    seeds = sorted(set.intersection(*(set(cell.scored) for cell in cells)))
    by_seed = [POINTS * fmean(cell.scored[seed].score or 0.0 for cell in cells) for seed in seeds]

    def combine(summaries: Sequence[Summary], spread: float | None) -> Summary:
        medians = [s.median for s in summaries if s.median is not None]
        means = [s.mean for s in summaries if s.mean is not None]
        if len(medians) < len(tasks):
            return nothing
        return Summary(fmean(medians), spread, fmean(means))

    std = stdev(by_seed) if len(by_seed) > 1 else None
    return Average(
        model, norm, len(cells), combine([c.best for c in cells], std), combine([c.last for c in cells], None)
    )
