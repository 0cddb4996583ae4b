"""The short table that a run prints at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobn_finetune.tasks import get_task

if TYPE_CHECKING:
    from isobn_finetune.results import RunResult


def format_summary(result: RunResult) -> str:
    """Formats score, other metrics, isotropy before and after the norm, time, and where the files are."""
    spec = get_task(result.task)
    best = result.best or {}
    train = result.train
    lines = [
        f"{spec.title}, {result.model}, norm {result.norm['name']}, seed {result.seed}",
        "",
        f"  {result.primary_metric:<22}{_number(result.score)}   "
        f"best, epoch {best.get('epoch', 0):g}, {spec.selection_split}",
        f"  {'':<22}{_number(result.last_score)}   last epoch",
    ]
    for split, metrics in result.metrics.items():
        for name, value in metrics.items():
            if (split, name) != (spec.selection_split, result.primary_metric):
                lines.append(f"  {name:<22}{_number(value)}   best, {split}")
    lines += ["", *_isotropy_lines(result.isotropy or {}), ""]
    lines += [
        f"  {train.get('steps')} steps, {train.get('epochs', 0):g} epochs in {_duration(train.get('seconds', 0))}"
        f" ({train.get('samples_per_second', 0):.0f} rows a second, {train.get('precision')})",
    ]
    if result.collapsed:
        lines.append("  warning: collapsed, every prediction is the same; try another seed or a smaller learning rate")
    if result.reason:
        lines.append(f"  undefined: {result.reason}")
    lines.append(f"  files: {result.output_dir} (result.json, curves.png, model/)")
    return "\n".join(lines)


def _isotropy_lines(isotropy: dict[str, Any]) -> list[str]:
    if not isotropy:
        return []
    keys = ("ev1", "ev2", "ev3", "isoscore")
    lines = [f"  isotropy, {isotropy['n']} rows    EV_1    EV_2    EV_3    IsoScore"]
    for place, title in (("pooler_output", "before the norm"), ("normed_output", "after the norm")):
        values = "  ".join(_number(isotropy[place].get(key)) for key in keys)
        lines.append(f"  {title:<22}{values}")
    return lines


def _number(value: float | None) -> str:
    return "  -   " if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
