"""What makes training fast and changes nothing about it: batches without padding, and on a CPU cheaper layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase

from isobn_finetune.cpu_dropout import use_cheap_dropout
from isobn_finetune.cpu_memory import keep_freed_memory
from isobn_finetune.encoding import Feature, PaddingCollator
from isobn_finetune.mixed_precision import use_bf16_linear
from isobn_finetune.modeling import IsobnForSequenceClassification
from isobn_finetune.packing import PackingCollator, prepare_for_packing
from isobn_finetune.trained_rows import train_all_rows, train_used_rows

logger = logging.getLogger(__name__)


def create_collator(
    model: IsobnForSequenceClassification, tokenizer: PreTrainedTokenizerBase, packing: str
) -> PaddingCollator | PackingCollator:
    """Batches without padding where that is asked for and the encoder can, else padded to their longest row.

    Args:
        model: Its encoder is prepared for packed batches; it still takes padded ones.
        tokenizer: Pads.
        packing: ``auto`` or ``off``.
    """
    if packing == "off":
        return PaddingCollator(tokenizer)
    if not prepare_for_packing(model.encoder):
        logger.info("train.packing: %s computes its own attention; batches are padded.", model.config.family.title)
        return PaddingCollator(tokenizer)
    return PackingCollator(model.config.encoder_config)


@contextmanager
def fast_cpu_layers(
    model: IsobnForSequenceClassification, train: Sequence[Feature], weight_decay: float
) -> Iterator[None]:
    """While it lasts, a model on a CPU trains with cheaper layers; on other devices nothing happens.

    The state dict keeps its names and shapes, so checkpoints are the same with and without.

    Args:
        model: What is trained.
        train: The training rows.
        weight_decay: Rows of the word embeddings that no training row uses are left out of training where it is 0.
    """
    if torch.cuda.is_available() or model.device.type != "cpu":
        yield
        return
    use_cheap_dropout(model)
    use_bf16_linear(model.encoder)
    if weight_decay == 0.0:
        train_used_rows(model.encoder, {token for feature in train for token in feature["input_ids"]})
    try:
        with keep_freed_memory():
            yield
    finally:
        train_all_rows(model.encoder)
