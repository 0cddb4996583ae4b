"""``export``: what it writes is stock, checks itself, and is whole or not there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import create_classifier, make_run, save_classifier
from conftest import Outcome, create_tokenizer

from isobn_finetune import export as export_module

Cli = Callable[..., Outcome]

STOCK_ALONE = """
import json, sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder = sys.argv[1]
model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
logits = model(**tokenizer(["a dog", ""], ["the cat runs", "a"], padding=True, return_tensors="pt")).logits
print(json.dumps({"ours": [name for name in sys.modules if name.startswith("isobn")], "logits": logits.tolist(),
                  "class": type(model).__name__, "labels": model.config.id2label}))
"""


def test_an_exported_run_needs_nothing_of_ours(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    from isobn_finetune import load_model

    run = make_run(tmp_path / "run", "rte", str(glue_dir), norm="batchnorm")

    outcome = cli("export", "--model", run, "--format", "hf", "--output-dir", tmp_path / "out")

    assert outcome.code == 0, outcome.stderr
    assert (
        "BertForSequenceClassification" in outcome.stdout and "rte validation (the data of the run)" in outcome.stdout
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    done = subprocess.run(
        [sys.executable, "-c", STOCK_ALONE, str(tmp_path / "out")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    stock = json.loads(done.stdout.splitlines()[-1])
    model, tokenizer = load_model(run)
    batch = tokenizer(["a dog", ""], ["the cat runs", "a"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = model(**batch).logits
    assert stock["ours"] == [] and stock["class"] == "BertForSequenceClassification"
    assert stock["labels"] == {"0": "entailment", "1": "not_entailment"}
    torch.testing.assert_close(torch.tensor(stock["logits"]), expected, atol=1e-5, rtol=0)


def test_what_was_exported_scores_as_the_run_does(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "run", "stsb", str(glue_dir))
    assert cli("export", "--model", run, "--format", "hf", "--output-dir", tmp_path / "out").code == 0

    for model, name in ((run, "a"), (tmp_path / "out", "b")):
        options = ("--data", glue_dir, "--output-dir", tmp_path / name)
        assert cli("evaluate", "--model", model, *options).code == 0

    scores = [json.loads((tmp_path / name / "evaluate.json").read_text())["metrics"] for name in "ab"]
    assert scores[0]["validation"] == pytest.approx(scores[1]["validation"], abs=1e-6)


def test_a_model_folder_alone_is_checked_on_the_demo(cli: Cli, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", create_classifier("roberta", task="rte"))

    outcome = cli("export", "--model", model, "--format", "hf", "--output-dir", tmp_path / "out")

    assert outcome.code == 0, outcome.stderr
    assert "rte validation (demo)" in outcome.stdout
    assert "isobn-finetune" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("family", ["distilbert", "electra", "modernbert"])
def test_a_tokenizer_with_token_types_gives_only_what_the_stock_model_takes(
    cli: Cli, tmp_path: Path, glue_dir: Path, family: str
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = make_run(tmp_path / "run", "rte", str(glue_dir), family=family, **_one_type(family))
    create_tokenizer("bert").save_pretrained(run / "model")

    outcome = cli("export", "--model", run, "--format", "hf", "--output-dir", tmp_path / "out")

    assert outcome.code == 0, outcome.stderr
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")("a dog", "the cat", return_tensors="pt")
    assert "token_type_ids" not in batch
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")(**batch).logits.shape == (1, 2)


def _one_type(family: str) -> dict[str, Any]:
    return {"type_vocab_size": 1} if family == "electra" else {}


def test_a_run_whose_data_is_gone_is_checked_on_the_demo(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "rte", str(tmp_path / "gone"))

    outcome = cli("export", "--model", run, "--format", "hf", "--output-dir", tmp_path / "out")

    assert outcome.code == 0 and "rows of the demo take their place" in outcome.stderr


def test_half_precision_is_carried_over(cli: Cli, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = create_classifier(task="rte").to(torch.bfloat16)
    folder = save_classifier(tmp_path / "m", model)

    outcome = cli("export", "--model", folder, "--format", "hf", "--output-dir", tmp_path / "out")

    assert outcome.code == 0, outcome.stderr
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype="auto")
    assert {parameter.dtype for parameter in stock.parameters()} == {torch.bfloat16}
    assert "As stored" in outcome.stderr


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_poolings_without_a_stock_twin_are_offered_onnx(cli: Cli, tmp_path: Path, pooling: str) -> None:
    folder = save_classifier(tmp_path / "m", create_classifier(pooling=pooling, task="rte"))

    outcome = cli("export", "--model", folder, "--format", "hf", "--output-dir", tmp_path / "out")

    assert outcome.code == 2
    assert f"model.pooling is {pooling}" in outcome.error and "--format onnx" in outcome.error
    assert not (tmp_path / "out").exists()


def test_a_fold_that_is_wrong_fails_and_writes_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_classifier(tmp_path / "m", create_classifier(task="rte"))
    right = export_module.fold_classifier

    def wrong(*arguments: Any) -> Any:
        weight, bias = right(*arguments)
        return weight, bias + 2e-5

    monkeypatch.setattr(export_module, "fold_classifier", wrong)

    outcome = cli("export", "--model", folder, "--format", "hf", "--output-dir", tmp_path / "out")

    assert outcome.code == 1 and "not written" in outcome.error
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_only_a_model_of_ours_goes_into_a_new_folder(cli: Cli, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "m", create_classifier(task="rte"))
    assert cli("export", "--model", folder, "--format", "hf", "--output-dir", tmp_path / "out").code == 0
    (tmp_path / "file").write_text("x")

    for arguments, says in (
        (("--model", folder, "--output-dir", tmp_path / "out"), "not empty"),
        (("--model", folder, "--output-dir", tmp_path / "file"), "is a file"),
        (("--model", tmp_path / "out", "--output-dir", tmp_path / "new"), "a stock bert checkpoint already"),
        (("--model", tmp_path / "none", "--output-dir", tmp_path / "new"), "none"),
        (("--model", folder, "--output-dir", tmp_path / "new", "--format", "tflite"), "Known: hf, onnx"),
    ):
        outcome = cli("export", *arguments)
        assert outcome.code == 2 and says in outcome.error
    assert not (tmp_path / "new").exists()


def test_onnx_takes_any_batch_and_length(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from transformers import AutoTokenizer

    from isobn_finetune import load_model

    run = make_run(tmp_path / "run", "rte", str(glue_dir), pooling="mean")

    outcome = cli("export", "--model", run, "--format", "onnx", "--output-dir", tmp_path / "out")

    assert outcome.code == 0, outcome.stderr
    assert b"site-packages" not in (tmp_path / "out/model.onnx").read_bytes()
    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"))
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "out"), load_model(run)[0]
    for texts in (["a dog"], ["a dog runs by the road " * 3, "the cat", ""], ["fish"] * 9):
        batch = tokenizer(texts, texts, padding=True, truncation=True, max_length=40, return_tensors="pt")
        names = [node.name for node in session.get_inputs()]
        logits = session.run(["logits"], {name: batch[name].numpy() for name in names})[0]
        with torch.inference_mode():
            torch.testing.assert_close(torch.tensor(logits), model(**batch).logits, atol=1e-4, rtol=0)


def test_onnx_without_its_packages_says_what_to_install(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)

    outcome = cli("export", "--model", "tiny", "--format", "onnx", "--output-dir", tmp_path / "out")

    assert outcome.code == 2 and "isobn-finetune[onnx]" in outcome.error
