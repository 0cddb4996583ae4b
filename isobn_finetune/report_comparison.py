"""Each pair of norms of a model compared: per task, on average over tasks, and in words."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import numpy as np

from isobn_finetune import significance
from isobn_finetune.report_runs import Run, title_of
from isobn_finetune.report_types import POINTS, Cell, Comparison, Difference, Report

FEWEST_SEEDS = 3
"""With two seeds an interval over seeds is far too narrow for any verdict but that one cannot tell."""


def compare_norms(report: Report, model: str) -> list[Comparison]:
    """Compares each pair of norms of a model, each with those before it."""
    norms = report.norms(model)
    if len(norms) < 2:
        return []
    resampled = {task: _resample(report, model, task) for task in report.tasks}
    comparisons = []
    for reference, norm in combinations(norms, 2):
        tasks, replicates = [], []
        for task in report.tasks:
            first, second = report.cell(model, task, norm), report.cell(model, task, reference)
            if first is None or second is None or not set(first.scored) & set(second.scored):
                continue
            difference, drawn = _compare_cells(first, second, resampled[task])
            tasks.append(difference)
            replicates.append(drawn)
        if not tasks:
            continue
        for difference, corrected in zip(tasks, significance.holm([d.p for d in tasks]), strict=True):
            difference.p_holm = corrected
        average = _compare_average(report, model, norm, reference, tasks, replicates) if len(tasks) > 1 else None
        comparison = Comparison(model, norm, reference, tasks, average)
        if len(tasks) > 1:
            comparison.wilcoxon_p = significance.wilcoxon_p([d.difference for d in tasks])
            comparison.wilcoxon_smallest_p = significance.smallest_p(len(tasks))
        comparison.sentence = describe(comparison)
        comparisons.append(comparison)
    tested = [c for c in comparisons if c.wilcoxon_p is not None]
    for comparison, p in zip(tested, significance.holm([c.wilcoxon_p or 0.0 for c in tested]), strict=True):
        comparison.wilcoxon_p_holm = p
    return comparisons


def _generator(name: str) -> np.random.Generator:
    """Fixed by the task alone, so that a report does not change as other tasks come in."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def _resample(report: Report, model: str, task: str) -> dict[int, np.ndarray]:
    """Resampled scores of the runs of one task, by the run's id; runs on other dev rows than most are left out."""
    runs = [run for c in report.cells if (c.model, c.task) == (model, task) for run in c.scored.values()]
    groups: dict[tuple[str, bytes], list[Run]] = {}
    for run in runs:
        if len(run.labels):
            groups.setdefault((run.metric, run.labels.tobytes()), []).append(run)
    if not groups:
        return {}
    most = max(groups.values(), key=len)
    predictions = np.stack([run.predictions for run in most])
    scores = significance.resample_scores(most[0].metric, predictions, most[0].labels, _generator(task))
    return {id(run): row for run, row in zip(most, scores, strict=True)}


def _compare_cells(first: Cell, second: Cell, resampled: dict[int, np.ndarray]) -> tuple[Difference, np.ndarray]:
    seeds = sorted(set(first.scored) & set(second.scored))
    pairs = [(first.scored[seed], second.scored[seed]) for seed in seeds]
    ours, theirs = ([run.score or 0.0 for run in runs] for runs in zip(*pairs, strict=True))
    by_seed = [POINTS * (a - b) for a, b in zip(ours, theirs, strict=True)]
    result = Difference(first.task, seeds, fmean(by_seed))
    result.p, result.smallest_p = significance.permutation_p(by_seed), significance.smallest_p(len(seeds))
    result.correlation = significance.paired_correlation(ours, theirs)
    if len(seeds) < 2:
        return result, np.empty(0)
    if all(id(run) in resampled for pair in pairs for run in pair):
        a, b = (np.stack([resampled[id(run)] for run in runs]) for runs in zip(*pairs, strict=True))
        result.examples = len(pairs[0][0].labels)
    else:
        a, b = (np.repeat(np.array(scores)[:, None], significance.RESAMPLES, axis=1) for scores in (ours, theirs))
    drawn = POINTS * significance.bootstrap_difference(a, b, _generator(f"seeds of {first.task}"))
    _finish(result, drawn, significance.standard_error(drawn, len(seeds)), len(seeds) - 1, len(seeds))
    return result, drawn


def _finish(result: Difference, drawn: np.ndarray, error: float, degrees: int, seeds: int) -> None:
    result.low, result.high = significance.interval(drawn)
    result.detectable = significance.detectable_difference(error, degrees)
    if seeds >= FEWEST_SEEDS:
        result.verdict = significance.judge(result.low, result.high)


def _compare_average(
    report: Report,
    model: str,
    norm: str,
    reference: str,
    tasks: Sequence[Difference],
    replicates: Sequence[np.ndarray],
) -> Difference:
    """The average over tasks, which are independent: their resamples are averaged one by one."""
    common = sorted(set.intersection(*(set(d.seeds) for d in tasks)))
    result = Difference("average", common, fmean(d.difference for d in tasks))
    result.examples = sum(d.examples for d in tasks)
    columns = []
    for name in (norm, reference):
        cells = [report.cell(model, d.task, name) for d in tasks]
        columns.append([fmean(c.scored[seed].score or 0.0 for c in cells if c is not None) for seed in common])
    by_seed = [POINTS * (a - b) for a, b in zip(*columns, strict=True)]
    result.p, result.smallest_p = significance.permutation_p(by_seed), significance.smallest_p(len(common))
    result.p_holm = result.p
    result.correlation = significance.paired_correlation(*columns)
    if all(len(drawn) for drawn in replicates):
        errors = [significance.standard_error(r, len(d.seeds)) for r, d in zip(replicates, tasks, strict=True)]
        error = float(np.sqrt(np.sum(np.square(errors)))) / len(tasks)
        fewest = min(len(d.seeds) for d in tasks)
        _finish(result, np.mean(replicates, axis=0), error, sum(len(d.seeds) - 1 for d in tasks), fewest)
    return result


def describe(comparison: Comparison) -> str:
    """The verdicts in one sentence, the average last."""
    parts = [f"{describe_difference(d, named=True)}" for d in comparison.tasks]
    if comparison.average is not None:
        parts.append(f"average {describe_difference(comparison.average)}")
    return f"{comparison.norm} against {comparison.reference}: {', '.join(parts)}"


def describe_difference(d: Difference, named: bool = False) -> str:
    """``cannot tell on RTE (+0.4 [-1.1, +1.9]; this design sees 2.6)``; without the name, the numbers first."""
    if d.low is None or d.high is None or d.detectable is None:
        numbers, remark = f"{d.difference:+.1f}", "one seed"
    else:
        numbers = f"{d.difference:+.1f} [{d.low:+.1f}, {d.high:+.1f}]"
        remark = f"this design sees {d.detectable:.1f}" if d.verdict == "cannot tell" else ""
    if not named:
        return f"{numbers} ({d.verdict}{'; ' if remark else ''}{remark})"
    return f"{d.verdict} on {title_of(d.task)} ({numbers}{'; ' if remark else ''}{remark})"
