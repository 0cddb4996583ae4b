"""Token ids that the runs of a sweep share, in this process and with others."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from isobn_finetune.data import compute_fingerprint
from isobn_finetune.encoding import Feature, encode
from isobn_finetune.tasks import TaskSpec

KEPT_SPLITS = 6
"""Splits kept in memory: two tasks' worth, since neighbouring runs of a sweep mostly share theirs."""


class SharedTokens:
    """Tokenizes each split once for each tokenizer and length, whichever process comes first.

    Takes the place of `encoding.encode`. Files are found by what was tokenized and how, so a changed file of the data
    set is never mistaken for the one before.

    Args:
        folder: Where the token ids are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: OrderedDict[str, list[Feature]] = OrderedDict()

    def __call__(
        self, rows: Dataset, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> list[Feature]:
        """See `encoding.encode`."""
        key = self._key(rows, tokenizer, max_length)
        if key not in self._kept:
            self._kept[key] = self._load_or_encode(
                self.folder / f"{spec.name}-{key}.npz", rows, spec, tokenizer, max_length
            )
            while len(self._kept) > KEPT_SPLITS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _key(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
        digest = hashlib.sha256(compute_fingerprint({"rows": rows}).encode())
        digest.update(tokenizer.backend_tokenizer.to_str().encode())
        digest.update(f"{tokenizer.model_input_names} {tokenizer.truncation_side} {max_length}".encode())
        return digest.hexdigest()[:24]

    def _load_or_encode(
        self, path: Path, rows: Dataset, spec: TaskSpec, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> list[Feature]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if path.is_file():
                with np.load(path, allow_pickle=False) as arrays:
                    return unpack(dict(arrays))
            features = encode(rows, spec, tokenizer, max_length)
            temporary = path.with_suffix(".partial.npz")
            np.savez(temporary, **pack(features))
            os.replace(temporary, path)
            return features


def pack(features: Sequence[Feature]) -> dict[str, Any]:
    """Features as a few arrays: the rows of each column end to end, ``lengths`` ``(n,)`` and ``labels`` ``(n,)``."""
    columns = [key for key in features[0] if key != "labels"] if features else []
    flat = {key: np.concatenate([np.asarray(feature[key], np.int32) for feature in features]) for key in columns}
    lengths = [len(feature["input_ids"]) for feature in features]
    return {**flat, "lengths": np.array(lengths, np.int64), "labels": np.array([f["labels"] for f in features])}


def unpack(arrays: Mapping[str, np.ndarray]) -> list[Feature]:
    """Undoes `pack`."""
    ends = np.cumsum(arrays["lengths"]).tolist()
    starts = [0, *ends][:-1]
    columns = {key: values.tolist() for key, values in arrays.items() if key not in ("lengths", "labels")}
    return [
        {**{key: values[start:end] for key, values in columns.items()}, "labels": label}
        for start, end, label in zip(starts, ends, arrays["labels"].tolist(), strict=True)
    ]
