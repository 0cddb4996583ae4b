"""A report as text: terminal, Markdown, CSV, JSON and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from isobn_finetune.report_notes import format_seeds
from isobn_finetune.report_runs import Run, title_of
from isobn_finetune.report_types import Cell, Comparison, Report, Summary
from isobn_finetune.run_folder import dump_json

METRIC_NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews_correlation": "Matthews",
    "spearmanr": "Spearman",
    "pearson": "Pearson",
}
SPREAD = "median ± standard deviation over seeds (n-1), in points (100 x score)"
WRONG = ("collapsed", "diverged", "failed", "unfinished")
PLOTS = {
    "scores": "Box plots of the scores over seeds",
    "curves": "Learning curves: median over seeds, with the band from the lowest to the highest",
    "isotropy": "EV_3 after the norm, against the score, one point a run",
}

Table = list[list[str]]


def score_table(report: Report) -> Table:
    """Tasks across, model and norm down, the average over tasks last; the first row is the head."""
    metrics = {cell.task: METRIC_NAMES.get(cell.metric, cell.metric) for cell in report.cells if cell.metric}
    several = len(report.tasks) > 1
    head = ["model", "norm", *(f"{title_of(task)} {metrics.get(task, '')}".rstrip() for task in report.tasks)]
    rows = [head + ["average"] * several]
    for model in report.models:
        for norm in report.norms(model):
            cells = [report.cell(model, task, norm) for task in report.tasks]
            row = [model, norm, *(format_cell(cell) for cell in cells)]
            rows.append(row + [format_summary(report.average(model, norm).best)] * several)
        for published in (row for row in report.published if _same_model(row.model, model)):
            scores = [published.scores.get(task, "-") for task in report.tasks]
            shown = [score if isinstance(score, str) else f"{score:.2f}" for score in scores]
            rows.append([f"{published.model}, published", published.norm, *shown] + ["-"] * several)
    return rows


def _same_model(published: str, model: str) -> bool:
    return published.split()[0].rpartition("/")[2].lower() == model.rpartition("/")[2].lower()


def long_table(report: Report) -> Table:
    """One row a task and norm, with all that the short table leaves out."""
    head = "model,task,norm,seeds,median,std,mean,last epoch,collapsed,diverged,failed,unfinished"
    rows = [[*head.split(","), "steps to 95%", "EV_3 before", "EV_3 after"]]
    several = any(len(cell.settings) > 1 for cell in report.cells)
    rows[0] += ["setting", "settings tried"] * several
    for cell in report.cells:
        row = [cell.model, title_of(cell.task), cell.norm, str(len(cell.scored))]
        row += [_points(value) for value in (cell.best.median, cell.best.std, cell.best.mean, cell.last.median)]
        row += [str(cell.count(status)) for status in WRONG]
        row += [_plain(cell.steps_to_final), _share(cell.ev3_before), _share(cell.ev3_after)]
        rows.append(row + [cell.setting or "-", str(len(cell.settings))] * several)
    if len(report.tasks) > 1:
        for a in report.averages:
            row = [a.model, "average", a.norm, "-", *(_points(v) for v in (a.best.median, a.best.std, a.best.mean))]
            rows.append([*row, _points(a.last.median), *["-"] * (len(rows[0]) - 8)])
    return rows


def difference_table(comparison: Comparison) -> Table:
    """One pair of norms: a row a task, the average last."""
    rows = [
        [
            *("task", "seeds", "difference", "95% interval", "detectable"),
            *("p over seeds", "smallest p", "Holm", "r", "verdict"),
        ]
    ]
    differences = [*comparison.tasks, *([comparison.average] if comparison.average else [])]
    for d in differences:
        correlation = "-" if d.correlation is None else f"{d.correlation:+.2f}"
        interval = "-" if d.low is None else f"[{d.low:+.2f}, {d.high:+.2f}]"
        row = [title_of(d.task), str(len(d.seeds)), f"{d.difference:+.2f}", interval, _points(d.detectable)]
        tests = [_p(p) if len(d.seeds) > 1 else "-" for p in (d.p, d.smallest_p, d.p_holm)]
        rows.append([*row, *tests, correlation, d.verdict])
    return rows


def search_table(report: Report) -> Table:
    """Where settings were searched: the chosen one, and the expected best after each number of settings."""
    cells = [cell for cell in report.cells if cell.budget_curve]
    if not cells:
        return []
    longest = max(len(cell.budget_curve) for cell in cells)
    rows = [["model", "task", "norm", "settings", "chosen", *(f"after {n}" for n in range(1, longest + 1))]]
    for cell in cells:
        curve = [f"{value:.2f}" for value in cell.budget_curve]
        row = [cell.model, title_of(cell.task), cell.norm, str(len(cell.settings)), cell.setting]
        rows.append([*row, *curve, *["-"] * (longest - len(curve))])
    return rows


def odd_table(report: Report) -> Table:
    """Runs that collapsed, diverged, failed or are not over, each with its reason."""
    rows = [["run", "model", "task", "norm", "seed", "what", "reason"]]
    for run in report.odd_runs:
        what = "collapsed" if run.collapsed else run.status if run.status != "finished" else "without a score"
        reason = "one class, or no spread, in all predictions" if run.collapsed else run.reason or "-"
        rows.append(
            [run.path, run.model, title_of(run.task), run.norm, str(run.seed), what, shorten_paths(reason, run)]
        )
    return rows if len(rows) > 1 else []


def shorten_paths(text: str, run: Run) -> str:
    """A reason without the folders of the machine on which the run was made."""
    for folder in (str(run.folder), str(run.folder.resolve())):
        text = text.replace(folder, run.path)
    words = [word.rpartition("/")[2] or word if word.strip("'\"(:,;")[:1] == "/" else word for word in text.split()]
    return " ".join(words)


def wilcoxon_line(comparison: Comparison) -> str:
    """The test over tasks in one line; empty for a single task."""
    if comparison.wilcoxon_p is None:
        return ""
    return (
        f"Wilcoxon signed-rank test over {len(comparison.tasks)} tasks: p = {_p(comparison.wilcoxon_p)}, "
        f"Holm-corrected over pairs of norms {_p(comparison.wilcoxon_p_holm)}; the smallest that so many tasks can "
        f"give is {_p(comparison.wilcoxon_smallest_p)}."
    )


def format_terminal(report: Report) -> str:
    """The short table, the verdicts and the notes."""
    parts = [f"{SPREAD}:", "", _align(score_table(report)), ""]
    parts += [comparison.sentence for comparison in report.comparisons]
    parts += ["", *(f"- {note}" for note in report.notes)]
    return "\n".join(parts)


def format_markdown(report: Report, plots: Sequence[str]) -> str:
    """The whole report.

    Args:
        report: What to show.
        plots: Names of the plots beside it, without suffix.
    """
    parts = ["# Report", "", f"Scores are {SPREAD}.", "", _markdown(score_table(report)), ""]
    parts += [f"- {source}" for source in source_lines(report)]
    if report.comparisons:
        parts += ["", "## Is a difference real?", ""]
        parts += [f"- {comparison.sentence}." for comparison in report.comparisons]
    parts += ["", "Before believing it:", "", *(f"- {note}" for note in report.notes), ""]
    for comparison in report.comparisons:
        title = f"{comparison.norm} against {comparison.reference}"
        parts += [f"### {title} ({comparison.model})", "", _markdown(difference_table(comparison)), ""]
        parts += [wilcoxon_line(comparison), ""]
    if report.comparisons:
        parts += [*EXPLANATION, ""]
    if search := search_table(report):
        parts += ["## Search", "", "Median over seeds that the best of n settings is expected to have, in points:", ""]
        parts += [_markdown(search), ""]
    parts += ["## All numbers", "", _markdown(long_table(report)), "", LONG_EXPLANATION, ""]
    if odd := odd_table(report):
        parts += ["## Runs without a proper result", "", _markdown(odd), ""]
    if report.problems:
        parts += ["## Files that could not be used", "", *(f"- {problem}" for problem in report.problems), ""]
    if plots:
        parts += ["## Plots", ""]
        parts += [f"![{PLOTS[name]}]({name}.png)\n" for name in plots]
    return "\n".join(parts).rstrip() + "\n"


EXPLANATION = (
    "Differences are means over the common seeds, in points. The interval resamples seeds (in pairs) and dev examples "
    "together (multi-bootstrap, Sellam et al., ICLR 2022); detectable is the smallest difference that this design "
    "would find with 80% power; p is an exact paired permutation test over seeds, with the smallest p that so many "
    "seeds can give beside it, and corrected by Holm over the tasks; r is the correlation of the two norms' scores "
    "over seeds.",
    "Verdicts: equivalent, if the interval lies within ±0.5 points; else better or worse, if it excludes 0; else "
    "cannot tell. Fewer than three seeds never tell.",
)
LONG_EXPLANATION = (
    "Median, std and mean are over seeds, of the best epoch; last epoch is the median of the last epoch's score. "
    "Steps to 95%: median step of the first evaluation with 95% of the run's final score. EV_3: share of the variance "
    "of the pooled vectors of training rows in their top three directions, median over seeds, before and after the "
    "norm."
)


def source_lines(report: Report) -> list[str]:
    """Where published rows come from."""
    return list(
        dict.fromkeys(f"{row.model}, published: {row.protocol}. Source: {row.source}" for row in report.published)
    )


def format_csv(report: Report) -> str:
    """One line a model, task and norm, numbers in full, and the average over tasks."""
    columns = (
        "model task norm metric seeds n median std mean last_median last_mean collapsed diverged failed unfinished"
    )
    head = [*columns.split(), "steps_to_95", "ev3_before", "ev3_after", "setting", "settings_tried"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    for c in report.cells:
        row: list[Any] = [c.model, c.task, c.norm, c.metric, format_seeds(list(c.scored)), len(c.scored)]
        row += [_exact(v) for v in (c.best.median, c.best.std, c.best.mean, c.last.median, c.last.mean)]
        row += [c.count(status) for status in WRONG]
        row += [_exact(v) for v in (c.steps_to_final, c.ev3_before, c.ev3_after)]
        writer.writerow([*row, c.setting, len(c.settings)])
    for a in report.averages if len(report.tasks) > 1 else []:
        row = [a.model, "average", a.norm, "", "", ""]
        row += [_exact(v) for v in (a.best.median, a.best.std, a.best.mean, a.last.median, a.last.mean)]
        writer.writerow([*row, *[""] * (len(head) - len(row))])
    return file.getvalue()


def format_json(report: Report) -> str:
    """All numbers, for programs; scores in points."""
    return dump_json({"schema": 1, "unit": "points (100 x score)", **_values(report)}, indent=2) + "\n"


def _values(report: Report) -> dict[str, Any]:
    return {
        "cells": [_cell_values(cell) for cell in report.cells],
        "averages": [asdict(average) for average in report.averages],
        "comparisons": [asdict(comparison) for comparison in report.comparisons],
        "published": [asdict(row) for row in report.published],
        "odd_runs": [dict(zip(odd[0], row, strict=True)) for odd in [odd_table(report)] for row in odd[1:]],
        "problems": report.problems,
        "notes": report.notes,
    }


def _cell_values(cell: Cell) -> dict[str, Any]:
    return {
        "model": cell.model,
        "task": cell.task,
        "norm": cell.norm,
        "metric": cell.metric,
        "median": cell.best.median,
        "std": cell.best.std,
        "mean": cell.best.mean,
        "last_epoch": asdict(cell.last),
        "scores": {str(seed): 100 * (run.score or 0.0) for seed, run in cell.scored.items()},
        "counts": {status: cell.count(status) for status in WRONG},
        "setting": cell.setting,
        "settings": cell.settings,
        "expected_maximum": cell.budget_curve,
        "steps_to_95": cell.steps_to_final,
        "ev3": {"before": cell.ev3_before, "after": cell.ev3_after},
        "runs": [run.path for run in cell.runs],
    }


def format_latex(report: Report) -> str:
    """The short table for a paper, with booktabs."""
    head, *rows = score_table(report)
    lines = [
        "% \\usepackage{booktabs}",
        f"% {SPREAD.replace('±', '+-')}",
        f"\\begin{{tabular}}{{ll{'r' * (len(head) - 2)}}}",
        "\\toprule",
        " & ".join(map(_escape, head)) + " \\\\",
        "\\midrule",
    ]
    lines += [" & ".join(map(_escape, row)) + " \\\\" for row in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _escape(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def format_cell(cell: Cell | None) -> str:
    """``66.43 ± 1.20``, with what went wrong."""
    if cell is None:
        return "-"
    wrong = [f"{cell.count(s)} {s}" for s in ("collapsed", "diverged", "failed") if cell.count(s)]
    return format_summary(cell.best) + (f" ({', '.join(wrong)})" if wrong else "")


def format_summary(summary: Summary) -> str:
    """``66.43 ± 1.20``."""
    if summary.median is None:
        return "-"
    return f"{summary.median:.2f}" + ("" if summary.std is None else f" ± {summary.std:.2f}")


def _points(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _align(table: Table) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def _markdown(table: Table) -> str:
    head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in table]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
