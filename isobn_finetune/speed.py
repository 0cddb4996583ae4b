"""What makes training fast and changes nothing about it: batches without padding, and on a CPU cheaper layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from isobn_finetune.cpu_dropout import use_cheap_dropout
from isobn_finetune.cpu_memory import keep_freed_memory
from isobn_finetune.encoding import Feature, PaddingCollator
from isobn_finetune.mixed_precision import use_bf16_linear
from isobn_finetune.modeling import IsobnForSequenceClassification
from isobn_finetune.packed_attention import PackedSequences, packed_attention
from isobn_finetune.packing import PackingCollator, prepare_for_packing, supports_packing
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
    if not supports_packing(model.config.encoder_config):
        logger.info("train.packing: %s computes its own attention; batches are padded.", model.config.family.title)
        return PaddingCollator(tokenizer)
    if torch.cuda.is_available() and not attends_like_padded("cuda"):
        logger.info(
            "train.packing: this GPU or torch %s lacks a fitting kernel; batches are padded.", torch.__version__
        )
        return PaddingCollator(tokenizer)
    prepare_for_packing(model.encoder)
    return PackingCollator(model.config.encoder_config)


def attends_like_padded(device: str) -> bool:
    """True where attention over packed sequences works on a device and gives what each sequence gives by itself.

    Kernels for sequences of uneven length differ between GPUs and releases of torch, so they are tried before a run
    relies on them: in float32 and bfloat16, and with dropout, forward and backward.
    """
    lengths, heads, width = (5, 17, 1, 64), 2, 64
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    packed = PackedSequences(offsets, max(lengths))
    module = nn.Module()
    with torch.random.fork_rng(devices=[device] if device != "cpu" else []):
        torch.manual_seed(0)
        rows = torch.randn(3, 1, sum(lengths), heads, width, device=device)
        try:
            for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 5e-2)):
                query, key, value = (row.to(dtype).transpose(1, 2).requires_grad_() for row in rows)
                ours, _ = packed_attention(module, query, key, value, None, packed=packed)
                pieces = zip(*(state.split(lengths, dim=2) for state in (query, key, value)), strict=True)
                each = [nn.functional.scaled_dot_product_attention(*piece).transpose(1, 2) for piece in pieces]
                with torch.inference_mode():
                    alone, _ = packed_attention(module, query, key, value, None, packed=packed)
                expected = torch.cat(each, dim=1)
                if not all(torch.allclose(output, expected, atol=tolerance) for output in (ours, alone)):
                    return False
                dropped, _ = packed_attention(module, query, key, value, None, dropout=0.1, packed=packed)
                (gradient,) = torch.autograd.grad(dropped.float().sum(), value)
                if not gradient.isfinite().all():
                    return False
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            logger.debug("packed attention on %s: %s", device, error)
            return False
    return True


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
