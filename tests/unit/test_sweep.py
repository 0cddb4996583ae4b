from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobn_finetune.config import RunConfig
from isobn_finetune.errors import ConfigError, DataError, InterruptedRunError
from isobn_finetune.launchers import share_of_machine, visible_gpus
from isobn_finetune.live_view import LiveView, PlainView, format_seconds, read_progress
from isobn_finetune.run_folder import RunFolder, write_json
from isobn_finetune.sweep import Sweep, plan_sweep, run_sweep
from isobn_finetune.sweep_config import SlurmConfig, create_sweep, expand, load_sweep
from isobn_finetune.sweep_run import RunState, execute

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL: dict[str, Any] = {
    "base": {"model": "tiny"},
    "grid": {"task": ["rte", "mrpc"], "norm": ["none", "isobn"], "seed": [1, 2, 3]},
}


def refused(values: dict[str, Any], *parts: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand(create_sweep(values, "file.yaml"), "runs")
    message = str(error.value)
    assert message.startswith("file.yaml: ") and "\n" not in message
    for part in parts:
        assert part in message, message


def score_of(config: RunConfig) -> float:
    return round(0.5 + 0.01 * config.seed + 0.1 * (config.task == "rte"), 4)


def fake_fine_tune(config: RunConfig, *, resume: bool, overwrite: bool) -> None:
    """Leaves what a run leaves, without a model."""
    folder = RunFolder(str(config.output_dir))
    if overwrite:
        folder.clear()
    folder.start(config)
    result = {"schema": 1, "status": "finished", "task": config.task, "model": config.model.name, "seed": config.seed}
    result |= {"norm": config.norm.model_dump(), "score": score_of(config), "train": {"seconds": 2.0}}
    write_json(folder.result, result)


def plan(folder: Path, values: dict[str, Any] = SMALL) -> Sweep:
    return plan_sweep(create_sweep(values, "file.yaml"), folder)


def statuses(sweep: Sweep) -> dict[str, str]:
    return {path: state.status for path, state in sweep.states.items()}


def test_runs_come_seed_by_seed_in_folders_named_by_what_varies() -> None:
    values = {
        "base": {"model": "org/small-bert"},
        "grid": {
            "seed": [2, 1],
            "task": ["STS-B", "rte"],
            "norm": ["none", {"name": "isobn", "bias_correction": True, "eps": "1e-5"}],
            "train.learning_rate": ["1e-5", 2.0e-5],
        },
    }
    runs = expand(create_sweep(values), "runs")
    assert [run.config.seed for run in runs] == [2] * 8 + [1] * 8
    assert runs[0].path == "org--small-bert/stsb/none-learning_rate=1e-05/seed_2"
    assert runs[3].path == "org--small-bert/stsb/isobn-bias_correction=true-eps=1e-05-learning_rate=2e-05/seed_2"
    assert runs[3].config.output_dir == f"runs/{runs[3].path}"
    assert runs[3].setting == {"train.learning_rate": 2e-5}
    assert (runs[3].config.norm.eps, runs[3].config.train.learning_rate) == (1e-5, 2e-5)


def test_a_whole_section_may_be_an_axis() -> None:
    values = {"grid": {"task": ["rte"], "train": [{"epochs": 1}, {"epochs": 2, "batch_size": 8}]}}
    runs = expand(create_sweep(values), "runs")
    assert [run.path.split("/")[2] for run in runs] == ["isobn-epochs=1", "isobn-epochs=2-batch_size=8"]


def test_zip_takes_the_lists_side_by_side() -> None:
    values = {
        "base": {"task": "rte"},
        "zip": {"model": ["bert-base-cased", "roberta-large"], "train.learning_rate": [5e-5, 1e-5]},
    }
    runs = expand(create_sweep(values), "runs")
    assert [(run.config.model.name, run.config.train.learning_rate) for run in runs] == [
        ("bert-base-cased", 5e-5),
        ("roberta-large", 1e-5),
    ]


def test_an_option_of_one_norm_multiplies_only_the_runs_of_that_norm() -> None:
    values = {"base": {"task": "rte"}, "grid": {"norm": ["none", "batchnorm", "isobn"], "norm.beta": [0.25, 0.5, 1]}}
    assert [run.path.split("/")[2] for run in expand(create_sweep(values), "runs")] == [
        "none",
        "batchnorm",
        "isobn-beta=0.25",
        "isobn-beta=0.5",
        "isobn-beta=1",
    ]
    refused({"base": {"task": "rte", "norm": "none"}, "grid": {"norm.beta": [0.25, 0.5]}}, "no norm of this sweep")


def test_a_task_from_which_others_start_comes_first_within_its_seed() -> None:
    values = {
        "grid": {"task": ["rte", "stsb", "mnli"], "norm": ["none", "isobn"], "seed": [1, 2]},
        "init_from": {"rte": "mnli", "STS-B": "MNLI"},
    }
    runs = expand(create_sweep(values), "runs")
    assert [run.config.task for run in runs] == ["mnli", "mnli", "rte", "rte", "stsb", "stsb"] * 2
    assert runs[3].sources == ("roberta-base/mnli/isobn/seed_1",)
    assert runs[8].sources == ("roberta-base/mnli/none/seed_2",)
    refused({"grid": {"task": ["rte"]}, "init_from": {"rte": "mnli"}}, "init_from", "no run of mnli")
    refused({"grid": {"task": ["rte"]}, "init_from": {"rte": "mnli", "mnli": "rte"}}, "circle")
    refused({"grid": {"task": ["rte"]}, "init_from": {"rte": "mnly"}}, "init_from", "mnli")


def test_bad_sweep_files_are_refused_in_one_line() -> None:
    refused({**SMALL, "gird": {}}, "unknown key 'gird'", "'grid'")
    refused({"base": {}}, "either 'grid:' or 'zip:'")
    refused({**SMALL, "zip": {"seed": [1]}}, "grid and zip")
    refused({"grid": {}}, "names no key")
    refused({"grid": {"task": ["rte"], "seed": []}}, "grid.seed", "empty")
    refused({"grid": {"task": "rte"}}, "grid.task", "expected a list")
    refused({"grid": {"task": ["rte"], "seed": [1, 2, 1]}}, "same folder", "seed_1")
    refused({"grid": {"task": ["rte"], "model": ["a/b", "a--b"]}}, "same folder")
    refused({"grid": {"task": ["rte"], "train.learnig_rate": [1e-5]}}, "learnig_rate", "train.learning_rate")
    refused({"grid": {"task": ["rte"], "norm.betta": [1]}}, "betta")
    refused({"grid": {"task": ["rte", "mnly"]}}, "mnly", "mnli")
    refused({"grid": {"task": ["rte"]}, "base": {"output_dir": "x"}}, "output_dir")
    refused({"zip": {"task": ["rte", "mrpc"], "seed": [1]}}, "equal length", "task has 2")
    refused({"grid": {"task": ["rte"]}, "slurm": {"partitoin": "x"}}, "slurm.partitoin", "partition")
    refused({"grid": {"task": ["rte"]}, "slurm": {"gpus": -1}}, "slurm.gpus")
    refused({"grid": ["task"]}, "grid", "keys and values")
    refused({"task": "rte", "train": {"epochs": 1}}, "single run")
    refused({"grid": {3: ["rte"], "task": ["rte"]}}, "grid.3", "name of a config key")
    refused({"base": {"norm": 3}, "grid": {"task": ["rte"], "seed": [1]}}, "norm")
    refused({"grid": {"task": [["rte"]]}}, "task")


def test_options_lie_over_the_file_and_over_its_lists(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    assignments = [("seed", [4, 5]), ("task", "cola"), ("model", "other"), ("train.epochs", 2), ("slurm.gpus", 0)]
    sweep = load_sweep(file, assignments)
    runs = expand(sweep, "runs")
    assert [(run.config.task, run.config.seed) for run in runs] == [("cola", 4)] * 2 + [("cola", 5)] * 2
    assert all(run.config.train.epochs == 2 and run.model == "other" for run in runs)
    assert sweep.slurm == SlurmConfig(gpus=0)


def test_all_runs_are_done_once_and_a_second_sweep_does_nothing(tmp_path: Path) -> None:
    done = []

    def count(config: RunConfig, **options: bool) -> None:
        done.append(config.output_dir)
        fake_fine_tune(config, **options)

    for _ in range(2):
        sweep = plan(tmp_path / "s")
        run_sweep(sweep, fine_tune=count)
        assert set(statuses(sweep).values()) == {"finished"}
    assert len(done) == len(set(done)) == 12


def test_a_failing_run_is_recorded_stops_no_other_and_is_retried_only_when_asked(tmp_path: Path) -> None:
    broken = True

    def fail_one(config: RunConfig, **options: bool) -> None:
        if broken and config.task == "rte" and config.norm.name == "none" and config.seed == 2:
            raise DataError("train.tsv, row 3: no label")
        fake_fine_tune(config, **options)

    bad = "tiny/rte/none/seed_2"
    sweep = plan(tmp_path)
    run_sweep(sweep, fine_tune=fail_one)
    assert [run.path for run in sweep.bad] == [bad] and sweep.count("finished") == 11
    result = json.loads((tmp_path / bad / "result.json").read_text())
    assert (result["status"], result["reason"], result["task"]) == ("failed", "train.tsv, row 3: no label", "rte")
    broken = False
    sweep = plan(tmp_path)
    assert sweep.pending() == [] and len(sweep.pending(retry_failed=True)) == 1
    run_sweep(sweep, fine_tune=fail_one)
    assert [run.path for run in sweep.bad] == [bad]
    run_sweep(sweep, fine_tune=fail_one, retry_failed=True)
    assert sweep.bad == [] and sweep.count("finished") == 12


def test_an_interrupt_ends_the_sweep_and_leaves_the_rest(tmp_path: Path) -> None:
    def interrupted(config: RunConfig, **options: bool) -> None:
        if config.seed == 2:
            raise InterruptedRunError("SIGTERM")
        fake_fine_tune(config, **options)

    sweep = plan(tmp_path)
    with pytest.raises(InterruptedRunError):
        run_sweep(sweep, fine_tune=interrupted)
    sweep.refresh()
    assert sweep.count("finished") == 4 and sweep.count("waiting") == 8


def test_a_task_starts_from_the_best_model_of_its_source(tmp_path: Path) -> None:
    values = {
        "grid": {"task": ["rte", "mnli"], "norm": ["isobn"], "train.learning_rate": [1e-5, 2e-5]},
        "init_from": {"rte": "mnli"},
    }
    started_from = {}

    def remember(config: RunConfig, **options: bool) -> None:
        fake_fine_tune(config, **options)
        started_from[str(config.output_dir)] = config.model.name
        if config.task == "mnli" and config.train.learning_rate == 2e-5:
            file = RunFolder(str(config.output_dir)).result
            file.write_text(file.read_text().replace(f"{score_of(config)}", "0.99"))

    sweep = plan(tmp_path, values)
    run_sweep(sweep, fine_tune=remember)
    best = (tmp_path / "roberta-base/mnli/isobn-learning_rate=2e-05/seed_1").resolve()
    rte = {name for folder, name in started_from.items() if "/rte/" in folder}
    assert rte == {str(best)} and sweep.count("finished") == 4


def test_a_task_whose_source_failed_is_recorded_as_failed(tmp_path: Path) -> None:
    def fail(config: RunConfig, **options: bool) -> None:
        if config.task == "mnli":
            raise DataError("no rows")
        fake_fine_tune(config, **options)

    sweep = plan(tmp_path, {"grid": {"task": ["rte", "mnli"]}, "init_from": {"rte": "mnli"}})
    run_sweep(sweep, fine_tune=fail)
    assert "starts from roberta-base/mnli/isobn/seed_1" in str(sweep.states["roberta-base/rte/isobn/seed_1"].reason)


def test_a_folder_of_another_sweep_or_run_is_refused_and_more_seeds_are_welcome(tmp_path: Path) -> None:
    run_sweep(plan(tmp_path), fine_tune=fake_fine_tune)
    for change in (
        {"base": {"model": "tiny", "train": {"epochs": 3}}},
        {"grid": {**SMALL["grid"], "train.epochs": [1]}},
    ):
        with pytest.raises(ConfigError, match="holds another sweep"):
            plan(tmp_path, {**SMALL, **change})
    more = plan(tmp_path, {**SMALL, "grid": {**SMALL["grid"], "seed": [4]}})
    assert len(more.pending()) == 4
    run_sweep(more, fine_tune=fake_fine_tune)
    assert yaml.safe_load((tmp_path / "sweep.yaml").read_text())["grid"]["seed"] == [1, 2, 3, 4]
    assert plan(tmp_path).count("finished") == 12

    config = tmp_path / "tiny/rte/none/seed_1/config.yaml"
    config.write_text(config.read_text().replace("epochs: 5", "epochs: 6"))
    with pytest.raises(ConfigError, match="holds another run: train.epochs: 6"):
        plan(tmp_path)
    with pytest.raises(ConfigError, match="single run"):
        plan(tmp_path / "tiny/rte/none/seed_2")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        plan(tmp_path / "file")


def test_a_damaged_result_is_named_left_alone_and_redone_only_when_asked(tmp_path: Path) -> None:
    sweep = plan(tmp_path)
    run_sweep(sweep, fine_tune=fake_fine_tune)
    result = tmp_path / "tiny/mrpc/isobn/seed_3/result.json"
    result.write_text(result.read_text()[:20])
    sweep = plan(tmp_path)
    run_sweep(sweep, fine_tune=fake_fine_tune)
    assert [run.path for run in sweep.bad] == ["tiny/mrpc/isobn/seed_3"]
    assert "result.json" in str(sweep.states["tiny/mrpc/isobn/seed_3"].reason)
    run_sweep(sweep, fine_tune=fake_fine_tune, retry_failed=True)
    assert sweep.bad == []


def test_a_run_that_another_process_is_on_is_left_to_it(tmp_path: Path) -> None:
    sweep = plan(tmp_path)
    first = sweep.runs[0]

    def inside(config: RunConfig, **options: bool) -> None:
        program = (
            "import sys, pickle; from isobn_finetune.sweep_run import execute; "
            "print(execute(*pickle.load(sys.stdin.buffer)).status)"
        )
        answer = subprocess.run(
            [sys.executable, "-c", program], input=pickle.dumps((first, tmp_path)), capture_output=True, check=True
        )
        assert answer.stdout.decode().strip() == "busy"
        fake_fine_tune(config, **options)

    assert execute(first, tmp_path, fine_tune=inside).status == "finished"


def test_the_time_left_is_that_of_finished_runs_of_the_same_task(tmp_path: Path) -> None:
    sweep = plan(tmp_path)
    assert sweep.estimate_seconds(sweep.runs) is None
    sweep.states[sweep.runs[0].path] = RunState("finished", 0.5, seconds=10.0)
    assert sweep.runs[0].config.task == "rte"
    sweep.states[sweep.runs[2].path] = RunState("finished", 0.5, seconds=30.0)
    assert sweep.runs[2].config.task == "mrpc"
    assert sweep.estimate_seconds(sweep.pending(), jobs=2) == pytest.approx((5 * 10 + 5 * 30) / 2)


def test_plain_view_says_one_line_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="isobn_finetune")
    run_sweep(plan(tmp_path), fine_tune=fake_fine_tune, view=PlainView)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("[")]
    assert len(lines) == 12
    assert lines[0].startswith("[1/12] rte none, seed 1: 0.6100 (")
    assert lines[0].endswith("; about 22 s left") and "left" not in lines[-1]


def test_live_view_shows_what_runs_what_is_done_and_the_time_left(tmp_path: Path) -> None:
    from rich.console import Console

    sweep = plan(tmp_path)
    view = LiveView(sweep, 12, 1)
    view.recent = []
    first, second = sweep.runs[:2]
    view.begin(first)
    view.end(first, RunState("finished", 0.6125, 60.0))
    view.begin(second)
    folder = RunFolder(str(second.config.output_dir))
    folder.path.mkdir(parents=True)
    folder.append_history({"event": "evaluation", "step": 40, "metrics": {"accuracy": 0.5875}})
    folder.append_history({"event": "train", "step": 50, "loss": 0.1})
    assert read_progress(folder) == ("50", "0.5875")
    console = Console(width=120, record=True, file=open(os.devnull, "w"))
    console.print(view.render())
    shown = console.export_text()
    assert "0.6125" in shown and "rte isobn, seed 1" in shown and "0.5875" in shown
    assert "1 of 12 runs finished, 0 failed, 10 waiting; about 11 min 0 s left" in shown or "about 10 min 59 s" in shown


def test_workers_share_gpus_and_threads() -> None:
    four = {"CUDA_VISIBLE_DEVICES": "2,5", "OMP_NUM_THREADS": "8"}
    assert [share_of_machine(n, 3, four)["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["2", "5", "2"]
    assert share_of_machine(0, 3, four)["OMP_NUM_THREADS"] == "2"
    assert share_of_machine(0, 16, four)["OMP_NUM_THREADS"] == "1"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert "CUDA_VISIBLE_DEVICES" not in share_of_machine(0, 2, {"CUDA_VISIBLE_DEVICES": ""})


def test_durations_are_readable() -> None:
    assert [format_seconds(s) for s in (5.2, 192, 7500, 200000)] == ["5 s", "3 min 12 s", "2 h 5 min", "2 d 7 h"]


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.name)
def test_each_shipped_sweep_is_valid(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "grid" not in values and "zip" not in values:
        pytest.skip("a single run, which has its own test")
    assert len(expand(load_sweep(path), "runs")) > 1


def test_the_shipped_sweeps_are_those_of_the_paper_and_of_the_small_real_result() -> None:
    for name, model in (("paper_bert_base_cased", "bert-base-cased"), ("paper_roberta_large", "roberta-large")):
        runs = expand(load_sweep(CONFIGS / f"{name}.yaml"), "runs")
        assert len(runs) == 7 * (3 + 3 + 9) * 5
        assert {run.config.model.name for run in runs} == {model}
        assert {run.config.precision for run in runs} == {"fp16"}
        assert all(run.config.train.early_stopping_patience for run in runs)
    runs = expand(load_sweep(CONFIGS / "small_real.yaml"), "runs")
    assert len(runs) == 4 * 3 * 9
    assert {
        (r.config.train.epochs, r.config.train.batch_size, r.config.data.max_length, r.config.precision) for r in runs
    } == {(3, 16, 128, "bf16")}
    released = expand(load_sweep(CONFIGS / "released_code_sweep.yaml"), "runs")[0].config
    single = yaml.safe_load((CONFIGS / "released_code.yaml").read_text())
    assert released.train.model_dump() == RunConfig.model_validate(single).train.model_dump()


KILLED = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from test_sweep import fake_fine_tune, plan, run_sweep
from isobn_finetune.run_folder import RunFolder
from pathlib import Path
def slow(config, *, resume, overwrite):
    folder = RunFolder(str(config.output_dir))
    folder.start(config)
    folder.checkpoints.mkdir(exist_ok=True)
    saved = folder.checkpoints / "step"
    for step in range(int(saved.read_text()) if saved.exists() else 0, 3):
        time.sleep(0.08)
        temporary = saved.with_suffix(".new"); temporary.write_text(str(step + 1)); os.replace(temporary, saved)
    fake_fine_tune(config, resume=resume, overwrite=overwrite)
    with open(sys.argv[1] + ".done", "a") as file:
        file.write(f"{config.output_dir}\\n")
sweep = plan(Path(sys.argv[1]))
print('ready', flush=True)
run_sweep(sweep, fine_tune=slow)
"""


def test_twenty_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent)]
    kills = 0
    for _ in range(200):
        process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        before = len(list(folder.rglob("result.json")))
        assert process.stdout is not None
        if process.stdout.readline() == b"ready\n" and kills < 20:
            time.sleep(rng.uniform(0, 0.3))
            process.kill()
            kills += 1
        _, errors = process.communicate()
        assert process.returncode in (0, -9), errors.decode()
        if process.returncode == 0:
            break
        assert len(list(folder.rglob("result.json"))) >= before
    sweep = plan(folder)
    assert kills == 20 and sweep.count("finished") == 12
    done = Path(f"{folder}.done").read_text().splitlines()
    assert len(done) == len(set(done)) and len(done) >= 11  # the kill may fall between result and line
    whole = plan(tmp_path / "whole")
    run_sweep(whole, fine_tune=fake_fine_tune)
    assert {p: s.score for p, s in sweep.states.items()} == {p: s.score for p, s in whole.states.items()}
