"""Figures from values that others computed, readable in print and without colour vision.

Lines differ in dash and marker as well as in colour; the colours are those of Okabe and Ito, "Color Universal Design",
2008, https://jfly.uni-koeln.de/color/. Figures are drawn without pyplot, so nothing global changes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

BLUE, VERMILION, GREEN, PURPLE, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"

_STYLES: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": VERMILION, "linestyle": "--", "marker": "s"},
    {"color": GREEN, "linestyle": "-.", "marker": "^"},
    {"color": PURPLE, "linestyle": ":", "marker": "D"},
)

_METRIC_TITLES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearmanr": "Spearman correlation",
}


def plot_curves(
    history: Iterable[Mapping[str, Any]],
    path: Path,
    title: str,
    primary_metric: str | None = None,
    best_step: int | None = None,
) -> None:
    """Draws loss, score and EV_3 over training steps, side by side.

    Args:
        history: Lines of ``history.jsonl``; values may be ``None``.
        path: Where the figure goes; its suffix is the format.
        title: Says which run this is.
        primary_metric: Which metric is the score; the first found if not given.
        best_step: Step of the best evaluation, marked in every panel.
    """
    lines = list(history)
    training = [line for line in lines if line.get("event") == "train"]
    evaluations = [line for line in lines if line.get("event") == "evaluation"]
    metric = primary_metric
    if metric is None:
        metric = next((name for line in evaluations for name in line.get("metrics") or {}), None)

    figure = _create_figure(11, 4, title)
    loss, score, isotropy = figure.subplots(1, 3)
    _draw_loss(loss, training, evaluations)
    for style, (split, group) in zip(_STYLES[1:], _by_split(evaluations).items(), strict=False):
        _draw_line(score, group, [(line.get("metrics") or {}).get(metric) for line in group], split, style)
    score_title = _METRIC_TITLES.get(metric, metric) if metric else "score"
    _finish(score, f"Score: {score_title}", score_title, best_step, "no evaluation")

    # Splits of one task come from one distribution: the first is enough.
    first = next(iter(_by_split(evaluations).values()), [])
    for style, name in zip(_STYLES, ("pooler_output", "normed_output"), strict=False):
        values = [((line.get("isotropy") or {}).get(name) or {}).get("ev3") for line in first]
        label = "pooler output (before the norm)" if name == "pooler_output" else "normed output (after it)"
        # The two coincide where there is no norm: the second is drawn smaller, so that both are seen.
        _draw_line(isotropy, first, values, label, style | ({"markersize": 3} if name == "normed_output" else {}))
    _finish(isotropy, "Isotropy: variance in the top 3 directions", "EV$_3$", best_step, "no isotropy measured")
    isotropy.set_ylim(0, isotropy.get_ylim()[1] * 1.05)  # a share of the whole: small changes should look small
    last = max((line["step"] for line in lines if line.get("step") is not None), default=1)
    for axes in (loss, score, isotropy):
        axes.set_xlim(0, last * 1.03)
    save_figure(figure, path)


def plot_spreads(spreads: Mapping[str, np.ndarray], paths: Iterable[Path], title: str) -> None:
    """Draws the distribution of the dimensions' standard deviations: all of them by size, one line a norm.

    Args:
        spreads: Norm to standard deviations ``(d,)``; zeros are left out and counted in the legend.
        paths: Files to write, one for each format.
        title: Says which model, task and representation.
    """
    figure = _create_figure(6, 4, title)
    axes = figure.subplots()
    for number, (norm, std) in enumerate(spreads.items()):
        alive = np.sort(std[std > 0])[::-1]
        dead = len(std) - len(alive)
        label = f"{norm} ({dead} constant dimensions not drawn)" if dead else norm
        if len(alive):
            share = (np.arange(len(alive)) + 0.5) / len(alive)
            axes.plot(share, alive / alive.mean(), linewidth=1.8, label=label, **_line_style(number))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    _finish_plain(axes, "share of the dimensions, largest first", "standard deviation / its mean over dimensions")
    _save(figure, paths)


def plot_correlation(correlation: np.ndarray, paths: Iterable[Path], title: str, remark: str = "") -> None:
    """Draws an absolute correlation matrix.

    Args:
        correlation: ``(d, d)``, 0 to 1, in the order in which its dimensions are to be drawn.
        paths: Files to write, one for each format.
        title: Says which model, task and representation.
        remark: A line below the matrix.
    """
    figure = _create_figure(5.6, 5.2, title)
    axes = figure.subplots()
    # cividis looks the same without red-green vision, and its lightness rises steadily, as print needs.
    image = axes.imshow(correlation, cmap="cividis", vmin=0, vmax=1, interpolation="antialiased")
    figure.colorbar(image, ax=axes, label="absolute correlation", shrink=0.85)
    axes.set_xlabel("dimension, in the order of the clustering" + (f"\n{remark}" if remark else ""))
    axes.set_ylabel("dimension")
    # One square a dimension has more detail than other figures, and needs no more pixels.
    _save(figure, paths, dpi=110)


def plot_spectrum(shares: Mapping[str, np.ndarray], paths: Iterable[Path], title: str, top_k: int = 3) -> None:
    """Draws the share of the variance in each principal direction, and marks EV_k.

    Args:
        shares: Norm to shares ``(d,)``, largest first, adding up to 1.
        paths: Files to write, one for each format.
        title: Says which model, task and representation.
        top_k: The k of EV_k.
    """
    figure = _create_figure(6, 4, title)
    axes = figure.subplots()
    for number, (norm, share) in enumerate(shares.items()):
        style = _line_style(number)
        drawn = np.where(share > 1e-6, share, np.nan)  # the far end would fill half of the figure
        rank = np.arange(1, len(share) + 1)
        explained = min(1.0, float(share[:top_k].sum()))
        axes.plot(rank, drawn, linewidth=1.6, label=f"{norm}: EV$_{{{top_k}}}$ = {explained:.4f}", **style)
        # Hollow, and smaller one by one, so that those that coincide are all seen.
        marker = {"marker": _STYLES[number % len(_STYLES)]["marker"], "markersize": max(9 - 2 * number, 3)}
        axes.plot(rank[:top_k], drawn[:top_k], linewidth=0, color=style["color"], fillstyle="none", **marker)
    width = max((len(share) for share in shares.values()), default=0)
    if width:
        axes.axhline(1 / width, color="0.45", linewidth=0.9, linestyle=(0, (1, 2)), label=f"isotropic: 1/{width}")
    if width > top_k:
        axes.axvspan(axes.get_xlim()[0], top_k + 0.5, color="0.92", zorder=0)
    axes.set(xscale="log", yscale="log", xlim=(0.9, max(width, 2) * 1.1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _finish_plain(axes, f"principal direction, by variance (shaded: the top {top_k})", "share of the variance")
    _save(figure, paths)


def plot_components(
    points: Mapping[str, np.ndarray],
    shares: Mapping[str, np.ndarray],
    labels: np.ndarray,
    label_names: Sequence[str],
    paths: Iterable[Path],
    title: str,
) -> None:
    """Draws embeddings on their first two principal directions, coloured by label, one panel a norm.

    Args:
        points: Norm to coordinates ``(n, 2)``.
        shares: Norm to the share of the variance in each direction ``(2,)``.
        labels: ``(n,)`` indices into ``label_names``, or real numbers where there are no names; NaN where hidden.
        label_names: Names of the classes, empty for real numbers.
        paths: Files to write, one for each format.
        title: Says which model, task and representation.
    """
    figure = _create_figure(3.9 * len(points), 4.3, title)
    panels = figure.subplots(1, len(points), squeeze=False)[0]
    hidden = np.isnan(labels)
    for axes, (norm, xy) in zip(panels, points.items(), strict=True):
        axes.scatter(*xy[hidden].T, s=8, color="0.5", linewidths=0, rasterized=True, label="label hidden")
        if label_names:
            for number, name in enumerate(label_names):
                style = _STYLES[number % len(_STYLES)]
                options = {"color": style["color"], "marker": style["marker"], "label": name}
                chosen = xy[labels == number]
                axes.scatter(*chosen.T, s=11, alpha=0.6, linewidths=0, rasterized=True, **options)
        else:
            shown = axes.scatter(*xy[~hidden].T, s=11, c=labels[~hidden], cmap="cividis", linewidths=0, rasterized=True)
        axes.set_title(f"norm {norm}", fontsize=10)
        axes.set_xlabel(f"direction 1 ({shares[norm][0]:.1%} of the variance)")
        axes.set_ylabel(f"direction 2 ({shares[norm][1]:.1%})")
        axes.grid(alpha=0.3, linewidth=0.5)
    if label_names:
        handles, names = panels[0].get_legend_handles_labels()
        kept = [(handle, name) for handle, name in zip(handles, names, strict=True) if name != "label hidden"]
        kept = [(handles[0], "label hidden"), *kept] if hidden.any() else kept
        legend = figure.legend(*zip(*kept, strict=True), loc="outside lower center", ncols=4, frameon=False)
        for handle in legend.legend_handles:
            if isinstance(handle, PathCollection):
                handle.set_sizes([30])
                handle.set_alpha(1)
    elif not hidden.all():
        figure.colorbar(shown, ax=list(panels), label="label", shrink=0.85)
    _save(figure, paths)


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Writes a figure under a temporary name, then renames it, so that no half-written file is left."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    kind = path.suffix.lstrip(".").lower()
    # A date and random ids would make equal figures differ.
    metadata = {"Date": None} if kind == "svg" else {}
    try:
        with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "isobn_finetune"}):
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # names in scripts that the font lacks
            figure.savefig(temporary, format=kind, dpi=dpi, metadata=metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _save(figure: Figure, paths: Iterable[Path], dpi: int = 150) -> None:
    for path in paths:
        save_figure(figure, path, dpi)


def _line_style(number: int) -> dict[str, Any]:
    style = _STYLES[number % len(_STYLES)]
    return {"color": style["color"], "linestyle": style["linestyle"]}


def _finish_plain(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def _create_figure(width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    # A dollar sign in a name is no formula.
    figure.suptitle(title, fontsize=11, fontweight="bold", parse_math=False)
    return figure


def _draw_loss(axes: Axes, training: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
    points = [(line["step"], line["loss"]) for line in training if _is_number(line.get("loss"))]
    if points:
        steps, losses = np.array(points, dtype=np.float64).T
        window = max(1, len(losses) // 25)
        if window > 1:
            axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=0.7)
            losses = _running_mean(losses, window)
        marker = "." if len(losses) < 30 else ""
        label = "training" if window == 1 else f"training (mean of {window} logs)"
        axes.plot(steps, losses, color=BLUE, linewidth=1.5, marker=marker, label=label)
    for style, (split, group) in zip(_STYLES[1:], _by_split(evaluations).items(), strict=False):
        _draw_line(axes, group, [line.get("loss") for line in group], split, style)
    _finish(axes, "Loss", "loss", None, "no loss logged")


def _draw_line(
    axes: Axes, lines: Sequence[Mapping[str, Any]], values: Sequence[Any], label: str, style: Mapping[str, Any]
) -> None:
    """Draws one value per line over steps; values that are missing leave a gap."""
    numbers = [float(value) if _is_number(value) else np.nan for value in values]
    if lines and not np.isnan(numbers).all():
        axes.plot(
            [line["step"] for line in lines], numbers, label=label, **{"linewidth": 1.5, "markersize": 5, **style}
        )


def _finish(axes: Axes, title: str, label: str, best_step: int | None, empty: str) -> None:
    """Sets what all panels share, and says so where there is nothing to draw."""
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(label)
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.lines:
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    if best_step is not None:
        axes.axvline(best_step, color=BLACK, linewidth=0.9, linestyle=(0, (1, 2)), label=f"best, step {best_step}")
    # Below the panel, where it hides nothing.
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.17))


def _by_split(evaluations: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in evaluations:
        groups.setdefault(str(line.get("split") or "validation"), []).append(line)
    return groups


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last ``window`` values, fewer at the start, so that no point looks into the future."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and bool(np.isfinite(value))
