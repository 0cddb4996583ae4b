"""Folding: the stock model and ours are one function, for every norm and every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from classifiers import create_classifier
from conftest import FAMILY_CONFIGS, create_tokenizer
from torch import nn

from isobn_finetune.export import create_stock_model, fold_classifier, fold_norm

NORMS = ("none", "batchnorm", "isobn")


def create_batch(family: str) -> dict[str, torch.Tensor]:
    texts = (["the happy goat eats", "a dog", ""], ["no goat eats by the road", "the cat", "fish"])
    return dict(create_tokenizer(family)(*texts, padding=True, return_tensors="pt"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
@torch.inference_mode()
def test_stock_model_gives_our_logits(family: str, norm: str) -> None:
    model, batch = create_classifier(family, norm), create_batch(family)

    stock = create_stock_model(model)

    ours = model(**batch).logits
    assert not type(stock).__module__.startswith("isobn_finetune")
    assert ours.std() > 0.05  # else nothing would be compared
    torch.testing.assert_close(stock(**batch).logits, ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
@torch.inference_mode()
def test_without_the_fold_the_stock_model_differs(family: str) -> None:
    model, batch = create_classifier(family, "isobn"), create_batch(family)

    stock = create_stock_model(model)
    stock.get_submodule(model.config.family.classifier).load_state_dict(model.classifier.state_dict())

    assert (stock(**batch).logits - model(**batch).logits).abs().max() > 1e-3


def test_folding_a_norm_that_mixes_dimensions() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, shift = torch.randn(5, 5, generator=generator), torch.randn(5, generator=generator)
    x, classifier = torch.randn(7, 5, generator=generator), nn.Linear(5, 3)

    matrix, bias = fold_classifier(classifier, weight, shift)

    torch.testing.assert_close((x.double() @ matrix.T + bias).float(), classifier(x @ weight + shift))


@pytest.mark.parametrize("pooling", ["pooler", "cls", "mean"])
@torch.inference_mode()
def test_folding_in_place_keeps_logits_and_leaves_the_model_alone(pooling: str) -> None:
    model, batch = create_classifier("bert", "batchnorm", pooling), create_batch("bert")
    before = model.classifier.weight.clone()

    folded = fold_norm(model)

    assert folded.config.norm == {"name": "none"} and model.config.norm == {"name": "batchnorm"}
    torch.testing.assert_close(model.classifier.weight, before)
    torch.testing.assert_close(folded(**batch).logits, model(**batch).logits, atol=1e-5, rtol=0)


def test_stock_model_keeps_dtype_labels_and_says_where_nothing_lay() -> None:
    model = create_classifier("roberta", "isobn")
    model.config.encoder_config._name_or_path = "/home/somebody/model"

    stock = create_stock_model(model, torch.bfloat16)

    assert {parameter.dtype for parameter in stock.parameters()} == {torch.bfloat16}
    assert stock.config.id2label == {0: "no", 1: "yes", 2: "maybe"}
    assert stock.config.problem_type == "single_label_classification"
    assert stock.config._name_or_path == ""


def test_modernbert_is_exported_with_the_pooling_that_it_was_trained_with() -> None:
    model = create_classifier("modernbert", "isobn", classifier_pooling="mean")

    assert create_stock_model(model).config.classifier_pooling == "cls"


def test_building_a_stock_model_draws_no_random_numbers(tmp_path: Path) -> None:
    model = create_classifier("bert", "isobn")
    torch.manual_seed(5)
    expected = torch.rand(3)

    torch.manual_seed(5)
    create_stock_model(model)

    torch.testing.assert_close(torch.rand(3), expected)
