"""What a reader must know before believing the numbers of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from isobn_finetune.report_runs import Run, title_of
from isobn_finetune.report_types import Report


def create_notes(report: Report) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = [
        "Scores are those of the best epoch, chosen on the same dev set: a little too high for every norm alike.",
    ]
    notes += _note_seeds(report)
    notes += _note_search(report)
    for model in report.models:
        for task in report.tasks:
            cells = [c for c in report.cells if (c.model, c.task) == (model, task)]
            prints = {run.fingerprint for c in cells for run in c.runs if run.fingerprint}
            if len(prints) > 1:
                notes.append(f"{model}, {title_of(task)}: the runs were made on different data.")
    without = [title_of(d.task) for c in report.comparisons for d in c.tasks if d.low is not None and not d.examples]
    if without:
        notes.append(
            f"{', '.join(dict.fromkeys(without))}: predictions are missing or of different dev rows, so these "
            "intervals are over seeds alone."
        )
    counts = Counter(_kind(run) for run in report.odd_runs)
    if counts:
        notes.append(f"Of {len(report.runs)} runs, " + ", ".join(f"{n} {kind}" for kind, n in counts.items()) + ".")
    if report.problems:
        number = len(report.problems)
        notes.append(f"{number} run folder{'s' * (number > 1)} could not be used; see the list at the end.")
    return notes


def _kind(run: Run) -> str:
    if run.status != "finished":
        return run.status
    return "collapsed" if run.collapsed else "without a score"


def _note_seeds(report: Report) -> list[str]:
    notes = []
    for model in report.models:
        for task in report.tasks:
            sets = {c.norm: tuple(sorted(c.scored)) for c in report.cells if (c.model, c.task) == (model, task)}
            if len(set(sets.values())) > 1:
                shown = "; ".join(f"{norm}: {format_seeds(seeds)}" for norm, seeds in sets.items())
                notes.append(f"{model}, {title_of(task)}: unequal sets of seeds ({shown}); pairs use the common ones.")
    few = min((len(d.seeds) for c in report.comparisons for d in c.tasks), default=99)
    if few < 5:
        notes.append(
            f"With only {few} common seed{'s' * (few > 1)} a bootstrap interval over seeds is too narrow; take "
            "verdicts with care."
        )
    return notes


def format_seeds(seeds: Sequence[int]) -> str:
    """``1-3, 5``."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and parts[-1][-1] == seed - 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts) or "none"


def _note_search(report: Report) -> list[str]:
    notes = []
    for model in report.models:
        budgets: dict[str, dict[str, int]] = {}
        for cell in report.cells:
            if cell.model == model and cell.settings:
                budgets.setdefault(cell.task, {})[cell.norm] = len(cell.settings)
        if all(count == 1 for counts in budgets.values() for count in counts.values()):
            differ = {c.setting for c in report.cells if c.model == model}
            if len(differ) > 1:
                notes.append(f"{model}: the norms were run with different settings ({'; '.join(sorted(differ))}).")
            continue
        unequal = {task: counts for task, counts in budgets.items() if len(set(counts.values())) > 1}
        text = (
            f"{model}: hyper-parameters were chosen on the dev set, by the median over seeds, for each task and norm. "
        )
        if not unequal:
            number = max(max(counts.values()) for counts in budgets.values())
            notes.append(f"{text}Budgets are equal: {number} settings for each norm.")
            continue
        counts = next(iter(unequal.values()))
        shown = ", ".join(f"{norm} {number}" for norm, number in counts.items())
        notes.append(
            f"{text}Budgets are not equal ({shown} settings on {title_of(next(iter(unequal)))}): compare the norms by "
            "the expected maximum at the smaller budget."
        )
    return notes
