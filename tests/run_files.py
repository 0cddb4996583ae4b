"""What tests read of run folders, and the rows they start from."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

RUN_FILES = {
    "config.yaml",
    "curves.png",
    "history.jsonl",
    "model/README.md",
    "model/config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "predictions/validation.jsonl",
    "result.json",
}

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9"),
}


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def read_json(path: Path) -> Any:
    """Strict: NaN and infinities are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def predictions_of(folder: Path) -> bytes:
    return (folder / "predictions" / "validation.jsonl").read_bytes()


def copy_glue(glue_dir: Path, target: Path, task: str = "RTE") -> Path:
    shutil.copytree(glue_dir / task, target / task)
    return target


def command(*arguments: object, code: str = "from isobn_finetune.cli import main; main()") -> list[str]:
    return [sys.executable, "-c", code, *(str(argument) for argument in arguments)]


def small_run(task: str, model: Path, data: Path, output: Path, *options: object) -> list[object]:
    base = ["run", "--task", task, "--model", model, "--data", data, "--output-dir", output, "--precision", "fp32"]
    return [*base, "--batch-size", 4, *options]
