from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobn_finetune.encoding import encode
from isobn_finetune.shared_tokens import SharedTokens, pack, unpack
from isobn_finetune.sweep import plan_sweep, run_sweep
from isobn_finetune.sweep_config import create_sweep
from isobn_finetune.tasks import get_task

Cli = Callable[..., Any]


@pytest.fixture
def small(tmp_path: Path, bert_dir: Path, glue_dir: Path) -> Path:
    """A sweep file of tiny runs: three steps each on eight rows."""
    values = {
        "base": {
            "model": str(bert_dir),
            "data": {"source": str(glue_dir), "max_length": 32},
            "train": {"max_steps": 3, "batch_size": 4, "learning_rate": 1e-3},
        },
        "grid": {"task": ["rte"], "norm": ["isobn"], "seed": [7, 8]},
    }
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def predictions(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("predictions/*.jsonl")}


def test_a_sweeps_run_equals_the_lone_run_and_a_second_call_does_nothing(
    small: Path, tmp_path: Path, cli: Cli, bert_dir: Path
) -> None:
    dry = cli("sweep", "--config", small, "--output-dir", tmp_path / "s", "--dry-run")
    assert dry.code == 0 and "2 runs: 0 finished, 0 failed, 2 to do" in dry.stdout
    assert not (tmp_path / "s").exists()
    outcome = cli("sweep", "--config", small, "--output-dir", tmp_path / "s")
    assert outcome.code == 0 and "2 runs: 2 finished, 0 failed." in outcome.stdout
    assert "[2/2] rte isobn, seed 8" in outcome.stderr
    member = tmp_path / "s" / bert_dir.name / "rte/isobn/seed_8"
    lone = tmp_path / "lone"
    assert cli("run", "--config", member / "config.yaml", "--output-dir", lone).code == 0
    assert predictions(member) == predictions(lone)
    assert predictions(member) != predictions(member.parent / "seed_7")
    for name in ("score", "last_score", "metrics", "best", "isotropy"):
        assert (
            json.loads((member / "result.json").read_text())[name]
            == json.loads((lone / "result.json").read_text())[name]
        )

    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("result.json")}
    assert cli("sweep", "--config", small, "--output-dir", tmp_path / "s").code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("result.json")} == times
    again = cli("sweep", "--config", small, "--output-dir", tmp_path / "s", "--set", "seed=[7,8,9]", "--dry-run")
    assert "3 runs: 2 finished, 0 failed, 1 to do, about" in again.stdout


def test_worker_processes_give_the_same_results(small: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("sweep", "--config", small, "--output-dir", tmp_path / "one").code == 0
    outcome = cli("sweep", "--config", small, "--output-dir", tmp_path / "two", "--jobs", 2)
    assert outcome.code == 0, outcome.stderr
    assert len(predictions(tmp_path / "one")) == 2
    assert predictions(tmp_path / "two") == predictions(tmp_path / "one")


def test_failed_runs_end_in_exit_1_and_missing_inputs_in_exit_2(small: Path, tmp_path: Path, cli: Cli) -> None:
    values = yaml.safe_load(small.read_text())
    rows = (Path(values["base"]["data"]["source"]) / "RTE/train.tsv").read_text()
    for folder, text in (("RTE", rows), ("WNLI", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t7\n")):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for name in ("train.tsv", "dev.tsv"):
            (tmp_path / "data" / folder / name).write_text(text)
    arguments = ("sweep", "--config", small, "--output-dir", tmp_path / "s", "--data", tmp_path / "data")
    outcome = cli(*arguments, "--set", "task=[wnli,rte]", "--set", "seed=1")
    assert outcome.code == 1
    assert "2 runs: 1 finished, 1 failed." in outcome.stdout and "/wnli/isobn/seed_1: failed: " in outcome.stdout
    assert "row" in json.loads(next((tmp_path / "s").rglob("wnli/*/*/result.json")).read_text())["reason"]

    for option, value in (("--model", tmp_path / "none"), ("--data", tmp_path / "none"), ("--launcher", "ssh")):
        outcome = cli("sweep", "--config", small, "--output-dir", tmp_path / "t", option, value)
        assert outcome.code == 2 and outcome.stdout == "" and str(value) in outcome.error
        assert not (tmp_path / "t").exists()


def test_sharing_changes_no_token_and_tokenizes_once(tmp_path: Path, glue_dir: Path, bert_dir: Path) -> None:
    from isobn_finetune.data import load_splits
    from isobn_finetune.loading import load_tokenizer

    tokenizer = load_tokenizer(bert_dir)
    for task in ("rte", "stsb", "cola"):
        spec = get_task(task)
        rows = load_splits(spec, str(glue_dir))["train"]
        expected = encode(rows, spec, tokenizer, 16)
        assert unpack(pack(expected)) == expected
        assert SharedTokens(tmp_path)(rows, spec, tokenizer, 16) == expected  # written
        files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
        assert SharedTokens(tmp_path)(rows, spec, tokenizer, 16) == expected  # read
        assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")} == files
        assert SharedTokens(tmp_path)(rows, spec, tokenizer, 8) == encode(rows, spec, tokenizer, 8) != expected
        assert SharedTokens(tmp_path)(rows.select(range(4)), spec, tokenizer, 16) == expected[:4]
    assert unpack(pack([])) == []


def test_validate_knows_sweeps(small: Path, cli: Cli) -> None:
    outcome = cli("validate", small)
    assert outcome.code == 0 and "A sweep of 2 runs" in outcome.stdout
    small.write_text(small.read_text().replace("max_steps", "max_step"))
    outcome = cli("validate", small)
    assert outcome.code == 2 and "train.max_steps" in outcome.error


def test_init_from_starts_from_the_trained_encoder(small: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(small.read_text())
    values["grid"] = {"task": ["rte", "mnli"], "seed": [1]}
    values["init_from"] = {"rte": "mnli"}
    values["base"]["train"] |= {"learning_rate": 0.0}
    sweep = plan_sweep(create_sweep(values), tmp_path / "s")
    run_sweep(sweep)
    assert sweep.count("finished") == 2
    mnli, rte = (Path(str(run.config.output_dir)) for run in sweep.runs)
    assert json.loads((rte / "result.json").read_text())["model"] == str(mnli.resolve())


def is_at_work(folder: Path, since: float) -> bool:
    return any(path.stat().st_mtime > since for path in folder.rglob("history.jsonl"))


@pytest.mark.slow
def test_real_runs_killed_twenty_times_end_as_if_never_killed(small: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(small.read_text())
    values["grid"] = {"task": ["rte", "cola"], "norm": ["none", "isobn"], "seed": [1, 2, 3]}
    values["base"]["train"] |= {"max_steps": 40, "eval_steps": 4}
    small.write_text(yaml.safe_dump(values))
    rng = random.Random(0)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "isobn_finetune", "sweep", "--config", str(small), "--output-dir"]
    subprocess.run([*command, str(tmp_path / "whole")], env=environment, check=True, capture_output=True)
    kills = 0
    for kill in range(40):
        begun = time.time()
        process = subprocess.Popen([*command, str(tmp_path / "s")], env=environment, stderr=subprocess.PIPE)
        if kill < 20:
            # Not while it imports: from when the first run has its files open, for about two runs' length.
            while process.poll() is None and not is_at_work(tmp_path / "s", begun):
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 4))
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -9
        _, errors = process.communicate()
        assert process.returncode in (0, -9), errors.decode()
        if kill >= 20:
            break
    assert kills > 5 and len(predictions(tmp_path / "s")) == 12
    assert predictions(tmp_path / "s") == predictions(tmp_path / "whole")
