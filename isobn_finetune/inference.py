"""Logits for encoded rows, in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from isobn_finetune.encoding import Feature
from isobn_finetune.isotropy import CovarianceAccumulator, compute_isotropy
from isobn_finetune.modeling import IsobnForSequenceClassification, SentenceClassifierOutput


class IsotropyProbe:
    """Gathers the statistics of sentence vectors, never the vectors themselves."""

    def __init__(self) -> None:
        self._pooler_output = CovarianceAccumulator()

    def __call__(self, output: SentenceClassifierOutput) -> None:
        """Takes a batch in."""
        assert output.pooler_output is not None  # the model always gives it
        self._pooler_output.update(output.pooler_output)

    def measure(self, norm: Any) -> dict[str, Any]:
        """Isotropy before the norm and after it: ``{"n", "pooler_output": {...}, "normed_output": {...}}``.

        In eval mode a norm is affine, so the second follows exactly from the first's covariance.
        """
        weight, shift = (tensor.detach().double().cpu().numpy() for tensor in norm.affine())
        return {
            "n": self._pooler_output.count,
            "pooler_output": compute_isotropy(self._pooler_output),
            "normed_output": compute_isotropy(self._pooler_output.transform(weight, shift)),
        }


def compute_logits(
    model: IsobnForSequenceClassification,
    features: Sequence[Feature],
    collate: Callable[[list[Feature]], dict[str, Any]],
    batch_size: int,
    observe: Callable[[SentenceClassifierOutput], None] | None = None,
    advance: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Runs the model in eval mode over all rows, in float32.

    Rows of like length share a batch, so little is padded; the order is restored. Float32 whatever the precision of
    training: what is scored here is what the saved model gives again, in any batch size.

    Args:
        model: Left in the mode in which it came.
        features: Encoded rows; ``labels`` are not read.
        collate: Makes a batch.
        batch_size: Rows at once.
        observe: Called with each batch's output.
        advance: Called with the number of rows of each batch, for a progress bar.

    Returns:
        ``(rows, num_labels)`` float32.
    """
    order = sorted(range(len(features)), key=lambda row: len(features[row]["input_ids"]), reverse=True)
    logits = np.empty((len(features), model.config.num_labels), dtype=np.float32)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                batch = collate([{k: v for k, v in features[row].items() if k != "labels"} for row in rows])
                output = model(**{name: _to_device(value, model.device) for name, value in batch.items()})
                logits[rows] = output.logits.float().cpu().numpy()
                if observe is not None:
                    observe(output)
                if advance is not None:
                    advance(len(rows))
    finally:
        model.train(was_training)
    return logits


def _to_device(value: Any, device: torch.device) -> Any:
    """A packed batch also holds a plain number."""
    return value.to(device) if isinstance(value, torch.Tensor) else value
