"""Run folders written directly, as a run leaves them, so that reports are tested without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from isobn_finetune.config import create_run_config
from isobn_finetune.significance import score_runs
from isobn_finetune.tasks import get_task

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def write_run(
    folder: Path,
    task: str,
    norm: Any,
    seed: int,
    predictions: Sequence[float],
    labels: Sequence[float],
    model: str = "bert-base-cased",
    train: dict[str, Any] | None = None,
    curve: Sequence[float] = (),
    **changes: Any,
) -> Path:
    """Writes one run folder.

    Args:
        folder: Where.
        task: Name.
        norm: As in a config.
        seed: Seed.
        predictions: Class numbers, or scores.
        labels: Likewise.
        model: Name or folder.
        train: Section of the config.
        curve: Scores of the evaluations; empty: the final score alone, at step 100.
        **changes: Laid over the values of ``result.json``.
    """
    spec = get_task(task)
    values = {"task": task, "norm": norm, "seed": seed, "model": model, "train": train or {}}
    config = create_run_config({**values, "output_dir": str(folder)})
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.dump(config.model_dump(), Dumper=DUMPER, sort_keys=False))
    names = spec.labels
    lines = []
    for index, (prediction, label) in enumerate(zip(predictions, labels, strict=True)):
        line: dict[str, Any] = {"idx": index, "prediction": prediction, "label": label}
        if names:
            line |= {"prediction": names[int(prediction)], "label": names[int(label)]}
            line["probabilities"] = {name: 0.9 if i == int(prediction) else 0.1 for i, name in enumerate(names)}
        lines.append(json.dumps(line))
    split = spec.selection_split
    (folder / "predictions").mkdir()
    (folder / "predictions" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    metric = spec.primary_metric
    value = float(score_runs(metric, np.array([predictions]), np.array(labels))[0])
    score = None if np.isnan(value) else value
    curve = curve or [score or 0.0]
    history = [{"event": "train", "step": 10, "epoch": 0.1, "loss": 0.5}]
    history += [
        {
            "event": "evaluation",
            "step": 100 * (index + 1),
            "epoch": index + 1.0,
            "split": split,
            "metrics": {metric: point},
            "isotropy": {"n": 9, "normed_output": {"ev3": 0.5}},
        }
        for index, point in enumerate(curve)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    result = {
        "schema": 1,
        "status": "finished",
        "task": task,
        "model": model,
        "norm": config.norm.model_dump(),
        "seed": seed,
        "primary_metric": metric,
        "score": score,
        "last_score": score,
        "metrics": {split: {metric: score}},
        "best": {"epoch": 1.0, "step": 100},
        "collapsed": False,
        "isotropy": {"n": 9, "split": "train", "pooler_output": {"ev3": 0.6}, "normed_output": {"ev3": 0.5}},
        "train": {"steps": 100, "seconds": 10.0},
        "data": {"source": "demo", "rows": {}, "fingerprint": "f" * 8},
        "reason": None,
        **changes,
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_grid(
    root: Path,
    tasks: Sequence[str] = ("rte", "cola", "stsb"),
    norms: Sequence[Any] = ("none", "isobn"),
    seeds: int = 5,
    rows: int = 200,
    gain: float = 0.1,
) -> None:
    """Random runs in which each norm is better than the one before it by ``gain`` in the share of right answers."""
    rng = np.random.default_rng(0)
    for task in tasks:
        regression = get_task(task).is_regression
        labels = rng.uniform(0, 5, rows) if regression else rng.integers(0, 2, rows)
        for number, norm in enumerate(norms):
            for seed in range(1, seeds + 1):
                noise = rng.normal(0, 1.2 - gain * number, rows)
                right = rng.random(rows) < 0.7 + gain * number
                predictions = labels + noise if regression else np.where(right, labels, 1 - labels)
                name = norm if isinstance(norm, str) else f"{norm['name']}-other"
                folder = root / task / name / f"seed_{seed}"
                curve = [0.3 + 0.05 * seed / seeds + 0.1 * number, 0.5 + 0.1 * number, 0.55 + 0.1 * number]
                write_run(folder, task, norm, seed, predictions.tolist(), labels.tolist(), curve=curve)
