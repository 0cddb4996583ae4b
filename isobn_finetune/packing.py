"""Batches without padding: the sequences of a batch lie one after another in a single row of tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from isobn_finetune.packed_attention import PACKED_ATTENTION

# Their attention goes through transformers' interface, and their embeddings take ``position_ids``. MPNet and DeBERTa
# compute attention by themselves, from relative positions.
_FIRST_POSITION_AFTER_PADDING = ("roberta", "xlm-roberta")
_TOKEN_TYPED = ("bert", "electra", "albert", *_FIRST_POSITION_AFTER_PADDING)
_PACKABLE = (*_TOKEN_TYPED, "distilbert", "modernbert")


def supports_packing(encoder_config: PreTrainedConfig) -> bool:
    """True where encoders of that family run on packed batches."""
    return encoder_config.model_type in _PACKABLE and not getattr(encoder_config, "is_decoder", False)


def prepare_for_packing(encoder: PreTrainedModel) -> bool:
    """Lets an encoder run on packed batches; padded ones still work.

    Returns:
        False where the family cannot, and the encoder is as it was.
    """
    if not supports_packing(encoder.config):
        return False
    encoder.set_attn_implementation(PACKED_ATTENTION)
    return True


class PackingCollator:
    """Lays the sequences of a batch one after another.

    Makes ``input_ids``, ``position_ids`` and, where the family has them, ``token_type_ids``, all ``(1, tokens)``;
    ``cu_seqlens``, the offsets ``(sequences + 1,)`` where they begin and end; ``max_length``, an int; and ``labels``
    ``(sequences,)`` where the rows have them.

    Args:
        encoder_config: Config of an encoder that :func:`supports_packing`.

    Attributes:
        real_tokens: Tokens seen so far.
        all_tokens: Places seen so far: the same, as there is no padding.
    """

    def __init__(self, encoder_config: PreTrainedConfig) -> None:
        family = encoder_config.model_type
        self.first_position = encoder_config.pad_token_id + 1 if family in _FIRST_POSITION_AFTER_PADDING else 0
        # One type alone needs no ids, and a tokenizer of another family might give more.
        self.has_token_types = family in _TOKEN_TYPED and encoder_config.type_vocab_size > 1
        self.real_tokens = 0

    @property
    def all_tokens(self) -> int:
        """Places seen so far."""
        return self.real_tokens

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch of rows with ``input_ids``, ``token_type_ids`` where there are any, and ``labels``."""
        lengths = torch.tensor([len(feature["input_ids"]) for feature in features])
        ends = lengths.cumsum(0)
        starts = ends - lengths
        tokens = int(ends[-1])
        position_ids = torch.arange(self.first_position, self.first_position + tokens)
        batch = {
            "input_ids": _concatenate(features, "input_ids"),
            "position_ids": (position_ids - starts.repeat_interleave(lengths)).unsqueeze(0),
            "cu_seqlens": torch.cat([starts, ends[-1:]]).to(torch.int32),
            "max_length": int(lengths.max()),
        }
        if self.has_token_types and "token_type_ids" in features[0]:
            batch["token_type_ids"] = _concatenate(features, "token_type_ids")
        for name in ("labels", "label"):
            if name in features[0]:
                batch["labels"] = torch.tensor([feature[name] for feature in features])
        self.real_tokens += tokens
        return batch


def _concatenate(features: list[dict[str, Any]], name: str) -> torch.Tensor:
    return torch.tensor([token for feature in features for token in feature[name]]).unsqueeze(0)
