"""Every encoder family, from a tiny random model: the same function as its stock classifier, and trainable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from isobn_finetune import load_model
from isobn_finetune.data import load_splits
from isobn_finetune.encoding import PaddingCollator, encode
from isobn_finetune.families import FAMILIES
from isobn_finetune.loading import create_model
from isobn_finetune.tasks import TASKS

Cli = Callable[..., Any]

POOLER_OF_ITS_OWN = {"bert", "albert"}
"""Families whose encoder checkpoint holds a pooler that was trained with it."""

STOCK = pytest.mark.parametrize("family", sorted(FAMILIES))


@pytest.fixture
def batch(glue_dir: Path) -> Callable[[Path], dict[str, torch.Tensor]]:
    def make(model_dir: Path) -> dict[str, torch.Tensor]:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        features = encode(load_splits(TASKS["mnli"], str(glue_dir))["train"], TASKS["mnli"], tokenizer, 40)
        inputs = PaddingCollator(tokenizer)(features)
        inputs.pop("labels")
        return inputs

    return make


@STOCK
def test_without_a_norm_our_model_is_the_stock_classifier(family: str, make_model: Cli, batch: Cli) -> None:
    folder = make_model(family, "AutoModelForSequenceClassification", num_labels=3)
    stock = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ours = create_model(folder, TASKS["mnli"], {"name": "none"}).eval()
    row = FAMILIES[family]
    dense, classifier = stock.get_submodule(row.dense), stock.get_submodule(row.classifier)
    assert torch.equal(ours.pooler.dense.weight, dense.weight), "the trained head's dense layer is taken over"
    with torch.no_grad():
        ours.classifier.load_state_dict(classifier.state_dict())
        inputs = batch(folder)
        expected = stock(**inputs).logits
        torch.testing.assert_close(ours(**inputs).logits, expected, atol=1e-6, rtol=1e-5)
    assert expected.std(dim=0).min() > 1e-3, "rows must differ, or anything would pass"


@STOCK
def test_every_family_trains_and_loads_again(
    family: str, make_model: Cli, cli: Cli, glue_dir: Path, tmp_path: Path
) -> None:
    masked = family in ("roberta", "xlm-roberta", "mpnet")
    model = make_model(family, "AutoModelForMaskedLM" if masked else "AutoModel")
    options = ["--task", "rte", "--model", model, "--data", glue_dir, "--output-dir", tmp_path / "run"]
    options += ["--norm", "isobn", "--precision", "fp32", "--batch-size", 4, "--max-steps", 3, "--learning-rate", 1e-3]
    outcome = cli("run", *options)
    assert outcome.code == 0, outcome.stderr
    notices = [line for line in outcome.stderr.splitlines() if "pooler" in line]
    assert len(notices) == (0 if family in POOLER_OF_ITS_OWN else 1), outcome.stderr
    assert "arning" not in outcome.stderr and "newly initialized" not in outcome.stderr
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert "encoder.pooler.dense.weight" not in after and "pooler.dense.weight" in after
    assert int(after["norm.num_batches_tracked"]) in (2, 3)
    changed = 0
    for name, tensor in after.items():
        ends = [old for key, old in before.items() if key.split(".", 1)[-1] == name.removeprefix("encoder.")]
        ends += [old for key, old in before.items() if key == name.removeprefix("encoder.")]
        if name.startswith("encoder.") and ends and ends[0].shape == tensor.shape:
            changed += not torch.equal(ends[0], tensor)
    assert changed > 5, "the encoder is trained too"
    loaded, tokenizer = load_model(tmp_path / "run")
    lines = (tmp_path / "run" / "predictions" / "validation.jsonl").read_text().splitlines()
    rows = load_splits(TASKS["rte"], str(glue_dir), ["validation"])["validation"]
    with torch.no_grad():
        inputs = tokenizer(list(rows["sentence1"]), list(rows["sentence2"]), padding=True, return_tensors="pt")
        logits = loaded(**inputs).logits
    expected = torch.tensor([list(json.loads(line)["probabilities"].values()) for line in lines])
    torch.testing.assert_close(logits.softmax(dim=-1), expected, atol=1e-5, rtol=0)


def test_modernbert_goes_on_with_the_head_of_its_masked_lm_as_the_stock_classifier_does(make_model: Cli) -> None:
    folder = make_model("modernbert", "AutoModelForMaskedLM")
    stock = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    ours = create_model(folder, TASKS["rte"], {"name": "none"})
    assert torch.equal(ours.pooler.dense.weight, stock.head.dense.weight)
    assert torch.equal(ours.pooler.LayerNorm.weight, stock.head.norm.weight)
    assert torch.equal(ours.pooler.dense.weight, load_file(folder / "model.safetensors")["head.dense.weight"])


@STOCK
def test_padding_changes_no_result(family: str, make_model: Cli, batch: Cli) -> None:
    folder = make_model(family)
    model = create_model(folder, TASKS["mnli"], {"name": "none"}, pooling="mean").eval()
    inputs = batch(folder)
    with torch.no_grad():
        together = model(**inputs).logits
        for row in range(4):
            length = int(inputs["attention_mask"][row].sum())
            alone = model(**{name: value[row : row + 1, :length] for name, value in inputs.items()}).logits
            torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["pooler", "cls", "mean"])
def test_every_pooling_trains_and_loads_again(
    pooling: str, bert_dir: Path, cli: Cli, glue_dir: Path, tmp_path: Path
) -> None:
    options = ["--task", "sst2", "--model", bert_dir, "--data", glue_dir, "--output-dir", tmp_path / "run"]
    options += ["--set", f"model.pooling={pooling}", "--precision", "fp32", "--batch-size", 4, "--max-steps", 2]
    outcome = cli("run", *options)
    assert outcome.code == 0, outcome.stderr
    model, _ = load_model(tmp_path / "run")
    assert model.config.pooling == pooling
    assert ("pooler.dense.weight" in model.state_dict()) == (pooling == "pooler")
