from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobn_finetune.data import compute_fingerprint, create_split, load_splits
from isobn_finetune.errors import ConfigError, DataError
from isobn_finetune.tasks import TASKS

RTE_TRAIN = (
    "index\tsentence1\tsentence2\tlabel\n"
    "0\tIt rains.\tIt is wet.\tentailment\n"
    "1\tIt snows.\tIt is hot.\tnot_entailment\n"
)
RTE_TEST = "index\tsentence1\tsentence2\n0\tA hidden pair.\tOf texts.\n"


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_rte(root: Path, train: str | bytes = RTE_TRAIN, dev: str | bytes = RTE_TRAIN, folder: str = "RTE") -> Path:
    write(root / folder / "train.tsv", train)
    write(root / folder / "dev.tsv", dev)
    return root


def write_parquet(
    path: Path, columns: dict, names: list[str] | None = None, label_type: pa.DataType | None = None
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({key: pa.array(v, label_type if key == "label" else None) for key, v in columns.items()})
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)
    return path


def rte_parquet(root: Path, split: str = "train", label: list | None = None, **options) -> Path:
    labels = [0, 1, 1] if label is None else label
    columns = {
        "sentence1": [f"first {i}" for i in range(len(labels))],
        "sentence2": [f"second {i}" for i in range(len(labels))],
        "label": labels,
        "idx": [i + 70 for i in range(len(labels))],
    }
    return write_parquet(root / "rte" / f"{split}-00000-of-00001.parquet", columns, **options)


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


# ------------------------------------------------------------------- folders


def test_glue_folder_gives_texts_class_indices_and_row_numbers(tmp_path: Path) -> None:
    write_rte(tmp_path)
    write(tmp_path / "RTE" / "test.tsv", RTE_TEST)
    splits = load_splits(TASKS["rte"], str(tmp_path))
    assert list(splits) == ["train", "validation", "test"]
    assert splits["train"].to_list() == [
        {"sentence1": "It rains.", "sentence2": "It is wet.", "label": 0, "idx": 0},
        {"sentence1": "It snows.", "sentence2": "It is hot.", "label": 1, "idx": 1},
    ]
    assert splits["test"]["label"] == [-1]


@pytest.mark.parametrize("folder", ["RTE", "rte", "Rte"])
def test_task_folder_is_found_in_any_case(tmp_path: Path, folder: str) -> None:
    assert load_splits(TASKS["rte"], str(write_rte(tmp_path, folder=folder)))["train"].num_rows == 2


@pytest.mark.parametrize("folder", ["STS-B", "stsb", "STSB", "sts_b"])
def test_folder_names_ignore_hyphens_as_task_names_do(tmp_path: Path, folder: str) -> None:
    rows = "index\tsentence1\tsentence2\tscore\n0\ta\tb\t2.5\n"
    write(tmp_path / folder / "train.tsv", rows)
    write(tmp_path / folder / "dev.tsv", rows)
    assert load_splits(TASKS["stsb"], str(tmp_path))["train"]["label"] == [2.5]


def test_the_task_folder_itself_may_be_given(tmp_path: Path) -> None:
    write_rte(tmp_path)
    assert load_splits(TASKS["rte"], str(tmp_path / "RTE"))["train"].num_rows == 2


def test_a_folder_named_after_another_task_is_not_taken(tmp_path: Path) -> None:
    write_rte(tmp_path, folder="WNLI")
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["rte"], str(tmp_path / "WNLI"))
    one_line(error, str(tmp_path / "WNLI"), "RTE")


def test_missing_dev_file_is_named_before_train_is_read(tmp_path: Path) -> None:
    write(tmp_path / "RTE" / "train.tsv", b"\xff not even text")
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["rte"], str(tmp_path))
    one_line(error, str(tmp_path / "RTE"), "dev.tsv", "validation-00000-of-00001.parquet", "--data")


def test_missing_test_file_is_no_error_unless_asked_for(tmp_path: Path) -> None:
    write_rte(tmp_path)
    assert list(load_splits(TASKS["rte"], str(tmp_path))) == ["train", "validation"]
    assert list(load_splits(TASKS["rte"], str(tmp_path), ["validation"])) == ["validation"]
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["rte"], str(tmp_path), ["test"])
    one_line(error, "split test", "test.tsv")


def test_evaluation_needs_no_train_file(tmp_path: Path) -> None:
    write(tmp_path / "RTE" / "dev.tsv", RTE_TRAIN)
    assert load_splits(TASKS["rte"], str(tmp_path), ["validation"])["validation"].num_rows == 2


def test_unknown_split_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["mnli"], str(tmp_path), ["validation"])
    one_line(error, "'validation'", "validation_matched", "validation_mismatched")


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("x")])
def test_source_that_is_no_folder(tmp_path: Path, make) -> None:
    make(tmp_path / "glue")
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["rte"], str(tmp_path / "glue"))
    one_line(error, str(tmp_path / "glue"), "demo", "RTE")


def test_folder_without_the_task_names_what_is_there(tmp_path: Path) -> None:
    write_rte(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["cola"], str(tmp_path))
    one_line(error, "CoLA", "RTE")


def test_stray_folder_named_glue_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B07."""
    write_rte(tmp_path / "mini")
    expected = compute_fingerprint(load_splits(TASKS["rte"], str(tmp_path / "mini")))
    write(tmp_path / "work" / "glue" / "notes.txt", "not a data set")
    write_rte(tmp_path / "work" / "glue", RTE_TRAIN * 2)
    monkeypatch.chdir(tmp_path / "work")
    assert compute_fingerprint(load_splits(TASKS["rte"], "../mini")) == expected


def test_mnli_has_two_dev_sets_and_takes_its_columns_by_name(tmp_path: Path) -> None:
    header = "index\tpromptID\tgenre\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
    for name, label in [("train", "neutral"), ("dev_matched", "entailment"), ("dev_mismatched", "contradiction")]:
        write(tmp_path / "MNLI" / f"{name}.tsv", f"{header}0\t1\tfiction\t(x)\tA {name}\tB\tneutral\t{label}\n")
    splits = load_splits(TASKS["mnli"], str(tmp_path))
    assert {split: rows[0] for split, rows in splits.items()} == {
        "train": {"premise": "A train", "hypothesis": "B", "label": 1, "idx": 0},
        "validation_matched": {"premise": "A dev_matched", "hypothesis": "B", "label": 0, "idx": 0},
        "validation_mismatched": {"premise": "A dev_mismatched", "hypothesis": "B", "label": 2, "idx": 0},
    }


def test_diagnostic_set_has_only_a_test_split(tmp_path: Path) -> None:
    write(tmp_path / "diagnostic" / "diagnostic.tsv", RTE_TEST)
    splits = load_splits(TASKS["ax"], str(tmp_path))
    assert {split: rows.num_rows for split, rows in splits.items()} == {"test": 1}


# ------------------------------------------------------------------- exact reading


def test_quote_marks_are_text(tmp_path: Path) -> None:
    """B02."""
    rows = 'sentence\tlabel\n"open the box\t0\nclose the box\t1\nlast "word"\t0\n'
    write(tmp_path / "SST-2" / "train.tsv", rows)
    train = load_splits(TASKS["sst2"], str(tmp_path), ["train"])["train"]
    assert train["sentence"] == ['"open the box', "close the box", 'last "word"']
    assert train["label"] == [0, 1, 0]


def test_cola_has_no_header_in_train_and_dev_and_no_last_newline(tmp_path: Path) -> None:
    """B03."""
    rows = [f"src\t{i % 2}\t{'*' if i % 2 else ''}\tSentence number {i}." for i in range(5)]
    write(tmp_path / "CoLA" / "train.tsv", "\n".join(rows) + "\n")
    write(tmp_path / "CoLA" / "dev.tsv", "\n".join(rows[:3]))
    write(tmp_path / "CoLA" / "test.tsv", "index\tsentence\n0\tOne.\n1\tTwo.\n")
    splits = load_splits(TASKS["cola"], str(tmp_path))
    assert {split: len(data) for split, data in splits.items()} == {"train": 5, "validation": 3, "test": 2}
    assert splits["train"][0] == {"sentence": "Sentence number 0.", "label": 0, "idx": 0}
    assert splits["validation"][2] == {"sentence": "Sentence number 2.", "label": 0, "idx": 2}
    assert splits["test"]["sentence"] == ["One.", "Two."]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.removesuffix("\n").encode(),
        lambda text: (text + "\n\n").encode(),
    ],
    ids=["byte-order mark", "CRLF", "no last newline", "blank lines at the end"],
)
def test_ways_to_end_and_begin_a_file_do_not_change_the_rows(tmp_path: Path, change) -> None:
    plain = load_splits(TASKS["rte"], str(write_rte(tmp_path / "plain")))
    changed = load_splits(TASKS["rte"], str(write_rte(tmp_path / "changed", change(RTE_TRAIN), change(RTE_TRAIN))))
    assert compute_fingerprint(changed) == compute_fingerprint(plain)


def test_byte_order_mark_inside_the_text_and_empty_texts_stay(tmp_path: Path) -> None:
    write_rte(tmp_path, "index\tsentence1\tsentence2\tlabel\n0\t\t\ufeffb\tentailment\n")
    train = load_splits(TASKS["rte"], str(tmp_path), ["train"])["train"]
    assert train[0] == {"sentence1": "", "sentence2": "\ufeffb", "label": 0, "idx": 0}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(
            st.text(
                st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\0")
                | st.sampled_from("\x0b\x1c\x85\u2028\r\"'")
            ),
            st.sampled_from(["0", "1"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_text_comes_back_as_it_was_written(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    write(tmp_path / "SST-2" / "train.tsv", "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    train = load_splits(TASKS["sst2"], str(tmp_path), ["train"])["train"]
    assert train["sentence"] == [text for text, _ in rows]
    assert train["label"] == [int(label) for _, label in rows]


# ------------------------------------------------------------------- bad rows


def test_label_that_is_not_known_is_named_with_file_and_line(tmp_path: Path) -> None:
    """B05."""
    dev = RTE_TRAIN + "2\tx\ty\tmaybe\n"
    with pytest.raises(DataError) as error:
        load_splits(TASKS["rte"], str(write_rte(tmp_path, dev=dev)))
    one_line(error, f"{tmp_path / 'RTE' / 'dev.tsv'}: line 4:", "'maybe'", "entailment, not_entailment")
    assert error.value.exit_code == 1


@pytest.mark.parametrize("label", ["2", "-1", "1.0", "", "01"])
def test_class_number_must_be_one_of_the_task(tmp_path: Path, label: str) -> None:
    write(tmp_path / "SST-2" / "train.tsv", f"sentence\tlabel\ngood\t1\nbad\t{label}\n")
    with pytest.raises(DataError) as error:
        load_splits(TASKS["sst2"], str(tmp_path), ["train"])
    one_line(error, "train.tsv: line 3:", "0 (negative), 1 (positive)")


@pytest.mark.parametrize("score", ["nan", "inf", "1e999", "", "high", "1_0", "2,5", " 1"])
def test_score_must_be_a_finite_number(tmp_path: Path, score: str) -> None:
    write(tmp_path / "STS-B" / "train.tsv", f"index\tsentence1\tsentence2\tscore\n0\ta\tb\t5.000\n1\ta\tb\t{score}\n")
    with pytest.raises(DataError) as error:
        load_splits(TASKS["stsb"], str(tmp_path), ["train"])
    one_line(error, "train.tsv: line 3:", "finite number")


@pytest.mark.parametrize("row", ["2\tonly one text\tentailment", "2\ta\tb\tentailment\tmore", ""])
def test_wrong_number_of_fields_is_named_with_its_line(tmp_path: Path, row: str) -> None:
    train = RTE_TRAIN + row + "\n3\ta\tb\tentailment\n"
    with pytest.raises(DataError) as error:
        load_splits(TASKS["rte"], str(write_rte(tmp_path, train)))
    one_line(error, "train.tsv: line 4:", "where 4 are expected")


def test_qqp_rows_cut_short_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    rows += "1\t1\t2\tWhy?\tWhat?\t0\n2\t3\t4\tcut\n3\t5\t6\tWhere?\tWhere is it?\t1\n"
    write(tmp_path / "QQP" / "train.tsv", rows)
    with caplog.at_level(logging.INFO):
        train = load_splits(TASKS["qqp"], str(tmp_path), ["train"])["train"]
    assert train.to_list() == [
        {"question1": "Why?", "question2": "What?", "label": 0, "idx": 0},
        {"question1": "Where?", "question2": "Where is it?", "label": 1, "idx": 1},
    ]
    assert "left out 1 row " in caplog.text and "train.tsv" in caplog.text


def test_line_numbers_count_the_rows_left_out(tmp_path: Path) -> None:
    rows = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n2\t3\t4\tcut\n3\t5\t6\ta\tb\t7\n"
    write(tmp_path / "QQP" / "train.tsv", rows)
    with pytest.raises(DataError, match="line 3:"):
        load_splits(TASKS["qqp"], str(tmp_path), ["train"])


@pytest.mark.parametrize("bad", [b"caf\xe9", b"nul \0"], ids=["Latin-1", "NUL"])
def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path, bad: bytes) -> None:
    with pytest.raises(DataError) as error:
        load_splits(TASKS["rte"], str(write_rte(tmp_path, RTE_TRAIN.encode() + b"2\t" + bad + b"\tb\tentailment\n")))
    one_line(error, "train.tsv: line 4:", "UTF-8")


def test_utf16_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: .*Save the file as UTF-8"):
        load_splits(TASKS["rte"], str(write_rte(tmp_path, RTE_TRAIN.encode("utf-16"))))


@pytest.mark.parametrize("content", ["", "\ufeff", "\n", "index\tsentence1\tsentence2\tlabel\n"])
def test_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["rte"], str(write_rte(tmp_path, content)))
    one_line(error, str(tmp_path / "RTE" / "train.tsv"), "no rows")


def test_missing_column_names_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["rte"], str(write_rte(tmp_path, "index\tpremise\tsentence2\tlabel\n0\ta\tb\tentailment\n")))
    one_line(error, "train.tsv", "'sentence1'", "index, premise, sentence2, label")


def test_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'sentence1' is there twice"):
        load_splits(
            TASKS["rte"], str(write_rte(tmp_path, "sentence1\tsentence1\tsentence2\tlabel\na\tb\tc\tentailment\n"))
        )


def test_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "RTE" / "train.tsv").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_splits(TASKS["rte"], str(tmp_path), ["train"])


def test_a_long_text_in_the_place_of_a_label_is_cut(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load_splits(TASKS["rte"], str(write_rte(tmp_path, RTE_TRAIN + f"2\ta\tentailment\t{'long ' * 200}\n")))
    assert len(str(error.value)) < 300


# ------------------------------------------------------------------- parquet


def test_parquet_gives_the_rows_that_tsv_gives(tmp_path: Path) -> None:
    rte_parquet(tmp_path / "parquet")
    rows = "".join(f"{i}\tfirst {i}\tsecond {i}\t{'not_' if i else ''}entailment\n" for i in range(3))
    write(tmp_path / "tsv" / "RTE" / "train.tsv", "index\tsentence1\tsentence2\tlabel\n" + rows)
    loaded = [load_splits(TASKS["rte"], str(tmp_path / kind), ["train"]) for kind in ("parquet", "tsv")]
    assert loaded[0]["train"].to_list() == loaded[1]["train"].to_list()
    assert loaded[0]["train"].features == loaded[1]["train"].features
    assert loaded[0]["train"]["idx"] == [0, 1, 2]
    assert compute_fingerprint(loaded[0]) == compute_fingerprint(loaded[1])


def test_parquet_class_names_are_matched_by_name_whatever_order_and_case(tmp_path: Path) -> None:
    rte_parquet(tmp_path, label=[0, 1, 1], names=["Not_Entailment", "ENTAILMENT"])
    assert load_splits(TASKS["rte"], str(tmp_path), ["train"])["train"]["label"] == [1, 0, 0]


@pytest.mark.parametrize("label_type", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_labels_may_be_words(tmp_path: Path, label_type: pa.DataType) -> None:
    rte_parquet(tmp_path, label=["not_entailment", "entailment"], label_type=label_type)
    assert load_splits(TASKS["rte"], str(tmp_path), ["train"])["train"]["label"] == [1, 0]


def test_parquet_class_name_that_the_task_lacks_is_an_error_only_if_a_row_has_it(tmp_path: Path) -> None:
    names = ["entailment", "not_entailment", "unsure"]
    rte_parquet(tmp_path, label=[1, 0], names=names)
    assert load_splits(TASKS["rte"], str(tmp_path), ["train"])["train"]["label"] == [1, 0]
    path = rte_parquet(tmp_path, label=[1, 2], names=names)
    with pytest.raises(DataError) as error:
        load_splits(TASKS["rte"], str(tmp_path), ["train"])
    one_line(error, str(path), "row 1", "'unsure'", "entailment, not_entailment")


@pytest.mark.parametrize("label", [[0, 2], [0, -1], [0, None]])
def test_parquet_label_of_a_labelled_split_must_be_a_class(tmp_path: Path, label: list) -> None:
    rte_parquet(tmp_path, "validation", label=label)
    with pytest.raises(DataError, match="row 1"):
        load_splits(TASKS["rte"], str(tmp_path), ["validation"])


def test_parquet_test_labels_are_kept_where_published_and_hidden_elsewhere(tmp_path: Path) -> None:
    rte_parquet(tmp_path, "test", label=[1, -1, None])
    assert load_splits(TASKS["rte"], str(tmp_path), ["test"])["test"]["label"] == [1, -1, -1]


def test_parquet_scores_keep_the_decimals_that_were_stored(tmp_path: Path) -> None:
    columns = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [3.8, 0.7]}
    write_parquet(tmp_path / "stsb" / "train-00000-of-00001.parquet", columns, label_type=pa.float32())
    assert load_splits(TASKS["stsb"], str(tmp_path), ["train"])["train"]["label"] == [3.8, 0.7]


def test_parquet_shards_are_read_in_order(tmp_path: Path) -> None:
    for index in (2, 0, 1):
        path = tmp_path / "sst2" / f"train-0000{index}-of-00003.parquet"
        write_parquet(path, {"sentence": [f"text {index}"], "label": [index % 2]})
    train = load_splits(TASKS["sst2"], str(tmp_path), ["train"])["train"]
    assert train["sentence"] == ["text 0", "text 1", "text 2"]
    assert train["idx"] == [0, 1, 2]


def test_missing_parquet_shard_is_named_only_if_its_split_is_wanted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "sst2" / "train-00000-of-00002.parquet", {"sentence": ["a"], "label": [1]})
    write_parquet(tmp_path / "sst2" / "validation-00000-of-00001.parquet", {"sentence": ["a"], "label": [1]})
    assert load_splits(TASKS["sst2"], str(tmp_path), ["validation"])["validation"].num_rows == 1
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["sst2"], str(tmp_path), ["train"])
    one_line(error, "train-00001-of-00002.parquet")


def test_parquet_shards_of_two_copies_are_refused(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"):
        write_parquet(tmp_path / "sst2" / f"{name}.parquet", {"sentence": ["a"], "label": [1]})
    with pytest.raises(ConfigError, match="more than one copy"):
        load_splits(TASKS["sst2"], str(tmp_path), ["train"])


def test_parquet_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "sst2" / "train-00000-of-00001.parquet", "sentence\tlabel\na\t1\n")
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["sst2"], str(tmp_path), ["train"])
    one_line(error, str(path), "parquet")


@pytest.mark.parametrize("missing", ["sentence2", "label"])
def test_missing_parquet_column_names_those_that_are_there(tmp_path: Path, missing: str) -> None:
    columns = {"sentence1": ["a"], "sentence2": ["b"], "label": [0]}
    del columns[missing]
    write_parquet(tmp_path / "rte" / "train-00000-of-00001.parquet", columns)
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["rte"], str(tmp_path), ["train"])
    one_line(error, f"'{missing}'", ", ".join(columns))


def test_parquet_text_must_be_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "sst2" / "train-00000-of-00001.parquet", {"sentence": [1, 2], "label": [0, 1]})
    with pytest.raises(ConfigError, match="'sentence' holds int64"):
        load_splits(TASKS["sst2"], str(tmp_path), ["train"])


def test_parquet_row_without_text_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "sst2" / "train-00000-of-00001.parquet", {"sentence": ["a", None], "label": [0, 1]})
    with pytest.raises(DataError, match="row 1: no text in 'sentence'"):
        load_splits(TASKS["sst2"], str(tmp_path), ["train"])


# ------------------------------------------------------------------- demo, fingerprint, real GLUE


def test_demo_gives_the_same_columns_as_a_folder() -> None:
    splits = load_splits(TASKS["stsb"], "demo")
    assert list(splits) == ["train", "validation", "test"]
    assert splits["train"].column_names == ["sentence1", "sentence2", "label", "idx"]
    assert all(isinstance(label, float) for label in splits["train"]["label"])
    assert set(splits["test"]["label"]) == {-1.0}


def test_demo_without_the_task_says_which_there_are() -> None:
    with pytest.raises(ConfigError) as error:
        load_splits(TASKS["wnli"], "demo")
    one_line(error, "wnli", "rte")


def sst2(texts: list[str], labels: list[int]) -> Dataset:
    return create_split(TASKS["sst2"], {"sentence": texts, "label": labels})


def test_fingerprint_is_a_sha256_and_ignores_the_order_of_splits() -> None:
    train, dev = sst2(["a"], [0]), sst2(["b"], [1])
    fingerprint = compute_fingerprint({"train": train, "validation": dev})
    assert re.fullmatch(r"[0-9a-f]{64}", fingerprint)
    assert len(bytes.fromhex(fingerprint)) == hashlib.sha256().digest_size
    assert compute_fingerprint({"validation": dev, "train": train}) == fingerprint


def test_fingerprint_tells_every_change_of_rows_apart() -> None:
    fingerprints = [
        compute_fingerprint(splits)
        for splits in (
            {"train": sst2(["ab", "c"], [0, 1])},
            {"train": sst2(["a", "bc"], [0, 1])},
            {"train": sst2(["ab", "c"], [1, 1])},
            {"train": sst2(["c", "ab"], [1, 0])},
            {"train": sst2(["ab"], [0])},
            {"validation": sst2(["ab", "c"], [0, 1])},
            {"train": sst2(["ab"], [0]), "validation": sst2(["c"], [1])},
        )
    ]
    assert len(set(fingerprints)) == len(fingerprints)


REAL_ROWS = {
    "cola": (8551, 1043, 1063),
    "sst2": (67349, 872, 1821),
    "mrpc": (3668, 408, 1725),
    "rte": (2490, 277, 3000),
    "stsb": (5749, 1500, 1379),
    "wnli": (635, 71, 146),
    "qnli": (None, 5463, 5463),
}


@pytest.mark.skipif("ISOBN_GLUE_DIR" not in os.environ, reason="ISOBN_GLUE_DIR names no folder with real GLUE")
@pytest.mark.parametrize("task", REAL_ROWS)
def test_real_glue_has_its_published_row_counts(task: str) -> None:
    rows = dict(zip(("train", "validation", "test"), REAL_ROWS[task], strict=True))
    expected = {split: count for split, count in rows.items() if count is not None}
    splits = load_splits(TASKS[task], os.environ["ISOBN_GLUE_DIR"], list(expected))
    assert {split: data.num_rows for split, data in splits.items()} == expected
    assert -1 not in splits["validation"]["label"]
    assert set(splits["test"]["label"]) == {-1}
