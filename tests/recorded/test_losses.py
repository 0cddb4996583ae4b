"""Losses of short runs against those once recorded by ``scripts/record_references.py``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isobn_finetune.config import create_run_config
from isobn_finetune.training import fine_tune

HERE = Path(__file__).parent
RECORDS = sorted(HERE.glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_losses_are_those_recorded(path: Path, tmp_path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    config = record["config"]
    data = {"source": str(HERE.parents[1] / config["data"]["source"])}
    fine_tune(create_run_config({**config, "data": data, "output_dir": str(tmp_path / "run")}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    losses = np.array([line["loss"] for line in lines if line["event"] == "train"])
    recorded = np.array(record["loss"])
    assert len(losses) == len(recorded) > 10
    difference = np.abs(losses - recorded)
    assert difference.max() <= record["tolerance"], record["tolerance_reason"]
    assert difference.mean() <= record["mean_tolerance"], record["tolerance_reason"]


def test_there_are_records() -> None:
    assert len(RECORDS) >= 2
