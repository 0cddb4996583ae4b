"""Measures of sentence embeddings before and after each norm, with what plots and tables show of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from isobn_finetune.isotropy import (
    CovarianceAccumulator,
    compute_correlation,
    compute_measures,
    mean_cosine_similarity,
    why_undefined,
)
from isobn_finetune.norms import IsoBN, create_norm
from isobn_finetune.tasks import TaskSpec

MEASURES = ("isoscore", "isoscore_star", "participation_ratio", "mean_abs_correlation", "std_variation", "mean_cosine")
"""Measures beside EV_k, defined in :mod:`isobn_finetune.isotropy`."""

TRAINED = "trained"
"""Key of a saved classifier's own norm, with the statistics and parameters that it learned."""

AVERAGE = "average"
"""Key of the mean over tasks."""

ROWS_PER_DIMENSION = 5
"""With fewer rows IsoScore and EV_k are noticeably biased: method and numbers in I-STAR (ICLR 2024)."""

_PLOTTED_ROWS = 1500


@dataclass
class NormedEmbeddings:
    """What one norm makes of the embeddings.

    Attributes:
        norm: Its name and options.
        measures: ``n``, ``ev1`` and so on, and :data:`MEASURES`.
        spreads: Standard deviations ``(d,)``.
        shares: Share of the variance in each principal direction ``(d,)``, largest first.
        points: Plotted rows on the first two of them, ``(rows, 2)``.
    """

    norm: dict[str, Any]
    measures: dict[str, Any]
    spreads: np.ndarray | None = None
    shares: np.ndarray | None = None
    points: np.ndarray | None = None


@dataclass
class EmbeddedTask:
    """One task in one representation.

    Attributes:
        spec: The task.
        representation: ``pooler``, ``cls`` or ``mean``.
        hidden_size: Width of the embeddings.
        norms: By norm name, ``none`` first.
        correlation: Absolute correlations ``(d, d)`` before any norm, like dimensions side by side.
        labels: Of the plotted rows; NaN where hidden.
        compared: Measures of another model's embeddings of the same rows.
        notes: What a reader should know, in whole sentences.
    """

    spec: TaskSpec
    representation: str
    hidden_size: int
    norms: dict[str, NormedEmbeddings]
    correlation: np.ndarray | None
    labels: np.ndarray
    compared: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Analysis:
    """All that one call of ``analyze`` found."""

    model: str
    split: str
    source: str
    top_k: int
    compare_to: str | None
    tasks: list[EmbeddedTask]

    @property
    def representations(self) -> list[str]:
        """Representations, the main one first."""
        return list(dict.fromkeys(task.representation for task in self.tasks))

    @property
    def norms(self) -> list[str]:
        """Norms of the main representation; others may lack the trained one."""
        return list(self.tasks[0].norms)

    def select(self, representation: str) -> list[EmbeddedTask]:
        """Tasks in one representation."""
        return [task for task in self.tasks if task.representation == representation]

    def to_json(self) -> dict[str, dict[str, dict[str, Any]]]:
        """``{task: {norm: {...}}}``: the main representation's measures, and those of all under ``representations``."""
        main = self.representations[0]
        result: dict[str, dict[str, dict[str, Any]]] = {}
        for task in self.tasks:
            for name, normed in task.norms.items():
                inner: dict[str, Any] = {**normed.measures, "notes": task.notes}
                if name == "none" and task.compared is not None:
                    inner["compared"] = {"model": self.compare_to, **task.compared}
                entry = result.setdefault(task.spec.name, {}).setdefault(name, {})
                if task.representation == main:
                    entry |= {**normed.measures, "representation": main, "hidden_size": task.hidden_size}
                    entry |= {"norm": normed.norm, "model": self.model, "source": self.source, "split": self.split}
                    entry["representations"] = {}
                entry["representations"][task.representation] = inner
        if len(result) > 1:
            result[AVERAGE] = {norm: self._average(norm) for norm in self.norms}
        return result

    def _average(self, norm: str) -> dict[str, Any]:
        groups = {representation: self.select(representation) for representation in self.representations}
        averages = {name: average_measures(tasks, norm) for name, tasks in groups.items() if norm in tasks[0].norms}
        main = self.representations[0]
        return {**averages[main], "representation": main, "representations": averages}


def average_measures(tasks: Sequence[EmbeddedTask], norm: str) -> dict[str, Any]:
    """Means over tasks, ``None`` with a reason where a task has no value; ``n`` is the number of all rows."""
    rows = [task.norms[norm].measures for task in tasks]
    result: dict[str, Any] = {"n": sum(row["n"] for row in rows)}
    for name in rows[0]:
        if name.startswith("ev") or name in MEASURES:
            values = [row[name] for row in rows]
            result[name] = None if None in values else float(np.mean(values))
            if None in values:
                result["reason"] = "not defined for every task"
    return result


def measure_embeddings(
    spec: TaskSpec,
    representation: str,
    embeddings: np.ndarray,
    labels: np.ndarray,
    norms: Sequence[Mapping[str, Any]],
    trained: tuple[Mapping[str, Any], nn.Module] | None = None,
    top_k: int = 3,
) -> EmbeddedTask:
    """Measures embeddings before and after each norm.

    Each norm is fitted on exactly these rows. In eval mode it is affine, so the covariance after it follows from the
    one before it, and no second pass is needed. Rows with a value that is not finite are left out and counted.

    Args:
        spec: The task.
        representation: What the embeddings are.
        embeddings: ``(n, d)``.
        labels: ``(n,)``, -1 where hidden.
        norms: Norms with their options, ``none`` first.
        trained: A norm with its options that is not fitted here but taken as it stands.
        top_k: EV_1 to EV_k are measured.
    """
    moments = CovarianceAccumulator(embeddings.shape[1])
    moments.update(embeddings)
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        embeddings, labels = embeddings[finite], labels[finite]
    # Evenly over the split: it may be sorted.
    plotted = np.linspace(0, max(len(embeddings) - 1, 0), min(len(embeddings), _PLOTTED_ROWS)).round().astype(int)
    shown_labels = labels[plotted].astype(np.float64)
    shown_labels[shown_labels == -1] = np.nan
    fitted = {norm["name"]: (norm, fit_norm(norm, embeddings)) for norm in norms}
    if trained is not None:
        fitted[TRAINED] = trained
    normed = {
        name: _measure_norm(options, norm, moments, embeddings, plotted, top_k)
        for name, (options, norm) in fitted.items()
    }
    correlation = None if why_undefined(moments) else order_by_clusters(np.abs(compute_correlation(moments)))
    task = EmbeddedTask(spec, representation, embeddings.shape[1], normed, correlation, shown_labels)
    task.notes = [*_note_rows(moments), *_note_isotropy(task)]
    if "isobn" in fitted and isinstance(fitted["isobn"][1], IsoBN) and not why_undefined(moments):
        task.notes += _note_eps(fitted["isobn"][1], moments)
    return task


def fit_norm(options: Mapping[str, Any], embeddings: np.ndarray) -> nn.Module:
    """Builds a norm whose statistics are those of ``embeddings`` ``(n, d)``, taken as one batch; in eval mode."""
    norm: Any = create_norm(hidden_size=embeddings.shape[1], **options)
    if hasattr(norm, "momentum"):
        norm.momentum = 1.0  # the running values become the batch's own
    if len(embeddings) > 1:
        with torch.no_grad():
            norm.train()(torch.from_numpy(embeddings))
    return norm.eval()


def order_by_clusters(correlation: np.ndarray) -> np.ndarray:
    """Reorders an absolute correlation matrix ``(d, d)`` so that correlated dimensions stand side by side.

    By average-linkage clustering with 1 - |correlation| as the distance.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(correlation) < 2:
        return correlation
    distance = 1 - correlation
    np.fill_diagonal(distance, 0)
    order = leaves_list(linkage(squareform(distance, checks=False), method="average"))
    return correlation[np.ix_(order, order)]


def _measure_norm(
    options: Mapping[str, Any],
    norm: Any,
    moments: CovarianceAccumulator,
    embeddings: np.ndarray,
    plotted: np.ndarray,
    top_k: int,
) -> NormedEmbeddings:
    weight, shift = (tensor.detach().float().cpu().numpy() for tensor in norm.affine())
    after = moments.transform(weight, shift)
    result = NormedEmbeddings(dict(options), compute_measures(after, top_k))
    normed = embeddings * weight + shift if weight.ndim == 1 else embeddings @ weight + shift
    try:
        result.measures["mean_cosine"] = mean_cosine_similarity(normed)
    except ValueError as error:
        result.measures["mean_cosine"] = None
        result.measures.setdefault("reason", str(error).rstrip("."))
    if why_undefined(after) is None:
        result.spreads = after.std
        values, vectors = np.linalg.eigh(after.covariance)
        values = values[::-1].clip(min=0)
        result.shares = values / values.sum()
        top = vectors[:, ::-1][:, :2]
        # A direction has no sign of its own: the largest entry is made positive, so that figures repeat.
        top = top * np.sign(top[np.abs(top).argmax(axis=0), np.arange(top.shape[1])])
        result.points = (normed[plotted] - after.mean) @ top
    return result


def _note_rows(moments: CovarianceAccumulator) -> list[str]:
    notes = []
    count, width = moments.count, moments.hidden_size or 0
    if moments.non_finite_rows:
        notes.append(f"{moments.non_finite_rows} rows gave values that are not finite and are left out.")
    reason = why_undefined(moments)
    if reason is not None:
        notes.append(f"No measure is defined: {reason}.")
    elif count < ROWS_PER_DIMENSION * width:
        notes.append(
            f"{count} rows are fewer than {ROWS_PER_DIMENSION} x {width} dimensions: IsoScore reads low and EV_k high; "
            "IsoScore* corrects for that."
        )
    return notes


def _note_isotropy(task: EmbeddedTask) -> list[str]:
    """Says in words how much there is for a norm to mend, and which norms make it worse."""
    before = task.norms["none"].measures["ev3"]
    if before is None:
        return []
    if before < 0.2:
        notes = [f"EV_3 {before:.2f}: already near-isotropic; expect little from IsoBN."]
    elif before < 0.5:
        notes = [f"EV_3 {before:.2f}: moderately anisotropic; there is some room for IsoBN."]
    else:
        notes = [
            f"EV_3 {before:.2f}: strongly anisotropic; a few directions hold most of the variance, as the IsoBN paper "
            "reports of BERT and RoBERTa (about 0.86)."
        ]
    for name, normed in task.norms.items():
        after = normed.measures["ev3"]
        if name != "none" and after is not None and after > before + 5e-4:
            notes.append(f"Norm {name} raises EV_3 here, from {before:.3f} to {after:.3f}.")
    return notes


def _note_eps(norm: IsoBN, moments: CovarianceAccumulator) -> list[str]:
    """Says where eps, not beta, limits IsoBN: raw_i = (gamma_i * std_i + eps)^(-beta) is then nearly constant."""
    gamma = np.square(compute_correlation(moments)).mean(axis=1)
    typical = float((gamma * moments.std).mean())
    if typical >= norm.eps:
        return []
    return [
        f"The mean of gamma * std is {typical:.1e}, below IsoBN's eps {norm.eps:g}: eps, not beta, limits it here; "
        f"a smaller one, such as norm.eps={_power_below(typical):g}, lets it act."
    ]


def _power_below(value: float) -> float:
    """The power of ten that is at least ten times smaller."""
    return float(10.0 ** np.floor(np.log10(max(value, 1e-12) / 10)))


def note_comparison(task: EmbeddedTask, model: str) -> list[str]:
    """Says whether the space is more elongated than the other model's: ``task.compared`` against norm ``none``."""
    here, there = task.norms["none"].measures["ev3"], (task.compared or {}).get("ev3")
    if here is None or there is None:
        return []
    change = "about as elongated as" if abs(here - there) < 0.01 else "more" if here > there else "less"
    than = change if change.startswith("about") else f"{change} elongated than"
    return [f"The space is {than} that of {model}: EV_3 {here:.3f} here, {there:.3f} there."]
