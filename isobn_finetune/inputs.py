"""What a run reads: model, tokenizer and rows, loaded and checked before anything is written."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import set_seed

from isobn_finetune.config import RunConfig
from isobn_finetune.data import compute_fingerprint, load_splits
from isobn_finetune.encoding import EncodeRows, Feature, check_vocabulary, limit_length
from isobn_finetune.errors import ConfigError
from isobn_finetune.hub import resolve_model
from isobn_finetune.loading import create_model, load_tokenizer
from isobn_finetune.modeling import IsobnForSequenceClassification
from isobn_finetune.precision import resolve_precision
from isobn_finetune.tasks import TaskSpec
from isobn_finetune.trackers import check_tracker


@dataclass
class Inputs:
    """All that a run reads, loaded and checked before anything is written."""

    tokenizer: Any
    model: IsobnForSequenceClassification
    splits: dict[str, Dataset]
    rows: dict[str, int]
    features: dict[str, list[Feature]]
    class_weights: torch.Tensor | None
    fingerprint: str
    precision: str

    def dev(self, spec: TaskSpec) -> dict[str, list[Feature]]:
        """The labelled dev splits, the selection split first."""
        others = [split for split in spec.labelled_dev_splits if split in self.features]
        return {split: self.features[split] for split in dict.fromkeys((spec.selection_split, *others))}


def load_inputs(config: RunConfig, encode_rows: EncodeRows) -> Inputs:
    """Loads model files, tokenizer and data, so that what is missing is said before any work."""
    spec = config.spec
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "run: started as one of several processes (WORLD_SIZE); a run takes one process, start it alone"
        )
    precision = resolve_precision(config.precision)
    check_tracker(config.train.report_to)
    model_dir = resolve_model(config.model.name)
    tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
    splits = load_splits(spec, config.data.source)
    for split in ("train", spec.selection_split):
        if len(splits[split]) == 0:
            raise ConfigError(f"data.source {config.data.source}: split '{split}' of {spec.title} has no rows")
    # Test rows are counted but not read further: their labels are hidden, and the hub's copy differs in that.
    used = {split: rows for split, rows in splits.items() if split in ("train", *spec.labelled_dev_splits)}
    rows = {split: len(rows) for split, rows in splits.items()}
    # Before the model: the head is drawn from this seed too.
    seed_everything(config.seed)
    model = create_model(
        model_dir, spec, config.norm.model_dump(), config.model.pooling, config.model.trust_remote_code
    )
    if config.train.gradient_checkpointing:
        _enable_gradient_checkpointing(model)
    max_length = limit_length(config.data.max_length, model.config.family, model.config.encoder_config)
    model.config.finetuning_max_length = max_length  # so that whoever loads the model cuts rows alike
    features = {split: encode_rows(rows, spec, tokenizer, max_length) for split, rows in used.items()}
    for encoded in features.values():
        check_vocabulary(encoded, tokenizer, model.encoder.get_input_embeddings().num_embeddings)
    return Inputs(
        tokenizer=tokenizer,
        model=model,
        splits=used,
        rows=rows,
        features=features,
        class_weights=_class_weights(config, features["train"]),
        fingerprint=compute_fingerprint(used),
        precision=precision,
    )


def seed_everything(seed: int) -> None:
    """Seeds python, numpy and torch; on a GPU also asks for kernels that repeat."""
    set_seed(seed)
    if torch.cuda.is_available():
        # Not transformers' enable_full_determinism: it makes every kernel launch wait for the one before.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # A guard for debugging that costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _class_weights(config: RunConfig, train: list[Feature]) -> torch.Tensor | None:
    weights = config.train.class_weights
    if weights is None:
        return None
    labels = config.spec.labels
    if weights == "balanced":
        counts = np.bincount([feature["labels"] for feature in train], minlength=len(labels))
        if (counts == 0).any():
            raise ConfigError(f"train.class_weights: no training row is '{labels[int(counts.argmin())]}'")
        return torch.tensor(len(train) / (len(labels) * counts), dtype=torch.float32)
    return torch.tensor([weights[name] for name in labels], dtype=torch.float32)


def _enable_gradient_checkpointing(model: IsobnForSequenceClassification) -> None:
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"train.gradient_checkpointing: transformers' {model.config.family.title} cannot do it")
    # The norm stands outside the encoder's checkpointed layers, so no batch enters its statistics twice.
    with warnings.catch_warnings():
        # transformers 5.24 has a new name for it, which 5.0 does not know.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
