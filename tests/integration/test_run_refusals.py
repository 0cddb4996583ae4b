"""Folders and models that ``isobn-finetune run`` cannot use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_files import copy_glue
from safetensors.torch import load_file, save_file

Cli = Callable[..., Any]


# Folders that cannot be used.


def test_an_output_folder_under_a_file_is_refused_before_any_work(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for into in ("file", "file/deeper"):
        outcome = run("rte", into=into)
        assert outcome.code == 2 and "is a file" in outcome.error and "--output-dir" in outcome.error


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_an_output_folder_without_permission_is_refused(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    outcome = run("rte", into="locked/run")
    assert outcome.code == 2 and "permission" in outcome.error


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"model": "nowhere/at all"}, ["--model"]),
        ({"model": "{tmp}/empty"}, ["{tmp}/empty"]),
        ({"data": "{tmp}/none"}, ["--data", "no such folder"]),
        ({"data": "{tmp}/empty"}, ["--data", "RTE"]),
    ],
)
def test_a_missing_model_or_data_folder_is_refused_and_nothing_is_written(
    run: Cli, tmp_path: Path, options: dict[str, str], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    outcome = run("rte", **{key: value.format(tmp=tmp_path) for key, value in options.items()})
    assert outcome.code == 2 and outcome.stdout == ""
    for part in parts:
        assert part.format(tmp=tmp_path) in outcome.error
    assert not (tmp_path / "out").exists()


def test_a_task_folder_without_a_needed_file_is_refused(run: Cli, glue_dir: Path, tmp_path: Path) -> None:
    data = copy_glue(glue_dir, tmp_path / "glue")
    (data / "RTE" / "dev.tsv").unlink()
    outcome = run("rte", data=data)
    assert outcome.code == 2 and "dev.tsv" in outcome.error and not (tmp_path / "out").exists()


def damage(model: Path, kind: str) -> None:
    weights = model / "model.safetensors"
    if kind == "cut weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "empty weights":
        weights.write_bytes(b"")
    elif kind == "config that is no JSON":
        (model / "config.json").write_text("{")
    elif kind == "config that is a list":
        (model / "config.json").write_text("[]")
    elif kind == "no tokenizer":
        for path in model.glob("*token*"):
            path.unlink()
        (model / "vocab.txt").unlink(missing_ok=True)
    elif kind == "broken tokenizer":
        (model / "tokenizer.json").write_text('{"version": "1.0"}')
    elif kind == "family that is not supported":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    elif kind == "layers missing":
        tensors = {name: tensor for name, tensor in load_file(weights).items() if "layer.1." not in name}
        save_file(tensors, weights, metadata={"format": "pt"})
    elif kind == "other shapes":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    elif kind == "width as text":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    elif kind == "vocabulary larger than the embeddings":
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab |= {word: len(vocab) + number for number, word in enumerate(("extra", "dog2"))}
        vocab["dog"], vocab["extra"] = vocab["extra"], vocab["dog"]
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    "kind",
    [
        "cut weights", "no weights", "empty weights", "config that is no JSON", "config that is a list",
        "no tokenizer", "broken tokenizer", "family that is not supported", "layers missing", "other shapes",
        "width as text", "vocabulary larger than the embeddings",
    ],
)  # fmt: skip
def test_a_damaged_model_is_refused_before_any_work(run: Cli, bert_dir: Path, tmp_path: Path, kind: str) -> None:
    model = Path(shutil.copytree(bert_dir, tmp_path / "model"))
    damage(model, kind)
    outcome = run("rte", model=model)
    assert outcome.code == 2, outcome.stderr
    assert str(model) in outcome.error and "Traceback" not in outcome.stderr
    assert not (tmp_path / "out").exists()
