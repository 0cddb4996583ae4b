"""``isobn-finetune run`` interrupted, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_files import OFFLINE, RUN_FILES, command, files_of, predictions_of, read_json, read_lines, small_run

Cli = Callable[..., Any]


# Signals.


def start(arguments: list[object], tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), env={**os.environ, **OFFLINE}, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


STEPS = 160


def long_run(bert_dir: Path, glue_dir: Path, output: Path) -> list[object]:
    settings = ["--set", "train.logging_steps=1", "--set", "train.eval_steps=20", "--max-steps", STEPS]
    return small_run("rte", bert_dir, glue_dir, output, "--learning-rate", 1e-3, *settings)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, bert_dir: Path, glue_dir: Path) -> Path:
    from isobn_finetune.cli import main

    folder = tmp_path_factory.mktemp("long") / "whole"
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in long_run(bert_dir, glue_dir, folder)])
    assert not leaving.value.code
    return folder


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_is_resumed_to_the_same_end(
    bert_dir: Path, glue_dir: Path, uninterrupted: Path, cli: Cli, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    process = start(long_run(bert_dir, glue_dir, folder), tmp_path)
    wait_for(lambda: any(folder.glob("checkpoints/checkpoint-*/trainer_state.json")), process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert not (folder / "result.json").exists()
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "--resume" in errors.splitlines()[-1], errors
    outcome = cli("run", "--output-dir", folder, "--resume")
    assert outcome.code == 0, outcome.stderr
    assert "Going on from step" in outcome.stderr
    assert files_of(folder) == RUN_FILES
    ours, theirs = read_json(folder / "result.json"), read_json(uninterrupted / "result.json")
    assert ours["train"]["steps"] == theirs["train"]["steps"] == STEPS
    steps = [line["step"] for line in read_lines(folder / "history.jsonl") if line["event"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    assert ours["score"] == theirs["score"] and ours["best"] == theirs["best"]
    assert predictions_of(folder) == predictions_of(uninterrupted)
