"""``predict``: every row once, in order, whatever the file and the batch size."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from classifiers import create_classifier, make_run, read_json_lines, save_classifier
from conftest import Outcome

from isobn_finetune import predict as predict_module

Cli = Callable[..., Outcome]

TEXTS = ["the happy goat eats", "", "  ", "fish " * 5000, "a dog runs by the road", 'the "cat"', "ünknown wörds", "a"]


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("sst2") / "m", create_classifier(task="sst2"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("rte") / "m", create_classifier(task="rte"))


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_file_without_labels_gives_one_line_a_row(cli: Cli, tmp_path: Path, sentiment: Path) -> None:  # B04
    (tmp_path / "new.csv").write_text("sentence\nthe happy goat\na dog\n\nthe cat\n")

    outcome = cli("predict", "--model", sentiment, "--input", tmp_path / "new.csv", "--output", tmp_path / "p.tsv")

    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout == "" and "accuracy" not in outcome.stderr
    header, *lines = (tmp_path / "p.tsv").read_text().splitlines()
    assert header.split("\t")[:4] == ["idx", "sentence", "prediction", "label"]
    rows = [line.split("\t") for line in lines]
    assert [row[:2] for row in rows] == [["0", "the happy goat"], ["1", "a dog"], ["2", ""], ["3", "the cat"]]
    assert {row[2] for row in rows} <= {"negative", "positive"} and {row[3] for row in rows} == {""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "p.tsv"]


def test_a_label_column_full_of_blanks_changes_nothing(cli: Cli, tmp_path: Path, sentiment: Path) -> None:  # B04
    (tmp_path / "without.csv").write_text("sentence\na dog\nthe cat\n")
    (tmp_path / "blank.csv").write_text("sentence,label\na dog,\nthe cat, \n")

    outcomes = [
        cli("predict", "--model", sentiment, "--input", tmp_path / name) for name in ("without.csv", "blank.csv")
    ]

    assert outcomes[0].code == outcomes[1].code == 0
    assert outcomes[0].stdout == outcomes[1].stdout
    assert "label" not in outcomes[1].stderr


def test_quote_marks_of_a_tsv_are_echoed(cli: Cli, tmp_path: Path, sentiment: Path) -> None:  # B02
    (tmp_path / "q.tsv").write_text('sentence\tlabel\n"open the box\t0\nclose the box\t1\nlast "word"\t0\n')

    outcome = cli("predict", "--model", sentiment, "--input", tmp_path / "q.tsv")

    rows = read_json_lines(outcome.stdout)
    assert [row["sentence"] for row in rows] == ['"open the box', "close the box", 'last "word"']
    assert [row["label"] for row in rows] == ["negative", "positive", "negative"]


def test_a_missing_column_is_named(cli: Cli, tmp_path: Path, pairs: Path) -> None:  # B04
    (tmp_path / "new.csv").write_text("sentence1\na dog\n")

    outcome = cli("predict", "--model", pairs, "--input", tmp_path / "new.csv", "--output", tmp_path / "p.jsonl")

    assert outcome.code == 2
    assert "new.csv" in outcome.error and "column 'sentence2' is missing" in outcome.error
    assert not (tmp_path / "p.jsonl").exists()


def test_order_and_values_do_not_depend_on_batch_size_window_or_format(
    cli: Cli, tmp_path: Path, sentiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = TEXTS * 4
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"sentence": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"sentence": texts}), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["sentence"], *([text] for text in texts)])
    (tmp_path / "a.txt").write_text("".join(text + "\n" for text in texts))

    def predict(suffix: str, batch_size: int) -> list[dict[str, Any]]:
        outcome = cli("predict", "--model", sentiment, "--input", tmp_path / f"a{suffix}", "--batch-size", batch_size)
        assert outcome.code == 0, outcome.stderr
        return read_json_lines(outcome.stdout)

    expected = predict(".jsonl", 1)
    assert [row.get("sentence") for row in expected] == texts
    assert len({row["probabilities"]["positive"] for row in expected}) > 3
    others = [predict(".jsonl", 7), predict(".parquet", 64), predict(".csv", 3), predict(".txt", 5)]
    monkeypatch.setattr(predict_module, "_WINDOW_ROWS", 5)
    others.append(predict(".jsonl", 4))
    for rows in others:
        assert [row["idx"] for row in rows] == list(range(len(texts)))
        assert [row["prediction"] for row in rows] == [row["prediction"] for row in expected]
        for row, other in zip(rows, expected, strict=True):
            assert row["probabilities"]["positive"] == pytest.approx(other["probabilities"]["positive"], abs=1e-5)


def test_lines_from_standard_input(cli: Cli, pairs: Path, sentiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, "\ufeffa dog\r\n\n the cat".encode())
    single = cli("predict", "--model", sentiment, "--input", "-")
    feed(monkeypatch, b"a dog\ta cat\nalone\n")
    bad = cli("predict", "--model", pairs, "--input", "-")
    feed(monkeypatch, b'{"sentence1": "a dog", "sentence2": "a cat"}\n')
    chosen = cli("predict", "--model", pairs, "--input", "-", "--input-format", "jsonl")
    feed(monkeypatch, b"")
    nothing = cli("predict", "--model", sentiment, "--input", "-")

    assert [row["sentence"] for row in read_json_lines(single.stdout)] == ["a dog", "", " the cat"]
    assert bad.code == 1 and "standard input: line 2" in bad.error
    assert len(read_json_lines(chosen.stdout)) == 1
    assert (nothing.code, nothing.stdout) == (0, "") and "No rows" in nothing.stderr


def test_a_bad_row_late_in_the_file_leaves_no_output(cli: Cli, tmp_path: Path, sentiment: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"sentence\n" + b"a dog\n" * 50 + b"\xff\n")
    (tmp_path / "p.csv").write_text("earlier\n")

    outcome = cli("predict", "--model", sentiment, "--input", tmp_path / "a.tsv", "--output", tmp_path / "p.csv")

    assert outcome.code == 1 and "line 52" in outcome.error
    assert (tmp_path / "p.csv").read_text() == "earlier\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "p.csv"]


def test_a_split_is_predicted_with_and_without_labels(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "run", "cola", str(glue_dir))

    dev = cli("predict", "--model", run, "--split", "validation", "--output", tmp_path / "sub/dev.jsonl")
    test = cli("predict", "--model", run / "model", "--split", "test", "--data", glue_dir)

    assert dev.code == test.code == 0, dev.stderr + test.stderr
    rows = read_json_lines((tmp_path / "sub/dev.jsonl").read_text())
    assert set(rows[0]) == {"idx", "prediction", "label", "probabilities"}
    assert {row["label"] for row in rows} <= {"acceptable", "unacceptable"}
    assert {row["label"] for row in read_json_lines(test.stdout)} == {None}


def test_a_regression_gives_scores(cli: Cli, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", create_classifier(task="stsb"))
    (tmp_path / "a.tsv").write_text("sentence1\tsentence2\tscore\na dog\ta cat\t3.5\na\tb\t\n")

    outcome = cli("predict", "--model", model, "--input", tmp_path / "a.tsv")

    rows = read_json_lines(outcome.stdout)
    assert [row["label"] for row in rows] == [3.5, None]
    assert all(isinstance(row["prediction"], float) and "probabilities" not in row for row in rows)


def test_a_model_that_names_no_task_finds_the_usual_columns(cli: Cli, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", create_classifier())
    (tmp_path / "a.csv").write_text("text\na dog\n")
    (tmp_path / "b.csv").write_text("premise,hypothesis\na dog,a cat\n")

    rows = [
        read_json_lines(cli("predict", "--model", model, "--input", tmp_path / name).stdout)
        for name in ("a.csv", "b.csv")
    ]

    assert list(rows[0][0]["probabilities"]) == ["no", "yes", "maybe"] and rows[0][0]["text"] == "a dog"
    assert rows[1][0]["premise"] == "a dog"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--input FILE"),
        (("--input", "a.csv", "--split", "test"), "--input FILE"),
        (("--input", "a.csv", "--data", "demo"), "exclude each other"),
        (("--input", "missing.csv"), "missing.csv: cannot be read"),
        (("--input", "."), "a folder"),
        (("--input", "a.csv", "--output", "p.xml"), ".jsonl, .csv, .tsv"),
        (("--input", "a.csv", "--output", "a.csv"), "that is the input"),
        (("--input", "a.csv", "--batch-size", "0"), "batch-size"),
        (("--input", "a.csv", "--input-format", "xml"), "unknown kind"),
        (("--split", "dev"), "validation"),
        (("--input", "a.csv", "--task", "mnlli"), "mnli"),
    ],
)
def test_options_that_make_no_sense_start_nothing(
    cli: Cli, tmp_path: Path, sentiment: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("sentence\na dog\n")

    outcome = cli("predict", "--model", sentiment, *arguments)

    assert outcome.code == 2
    assert says in outcome.error and outcome.stdout == ""


def test_an_interrupt_leaves_no_file_behind(tmp_path: Path, sentiment: Path) -> None:
    pipe = tmp_path / "endless"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "isobn_finetune", "predict", "--model", str(sentiment), "--input", str(pipe)]
        + ["--input-format", "lines", "--output", str(tmp_path / "p.jsonl")],
        stderr=subprocess.PIPE,
        text=True,
    )
    with pipe.open("wb") as writer:  # opens once the command reads
        writer.write(b"a dog\n")
        writer.flush()
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".p.jsonl.*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)

    assert process.returncode == 130, stderr
    assert stderr.strip().splitlines()[-1] == "isobn-finetune: interrupted; no file was left half-written"
    assert [path.name for path in tmp_path.iterdir()] == ["endless"]


def test_a_saved_model_gives_equal_logits_by_every_way_of_loading(tmp_path: Path, glue_dir: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    from isobn_finetune import load_model

    run = make_run(tmp_path / "run", "rte", str(glue_dir))
    model, tokenizer = load_model(run)
    auto = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    pipe = pipeline("text-classification", model=str(run / "model"), function_to_apply="none", top_k=None)
    encoded = AutoTokenizer.from_pretrained(run / "model")("a dog", "the cat", return_tensors="pt")

    with torch.inference_mode():
        expected = model(**tokenizer("a dog", "the cat", return_tensors="pt")).logits
        torch.testing.assert_close(auto(**encoded).logits, expected, atol=1e-6, rtol=0)
    scores = {entry["label"]: entry["score"] for entry in pipe([{"text": "a dog", "text_pair": "the cat"}])[0]}
    assert [scores[name] for name in ("entailment", "not_entailment")] == pytest.approx(expected[0].tolist(), abs=1e-6)


@pytest.mark.skipif("ISOBN_GLUE_DIR" not in os.environ, reason="needs real GLUE in ISOBN_GLUE_DIR")
@pytest.mark.parametrize(("task", "split", "count"), [("mrpc", "test", 1725), ("stsb", "validation", 1500)])
def test_real_files_give_every_row(cli: Cli, tmp_path: Path, task: str, split: str, count: int) -> None:  # B02
    model = save_classifier(tmp_path / "m", create_classifier(task=task))

    outcome = cli("predict", "--model", model, "--data", os.environ["ISOBN_GLUE_DIR"], "--split", split)

    assert [row["idx"] for row in read_json_lines(outcome.stdout)] == list(range(count))
