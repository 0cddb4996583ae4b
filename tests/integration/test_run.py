"""``isobn-finetune run``: what it leaves behind, and the second run into the same folder."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_files import RUN_FILES, files_of, predictions_of, read_json, read_lines, weights_of

Cli = Callable[..., Any]


# What a run leaves behind.


def test_a_run_writes_exactly_these_files(finished: Path) -> None:
    assert files_of(finished) == RUN_FILES
    assert not (finished / "checkpoints").exists()


def test_no_pickle_is_written(finished: Path) -> None:
    for path in finished.rglob("*"):
        if path.is_file():
            assert path.suffix not in (".bin", ".pt", ".pth", ".pkl"), path
            assert not path.read_bytes().startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")), path


def test_result_json_is_what_the_contract_says(finished: Path, bert_dir: Path, glue_dir: Path) -> None:
    result = read_json(finished / "result.json")
    assert set(result) == {
        "schema", "status", "task", "model", "norm", "seed", "primary_metric", "score", "last_score", "metrics",
        "best", "collapsed", "isotropy", "train", "data", "environment", "reason",
    }  # fmt: skip
    assert (result["schema"], result["status"], result["task"], result["seed"]) == (1, "finished", "rte", 1)
    assert result["model"] == str(bert_dir)
    assert result["norm"] == {
        "name": "isobn", "momentum": 0.05, "beta": 0.5, "eps": 1e-3, "bias_correction": False, "sync": True,
    }  # fmt: skip
    assert result["primary_metric"] == "accuracy" and result["score"] == result["metrics"]["validation"]["accuracy"]
    assert result["best"]["epoch"] in (1, 2) and result["best"]["step"] in (2, 4)
    assert isinstance(result["collapsed"], bool) and result["reason"] is None
    assert set(result["isotropy"]) == {"n", "split", "pooler_output", "normed_output"}
    assert (result["isotropy"]["n"], result["isotropy"]["split"]) == (8, "train")
    for place in ("pooler_output", "normed_output"):
        measures = result["isotropy"][place]
        assert {"ev1", "ev2", "ev3", "isoscore"} <= set(measures)
        assert 0 < measures["ev1"] <= measures["ev2"] <= measures["ev3"] <= 1 + 1e-9
    train = result["train"]
    assert {"steps", "epochs", "seconds", "samples_per_second", "precision", "real_token_fraction"} <= set(train)
    assert (train["steps"], train["epochs"], train["precision"]) == (4, 2, "fp32")
    assert 0 < train["real_token_fraction"] <= 1 and train["seconds"] > 0 and train["samples_per_second"] > 0
    assert result["data"]["source"] == str(glue_dir)
    assert result["data"]["rows"] == {"train": 8, "validation": 8, "test": 4}
    assert len(result["data"]["fingerprint"]) == 64
    assert {"torch", "transformers", "python", "platform", "device"} <= set(result["environment"])


def test_predictions_have_a_line_a_row_in_order(finished: Path) -> None:
    lines = read_lines(finished / "predictions" / "validation.jsonl")
    assert [line["idx"] for line in lines] == list(range(8))
    labels = [line["label"] for line in lines]
    assert labels == ["entailment", "not_entailment", "not_entailment"] * 2 + ["entailment", "not_entailment"]
    for line in lines:
        assert set(line) == {"idx", "prediction", "label", "probabilities"}
        assert math.isclose(sum(line["probabilities"].values()), 1, rel_tol=1e-9)
        assert line["prediction"] == max(line["probabilities"], key=line["probabilities"].get)
    right = sum(line["prediction"] == line["label"] for line in lines) / 8
    assert right == read_json(finished / "result.json")["score"]


def test_history_has_a_line_per_log_and_evaluation(finished: Path) -> None:
    lines = read_lines(finished / "history.jsonl")
    train = [line for line in lines if line["event"] == "train"]
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert [line["step"] for line in train] == [1, 2, 3, 4]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert all({"epoch", "loss", "learning_rate", "grad_norm"} <= set(line) for line in train)
    for line in evaluations:
        assert set(line["metrics"]) == {"accuracy"} and line["loss"] > 0
        assert line["isotropy"]["pooler_output"]["ev3"] <= 1 + 1e-9
    assert max(line["metrics"]["accuracy"] for line in evaluations) == read_json(finished / "result.json")["score"]


def test_the_saved_model_gives_the_written_predictions(finished: Path, glue_dir: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    from isobn_finetune import load_model

    rows = [line.split("\t") for line in (glue_dir / "RTE" / "dev.tsv").read_text().splitlines()[1:]]
    model, tokenizer = load_model(finished)
    auto = AutoModelForSequenceClassification.from_pretrained(finished / "model").eval()
    assert int(model.norm.num_batches_tracked) in (2, 4) and not model.training
    for row, line in zip(rows, read_lines(finished / "predictions" / "validation.jsonl"), strict=True):
        inputs = tokenizer(row[1], row[2], return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits
            assert torch.equal(logits, auto(**inputs).logits)
        expected = [line["probabilities"][name] for name in ("entailment", "not_entailment")]
        torch.testing.assert_close(logits[0].softmax(0), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}


def test_a_saved_model_works_in_a_pipeline(finished: Path) -> None:
    from transformers import pipeline

    import isobn_finetune  # noqa: F401

    classify = pipeline("text-classification", model=str(finished / "model"), device="cpu")
    answer = classify({"text": "The old dog runs.", "text_pair": "A dog moves."})
    answer = answer[0] if isinstance(answer, list) else answer
    assert answer["label"] in ("entailment", "not_entailment") and 0.5 <= answer["score"] <= 1


def test_the_written_config_repeats_the_run(finished: Path, cli: Cli, tmp_path: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert set(config) == {"task", "seed", "precision", "output_dir", "model", "data", "norm", "train"}
    outcome = cli("run", "--config", finished / "config.yaml", "--output-dir", tmp_path / "again")
    assert outcome.code == 0, outcome.stderr
    assert predictions_of(tmp_path / "again") == predictions_of(finished)
    ours, theirs = weights_of(tmp_path / "again"), weights_of(finished)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("score", "last_score", "metrics", "best", "isotropy", "data"):
        assert read_json(tmp_path / "again" / "result.json")[name] == read_json(finished / "result.json")[name]


def test_files_are_as_readable_as_the_umask_says(finished: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for name in RUN_FILES - {"model/model.safetensors"}:
        assert (finished / name).stat().st_mode & 0o777 == 0o666 & ~umask, name


def test_nothing_of_this_machine_stands_in_the_model_folder(finished: Path, bert_dir: Path) -> None:
    for path in (finished / "model").rglob("*"):
        assert str(bert_dir.parent).encode() not in path.read_bytes(), path


def test_the_summary_shows_score_isotropy_time_and_place(run: Cli, tmp_path: Path) -> None:
    outcome = run("mrpc", "--norm", "batchnorm")
    assert outcome.code == 0, outcome.stderr
    for part in (
        "MRPC",
        "f1",
        "accuracy",
        "isotropy",
        "before the norm",
        "after the norm",
        "steps",
        str(tmp_path / "out"),
    ):
        assert part in outcome.stdout
    assert "Warning" not in outcome.stderr and "Traceback" not in outcome.stderr
    assert not [line for line in outcome.stderr.splitlines() if line.startswith("[")], outcome.stderr


# The second run into the same folder.


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {name: ((folder / name).stat().st_mtime_ns, (folder / name).read_bytes()) for name in files_of(folder)}


def test_a_second_run_is_refused_and_says_what_is_there(copied: Path, cli: Cli) -> None:
    before = snapshot(copied)
    outcome = cli("run", "--config", copied / "config.yaml", "--output-dir", copied)
    assert outcome.code == 2 and outcome.stdout == ""
    for part in ("finished run", "rte", "isobn", "seed 1", "--resume", "--overwrite"):
        assert part in outcome.error
    assert snapshot(copied) == before


def test_resuming_a_finished_run_does_nothing_and_shows_it_again(copied: Path, cli: Cli) -> None:
    before = snapshot(copied)
    outcome = cli("run", "--output-dir", copied, "--resume")
    assert outcome.code == 0 and "accuracy" in outcome.stdout and "nothing to do" in outcome.stderr
    assert snapshot(copied) == before


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--task", "wnli"], "task: rte here, wnli asked for"),
        (["--norm", "none"], "norm.name: isobn here, none asked for"),
        (["--set", "norm.beta=0.25"], "norm.beta: 0.5 here, 0.25 asked for"),
        (["--seed", "2"], "seed: 1 here, 2 asked for"),
        (["--model", "tiny"], "model.name"),
        (["--data", "demo"], "data.source"),
    ],
)
def test_resuming_another_run_lists_the_differences(copied: Path, cli: Cli, options: list[str], part: str) -> None:
    before = snapshot(copied)
    outcome = cli("run", "--output-dir", copied, "--resume", *options)
    assert outcome.code == 2 and part in outcome.error
    assert snapshot(copied) == before


def test_resuming_without_the_config_of_the_run_is_refused(copied: Path, cli: Cli, glue_dir: Path) -> None:
    (copied / "config.yaml").unlink()
    outcome = cli("run", "--task", "wnli", "--model", "tiny", "--data", glue_dir, "--output-dir", copied, "--resume")
    assert outcome.code == 2 and "config.yaml is missing" in outcome.error


def test_overwrite_starts_afresh_and_touches_no_foreign_file(copied: Path, cli: Cli) -> None:
    (copied / "notes.txt").write_text("mine")
    (copied / "model" / "old.txt").write_text("of the old run")
    outcome = cli("run", "--config", copied / "config.yaml", "--output-dir", copied, "--overwrite", "--max-steps", 1)
    assert outcome.code == 0, outcome.stderr
    assert read_json(copied / "result.json")["train"]["steps"] == 1
    assert files_of(copied) == RUN_FILES | {"notes.txt"}


def test_overwrite_with_bad_inputs_leaves_the_old_run(copied: Path, cli: Cli, tmp_path: Path) -> None:
    before = snapshot(copied)
    options = ["--output-dir", copied, "--overwrite"]
    outcome = cli("run", "--config", copied / "config.yaml", *options, "--data", tmp_path / "none")
    assert outcome.code == 2
    assert snapshot(copied) == before


def test_resume_and_overwrite_exclude_each_other(cli: Cli) -> None:
    assert cli("run", "--task", "rte", "--resume", "--overwrite").code == 2


def test_resume_where_nothing_is_starts_from_the_beginning(run: Cli, tmp_path: Path) -> None:
    assert run("rte", "--resume", "--max-steps", 1).code == 0
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    outcome = run("rte", "--resume", into="foreign")
    assert outcome.code == 2 and "nothing to resume" in outcome.error


def test_a_folder_with_other_files_takes_a_run(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert run("rte", "--max-steps", 1).code == 0
    assert files_of(tmp_path / "out") == RUN_FILES | {"notes.txt"}


@pytest.mark.parametrize("text", ["{", "[]", '{"status": 5}', '{"status": "finished"}', "null", ""])
def test_a_damaged_result_file_is_said_in_one_line(copied: Path, cli: Cli, text: str) -> None:
    (copied / "result.json").write_text(text)
    outcome = cli("run", "--output-dir", copied, "--resume")
    assert outcome.code in (1, 2) and "result.json" in outcome.error and "--overwrite" in outcome.error
    outcome = cli("run", "--config", copied / "config.yaml", "--output-dir", copied)
    assert outcome.code in (1, 2) and "Traceback" not in outcome.stderr
    options = ["--overwrite", "--max-steps", 1]
    assert cli("run", "--config", copied / "config.yaml", "--output-dir", copied, *options).code == 0
