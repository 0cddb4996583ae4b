from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from isobn_finetune.config import create_run_config
from isobn_finetune.errors import ConfigError, DataError
from isobn_finetune.run_folder import RunFolder, dump_json, replace_folder, to_strict, write_json, write_text

CONFIG = create_run_config({"task": "rte", "model": "tiny"})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_starting_writes_a_config_that_reads_back(folder: RunFolder) -> None:
    assert not folder.is_occupied()
    folder.start(CONFIG)
    assert folder.is_occupied() and folder.differences(CONFIG, everything=True) == []
    assert folder.describe() == "a run that is not over (rte, tiny, norm isobn, seed 1)"


def test_differences_name_key_old_and_new_value(folder: RunFolder) -> None:
    folder.start(CONFIG)
    other = create_run_config({"task": "rte", "model": "tiny", "norm": "batchnorm", "train": {"epochs": 2}})
    lines = folder.differences(other)
    assert "norm.name: isobn here, batchnorm asked for" in lines
    assert not any(line.startswith("train.") for line in lines)
    assert "train.epochs: 5.0 here, 2.0 asked for" in folder.differences(other, everything=True)


def test_what_does_not_change_results_is_no_difference(folder: RunFolder) -> None:
    folder.start(CONFIG)
    harmless = {"eval_batch_size": 8, "logging_steps": 1, "save_total_limit": 5}
    other = create_run_config({"task": "rte", "model": "tiny", "output_dir": "elsewhere", "train": harmless})
    assert folder.differences(other, everything=True) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{}", '{"status": 1}', '"finished"', "\xff"])
def test_a_damaged_result_is_an_error_that_names_the_file(folder: RunFolder, text: str) -> None:
    folder.path.mkdir()
    folder.result.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="result.json"):
        folder.read_result()


def test_no_result_means_not_over(folder: RunFolder) -> None:
    assert folder.read_result() is None


def test_clearing_removes_what_a_run_wrote_and_nothing_else(folder: RunFolder) -> None:
    folder.start(CONFIG)
    for name in ("history.jsonl", "result.json", "curves.png", "notes.txt"):
        (folder.path / name).write_text("x")
    for name in ("model", "predictions", "checkpoints", "mine"):
        (folder.path / name).mkdir()
        (folder.path / name / "file").write_text("x")
    folder.clear()
    assert {path.name for path in folder.path.iterdir()} == {"notes.txt", "mine"}


def test_clearing_removes_folders_where_files_should_be_and_follows_no_link(folder: RunFolder, tmp_path: Path) -> None:
    folder.path.mkdir()
    folder.config.mkdir()
    folder.model.write_text("x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    folder.checkpoints.symlink_to(tmp_path / "mine")
    folder.clear()
    assert not list(folder.path.iterdir()) and (tmp_path / "mine" / "file").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file", "file/run", "file/run/deeper"):
        with pytest.raises(ConfigError, match="is a file"):
            RunFolder(tmp_path / name).check_usable()
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="--output-dir"):
            RunFolder(tmp_path / name).check_usable()
    RunFolder(tmp_path / "new" / "run").check_usable()
    assert not (tmp_path / "new").exists()


def test_history_forgets_steps_after_a_checkpoint_and_a_line_cut_short(folder: RunFolder) -> None:
    folder.path.mkdir()
    for step in (1, 2, 3):
        folder.append_history({"step": step, "loss": math.nan, "text": "a\u2028b"})
    with folder.history.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in folder.read_history()] == [1, 2, 3]
    folder.cut_history(2)
    assert folder.read_history() == [{"step": step, "loss": None, "text": "a\u2028b"} for step in (1, 2)]


def test_history_lines_that_are_no_objects_are_left_out(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.history.write_text('5\n[1]\nnull\n{"loss": 1}\n{"step": 1}\n')
    folder.cut_history(1)
    assert {"step": 1} in folder.read_history()


def make_checkpoint(folder: RunFolder, step: int) -> Path:
    path = folder.checkpoints / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_file({"weight": torch.zeros(50)}, path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"a": torch.zeros(50)}, path / name)
    return path


def test_the_newest_checkpoint_is_found_by_number_not_by_name(folder: RunFolder) -> None:
    assert folder.find_checkpoint() is None
    for step in (5, 10, 9):
        make_checkpoint(folder, step)
    (folder.checkpoints / "checkpoint-x").mkdir()
    (folder.checkpoints / "best").mkdir()
    found = folder.find_checkpoint()
    assert found is not None and found.name == "checkpoint-10"


@pytest.mark.parametrize(
    "damage",
    ["trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "cut model.safetensors",
     "cut optimizer.pt", "cut trainer_state.json", "empty", "state of another step"],
)  # fmt: skip
def test_b12_a_checkpoint_that_is_not_whole_is_named_and_the_one_before_is_taken(
    folder: RunFolder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(folder, 5)
    newest = make_checkpoint(folder, 10)
    if damage == "empty":
        for path in newest.iterdir():
            path.unlink()
    elif damage == "state of another step":
        (newest / "trainer_state.json").write_text('{"global_step": 9}')
    elif damage.startswith("cut "):
        path = newest / damage.removeprefix("cut ")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        (newest / damage).unlink()
    found = folder.find_checkpoint()
    assert found is not None and found.name == "checkpoint-5"
    assert "checkpoint-10 is not whole" in caplog.text


def test_json_is_strict_at_any_depth() -> None:
    value = {"a": [math.nan, {"b": (math.inf, 1.5)}], 3: -math.inf}
    assert to_strict(value) == {"a": [None, {"b": [None, 1.5]}], "3": None}
    assert dump_json(value) == '{"a": [null, {"b": [null, 1.5]}], "3": null}'


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_is_written_is_strict_json_on_one_line(value: Any) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = dump_json(value)
    assert "\n" not in text
    json.loads(text, parse_constant=refuse)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deeper" / "file.json"
    write_json(path, {"a": "\u00e9"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "\u00e9"\n}\n'

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "half")
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "\u00e9"}


def test_a_file_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "x")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"
    replace_folder(target, lambda folder: (folder / "one").write_text("1"))
    replace_folder(target, lambda folder: (folder / "two").write_text("2"))
    assert [path.name for path in target.iterdir()] == ["two"]

    def fail(folder: Path) -> None:
        (folder / "three").write_text("3")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        replace_folder(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["two"]
