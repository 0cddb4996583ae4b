from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_training.py"


def test_the_benchmark_reports_every_recipe_on_the_built_in_model(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--model", "tiny", "--data", "demo", "--tasks", "stsb", "--steps", "2"]
    command += ["--rounds", "1", "--batch-size", "4", "--max-length", "64", "--precision", "bf16", "--profile"]
    command += ["--recipes", "usual", "tuned", "ours", "padded", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text(encoding="utf-8"))
    result = report["tasks"]["stsb"]
    assert list(result["recipes"]) == ["usual", "tuned", "ours", "padded"]
    assert result["matmul_peak_flops"] > 0
    for recipe in result["recipes"].values():
        assert recipe["samples_per_second"] > 0
        assert abs(sum(recipe["shares"].values()) - 1) < 1e-6
    assert result["recipes"]["usual"]["times_usual"] == 1.0
    assert "| ours |" in done.stdout
    assert report["machine"]["threads"] > 0
