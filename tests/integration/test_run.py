"""``isobn-finetune run`` from end to end: tiny random models, invented rows, a few steps."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

Cli = Callable[..., Any]

RUN_FILES = {
    "config.yaml",
    "curves.png",
    "history.jsonl",
    "model/README.md",
    "model/config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "predictions/validation.jsonl",
    "result.json",
}


@pytest.fixture
def run(cli: Cli, bert_dir: Path, glue_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """``run("rte", "--norm", "none", into="out")``: two epochs of two steps on the small BERT, in fp32."""

    def call(task: str, *options: object, into: str = "out", model: Any = bert_dir, data: Any = glue_dir) -> Any:
        base = ["--task", task, "--model", model, "--data", data, "--output-dir", tmp_path / into]
        base += ["--precision", "fp32", "--epochs", 2, "--batch-size", 4, "--learning-rate", 1e-3]
        return cli("run", *base, *options)

    return call


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, bert_dir: Path, glue_dir: Path) -> Path:
    """A finished run of RTE with IsoBN. Tests only read it."""
    from isobn_finetune import RunConfig, fine_tune

    folder = tmp_path_factory.mktemp("finished") / "run"
    values = {
        "task": "rte",
        "model": {"name": str(bert_dir)},
        "data": {"source": str(glue_dir)},
        "norm": {"name": "isobn"},
        "precision": "fp32",
        "output_dir": str(folder),
        "train": {"epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1},
    }
    fine_tune(RunConfig.model_validate(values))
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def read_json(path: Path) -> Any:
    """Strict: NaN and infinities are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def predictions_of(folder: Path) -> bytes:
    return (folder / "predictions" / "validation.jsonl").read_bytes()


def copy_glue(glue_dir: Path, target: Path, task: str = "RTE") -> Path:
    shutil.copytree(glue_dir / task, target / task)
    return target


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


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


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


# Folders that cannot be used.


def test_an_output_folder_under_a_file_is_refused_before_any_work(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for into in ("file", "file/deeper"):
        outcome = run("rte", into=into)
        assert outcome.code == 2 and "is a file" in outcome.error and "--output-dir" in outcome.error


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_an_output_folder_without_permission_is_refused(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    outcome = run("rte", into="locked/run")
    assert outcome.code == 2 and "permission" in outcome.error


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"model": "nowhere/at all"}, ["--model"]),
        ({"model": "{tmp}/empty"}, ["{tmp}/empty"]),
        ({"data": "{tmp}/none"}, ["--data", "no such folder"]),
        ({"data": "{tmp}/empty"}, ["--data", "RTE"]),
    ],
)
def test_a_missing_model_or_data_folder_is_refused_and_nothing_is_written(
    run: Cli, tmp_path: Path, options: dict[str, str], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    outcome = run("rte", **{key: value.format(tmp=tmp_path) for key, value in options.items()})
    assert outcome.code == 2 and outcome.stdout == ""
    for part in parts:
        assert part.format(tmp=tmp_path) in outcome.error
    assert not (tmp_path / "out").exists()


def test_a_task_folder_without_a_needed_file_is_refused(run: Cli, glue_dir: Path, tmp_path: Path) -> None:
    data = copy_glue(glue_dir, tmp_path / "glue")
    (data / "RTE" / "dev.tsv").unlink()
    outcome = run("rte", data=data)
    assert outcome.code == 2 and "dev.tsv" in outcome.error and not (tmp_path / "out").exists()


def damage(model: Path, kind: str) -> None:
    weights = model / "model.safetensors"
    if kind == "cut weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "empty weights":
        weights.write_bytes(b"")
    elif kind == "config that is no JSON":
        (model / "config.json").write_text("{")
    elif kind == "config that is a list":
        (model / "config.json").write_text("[]")
    elif kind == "no tokenizer":
        for path in model.glob("*token*"):
            path.unlink()
        (model / "vocab.txt").unlink(missing_ok=True)
    elif kind == "broken tokenizer":
        (model / "tokenizer.json").write_text('{"version": "1.0"}')
    elif kind == "family that is not supported":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    elif kind == "layers missing":
        tensors = {name: tensor for name, tensor in load_file(weights).items() if "layer.1." not in name}
        save_file(tensors, weights, metadata={"format": "pt"})
    elif kind == "other shapes":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    elif kind == "width as text":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    elif kind == "vocabulary larger than the embeddings":
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab |= {word: len(vocab) + number for number, word in enumerate(("extra", "dog2"))}
        vocab["dog"], vocab["extra"] = vocab["extra"], vocab["dog"]
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    "kind",
    [
        "cut weights", "no weights", "empty weights", "config that is no JSON", "config that is a list",
        "no tokenizer", "broken tokenizer", "family that is not supported", "layers missing", "other shapes",
        "width as text", "vocabulary larger than the embeddings",
    ],
)  # fmt: skip
def test_a_damaged_model_is_refused_before_any_work(run: Cli, bert_dir: Path, tmp_path: Path, kind: str) -> None:
    model = Path(shutil.copytree(bert_dir, tmp_path / "model"))
    damage(model, kind)
    outcome = run("rte", model=model)
    assert outcome.code == 2, outcome.stderr
    assert str(model) in outcome.error and "Traceback" not in outcome.stderr
    assert not (tmp_path / "out").exists()


# B01 to B30, as far as they concern `run`.


def test_b02_quote_marks_in_texts_swallow_no_rows(run: Cli, glue_dir: Path, tmp_path: Path) -> None:
    data = copy_glue(glue_dir, tmp_path / "glue")
    header, *rows = (data / "RTE" / "train.tsv").read_text().splitlines()
    rows[1] = '1\t"The young goat sleeps.\tNo goat sleeps.\tnot_entailment'
    rows[3] = '3\tThe tired bird\tA "bird\tentailment'
    (data / "RTE" / "train.tsv").write_text("\n".join([header, *rows]))
    assert run("rte", "--max-steps", 1, data=data).code == 0
    assert read_json(tmp_path / "out" / "result.json")["data"]["rows"]["train"] == 8


def test_b03_cola_files_without_header_or_final_newline(run: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "mini" / "CoLA"
    folder.mkdir(parents=True)
    (folder / "train.tsv").write_text("".join(f"s\t{n % 2}\t*\tThe dog number {n} runs.\n" for n in range(5)))
    (folder / "dev.tsv").write_text("s\t1\t\tA cat sings.\ns\t0\t*\tcat A sings.\ns\t1\t\tA dog eats.")
    (folder / "test.tsv").write_text("index\tsentence\n0\tA cat.\n1\tA dog.\n")
    outcome = run("cola", "--max-steps", 1, data=folder.parent)
    assert outcome.code == 0, outcome.stderr
    assert read_json(tmp_path / "out" / "result.json")["data"]["rows"] == {"train": 5, "validation": 3, "test": 2}
    lines = read_lines(tmp_path / "out" / "predictions" / "validation.jsonl")
    assert [line["label"] for line in lines] == ["acceptable", "unacceptable", "acceptable"]


def test_b05_an_unknown_label_is_named_by_file_and_row_before_the_first_step(
    run: Cli, glue_dir: Path, tmp_path: Path
) -> None:
    data = copy_glue(glue_dir, tmp_path / "glue")
    header, *rows = (data / "RTE" / "dev.tsv").read_text().splitlines()
    rows[2] = rows[2].rsplit("\t", 1)[0] + "\tmaybe"
    (data / "RTE" / "dev.tsv").write_text("\n".join([header, *rows]) + "\n")
    outcome = run("rte", data=data)
    assert outcome.code == 1 and "Traceback" not in outcome.stderr
    for part in ("dev.tsv", "line 4", "maybe", "entailment", "not_entailment"):
        assert part in outcome.error
    assert not (tmp_path / "out").exists()


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9"),
}

NO_SOCKETS = """
import socket, sys
def refuse(*arguments, **options):
    raise AssertionError("a connection was tried")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from isobn_finetune.cli import main
main()
"""


def command(*arguments: object, code: str = "from isobn_finetune.cli import main; main()") -> list[str]:
    return [sys.executable, "-c", code, *(str(argument) for argument in arguments)]


def small_run(task: str, model: Path, data: Path, output: Path, *options: object) -> list[object]:
    base = ["run", "--task", task, "--model", model, "--data", data, "--output-dir", output, "--precision", "fp32"]
    return [*base, "--batch-size", 4, *options]


def test_b06_b07_b25_a_run_needs_no_network_reads_no_stray_folder_and_asks_nothing(
    bert_dir: Path, glue_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue" / "notes.txt").write_text("not GLUE")
    (tmp_path / "evaluate").mkdir()
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    done = subprocess.run(
        command(*small_run("mrpc", bert_dir, glue_dir, tmp_path / "out", "--max-steps", 1), code=NO_SOCKETS),
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert read_json(tmp_path / "out" / "result.json")["data"]["rows"] == {"train": 8, "validation": 8, "test": 4}
    written = {path.name for path in tmp_path.iterdir()}
    assert written <= {"glue", "evaluate", "cache", "home", "out"}


def test_b07_hub_data_offline_is_an_error_that_says_so(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue" / "notes.txt").write_text("not GLUE")
    monkeypatch.chdir(tmp_path)
    outcome = run("rte", data="hub")
    assert outcome.code == 2 and "not in the cache" in outcome.error and "HF_HUB_OFFLINE" in outcome.error


def test_b08_mnli_keeps_matched_and_mismatched_apart(run: Cli, tmp_path: Path) -> None:
    outcome = run("mnli")
    assert outcome.code == 0, outcome.stderr
    result = read_json(tmp_path / "out" / "result.json")
    assert set(result["metrics"]) == {"validation_matched", "validation_mismatched"}
    assert result["score"] == result["metrics"]["validation_matched"]["accuracy"]
    assert "validation_matched" in outcome.stdout and "validation_mismatched" in outcome.stdout
    names = {path.name for path in (tmp_path / "out" / "predictions").iterdir()}
    assert names == {"validation_matched.jsonl", "validation_mismatched.jsonl"}


@pytest.mark.parametrize(("task", "labels"), [("stsb", ["score"]), ("rte", ["entailment", "not_entailment"])])
def test_b09_a_checkpoint_with_another_head_gets_a_new_one(
    run: Cli, make_model: Cli, tmp_path: Path, task: str, labels: list[str]
) -> None:
    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    model = make_model("bert", "AutoModelForSequenceClassification", id2label=names)
    outcome = run(task, "--max-steps", 1, "--learning-rate", 0, "--norm", "none", model=model)
    assert outcome.code == 0, outcome.stderr
    notices = [line for line in outcome.stderr.splitlines() if "3 classes" in line]
    assert len(notices) == 1 and "is not taken over" in notices[0]
    config = read_json(tmp_path / "out" / "model" / "config.json")
    assert list(config["id2label"].values()) == labels and list(config["label2id"]) == labels
    assert "contradiction" not in json.dumps(config)
    source, saved = load_file(model / "model.safetensors"), weights_of(tmp_path / "out")
    assert saved["classifier.weight"].shape == (len(labels), 16)
    for name, tensor in source.items():
        if name.startswith("bert.") and "pooler" not in name:
            assert torch.equal(saved[name.replace("bert.", "encoder.")], tensor), name
    assert torch.equal(saved["pooler.dense.weight"], source["bert.pooler.dense.weight"])


def test_b09_going_on_from_a_run_of_another_task(run: Cli, finished: Path, tmp_path: Path) -> None:
    outcome = run("stsb", "--max-steps", 1, "--learning-rate", 0, "--norm", "batchnorm", model=finished)
    assert outcome.code == 0, outcome.stderr
    assert "not taken over" in outcome.stderr
    before, after = weights_of(finished), weights_of(tmp_path / "out")
    shared = [name for name in before if name.startswith(("encoder.", "pooler."))]
    assert shared and all(torch.equal(before[name], after[name]) for name in shared)
    assert "norm.running_cov" not in after


STSB_SCORES = (0, 0.7, 1.4, 2.1, 2.8, 3.6, 4.3, 5.0)


def write_stsb(folder: Path, scores: Any) -> Path:
    words = ["dog", "cat", "horse", "bird", "fish", "goat", "old", "young", "happy", "tired"]
    header = "\t".join(f"c{n}" for n in range(7)) + "\tsentence1\tsentence2\tscore\n"
    lines = [f"{'x'.join(str(n))}" + "\tx" * 6 + f"\tThe {words[n % 10]} runs.\tA {words[-1 - n % 10]} eats.\t{score}\n"
             for n, score in enumerate(scores)]  # fmt: skip
    (folder / "STS-B").mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        (folder / "STS-B" / name).write_text(header + "".join(lines))
    return folder


def test_b10_regression_learns_each_score_and_not_their_mean(run: Cli, tmp_path: Path) -> None:
    data = write_stsb(tmp_path / "data", STSB_SCORES)
    options = ["--max-steps", 150, "--batch-size", 8, "--norm", "none", "--learning-rate", 5e-3]
    outcome = run("stsb", *options, "--set", "train.eval_steps=150", "--set", "train.warmup_ratio=0", data=data)
    assert outcome.code == 0, outcome.stderr
    result = read_json(tmp_path / "out" / "result.json")
    assert result["metrics"]["validation"]["pearson"] > 0.9 and result["primary_metric"] == "spearmanr"
    assert "size" not in outcome.stderr
    lines = read_lines(tmp_path / "out" / "predictions" / "validation.jsonl")
    assert [line["label"] for line in lines] == [float(score) for score in STSB_SCORES]
    assert all(set(line) == {"idx", "prediction", "label"} for line in lines)


def test_b10_a_last_evaluation_batch_of_one_row_changes_no_prediction(run: Cli, tmp_path: Path) -> None:
    data = write_stsb(tmp_path / "data", (*STSB_SCORES, 3.3))
    values = []
    for batch in (8, 3):
        options = ["--max-steps", 2, "--set", f"train.eval_batch_size={batch}"]
        outcome = run("stsb", *options, data=data, into=f"by-{batch}")
        assert outcome.code == 0, outcome.stderr
        lines = read_lines(tmp_path / f"by-{batch}" / "predictions" / "validation.jsonl")
        values.append(torch.tensor([line["prediction"] for line in lines]))
    assert len(values[0]) == 9
    torch.testing.assert_close(*values, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("task", "setting", "part"),
    [
        ("cola", "train.best_metric=f1", "matthews_correlation"),
        ("rte", "train.save_steps=50", "eval_steps"),
    ],
)
def test_b11_best_model_settings_are_checked_before_the_model_is_read(
    run: Cli, tmp_path: Path, task: str, setting: str, part: str
) -> None:
    outcome = run(task, "--set", setting, model=tmp_path / "no-model")
    assert outcome.code == 2 and part in outcome.error and "no-model" not in outcome.error


def test_b11_shares_of_the_steps_are_taken(run: Cli, tmp_path: Path) -> None:
    settings = ["--set", "train.eval_steps=0.25", "--set", "train.save_steps=0.5", "--set", "train.logging_steps=1"]
    assert run("rte", *settings, "--max-steps", 8).code == 0
    lines = read_lines(tmp_path / "out" / "history.jsonl")
    assert [line["step"] for line in lines if line["event"] == "evaluation"] == [2, 4, 6, 8]


@pytest.mark.parametrize("norm", ["batchnorm", "isobn"])
@pytest.mark.parametrize("drop_last", ["true", "false"])
def test_b15_a_last_training_batch_of_one_row(run: Cli, tmp_path: Path, norm: str, drop_last: str) -> None:
    data = write_stsb(tmp_path / "data", (*STSB_SCORES, 3.3))
    options = ["--norm", norm, "--batch-size", 8, "--epochs", 1, "--set", f"train.drop_last={drop_last}"]
    outcome = run("stsb", *options, data=data)
    assert outcome.code == 0, outcome.stderr
    said = [line for line in outcome.stderr.splitlines() if "last batch" in line]
    assert len(said) == 1, outcome.stderr
    weights = weights_of(tmp_path / "out")
    assert all(tensor.isfinite().all() for name, tensor in weights.items() if name.startswith("norm."))
    assert int(weights["norm.num_batches_tracked"]) == 1
    assert read_json(tmp_path / "out" / "result.json")["train"]["steps"] == (1 if drop_last == "true" else 2)


def test_b15_fewer_rows_than_a_batch_still_make_a_step(run: Cli, tmp_path: Path) -> None:
    assert run("rte", "--batch-size", 64, "--epochs", 1).code == 0
    assert read_json(tmp_path / "out" / "result.json")["train"]["steps"] == 1
    assert int(weights_of(tmp_path / "out")["norm.num_batches_tracked"]) == 1


@pytest.mark.parametrize("norm", ["batchnorm", "isobn"])
def test_b15_a_batch_size_of_one_is_refused_with_advice(run: Cli, norm: str) -> None:
    outcome = run("rte", "--norm", norm, "--batch-size", 1)
    assert outcome.code == 2 and norm in outcome.error and "--batch-size 2" in outcome.error


@pytest.mark.parametrize("norm", ["batchnorm", "isobn"])
def test_b17_gradient_checkpointing_counts_no_statistics_twice(run: Cli, tmp_path: Path, norm: str) -> None:
    saved = []
    for checkpointing in ("false", "true"):
        setting = f"train.gradient_checkpointing={checkpointing}"
        assert run("rte", "--norm", norm, "--set", setting, into=checkpointing).code == 0
        saved.append(weights_of(tmp_path / checkpointing))
    assert int(saved[0]["norm.num_batches_tracked"]) == int(saved[1]["norm.num_batches_tracked"]) > 0
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["albert", "mpnet"])
def test_b17_gradient_checkpointing_is_refused_where_the_encoder_cannot(
    run: Cli, make_model: Cli, tmp_path: Path, family: str
) -> None:
    outcome = run("rte", "--set", "train.gradient_checkpointing=true", model=make_model(family))
    assert outcome.code == 2 and "gradient_checkpointing" in outcome.error
    assert not (tmp_path / "out").exists()


def test_b20_fp16_without_a_gpu_is_refused(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = run("rte", "--precision", "fp16", "--max-steps", 1)
    assert outcome.code == 2 and "fp16" in outcome.error and "GPU" in outcome.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("norm", ["batchnorm", "isobn"])
def test_b21_statistics_of_a_bf16_run_are_float32_and_near_those_of_fp32(run: Cli, tmp_path: Path, norm: str) -> None:
    saved = []
    for precision in ("fp32", "bf16"):
        options = ["--norm", norm, "--precision", precision, "--epochs", 10, "--learning-rate", 1e-4]
        assert run("rte", *options, "--set", "train.eval_steps=20", into=precision).code == 0
        saved.append(weights_of(tmp_path / precision))
        assert read_json(tmp_path / precision / "result.json")["train"]["precision"] == precision
    running = [name for name in saved[0] if name.startswith("norm.running")]
    assert running
    for name in running:
        assert saved[1][name].dtype == torch.float32 and saved[1][name].isfinite().all()
        torch.testing.assert_close(saved[1][name], saved[0][name], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("norm", ["none", "isobn"])
def test_b22_a_diverged_run_says_so_and_saves_no_model(run: Cli, tmp_path: Path, norm: str) -> None:
    settings = ["--set", "train.logging_steps=1", "--set", "train.warmup_ratio=0", "--set", "train.max_grad_norm=0"]
    outcome = run("rte", "--norm", norm, "--learning-rate", 1e30, "--max-steps", 6, *settings)
    assert outcome.code == 1 and "not finite" in outcome.error and "step " in outcome.error
    result = read_json(tmp_path / "out" / "result.json")
    assert result["status"] == "diverged" and result["score"] is None and "step " in result["reason"]
    assert not (tmp_path / "out" / "model").exists()
    for line in read_lines(tmp_path / "out" / "history.jsonl"):
        read = json.dumps(line, allow_nan=False)
        assert "NaN" not in read
        if line.get("loss", 0) is None:
            assert "loss" in line["reason"]


def test_b22_a_loss_that_overflows_between_two_logs_is_seen(run: Cli, tmp_path: Path) -> None:
    outcome = run("stsb", data=write_stsb(tmp_path / "data", (1e38, 2e38, 1e38, 3)))
    assert outcome.code == 1 and "step 1: the training loss is not finite" in outcome.error
    assert read_json(tmp_path / "out" / "result.json")["status"] == "diverged"


def test_an_undefined_score_is_null_with_its_reason_once(run: Cli, tmp_path: Path) -> None:
    outcome = run("stsb", data=write_stsb(tmp_path / "data", (1, 1, 1, 1)))
    assert outcome.code == 0, outcome.stderr
    result = read_json(tmp_path / "out" / "result.json")
    assert result["status"] == "finished" and result["score"] is None
    assert result["metrics"]["validation"] == {"spearmanr": None, "pearson": None}
    assert result["reason"].count("all labels are equal") == 1 and "undefined" in outcome.stdout


def test_b23_accumulation_equals_a_larger_batch_without_a_norm(run: Cli, tmp_path: Path) -> None:
    saved, losses = [], []
    for batch, accumulate in ((8, 1), (4, 2)):
        into = f"{batch}x{accumulate}"
        settings = ["--set", f"train.gradient_accumulation_steps={accumulate}", "--set", "train.logging_steps=1"]
        options = ["--norm", "none", "--batch-size", batch, "--epochs", 3, *settings]
        assert run("rte", *options, "--set", "train.best_metric=accuracy", into=into).code == 0
        lines = read_lines(tmp_path / into / "history.jsonl")
        losses.append([line["loss"] for line in lines if line["event"] == "train"])
        saved.append(weights_of(tmp_path / into))
    assert len(losses[0]) == 3
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=1e-4, rtol=0)
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, atol=1e-5, rtol=0)


def test_b23_each_micro_batch_is_one_batch_for_a_norm(run: Cli, tmp_path: Path) -> None:
    settings = ["--set", "train.gradient_accumulation_steps=2", "--set", "train.eval_steps=3"]
    outcome = run("rte", "--norm", "batchnorm", "--epochs", 3, *settings)
    assert outcome.code == 0, outcome.stderr
    assert read_json(tmp_path / "out" / "result.json")["train"]["steps"] == 3
    assert int(weights_of(tmp_path / "out")["norm.num_batches_tracked"]) == 6


def test_b24_a_seed_repeats_a_run_to_the_byte_and_another_differs(run: Cli, tmp_path: Path) -> None:
    for into, seed in (("a", 7), ("b", 7), ("c", 8)):
        assert run("rte", "--seed", seed, "--max-steps", 2, into=into).code == 0
    assert predictions_of(tmp_path / "a") == predictions_of(tmp_path / "b")
    assert (tmp_path / "a" / "history.jsonl").read_bytes() == (tmp_path / "b" / "history.jsonl").read_bytes()
    assert predictions_of(tmp_path / "a") != predictions_of(tmp_path / "c")
    first = weights_of(tmp_path / "a")
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights_of(tmp_path / "b").items())


def test_b24_another_seed_draws_another_head_at_step_0(bert_dir: Path) -> None:
    from isobn_finetune.inputs import seed_everything
    from isobn_finetune.loading import create_model
    from isobn_finetune.tasks import get_task

    heads = []
    for seed in (7, 7, 8):
        seed_everything(seed)
        heads.append(create_model(bert_dir, get_task("rte"), {"name": "none"}).classifier.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_b25_a_tracker_that_is_not_installed_is_refused(run: Cli, tmp_path: Path) -> None:
    import importlib.util

    if importlib.util.find_spec("trackio") is not None:
        pytest.skip("trackio is installed")
    outcome = run("rte", "--set", "train.report_to=trackio")
    assert outcome.code == 2 and "pip install trackio" in outcome.error and not (tmp_path / "out").exists()


def test_b25_a_tracker_without_key_and_terminal_is_refused(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobn_finetune import trackers

    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    outcome = run("rte", "--set", "train.report_to=wandb")
    assert outcome.code == 2 and "WANDB_API_KEY" in outcome.error


def test_b26_a_crash_shows_neither_rows_nor_tokens(
    run: Cli, glue_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobn_finetune import training

    data = copy_glue(glue_dir, tmp_path / "glue")
    path = data / "RTE" / "train.tsv"
    path.write_text(path.read_text().replace("The old dog", "private-row-zebra"))
    monkeypatch.setenv("HF_TOKEN", "tok_invented_98765")

    def fail(*arguments: object, **options: object) -> None:
        token = os.environ["HF_TOKEN"]
        raise RuntimeError(f"private-row-zebra {token}")

    monkeypatch.setattr(training, "plot_curves", fail)
    outcome = run("rte", "--max-steps", 1, data=data)
    assert outcome.code == 1 and "RuntimeError" in outcome.error and "--debug" in outcome.error
    assert "Traceback" not in outcome.stderr
    result = read_json(tmp_path / "out" / "result.json")
    assert result["status"] == "failed" and result["reason"]
    for text in (outcome.stdout, outcome.stderr, (tmp_path / "out" / "result.json").read_text()):
        assert "zebra" not in text and "98765" not in text
    outcome = run("rte", "--max-steps", 1, "--debug", data=data, into="debug")
    assert outcome.code == 1 and "Traceback" in outcome.stderr


@pytest.mark.parametrize("max_length", [64, 65, 66, 512])
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_b27_rows_longer_than_the_positions_of_roberta_are_cut(
    run: Cli, roberta_dir: Path, tmp_path: Path, max_length: int, packing: str
) -> None:
    folder = tmp_path / "data" / "SST-2"
    folder.mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        rows = [f"{'dog ' * 80}\t{n % 2}" for n in range(4)]
        (folder / name).write_text("\n".join(["sentence\tlabel", *rows]))
    options = ["--max-length", max_length, "--max-steps", 1, "--set", f"train.packing={packing}"]
    outcome = run("sst2", *options, model=roberta_dir, data=folder.parent)
    assert outcome.code == 0, outcome.stderr
    notices = [line for line in outcome.stderr.splitlines() if "cut at 64" in line]
    assert len(notices) == (0 if max_length == 64 else 1)


def test_b28_roberta_gets_one_calm_notice_of_its_new_pooler(run: Cli, roberta_dir: Path, tmp_path: Path) -> None:
    outcome = run("rte", "--max-steps", 1, model=roberta_dir)
    assert outcome.code == 0
    assert len([line for line in outcome.stderr.splitlines() if "pooler" in line]) == 1
    assert "warning" not in outcome.stderr and "newly initialized" not in outcome.stderr


def test_b28_a_model_without_its_pooler_or_head_is_an_error(copied: Path) -> None:
    from isobn_finetune import load_model
    from isobn_finetune.errors import ConfigError

    path = copied / "model" / "model.safetensors"
    whole = load_file(path)
    for part in ("pooler.dense.weight", "classifier.bias", "norm.running_cov", "norm.running_std"):
        save_file({name: tensor for name, tensor in whole.items() if name != part}, path, metadata={"format": "pt"})
        with pytest.raises(ConfigError):
            load_model(copied)


def test_b29_hidden_states_asked_for_by_the_config_are_not_gathered(run: Cli, make_model: Cli, tmp_path: Path) -> None:
    model = make_model("bert", "AutoModel", output_hidden_states=True, return_dict=False)
    outcome = run("rte", "--max-steps", 1, model=model)
    assert outcome.code == 0, outcome.stderr
    assert len(read_lines(tmp_path / "out" / "predictions" / "validation.jsonl")) == 8


# Signals.


def start(arguments: list[object], tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), env={**os.environ, **OFFLINE}, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


STEPS = 160


def long_run(bert_dir: Path, glue_dir: Path, output: Path) -> list[object]:
    settings = ["--set", "train.logging_steps=1", "--set", "train.eval_steps=20", "--max-steps", STEPS]
    return small_run("rte", bert_dir, glue_dir, output, "--learning-rate", 1e-3, *settings)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, bert_dir: Path, glue_dir: Path) -> Path:
    from isobn_finetune.cli import main

    folder = tmp_path_factory.mktemp("long") / "whole"
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in long_run(bert_dir, glue_dir, folder)])
    assert not leaving.value.code
    return folder


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_is_resumed_to_the_same_end(
    bert_dir: Path, glue_dir: Path, uninterrupted: Path, cli: Cli, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    process = start(long_run(bert_dir, glue_dir, folder), tmp_path)
    wait_for(lambda: any(folder.glob("checkpoints/checkpoint-*/trainer_state.json")), process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert not (folder / "result.json").exists()
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "--resume" in errors.splitlines()[-1], errors
    outcome = cli("run", "--output-dir", folder, "--resume")
    assert outcome.code == 0, outcome.stderr
    assert "Going on from step" in outcome.stderr
    assert files_of(folder) == RUN_FILES
    ours, theirs = read_json(folder / "result.json"), read_json(uninterrupted / "result.json")
    assert ours["train"]["steps"] == theirs["train"]["steps"] == STEPS
    steps = [line["step"] for line in read_lines(folder / "history.jsonl") if line["event"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    assert ours["score"] == theirs["score"] and ours["best"] == theirs["best"]
    assert predictions_of(folder) == predictions_of(uninterrupted)
