from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobn_finetune.version import __version__

Cli = Callable[..., Any]

HEAVY = ("torch", "transformers", "datasets", "evaluate", "scipy", "sklearn", "matplotlib", "accelerate", "numpy")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["analyze", "--help"],
        ["list", "--help"],
        ["validate", "--help"],
        ["list", "tasks"],
        ["list", "norms"],
        ["list", "models"],
        ["run", "--task", "mnlli", "--model", "tiny"],
        ["run", "--task", "rte", "--norm", "iso-bn"],
        ["--version"],
    ],
)
def test_help_lists_and_wrong_names_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom isobn_finetune.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, isobn_finetune\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isobn_finetune", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__


def test_public_names_are_there() -> None:
    import isobn_finetune

    for name in ("IsoBN", "RunConfig", "explained_variance", "fine_tune", "load_model"):
        assert callable(getattr(isobn_finetune, name)) and name in dir(isobn_finetune)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        isobn_finetune.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--task", "mnlli"], ["mnlli", "mnli, qnli, sst2", "Did you mean 'mnli'?"]),
        (["--task", "rte", "--norm", "iso-bn"], ["iso-bn", "none, batchnorm, isobn", "Did you mean 'isobn'?"]),
        (["--task", "rte", "--batch-size", "-1"], ["train.batch_size", "-1"]),
        (["--task", "rte", "--batch-size", "0"], ["train.batch_size"]),
        (["--task", "rte", "--epochs", "0"], ["train.epochs"]),
        (["--task", "rte", "--epochs", "nan"], ["train.epochs"]),
        (["--task", "rte", "--epochs", "many"], ["--epochs", "valid number"]),
        (["--task", "rte", "--learning-rate", "-1"], ["train.learning_rate"]),
        (["--task", "rte", "--precision", "fp8"], ["precision", "fp32"]),
        (["--task", "rte", "--set", "train.epoch=3"], ["train.epoch", "train.epochs"]),
        (["--task", "rte", "--set", "nonsense"], ["--set", "section.key=value"]),
        (["--task", "rte", "--no-such-option"], ["--no-such-option"]),
        (["--task"], ["--task"]),
        (["--task", "rte", "extra"], ["extra"]),
        ([], ["task", "required"]),
        (["--task", "rte", "--config", "no-such-file.yaml"], ["no-such-file.yaml"]),
    ],
)
def test_b30_wrong_options_exit_2_with_one_plain_line(cli: Cli, options: list[str], parts: list[str]) -> None:
    outcome = cli("run", *options)
    assert outcome.code == 2 and outcome.stdout == ""
    assert len(outcome.stderr.strip().splitlines()) == 1 and outcome.stderr.startswith("isobn-finetune: ")
    assert "\u256d" not in outcome.stderr  # a box
    for part in parts:
        assert part in outcome.stderr


def test_an_unknown_command_exits_2_in_one_line(cli: Cli) -> None:
    outcome = cli("runn")
    assert outcome.code == 2 and "runn" in outcome.stderr and len(outcome.stderr.strip().splitlines()) == 1


def test_no_command_shows_the_help(cli: Cli) -> None:
    outcome = cli()
    assert "run" in outcome.stdout + outcome.stderr and "Traceback" not in outcome.stderr


@pytest.mark.parametrize("command", ["run", "validate", "analyze"])
def test_help_says_what_each_option_means_and_gives_an_example(cli: Cli, command: str) -> None:
    outcome = cli(command, "--help")
    assert outcome.code == 0 and "Example" in outcome.stdout


def test_lists_name_tasks_norms_and_models(cli: Cli) -> None:
    assert all(task in cli("list", "tasks").stdout for task in ("mnli", "STS-B", "matthews_correlation"))
    assert all(norm in cli("list", "norms").stdout for norm in ("none", "batchnorm", "isobn", "bias_correction=False"))
    assert all(model in cli("list", "models").stdout for model in ("tiny", "roberta-base", "ModernBERT"))


def test_validate_says_what_a_config_would_do(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "ok.yaml"
    path.write_text("task: STS-B\nmodel: tiny\nnorm: none\n")
    outcome = cli("validate", path)
    assert outcome.code == 0 and "valid" in outcome.stdout and "runs/tiny/stsb/none/seed_1" in outcome.stdout
    path.write_text("task: rte\nnorm: {name: iso_bn}\n")
    outcome = cli("validate", path)
    assert outcome.code == 2 and outcome.error.startswith(f"isobn-finetune: {path}: norm.name: unknown norm 'iso_bn'")


def test_a_config_file_yields_to_set_and_set_to_named_options(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobn_finetune import training

    seen: list[Any] = []

    def record(config: Any, **options: Any) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "fine_tune", record)
    path = tmp_path / "c.yaml"
    path.write_text("task: rte\nmodel: tiny\nseed: 1\ntrain: {epochs: 1, batch_size: 2, max_steps: 1}\n")
    options = ["--set", "train.batch_size=3", "--set", "seed=2", "--set", "train.max_steps=null", "--seed", 3]
    outcome = cli("run", "--config", path, *options)
    assert outcome.code == 130 and outcome.error == "isobn-finetune: interrupted"
    config = seen[0]
    assert (config.train.epochs, config.train.batch_size, config.train.max_steps, config.seed) == (1, 3, None, 3)


def test_messages_appear_once_however_often_the_program_is_called(cli: Cli, tmp_path: Path) -> None:
    import logging

    for _ in range(3):
        cli("list", "tasks")
    handlers = logging.getLogger("isobn_finetune").handlers
    assert len([handler for handler in handlers if type(handler).__name__ == "_StderrHandler"]) == 1
