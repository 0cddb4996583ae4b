"""The leaderboard's files: headers, labels, ids and row counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isobn_finetune.errors import DataError
from isobn_finetune.submit import FILES, format_file, read_predictions

BY_NAME = {file.name: file for file in FILES}


def test_row_counts_are_the_published_ones() -> None:
    assert {name: file.rows for name, file in BY_NAME.items()} == {
        "CoLA.tsv": 1063,
        "SST-2.tsv": 1821,
        "MRPC.tsv": 1725,
        "STS-B.tsv": 1379,
        "MNLI-m.tsv": 9796,
        "MNLI-mm.tsv": 9847,
        "QNLI.tsv": 5463,
        "RTE.tsv": 3000,
        "QQP.tsv": 390965,
        "WNLI.tsv": 146,
        "AX.tsv": 1104,
    }
    assert {name for name, file in BY_NAME.items() if not file.required} == {"QQP.tsv", "WNLI.tsv", "AX.tsv"}


@pytest.mark.parametrize(
    ("name", "predictions", "lines"),
    [
        ("RTE.tsv", ["not_entailment", "entailment"], ["0\tnot_entailment", "1\tentailment"]),
        ("QNLI.tsv", ["entailment"], ["0\tentailment"]),
        ("MNLI-mm.tsv", ["contradiction", "neutral"], ["0\tcontradiction", "1\tneutral"]),
        ("AX.tsv", ["neutral"], ["0\tneutral"]),
        ("CoLA.tsv", ["acceptable", "unacceptable"], ["0\t1", "1\t0"]),
        ("SST-2.tsv", ["negative", "positive"], ["0\t0", "1\t1"]),
        ("MRPC.tsv", ["equivalent", "not_equivalent"], ["0\t1", "1\t0"]),
        ("QQP.tsv", ["duplicate", "not_duplicate"], ["0\t1", "1\t0"]),
        ("WNLI.tsv", ["entailment", "not_entailment"], ["0\t1", "1\t0"]),
        ("STS-B.tsv", [-0.25, 5.2, 3.14159, 2], ["0\t0.000", "1\t5.000", "2\t3.142", "3\t2.000"]),
    ],
)
def test_labels_are_written_as_the_leaderboard_reads_them(name: str, predictions: list[Any], lines: list[str]) -> None:
    assert format_file(BY_NAME[name], predictions) == "\n".join(["index\tprediction", *lines]) + "\n"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def good_rows() -> list[dict[str, Any]]:
    return [{"idx": index, "prediction": "entailment"} for index in range(146)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows[:-1], "145 predictions, GLUE has 146"),
        (lambda rows: [*rows, {"idx": 146, "prediction": "entailment"}], "147 predictions"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "line 1: idx 1 where 0"),
        (lambda rows: [{**rows[0], "prediction": "neutral"}, *rows[1:]], "line 1: prediction 'neutral'"),
        (lambda rows: [{"idx": 0}, *rows[1:]], "line 1: no prediction"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    path = write(tmp_path / "test.jsonl", change(good_rows()))

    with pytest.raises(DataError) as caught:
        read_predictions(path, BY_NAME["WNLI.tsv"])

    assert says in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), None, "3.0", True])
def test_scores_are_finite_numbers(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "test.jsonl", [{"idx": 0, "prediction": value}])

    with pytest.raises(DataError, match="line 1: prediction"):
        read_predictions(path, BY_NAME["STS-B.tsv"])


def test_good_predictions_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", good_rows())

    assert read_predictions(path, BY_NAME["WNLI.tsv"]) == ["entailment"] * 146
