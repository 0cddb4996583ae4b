from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from isobn_finetune import speed
from isobn_finetune.cpu_dropout import CheapDropout
from isobn_finetune.encoding import PaddingCollator
from isobn_finetune.inference import compute_logits
from isobn_finetune.mixed_precision import Bf16Linear
from isobn_finetune.modeling import IsobnConfig, IsobnForSequenceClassification, compute_loss
from isobn_finetune.packed_attention import packed_attention
from isobn_finetune.packing import PackingCollator
from isobn_finetune.speed import create_collator, fast_cpu_layers
from isobn_finetune.trained_rows import TrainedRowsEmbedding

VOCABULARY = 40
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class PadWithZeros:
    """As much of a tokenizer as padding needs."""

    def pad(self, features: list[dict[str, Any]], padding: bool, return_tensors: str) -> dict[str, torch.Tensor]:
        longest = max(len(feature["input_ids"]) for feature in features)
        fill = [longest - len(feature["input_ids"]) for feature in features]
        batch = {
            "input_ids": [feature["input_ids"] + [0] * rest for feature, rest in zip(features, fill, strict=True)],
            "attention_mask": [[1] * (longest - rest) + [0] * rest for rest in fill],
        }
        if "labels" in features[0]:
            batch["labels"] = [feature["labels"] for feature in features]
        return {name: torch.tensor(values) for name, values in batch.items()}


def create_model(family: str = "bert", pooling: str = "pooler", norm: str = "isobn") -> IsobnForSequenceClassification:
    torch.manual_seed(0)
    encoder = AutoConfig.for_model(family, vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0, **SHAPE)
    return IsobnForSequenceClassification(
        IsobnConfig(encoder_config=encoder, norm={"name": norm}, pooling=pooling, num_labels=3)
    )


def create_rows(count: int = 12) -> list[dict[str, Any]]:
    draw = random.Random(0)
    lengths = [1, 30, *(draw.randrange(2, 30) for _ in range(count - 2))]
    return [
        {"input_ids": [draw.randrange(5, 30) for _ in range(length)], "labels": draw.randrange(3)} for length in lengths
    ]


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


@pytest.mark.parametrize("norm", ["none", "batchnorm", "isobn"])
@pytest.mark.parametrize("pooling", ["pooler", "cls", "mean"])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_packed_batch_trains_the_whole_model_as_a_padded_one(family: str, pooling: str, norm: str) -> None:
    rows, outcomes = create_rows(), []
    for packing in ("off", "auto"):
        model = create_model(family, pooling, norm).train()
        without_dropout(model)
        batch = create_collator(model, PadWithZeros(), packing)(rows)
        labels = batch.pop("labels")
        output = model(**batch)
        loss = compute_loss(output.logits, labels)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        outcomes.append((loss.detach(), output.logits.detach(), gradients, dict(model.norm.named_buffers())))
    torch.testing.assert_close(outcomes[1], outcomes[0], atol=1e-5, rtol=1e-4)
    assert all(gradient.abs().max() > 0 for name, gradient in outcomes[0][2].items() if name.endswith("query.weight"))


def test_evaluation_gives_the_same_logits_packed_and_padded() -> None:
    model, rows = create_model(), create_rows(30)
    expected = compute_logits(model, rows, create_collator(model, PadWithZeros(), "off"), 8)
    got = compute_logits(model, rows, create_collator(model, PadWithZeros(), "auto"), 8)
    torch.testing.assert_close(torch.from_numpy(got), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


def test_a_family_without_pluggable_attention_is_padded_and_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="isobn_finetune"):
        collator = create_collator(create_model("mpnet"), PadWithZeros(), "auto")
    assert isinstance(collator, PaddingCollator)
    assert [record.getMessage() for record in caplog.records if "MPNet" in record.getMessage()] == [
        "train.packing: MPNet computes its own attention; batches are padded."
    ]
    assert isinstance(create_collator(create_model(), PadWithZeros(), "off"), PaddingCollator)
    assert isinstance(create_collator(create_model(), PadWithZeros(), "auto"), PackingCollator)


def train(model: IsobnForSequenceClassification, rows: list[dict[str, Any]], collate: Any) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    for _ in range(3):
        batch = collate(rows)
        labels = batch.pop("labels")
        with torch.autocast("cpu", torch.bfloat16):
            loss = compute_loss(model(**batch).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_fast_layers_train_to_the_weights_of_stock_layers_and_leave_the_same_state_dict() -> None:
    rows, stock, fast = create_rows(), create_model(), create_model()
    for model in (stock, fast):
        without_dropout(model)
    train(stock, rows, create_collator(stock, PadWithZeros(), "off"))
    with fast_cpu_layers(fast, rows, weight_decay=0.0):
        kinds = {type(module) for module in fast.modules()}
        assert kinds >= {CheapDropout, Bf16Linear, TrainedRowsEmbedding}
        train(fast, rows, create_collator(fast, PadWithZeros(), "auto"))
        saved = {name: value.clone() for name, value in fast.state_dict().items()}
    assert not any(isinstance(module, TrainedRowsEmbedding) for module in fast.modules())
    assert list(saved) == list(fast.state_dict()) == list(stock.state_dict())
    for name, value in fast.state_dict().items():
        assert torch.equal(value, saved[name])
        # Three steps of Adam go at most 0.03 far; bf16 rounds differently in batches of another shape.
        difference = (value - stock.state_dict()[name]).abs().double().mean()
        assert difference < 2e-3, name
    moved = (stock.state_dict()["classifier.weight"] - create_model().state_dict()["classifier.weight"]).abs().mean()
    assert moved > 1e-2


def test_rows_of_the_vocabulary_stay_in_training_where_weight_decay_moves_them() -> None:
    model = create_model()
    with fast_cpu_layers(model, create_rows(), weight_decay=0.01):
        assert isinstance(model.encoder.get_input_embeddings(), nn.Embedding)


def test_packed_attention_is_tried_before_a_gpu_relies_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.attends_like_padded("cpu")

    def no_kernel(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(speed, "packed_attention", no_kernel)
    assert not speed.attends_like_padded("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(speed, "attends_like_padded", lambda device: False)
    model = create_model()
    assert isinstance(create_collator(model, PadWithZeros(), "auto"), PaddingCollator)
    assert model.encoder.config._attn_implementation == "sdpa"


def test_packed_attention_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return 2 * packed_attention(*args, **kwargs)[0], None

    monkeypatch.setattr(speed, "packed_attention", doubled)
    assert not speed.attends_like_padded("cpu")
