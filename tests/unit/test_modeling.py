from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from isobn_finetune.loading import create_model
from isobn_finetune.modeling import IsobnConfig, IsobnForSequenceClassification, compute_loss
from isobn_finetune.tasks import TASKS
from isobn_finetune.trainer import SentenceTrainer

Make = Callable[..., Path]


@pytest.fixture
def model(bert_dir: Path) -> IsobnForSequenceClassification:
    torch.manual_seed(0)
    return create_model(bert_dir, TASKS["rte"], {"name": "isobn"})


IDS = torch.tensor([[2, 60, 61, 62, 3, 0, 0], [2, 63, 64, 65, 66, 67, 3]])
MASK = (IDS != 0).long()


def test_the_order_is_encoder_pooler_norm_dropout_classifier(model: IsobnForSequenceClassification) -> None:
    model.train()
    model.dropout.p = 0.5
    for _ in range(3):
        model(IDS, MASK)
    model.eval()
    output = model(IDS, MASK)
    torch.testing.assert_close(output.normed_output, output.pooler_output * model.norm.affine()[0])
    torch.testing.assert_close(output.logits, model.classifier(output.normed_output))
    hidden = model.encoder(IDS, MASK).last_hidden_state[:, 0]
    torch.testing.assert_close(output.pooler_output, torch.tanh(model.pooler.dense(hidden)))


def test_a_forward_in_training_counts_one_batch_and_one_in_evaluation_none(
    model: IsobnForSequenceClassification,
) -> None:
    model.train()(IDS, MASK)
    model.eval()(IDS, MASK)
    assert int(model.norm.num_batches_tracked) == 1


def test_mean_pooling_leaves_padding_out(bert_dir: Path) -> None:
    model = create_model(bert_dir, TASKS["rte"], {"name": "none"}, pooling="mean").eval()
    expected = model.encoder(IDS[:1, :5]).last_hidden_state.mean(dim=1)
    torch.testing.assert_close(model(IDS, MASK).pooler_output[:1], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(model(IDS[:1, :5]).pooler_output, expected)


def test_cls_pooling_is_the_first_hidden_state(bert_dir: Path) -> None:
    model = create_model(bert_dir, TASKS["rte"], {"name": "none"}, pooling="cls").eval()
    torch.testing.assert_close(model(IDS, MASK).pooler_output, model.encoder(IDS, MASK).last_hidden_state[:, 0])


def test_segments_of_a_pair_reach_the_encoder(model: IsobnForSequenceClassification) -> None:
    model.eval()
    types = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]])
    assert not torch.allclose(model(IDS, MASK, types).logits, model(IDS, MASK).logits)


def test_segments_do_not_break_an_encoder_that_knows_one(roberta_dir: Path) -> None:
    model = create_model(roberta_dir, TASKS["rte"], {"name": "none"}).eval()
    types = torch.ones_like(IDS)
    assert torch.equal(model(IDS, MASK, types).logits, model(IDS, MASK).logits)


def test_loss_of_a_regression_does_not_broadcast() -> None:
    logits, labels = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0])
    assert compute_loss(logits, labels).item() == pytest.approx(1 / 3)
    assert compute_loss(logits[:1], labels[:1]).item() == 0
    assert compute_loss(logits, torch.tensor([1, 2, 3])).item() == pytest.approx(1 / 3)


def test_loss_of_classes_is_cross_entropy_with_smoothing_and_weights() -> None:
    logits, labels = torch.tensor([[2.0, 0.0], [0.5, 1.0]]), torch.tensor([0, 1])
    log_p = logits.log_softmax(-1)
    picked = torch.stack([log_p[0, 0], log_p[1, 1]])
    torch.testing.assert_close(compute_loss(logits, labels), -picked.mean())
    weights = torch.tensor([3.0, 1.0])
    torch.testing.assert_close(compute_loss(logits, labels, 0.0, weights), -(picked * weights).sum() / 4)
    smooth = 0.8 * -picked.mean() + 0.2 * -log_p.mean()
    torch.testing.assert_close(compute_loss(logits, labels, 0.2), smooth)


def test_loss_is_float32_whatever_the_logits_are() -> None:
    loss = compute_loss(torch.zeros(2, 2, dtype=torch.bfloat16), torch.tensor([0, 1]))
    assert loss.dtype == torch.float32


def test_the_model_gives_the_loss_of_its_labels(model: IsobnForSequenceClassification) -> None:
    labels = torch.tensor([0, 1])
    output = model.eval()(IDS, MASK, labels=labels)
    torch.testing.assert_close(output.loss, compute_loss(output.logits, labels))
    assert model(IDS, MASK).loss is None


def test_the_trainer_does_not_think_that_the_loss_is_divided_already(model: IsobnForSequenceClassification) -> None:
    assert not Trainer(model, TrainingArguments("unused", use_cpu=True)).model_accepts_loss_kwargs


@pytest.mark.parametrize("norm", ["batchnorm", "isobn"])
def test_no_weight_decay_on_norms_biases_and_layer_norms(bert_dir: Path, norm: str) -> None:
    model = create_model(bert_dir, TASKS["rte"], {"name": norm})
    decayed = set(SentenceTrainer.get_decay_parameter_names(object.__new__(SentenceTrainer), model))
    assert "classifier.weight" in decayed and "pooler.dense.weight" in decayed
    for name, _ in model.named_parameters():
        if name.startswith("norm.") or name.endswith("bias") or "LayerNorm" in name:
            assert name not in decayed, name


def test_a_new_model_keeps_the_attention_that_its_encoder_was_loaded_with(model: Any) -> None:
    assert model.encoder.config._attn_implementation == "sdpa"
    assert model.config.encoder_config._attn_implementation == "sdpa"


def test_casting_the_model_leaves_statistics_in_float32(model: IsobnForSequenceClassification) -> None:
    model.train()(IDS, MASK)
    model.bfloat16()
    assert model.norm.running_cov.dtype == torch.float32 and model.classifier.weight.dtype == torch.bfloat16
    assert model.eval()(IDS, MASK).logits.dtype == torch.bfloat16


def test_a_config_reads_back_with_its_encoder_norm_and_labels(
    model: IsobnForSequenceClassification, tmp_path: Path
) -> None:
    model.config.save_pretrained(tmp_path)
    config = IsobnConfig.from_pretrained(tmp_path)
    assert config.encoder_config.model_type == "bert" and config.encoder_config.hidden_size == 16
    assert config.norm == {"name": "isobn"} and config.pooling == "pooler"
    assert config.id2label == {0: "entailment", 1: "not_entailment"} and config.num_labels == 2
    assert config.problem_type == "single_label_classification"


def test_loading_in_half_precision_keeps_the_statistics(model: IsobnForSequenceClassification, tmp_path: Path) -> None:
    model.train()(IDS, MASK)
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        loaded = IsobnForSequenceClassification.from_pretrained(tmp_path, dtype=dtype)
        assert loaded.classifier.weight.dtype == dtype
        assert torch.equal(loaded.norm.running_cov, model.norm.running_cov), dtype
        assert loaded.norm.running_std.dtype == torch.float32
