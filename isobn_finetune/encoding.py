"""From texts to token ids: one list of features a split, in the order of its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from isobn_finetune.errors import ConfigError
from isobn_finetune.families import Family
from isobn_finetune.tasks import TaskSpec

logger = logging.getLogger(__name__)

Feature = dict[str, Any]
"""``input_ids`` and what else the family reads, lists of equal length, and ``labels``."""

EncodeRows = Callable[..., list[Feature]]
"""Tokenizes a split, as ``encode`` does."""


def limit_length(max_length: int, family: Family, encoder_config: Any) -> int:
    """Tokens a row may have: what was asked for, or what the position embeddings hold, said where that is less."""
    limit = family.get_max_length(encoder_config)
    if limit is None or max_length <= limit:
        return max_length
    logger.info("Max length %d is more than this %s takes: rows are cut at %d tokens.", max_length, family.title, limit)
    return limit


def encode(
    rows: Dataset | Mapping[str, Sequence[Any]], spec: TaskSpec, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Feature]:
    """Tokenizes all rows at once.

    Args:
        rows: With ``spec.text_columns`` and ``label``.
        spec: The task.
        tokenizer: A fast one.
        max_length: Tokens a row, special ones included; of a pair, the longer text is cut first.
    """
    texts = [list(rows[column]) for column in spec.text_columns]
    encoded = tokenizer(*texts, truncation=True, max_length=max_length, return_attention_mask=False) if texts[0] else {}
    keys = list(encoded)
    return [
        {**dict(zip(keys, values, strict=True)), "labels": label}
        for *values, label in zip(*(encoded[key] for key in keys), rows["label"], strict=True)
    ]


def check_vocabulary(features: Iterable[Feature], tokenizer: PreTrainedTokenizerBase, embeddings: int) -> None:
    """Compares the tokens of encoded rows with what the encoder has embeddings for.

    Args:
        features: Encoded rows.
        tokenizer: Made them.
        embeddings: Rows of the encoder's word embeddings.

    Raises:
        ConfigError: A token has none: tokenizer and encoder are not of one model.
    """
    if len(tokenizer) <= embeddings:
        return
    highest = max((max(feature["input_ids"], default=0) for feature in features), default=0)
    if highest >= embeddings:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer gives token {highest}, and the encoder has embeddings for "
            f"{embeddings} only; put the tokenizer of this very model there"
        )


class PaddingCollator:
    """Pads a batch to its longest row.

    Attributes:
        real_tokens: Tokens seen so far.
        all_tokens: Places seen so far, padding included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.real_tokens = 0
        self.all_tokens = 0

    def __call__(self, features: list[Feature]) -> dict[str, Any]:
        """Returns tensors ``(batch, longest)``, and ``labels`` ``(batch,)``."""
        batch = dict(self.tokenizer.pad(features, padding=True, return_tensors="pt"))
        self.real_tokens += int(batch["attention_mask"].sum())
        self.all_tokens += batch["attention_mask"].numel()
        return batch
