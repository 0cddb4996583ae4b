"""Faults that users met in other tools (B01 to B30), as far as they concern ``isobn-finetune run``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import OFFLINE, command, copy_glue, predictions_of, read_json, read_lines, small_run, weights_of
from safetensors.torch import load_file, save_file

Cli = Callable[..., Any]


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


NO_SOCKETS = """
import socket, sys
def refuse(*arguments, **options):
    raise AssertionError("a connection was tried")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from isobn_finetune.cli import main
main()
"""


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
