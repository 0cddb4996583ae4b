"""Records what tests compare with: IsoBN by independent float64 arithmetic, and the losses of short runs.

Run it from a clean tree, with one thread, and say in the commit why the numbers changed:

    OMP_NUM_THREADS=1 python scripts/record_references.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ISOBN_FILE = ROOT / "tests" / "data" / "isobn_reference.json"
RECORDED = ROOT / "tests" / "recorded"

ISOBN_SETTINGS: list[dict[str, Any]] = [
    {"hidden_size": 6, "batch_size": 5, "momentum": 0.05, "eps": 1e-3, "beta": 0.5},
    {"hidden_size": 6, "batch_size": 4, "momentum": 0.2, "eps": 1e-5, "beta": 1.0},
    {"hidden_size": 9, "batch_size": 3, "momentum": 0.05, "eps": 1e-3, "beta": 0.25},
]
RUNS: dict[str, dict[str, Any]] = {
    "rte_isobn": {"task": "rte", "norm": {"name": "isobn"}},
    "stsb_batchnorm": {"task": "stsb", "norm": {"name": "batchnorm"}},
}
SHARED: dict[str, Any] = {
    "model": {"name": "tiny"},
    "data": {"source": "tests/data/glue"},
    "precision": "fp32",
    "seed": 3,
    "train": {"max_steps": 12, "batch_size": 4, "learning_rate": 5e-4, "logging_steps": 1},
}


def compute_isobn_case(options: dict[str, Any], seed: int, steps: int = 20) -> dict[str, Any]:
    """Inputs and outputs of IsoBN in float64, written from the paper's formulas without torch."""
    width, momentum, eps, beta = (options[key] for key in ("hidden_size", "momentum", "eps", "beta"))
    draw = np.random.default_rng(seed)
    mix = draw.normal(size=(width, width)) * np.geomspace(0.02, 1.0, width)
    inputs = [np.tanh(draw.normal(size=(options["batch_size"], width)) @ mix).round(6) for _ in range(steps)]
    eval_input = np.tanh(draw.normal(size=(4, width)) @ mix).round(6)
    cov, std = np.zeros((width, width)), np.zeros(width)

    def compute_scale() -> np.ndarray:
        rho = np.clip(cov / np.outer(std, std), -1, 1)
        raw = ((rho**2).mean(axis=1) * std + eps) ** -beta
        return raw * np.sqrt(np.trace(cov) / (raw**2 @ np.diag(cov) + eps))

    outputs = []
    for step, x in enumerate(inputs, start=1):
        cov = (1 - momentum) * cov + momentum * np.cov(x.T, bias=True)
        std = (1 - momentum) * std + momentum * x.std(axis=0)
        if step in (1, 2, 5, steps):
            outputs.append({"step": step, "output": (x * compute_scale()).tolist()})
    return {
        **options,
        "train_inputs": [x.tolist() for x in inputs],
        "train_outputs": outputs,
        "eval_input": eval_input.tolist(),
        "eval_output": (eval_input * compute_scale()).tolist(),
        "running_std": std.tolist(),
        "running_cov": cov.tolist(),
    }


def record_losses(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Losses of one run, step by step."""
    from isobn_finetune.config import create_run_config
    from isobn_finetune.training import fine_tune

    config = {**SHARED, **changes}
    with tempfile.TemporaryDirectory() as folder:
        data = {"source": str(ROOT / SHARED["data"]["source"])}
        fine_tune(create_run_config({**config, "data": data, "output_dir": f"{folder}/run"}))
        lines = [json.loads(line) for line in (Path(folder) / "run" / "history.jsonl").read_text().splitlines()]
    return {
        "config": config,
        "versions": {package: version(package) for package in ("torch", "transformers", "numpy")},
        "loss": [line["loss"] for line in lines if line["event"] == "train"],
        "tolerance": 2e-3,
        "tolerance_reason": "float32 sums in another order, on another CPU, drift apart over 12 steps",
        "mean_tolerance": 5e-4,
    }


def main() -> None:
    """Writes all files."""
    changed = subprocess.run(
        ["git", "status", "--porcelain", "isobn_finetune"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed and "--dirty" not in sys.argv:
        sys.exit(f"The package has changes that are not committed; commit them first.\n{changed}")
    cases = [compute_isobn_case(options, seed) for seed, options in enumerate(ISOBN_SETTINGS)]
    ISOBN_FILE.write_text(json.dumps(cases, separators=(",", ":")) + "\n", encoding="utf-8")
    RECORDED.mkdir(exist_ok=True)
    for name, changes in RUNS.items():
        text = json.dumps(record_losses(name, changes), indent=2) + "\n"
        (RECORDED / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{RECORDED / name}.json")


if __name__ == "__main__":
    main()
