"""Reading new texts, writing predictions, matching label names: what needs no trained model."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobn_finetune import predict
from isobn_finetune.errors import ConfigError, DataError
from isobn_finetune.prediction_files import PredictionWriter, check_output, open_predictions
from isobn_finetune.saved_model import match_labels
from isobn_finetune.tasks import TaskSpec, get_task
from isobn_finetune.text_files import TextRow, open_texts

SST2, RTE, STSB = get_task("sst2"), get_task("rte"), get_task("stsb")


def read(path: Path, spec: TaskSpec = SST2, file_format: str | None = None) -> list[TextRow]:
    with open_texts(str(path), spec, file_format) as texts:
        return list(texts.rows)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_quote_marks_in_tsv_are_characters(tmp_path: Path) -> None:  # B02
    path = write(tmp_path / "q.tsv", 'sentence\tlabel\n"open the box\t0\nclose the box\t1\nlast "word"\t0\n')

    rows = read(path)

    assert [row.texts[0] for row in rows] == ['"open the box', "close the box", 'last "word"']
    assert [row.label for row in rows] == ["0", "1", "0"]


def test_csv_is_quoted_and_holds_line_ends_inside_a_text(tmp_path: Path) -> None:
    path = write(tmp_path / "q.csv", 'id,sentence\r\n1,"a ""b"", c"\r\n2,"two\nlines"\r\n3,\r\n')

    assert [row.texts[0] for row in read(path)] == ['a "b", c', "two\nlines", ""]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_blank_lines_of_a_one_column_file_are_empty_texts(tmp_path: Path, suffix: str, mark: str) -> None:
    path = write(tmp_path / f"q{suffix}", f"{mark}sentence\na\n\nb\n\n")

    assert [row.texts[0] for row in read(path)] == ["a", "", "b", ""]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_blank_lines_of_a_wider_file_end_it_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    comma = "," if suffix == ".csv" else "\t"
    good = write(tmp_path / f"good{suffix}", f"id{comma}sentence\n1{comma}a\n\n\n")
    bad = write(tmp_path / f"bad{suffix}", f"id{comma}sentence\n1{comma}a\n\n2{comma}b\n")

    assert len(read(good)) == 1
    with pytest.raises(DataError, match="line 3: blank"):
        read(bad)


def test_lines_are_cut_at_line_feeds_only(tmp_path: Path) -> None:
    path = write(tmp_path / "q.txt", "one\u2028still\r\ntwo\x85still\n\nlast\ttab")

    assert [row.texts[0] for row in read(path)] == ["one\u2028still", "two\x85still", "", "last\ttab"]


def test_lines_of_a_pair_have_a_tab_between(tmp_path: Path) -> None:
    assert read(write(tmp_path / "q.txt", "a\tb\n\tb\n"), RTE) == [(("a", "b"), None), (("", "b"), None)]
    with pytest.raises(DataError, match="line 2: 1 text where RTE needs 2"):
        read(write(tmp_path / "bad.txt", "a\tb\nalone\n"), RTE)


def test_jsonl_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    values = [{"sentence1": "a", "sentence2": "b", "label": "entailment"}, {"sentence1": "", "sentence2": "ü"}]
    jsonl = write(tmp_path / "q.jsonl", "\n".join(map(json.dumps, values)))
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "q.parquet")

    rows = read(jsonl, RTE)

    assert rows == [(("a", "b"), "entailment"), (("", "ü"), None)]
    assert read(tmp_path / "q.parquet", RTE) == rows


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.tsv", "sentence\tlabel\na\n", "line 2: 1 field where 2"),
        ("a.csv", 'sentence,label\nx,1\n"a,0\nb,1\n', "line 3: not a whole CSV record"),
        ("a.csv", b"sentence\nok\n\xff\xfe\n", "line 3: byte 0xff"),
        ("a.txt", b"ok\nbi\0nary\n", "line 2: byte 0x00"),
        ("a.jsonl", '{"sentence": "a"}\n{"sentence": 5}\n', "line 2: int instead of a text in 'sentence'"),
        ("a.jsonl", '{"sentence": "a"}\n{"sentence": null}\n', "line 2: no text in 'sentence'"),
        ("a.jsonl", '{"sentence": "a"}\n["b"]\n', "line 2: not a JSON object"),
        ("a.jsonl", '{"sentence": "a"}\n' + "[" * 100_000 + "\n", "line 2: not a JSON object"),
        ("a.jsonl", '{"sentence": "a"}\n\n{"sentence": "b"}\n', "line 2: blank"),
        ("a.jsonl", '{"sentence": "a"}\n{"sentence": "\\ud800"}\n', "line 2: half a character"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path: Path, name: str, content: str | bytes, where: str) -> None:
    path = write(tmp_path / name, content)

    with pytest.raises(DataError, match=where) as caught:
        read(path)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "spec", "says"),
    [
        ("a.csv", "sentence1,id\na,1\n", RTE, "column 'sentence2' is missing. Columns there: sentence1, id"),
        ("a.tsv", "sentence1\tsentence1\tsentence2\na\ta\tb\n", RTE, "column 'sentence1' is there twice"),
        ("a.csv", "sentence;label\na;1\n", SST2, "Columns there: sentence;label"),
        ("a.csv", "", SST2, "empty, not even a header"),
        ("a.parquet", b"PAR1 no parquet", SST2, "cannot be read as parquet"),
        ("a.xlsx", b"PK", SST2, "unknown kind of file"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, name: str, content: str | bytes, spec: TaskSpec, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(write(tmp_path / name, content), spec)

    assert says in str(caught.value) and name in str(caught.value)


def test_glues_own_column_names_are_known(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "index\t#1 String\t#2 String\n0\ta\tb\n")

    assert read(path, get_task("mrpc")) == [(("a", "b"), None)]


def test_texts_may_be_longer_than_csv_likes(tmp_path: Path) -> None:
    text = "word " * 60_000

    assert read(write(tmp_path / "a.csv", f"sentence\n{text}\n")) == [((text,), None)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=8))
def test_any_text_comes_back_from_jsonl_and_csv(texts: list[str]) -> None:
    rows = [TextRow((text,), None) for text in texts]
    logits = np.tile(np.array([[0.0, 1.0]], dtype=np.float32), (len(rows), 1))
    jsonl, table = io.StringIO(), io.StringIO(newline="")
    PredictionWriter(jsonl, ".jsonl", SST2, ("sentence",)).write(rows, logits)
    PredictionWriter(table, ".csv", SST2, ("sentence",)).write(rows, logits)

    lines = jsonl.getvalue().split("\n")[:-1]
    assert [json.loads(line)["sentence"] for line in lines] == texts
    read_back = list(csv.DictReader(io.StringIO(table.getvalue(), newline="")))
    assert [row["sentence"] for row in read_back] == texts


def test_tsv_keeps_quote_marks_and_one_line_a_row() -> None:
    file = io.StringIO()

    PredictionWriter(file, ".tsv", SST2, ("sentence",)).write(
        [TextRow(('"open\tthe\nbox',), "1")], np.array([[2.0, 0.0]], dtype=np.float32)
    )

    header, line = file.getvalue().splitlines()
    assert header.split("\t") == [
        "idx",
        "sentence",
        "prediction",
        "label",
        "probability_negative",
        "probability_positive",
    ]
    fields = line.split("\t")
    assert fields[:4] == ["0", '"open the box', "negative", "positive"]
    assert float(fields[4]) == pytest.approx(1 / (1 + np.exp(-2.0)))


@pytest.mark.parametrize("label", [None, "", "  ", "-1", -1, -1.0])
def test_missing_labels_are_null(label: Any) -> None:
    file = io.StringIO()
    writer = PredictionWriter(file, ".jsonl", STSB, ())

    writer.write([TextRow(("a", "b"), label)], np.array([[3.25]], dtype=np.float32))

    assert json.loads(file.getvalue()) == {"idx": 0, "prediction": 3.25, "label": None}
    assert writer.unknown_labels == 0


def test_labels_that_the_task_does_not_know_are_counted_and_left_out() -> None:
    file = io.StringIO()
    writer = PredictionWriter(file, ".jsonl", RTE, ())

    writer.write([TextRow(("a", "b"), name) for name in ("Entailment", "maybe")], np.zeros((2, 2), dtype=np.float32))

    assert [json.loads(line)["label"] for line in file.getvalue().splitlines()] == ["entailment", None]
    assert writer.unknown_labels == 1


def test_an_output_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    target = write(tmp_path / "p.jsonl", "old\n")

    with pytest.raises(KeyboardInterrupt), open_predictions(str(target), SST2, ()) as writer:
        writer.write([TextRow(("a",), None)], np.zeros((1, 2), dtype=np.float32))
        raise KeyboardInterrupt

    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
    assert target.read_text() == "old\n"


def test_outputs_that_cannot_be_written_are_refused_before_work(tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", "sentence\na\n")
    for output, says in [
        (tmp_path / "p.xlsx", "suffix"),
        (tmp_path, "folder"),
        (source / "p.csv", "is a file"),
        (source, "that is the input"),
    ]:
        with pytest.raises(ConfigError, match=says):
            check_output(str(output), str(source))


def test_windows_are_bounded_by_rows_and_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_WINDOW_ROWS", 3)
    monkeypatch.setattr(predict, "_WINDOW_CHARACTERS", 10)
    rows = [TextRow((text,), None) for text in ("a", "b", "c", "d" * 30, "e", "f")]

    windows = list(predict._cut_windows(iter(rows)))

    assert [len(window) for window in windows] == [3, 1, 2]
    assert [row for window in windows for row in window] == rows


class Labels:
    def __init__(self, *names: str) -> None:
        self.id2label = dict(enumerate(names))
        self.num_labels = len(names)


def test_label_order_is_matched_by_name_whatever_its_case() -> None:  # B01
    spec, order = match_labels("m", Labels("CONTRADICTION", "Entailment", "neutral"), get_task("mnli"))

    assert spec.labels == ("entailment", "neutral", "contradiction")
    assert order == [1, 2, 0]


@pytest.mark.parametrize(
    ("names", "spec", "says"),
    [
        (("negative", "positive"), RTE, "a model of another task"),
        (("entailment", "neutral", "contradiction"), RTE, "its head has 3 outputs"),
        (("entailment", "not_entailment"), STSB, "its head has 2 outputs"),
        (("LABEL_0",), RTE, "its head has 1 output "),
        (("entailment", "LABEL_1"), RTE, "a model of another task"),
    ],
)
def test_heads_that_do_not_fit_are_refused(names: tuple[str, ...], spec: TaskSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        match_labels("m", Labels(*names), spec)


def test_nameless_labels_are_taken_in_order_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, order = match_labels("m", Labels("LABEL_0", "LABEL_1"), RTE)

    assert order == [0, 1]
    assert "cannot be matched by name" in caplog.text


def test_without_a_task_the_models_own_names_stand() -> None:
    spec, order = match_labels("m", Labels("spam", "ham"), None)

    assert spec.labels == ("spam", "ham") and not spec.text_columns and order == [0, 1]
    assert match_labels("m", Labels("LABEL_0"), None)[0].is_regression


def test_parquet_batches_are_read_as_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"sentence": [f"text {i}" for i in range(9000)]}), tmp_path / "a.parquet")
    sizes: list[int] = []
    whole = pq.ParquetFile.iter_batches

    def spy(self: Any, **kwargs: Any) -> Any:
        for batch in whole(self, **kwargs):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    with open_texts(str(tmp_path / "a.parquet"), SST2) as texts:
        first = next(texts.rows)
        assert first.texts == ("text 0",) and sizes == [4096]
        assert sum(1 for _ in texts.rows) == 8999
