"""``run --push-to-hub`` against a stand-in of the hub: model and card get there, and a failure loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_hub import TESTS, Hub

SCRIPT = """
import contextlib, io, json, os, sys, time, urllib.request
from pathlib import Path

time.sleep = lambda seconds: None  # the waits between tries
from isobn_finetune.cli import main
from huggingface_hub import HfApi, ModelCard

out = {}

def faults(**kind):
    body = json.dumps({"fail_first": 0, "fail_rate": 0, "fail_mode": "503", "fail_match": None, **kind}).encode()
    urllib.request.urlopen(f"{os.environ['HF_ENDPOINT']}/__hub__/faults", data=body).read()

def call(name, *arguments):
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main(list(arguments))
        except SystemExit as leaving:
            code = leaving.code
    out[name] = {"code": code, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()}

RUN = ["run", "--task", "rte", "--model", os.environ["MODEL"], "--data", os.environ["DATA"], "--output-dir", "rte",
       "--max-steps", "1", "--batch-size", "4", "--precision", "fp32"]

call("name", *RUN, "--push-to-hub", "no slash")
call("token", *RUN, "--push-to-hub", "me/rte")
os.environ["HF_TOKEN"] = "hf_invalid_token"
call("invalid", *RUN, "--push-to-hub", "me/rte")
out["started"] = Path("rte").exists()

os.environ["HF_TOKEN"] = "hf_invented"
call("first", *RUN, "--push-to-hub", "me/rte")
out["files"] = sorted(HfApi().list_repo_files("me/rte"))
scores = ModelCard.load("me/rte").data.eval_results
out["scores"] = [(score.metric_type, score.dataset_split, score.metric_value) for score in scores]
out["result"] = json.loads(Path("rte/result.json").read_text())["metrics"]

faults(fail_first=2, fail_match="commit")
call("at times", *RUN, "--resume", "--push-to-hub", "me/again")
out["again"] = sorted(HfApi().list_repo_files("me/again"))

faults(fail_rate=1, fail_match="me/never|repos/create")
call("never", *RUN, "--resume", "--push-to-hub", "me/never")
faults(fail_rate=1)
call("down", *RUN, "--resume", "--push-to-hub", "me/down")
out["left"] = sorted(file.name for file in Path("rte/model").iterdir())
out["status"] = json.loads(Path("rte/result.json").read_text())["status"]
print(json.dumps(out))
"""
SAVED = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    (root / "models").mkdir()
    server = Hub(root)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, hub: Hub, bert_dir: Path, glue_dir: Path) -> dict[str, Any]:
    """All commands in one process of their own: the client reads the hub's address when it is imported."""
    folder = tmp_path_factory.mktemp("client")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        env={
            **inherited,
            "PYTHONPATH": str(TESTS.parent),
            "HF_HOME": str(folder / "home"),
            "HF_ENDPOINT": hub.url,
            "NO_PROXY": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
            "MODEL": str(bert_dir),
            "DATA": str(glue_dir),
        },
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def last_line(outcome: dict[str, Any]) -> str:
    return outcome["stderr"].strip().splitlines()[-1]


def test_what_is_sure_to_fail_is_refused_before_training(out: dict[str, Any]) -> None:
    assert [out[name]["code"] for name in ("name", "token", "invalid")] == [2, 2, 2]
    assert "ORG/NAME" in last_line(out["name"])
    assert "HF_TOKEN" in last_line(out["token"])
    assert "refuses the token" in last_line(out["invalid"])
    assert "hf_invalid" not in out["invalid"]["stderr"]
    assert not out["started"]


def test_model_and_card_are_uploaded_and_the_hub_reads_the_scores(out: dict[str, Any]) -> None:
    assert out["first"]["code"] == 0, out["first"]["stderr"]
    assert "uploaded: " in out["first"]["stdout"]
    assert set(out["files"]) >= SAVED
    score = out["result"]["validation"]["accuracy"]
    assert out["scores"] == [["accuracy", "validation", pytest.approx(score, abs=1e-6)]]


def test_a_hub_that_fails_at_times_gets_the_model_all_the_same(out: dict[str, Any]) -> None:
    assert out["at times"]["code"] == 0, out["at times"]["stderr"]
    assert "nothing to do" in out["at times"]["stderr"]  # no second training
    assert set(out["again"]) >= SAVED


@pytest.mark.parametrize("name", ["never", "down"])
def test_a_failed_upload_loses_nothing(out: dict[str, Any], name: str) -> None:
    assert out[name]["code"] == 1
    assert last_line(out[name]).startswith(f"isobn-finetune: --push-to-hub me/{name}: not uploaded (status 503)")
    assert "rte/model" in last_line(out[name]) and "--resume" in last_line(out[name])
    assert "accuracy" in out[name]["stdout"]  # the summary comes first
    assert set(out["left"]) == SAVED
    assert out["status"] == "finished"


def test_offline_mode_is_no_surprise(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    outcome = cli("run", "--task", "rte", "--model", "tiny", "--output-dir", tmp_path / "r", "--push-to-hub", "me/rte")

    assert outcome.code == 2
    assert "HF_HUB_OFFLINE" in outcome.error
    assert not (tmp_path / "r").exists()
