from __future__ import annotations

import importlib.util
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobn_finetune.errors import ConfigError
from isobn_finetune.slurm import _parameters, load_jobs
from isobn_finetune.sweep_config import SlurmConfig

Cli = Callable[..., Any]


def why_no_slurm() -> str | None:
    if importlib.util.find_spec("submitit") is None:
        return "submitit is not installed"
    try:
        answer = subprocess.run(["sinfo", "--noheader", "--format=%t"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "no Slurm is running here"
    return None if re.search("idle|mix", answer.stdout) else "Slurm has no free node here"


needs_slurm = pytest.mark.skipif(bool(why_no_slurm()), reason=str(why_no_slurm()))


@pytest.fixture
def small(tmp_path: Path, bert_dir: Path, glue_dir: Path) -> Path:
    values = {
        "base": {
            "model": str(bert_dir),
            "data": {"source": str(glue_dir), "max_length": 16},
            "train": {"max_steps": 2, "batch_size": 4},
        },
        "grid": {"task": ["rte", "mnli"], "norm": ["isobn"], "seed": [1, 2]},
        "init_from": {"rte": "mnli"},
        "slurm": {"gpus": 0, "cpus": 1, "memory": "2G", "time": 15, "max_parallel": 2},
    }
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def wait_for_queue(jobs: dict[str, str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    ids = ",".join(job.partition("_")[0] for job in jobs.values())
    while subprocess.run(["squeue", "--noheader", f"--jobs={ids}"], capture_output=True, text=True).stdout.strip():
        assert time.monotonic() < deadline, "jobs still queued"
        time.sleep(1)


@needs_slurm
def test_a_job_array_does_the_runs_and_a_second_call_picks_up_what_is_missing(
    small: Path, tmp_path: Path, cli: Cli
) -> None:
    arguments = ("sweep", "--config", small, "--output-dir", tmp_path / "s", "--launcher", "slurm")
    outcome = cli(*arguments)
    assert outcome.code == 0 and outcome.stdout.count("Submitted 2 runs as job array") == 2, outcome.stderr
    jobs = load_jobs(tmp_path / "s")
    assert len(jobs) == 4
    again = cli(*arguments)
    assert "4 runs are with Slurm already" in again.stdout and load_jobs(tmp_path / "s") == jobs
    for job in jobs.values():
        subprocess.run(["scancel", job.partition("_")[0]], check=True)
    wait_for_queue(jobs)

    assert "Submitted" in cli(*arguments).stdout
    wait_for_queue(load_jobs(tmp_path / "s"))
    status = cli(*arguments, "--status")
    assert status.code == 0 and "4 runs: 4 finished, 0 failed, 0 to do" in status.stdout
    assert re.search(r"mnli/isobn/seed_1 +0\.\d+  job \d+_0 \((COMPLETED|no longer with Slurm)\)", status.stdout)
    assert "Nothing is left to do" in cli(*arguments).stdout


def test_the_job_asks_for_what_the_config_says() -> None:
    parameters = _parameters(SlurmConfig(partition="gpu", time="4:00:00", gpus=2, cpus=8, memory="32G"), ["17", "18"])
    assert parameters["partition"] == "gpu" and parameters["gpus_per_node"] == 2 and parameters["mem"] == "32G"
    assert parameters["time"] == "4:00:00" and parameters["dependency"] == "afterany:17:18"
    parameters = _parameters(SlurmConfig(gpus=0), [])
    assert "partition" not in parameters and "gpus_per_node" not in parameters and parameters["dependency"] is None


def test_without_slurm_nothing_is_started(
    small: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    outcome = cli("sweep", "--config", small, "--output-dir", tmp_path / "s", "--launcher", "slurm")
    assert outcome.code == 2 and outcome.stdout == "" and "--launcher slurm" in outcome.error
    assert not (tmp_path / "s").exists()


def test_a_damaged_list_of_jobs_is_named(tmp_path: Path) -> None:
    (tmp_path / "slurm_jobs.json").write_text('{"a": ')
    with pytest.raises(ConfigError, match="slurm_jobs.json"):
        load_jobs(tmp_path)
