from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from isobn_finetune.data import create_split
from isobn_finetune.results import RunResult, compute_probabilities, write_predictions, write_result_if_possible
from isobn_finetune.run_folder import RunFolder
from isobn_finetune.summary import format_summary
from isobn_finetune.tasks import TASKS


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_result(**changes: object) -> RunResult:
    values = {
        "output_dir": "runs/x",
        "status": "finished",
        "task": "mrpc",
        "model": "tiny",
        "norm": {"name": "isobn", "beta": 0.5},
        "seed": 1,
        "primary_metric": "f1",
        "score": 0.8,
        "last_score": 0.75,
        "metrics": {"validation": {"f1": 0.8, "accuracy": 0.7}},
        "best": {"epoch": 2.0, "step": 20},
        "isotropy": {
            "n": 80,
            "split": "train",
            "pooler_output": {"ev1": 0.5, "ev2": 0.6, "ev3": 0.7, "isoscore": 0.1},
            "normed_output": {"ev1": 0.4, "ev2": 0.5, "ev3": 0.6, "isoscore": None},
        },
        "train": {"steps": 30, "epochs": 3.0, "seconds": 75.0, "samples_per_second": 6.4, "precision": "fp32"},
    }
    return RunResult(**{**values, **changes})


def test_a_result_reads_back_as_it_was() -> None:
    result = make_result()
    values = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert values["schema"] == 1 and "output_dir" not in values
    assert RunResult.from_json(Path("runs/x"), values) == result


def test_numbers_that_are_not_finite_become_null() -> None:
    values = make_result(score=math.nan, metrics={"validation": {"f1": math.inf}}).to_json()
    assert values["score"] is None and values["metrics"]["validation"]["f1"] is None


def test_class_predictions_carry_names_and_probabilities(tmp_path: Path) -> None:
    spec = TASKS["rte"]
    rows = create_split(spec, {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [1, -1]})
    write_predictions(tmp_path / "p.jsonl", spec, np.array([[2.0, 0.0], [0.0, 1.0]], dtype=np.float32), rows)
    first, second = read(tmp_path / "p.jsonl")
    assert (first["idx"], first["prediction"], first["label"]) == (0, "entailment", "not_entailment")
    assert (second["prediction"], second["label"]) == ("not_entailment", None)
    assert first["probabilities"]["entailment"] == pytest.approx(1 / (1 + math.exp(-2)))
    assert list(first["probabilities"]) == ["entailment", "not_entailment"]


def test_scores_are_numbers_without_probabilities(tmp_path: Path) -> None:
    spec = TASKS["stsb"]
    rows = create_split(spec, {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [0.7, -1.0]})
    write_predictions(tmp_path / "p.jsonl", spec, np.array([[2.5], [-0.5]], dtype=np.float32), rows)
    assert read(tmp_path / "p.jsonl")[0] == {"idx": 0, "prediction": 2.5, "label": 0.7}
    hidden = create_split(spec, {"sentence1": ["a"], "sentence2": ["c"], "label": [-1.0]})
    write_predictions(tmp_path / "h.jsonl", spec, np.array([[2.5]], dtype=np.float32), hidden)
    assert read(tmp_path / "h.jsonl")[0]["label"] is None


def test_probabilities_survive_large_logits() -> None:
    probabilities = compute_probabilities(np.array([[1e4, 0.0], [-1e4, -1e4]], dtype=np.float32))
    np.testing.assert_allclose(probabilities, [[1.0, 0.0], [0.5, 0.5]])


def test_a_result_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    write_result_if_possible(RunFolder(tmp_path / "file" / "run"), make_result())
    assert "could not be written" in caplog.text


def test_the_summary_says_what_matters_in_few_lines() -> None:
    text = format_summary(make_result())
    for part in ("MRPC, tiny, norm isobn, seed 1", "0.8000", "0.7500", "0.7000", "EV_3", "1 min 15 s", "runs/x"):
        assert part in text
    assert len(text.splitlines()) < 20 and "collapsed" not in text
    assert "collapsed" in format_summary(make_result(collapsed=True))
    assert "no spread" in format_summary(make_result(score=None, reason="no spread"))
