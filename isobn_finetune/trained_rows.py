"""Word embeddings that train only the rows whose tokens occur in the training data.

A vocabulary has tens of thousands of rows, a GLUE task uses a fraction of them. The others have zero gradient at every
step, so Adam without weight decay leaves them where they are; but a dense gradient, its norm and the optimizer's state
cost as much for them as for the rest. Leaving them out gives the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class TrainedRowsEmbedding(nn.Module):
    """``nn.Embedding`` whose parameter holds the trained rows alone.

    The state dict is that of the layer it replaces: ``weight``, all rows in the order of the vocabulary. In training
    mode other tokens than the trained ones raise an IndexError.

    Args:
        embedding: What to replace.
        used: ``(rows,)`` Boolean, the rows to train.
    """

    def __init__(self, embedding: nn.Embedding, used: Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        order = torch.cat([used.nonzero()[:, 0], (~used).nonzero()[:, 0]])
        trained = int(used.sum())
        # Trained rows first, so that the parameter can be a view of the table that evaluation reads.
        self._table = embedding.weight.detach()[order]
        self.weight = nn.Parameter(self._table[:trained])
        self._slot_of = order.argsort()
        slot = None if embedding.padding_idx is None else int(self._slot_of[embedding.padding_idx])
        self.padding_idx = slot if slot is not None and slot < trained else None  # its row gets no gradient
        self._original_padding_idx = embedding.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """``(...)`` token ids to ``(..., embedding_dim)``."""
        slots = self._slot_of[input]
        if self.training:
            return F.embedding(slots, self.weight, self.padding_idx)
        return F.embedding(slots, self._table)

    def to_embedding(self) -> nn.Embedding:
        """A plain layer with the same rows."""
        embedding = nn.Embedding(
            self.num_embeddings, self.embedding_dim, self._original_padding_idx, _weight=self._table[self._slot_of]
        )
        return embedding.train(self.training)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self._table[self._slot_of]

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        if key not in state_dict:
            missing_keys.append(key)
        elif state_dict[key].shape != self._table.shape:
            error_msgs.append(f"{key}: shape {tuple(state_dict[key].shape)}, not {tuple(self._table.shape)}")
        else:
            with torch.no_grad():
                self._table[self._slot_of] = state_dict[key].to(self._table)


def train_used_rows(encoder: PreTrainedModel, token_ids: Iterable[int]) -> float:
    """Leaves rows of the word embeddings that are not used out of training. For a CPU, and without weight decay.

    Args:
        encoder: Its input embeddings are replaced, see :class:`TrainedRowsEmbedding`.
        token_ids: All that occur in training.

    Returns:
        Share of the rows that are trained.
    """
    embedding = encoder.get_input_embeddings()
    used = torch.zeros(embedding.num_embeddings, dtype=torch.bool)
    used[torch.tensor(sorted(set(token_ids)))] = True
    if embedding.padding_idx is not None:
        used[embedding.padding_idx] = True  # padded batches read it
    encoder.set_input_embeddings(TrainedRowsEmbedding(embedding, used))
    return float(used.float().mean())


def train_all_rows(encoder: PreTrainedModel) -> None:
    """Puts the plain layer back, with what was learned."""
    embedding = encoder.get_input_embeddings()
    if isinstance(embedding, TrainedRowsEmbedding):
        encoder.set_input_embeddings(embedding.to_embedding())
