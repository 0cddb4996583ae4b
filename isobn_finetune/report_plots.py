"""The report's figures: scores over seeds, learning curves, isotropy against score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isobn_finetune.plots import BLACK, BLUE, GREEN, PURPLE, VERMILION, save_figure
from isobn_finetune.report_runs import Run, title_of
from isobn_finetune.report_types import POINTS, Cell, Report

STYLES: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": VERMILION, "linestyle": "--", "marker": "s"},
    {"color": GREEN, "linestyle": "-.", "marker": "^"},
    {"color": PURPLE, "linestyle": ":", "marker": "D"},
    {"color": BLACK, "linestyle": (0, (5, 1, 1, 1)), "marker": "v"},
)


def save_plots(report: Report, folder: Path, formats: Iterable[str] = ("png", "svg")) -> list[str]:
    """Draws those figures for which there is something to draw, and returns their names without suffix."""
    kinds: dict[str, Callable[[Axes, list[tuple[str, Cell]]], bool]] = {
        "scores": _draw_scores,
        "curves": _draw_curves,
        "isotropy": _draw_isotropy,
    }
    names = []
    for name, draw in kinds.items():
        figure = _create_figure(report, name, draw)
        if figure is not None:
            for kind in formats:
                save_figure(figure, folder / f"{name}.{kind}")
            names.append(name)
    return names


def _create_figure(report: Report, name: str, draw: Callable[[Axes, list[tuple[str, Cell]]], bool]) -> Figure | None:
    """One panel a model and task."""
    panels = [(model, task) for model in report.models for task in report.tasks if _cells(report, model, task)]
    columns = min(len(panels), 4)
    rows = math.ceil(len(panels) / columns)
    extra = 0.3 if name == "scores" else 0.0
    figure = Figure(figsize=(3.3 * columns + 0.4, (2.9 + extra) * rows + 0.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    drawn = False
    for place, (model, task) in zip(axes, panels, strict=False):
        title = title_of(task) if len(report.models) == 1 else f"{title_of(task)}, {model}"
        place.set_title(title, fontsize=10, parse_math=False)
        drawn |= draw(place, _cells(report, model, task))
        place.grid(alpha=0.3, linewidth=0.5)
        place.spines[["top", "right"]].set_visible(False)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    labels: dict[str, Any] = {}
    for place in axes:
        handles, names = place.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure if drawn else None


def _cells(report: Report, model: str, task: str) -> list[tuple[str, Cell]]:
    found = ((norm, report.cell(model, task, norm)) for norm in report.norms(model))
    return [(norm, cell) for norm, cell in found if cell is not None]


def _style(number: int) -> dict[str, Any]:
    return STYLES[number % len(STYLES)]


def _draw_scores(axes: Axes, cells: list[tuple[str, Cell]]) -> bool:
    """A box a norm over its seeds, and each seed as a point."""
    drawn = False
    for number, (_, cell) in enumerate(cells):
        scores = [POINTS * (run.score or 0.0) for run in cell.scored.values()]
        if not scores:
            continue
        drawn = True
        style = _style(number)
        axes.boxplot(
            [scores],
            positions=[number],
            widths=0.5,
            showfliers=False,
            medianprops={"color": style["color"], "linewidth": 2},
            boxprops={"color": "0.4"},
            whiskerprops={"color": "0.4"},
            capprops={"color": "0.4"},
        )
        offsets = np.linspace(-0.15, 0.15, len(scores)) if len(scores) > 1 else [0.0]
        axes.plot(number + np.array(offsets), scores, linewidth=0, **{**style, "linestyle": "none"}, markersize=4)
    axes.set_xticks(
        range(len(cells)), [norm.replace(" (", "\n(").replace(", ", ",\n") for norm, _ in cells], fontsize=7
    )
    axes.set_xlim(-0.6, len(cells) - 0.4)
    axes.set_ylabel("score (points)", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    return drawn


def _draw_curves(axes: Axes, cells: list[tuple[str, Cell]]) -> bool:
    drawn = False
    for number, (norm, cell) in enumerate(cells):
        steps, scores = align_curves(list(cell.scored.values()))
        if len(steps) == 0:
            continue
        drawn = True
        style = _style(number)
        axes.plot(steps, np.nanmedian(scores, axis=0), linewidth=1.5, markersize=4, label=norm, **style)
        axes.fill_between(
            steps, np.nanmin(scores, axis=0), np.nanmax(scores, axis=0), color=style["color"], alpha=0.15, linewidth=0
        )
    axes.set_xlabel("training step", fontsize=8)
    axes.set_ylabel("dev score (points)", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.tick_params(labelsize=8)
    return drawn


def align_curves(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which at least half of the runs were evaluated, ``(steps,)``, and scores, ``(runs, steps)``, in points.

    NaN where a run has no score at a step, as after an early stop.
    """
    curves = [{e.step: e.score for e in run.evaluations if e.score is not None} for run in runs]
    curves = [curve for curve in curves if curve]
    counts: dict[int, int] = {}
    for curve in curves:
        for step in curve:
            counts[step] = counts.get(step, 0) + 1
    steps = sorted(step for step, count in counts.items() if 2 * count >= len(curves))
    scores = [[POINTS * curve[step] if step in curve else np.nan for step in steps] for curve in curves]
    return np.array(steps), np.array(scores, dtype=np.float64)


def _draw_isotropy(axes: Axes, cells: list[tuple[str, Cell]]) -> bool:
    drawn = False
    for number, (norm, cell) in enumerate(cells):
        points = [(run.ev3[1], POINTS * (run.score or 0.0)) for run in cell.scored.values() if run.ev3[1] is not None]
        if points:
            drawn = True
            style = {**_style(number), "linestyle": "none"}
            axes.plot(*np.array(points).T, alpha=0.8, markersize=5, label=norm, **style)
    axes.set_xlabel("EV$_3$ after the norm", fontsize=8)
    axes.set_ylabel("score (points)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    return drawn
