"""``submit``: from run folders to the zip."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from classifiers import make_run
from conftest import Outcome

from isobn_finetune.submit import FILES

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Invented test sets with as many rows as GLUE's, of the two smallest tasks and AX."""
    folder = tmp_path_factory.mktemp("glue")
    for name, file, rows, header in (
        ("WNLI", "test.tsv", 146, "index\tsentence1\tsentence2"),
        ("CoLA", "test.tsv", 1063, "index\tsentence"),
        ("diagnostic", "diagnostic.tsv", 1104, "index\tsentence1\tsentence2"),
    ):
        (folder / name).mkdir()
        texts = "\t".join(["a dog"] * header.count("sentence"))
        lines = [header, *(f"{index}\t{texts}" for index in range(rows))]
        (folder / name / file).write_text("\n".join(lines) + "\n")
    return folder


def write_predictions(run: Path, split: str, rows: int, prediction: Any) -> None:
    path = run / "predictions" / f"{split}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"idx": i, "prediction": prediction}) + "\n" for i in range(rows)))


def read_zip(path: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode().splitlines() for name in archive.namelist()}


def test_missing_predictions_are_made_and_kept(cli: Cli, tmp_path: Path, glue: Path) -> None:
    runs = [make_run(tmp_path / task, task, str(glue)) for task in ("cola", "wnli")]

    outcome = cli("submit", *runs, "--output", tmp_path / "s.zip", "--allow-partial")
    first = (tmp_path / "s.zip").read_bytes()
    again = cli("submit", *runs, "--output", tmp_path / "s.zip", "--allow-partial", "--data", tmp_path / "gone")

    assert outcome.code == 0, outcome.stderr
    files = read_zip(tmp_path / "s.zip")
    assert {name: len(lines) - 1 for name, lines in files.items()} == {"CoLA.tsv": 1063, "WNLI.tsv": 146}
    for lines in files.values():
        assert lines[0] == "index\tprediction"
        assert [line.split("\t")[0] for line in lines[1:]] == [str(index) for index in range(len(lines) - 1)]
        assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    assert "missing: RTE.tsv: no run of RTE is given" in outcome.stdout
    assert (tmp_path / "wnli/predictions/test.jsonl").is_file()
    assert again.code == 0 and (tmp_path / "s.zip").read_bytes() == first  # the kept ones are taken, nothing is read


def test_all_files_are_made_from_all_runs(cli: Cli, tmp_path: Path, glue: Path) -> None:
    runs = {}
    for file in FILES:
        if file.task in ("qqp", "ax"):
            continue
        run = runs.setdefault(file.task, tmp_path / file.task)
        if not run.exists():
            make_run(run, file.task, str(glue))
        prediction = file.spec.labels[-1] if file.spec.labels else 6.0
        write_predictions(run, file.split, file.rows, prediction)

    outcome = cli("submit", *runs.values(), "--output", tmp_path / "s.zip")

    assert outcome.code == 0, outcome.stderr
    files = read_zip(tmp_path / "s.zip")
    assert set(files) == {file.name for file in FILES} - {"QQP.tsv"}  # AX comes from the MNLI model
    assert {len(lines) - 1 for name, lines in files.items() if name == "AX.tsv"} == {1104}
    assert files["STS-B.tsv"][1] == "0\t5.000"
    assert files["MNLI-mm.tsv"][1] == "0\tcontradiction"
    assert set(line.split("\t")[1] for line in files["AX.tsv"][1:]) <= {"entailment", "neutral", "contradiction"}
    assert (tmp_path / "mnli/predictions/ax.jsonl").is_file()


def test_what_is_missing_is_listed_and_nothing_written(cli: Cli, tmp_path: Path, glue: Path) -> None:
    run = make_run(tmp_path / "wnli", "wnli", str(glue))

    outcome = cli("submit", run, "--output", tmp_path / "s.zip")

    assert outcome.code == 2
    for name in ("CoLA", "SST-2", "MRPC", "STS-B", "MNLI-m", "MNLI-mm", "QNLI", "RTE"):
        assert f"{name}.tsv: no run of" in outcome.error
    assert "QQP" not in outcome.error and "--allow-partial" in outcome.error
    assert not (tmp_path / "s.zip").exists() and not (run / "predictions").exists()


def test_test_sets_that_are_not_glues_are_refused(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "wnli", "wnli", str(glue_dir))

    outcome = cli("submit", run, "--output", tmp_path / "s.zip", "--allow-partial")

    assert outcome.code == 2 and "GLUE has 146" in outcome.error
    assert not (tmp_path / "s.zip").exists()


def test_rows_in_another_order_are_refused(cli: Cli, tmp_path: Path, glue: Path) -> None:
    lines = (glue / "WNLI/test.tsv").read_text().splitlines()
    (tmp_path / "data/WNLI").mkdir(parents=True)
    (tmp_path / "data/WNLI/test.tsv").write_text("\n".join([lines[0], lines[2], lines[1], *lines[3:]]) + "\n")
    run = make_run(tmp_path / "wnli", "wnli", str(tmp_path / "data"))

    outcome = cli("submit", run, "--output", tmp_path / "s.zip", "--allow-partial")

    assert outcome.code == 2 and "test.tsv: line 2: index is '1' where 0 is expected" in outcome.error


def test_damaged_predictions_are_named(cli: Cli, tmp_path: Path, glue: Path) -> None:
    run = make_run(tmp_path / "wnli", "wnli", str(glue))
    write_predictions(run, "test", 145, "entailment")

    outcome = cli("submit", run, "--output", tmp_path / "s.zip", "--allow-partial")

    assert outcome.code == 2 and "wnli/predictions/test.jsonl: 145 predictions" in outcome.error


def test_runs_and_outputs_that_cannot_be_used(cli: Cli, tmp_path: Path, glue: Path) -> None:
    run, twin = (make_run(tmp_path / name, "wnli", str(glue)) for name in ("a", "b"))
    diverged = make_run(tmp_path / "c", "cola", str(glue), status="diverged")

    for runs, output, says in (
        ((run, twin), "s.zip", "both runs of WNLI"),
        ((diverged,), "s.zip", "a diverged run"),
        ((tmp_path,), "s.zip", "no run here"),
        ((run,), "s.tar", "name it .zip"),
        ((run,), "a/config.yaml/s.zip", "is a file"),
    ):
        outcome = cli("submit", *runs, "--output", tmp_path / output, "--allow-partial")
        assert outcome.code == 2 and says in outcome.error


@pytest.mark.skipif("ISOBN_GLUE_DIR" not in os.environ, reason="needs real GLUE in ISOBN_GLUE_DIR")
def test_real_test_sets_fill_the_zip(cli: Cli, tmp_path: Path) -> None:
    folder = os.environ["ISOBN_GLUE_DIR"]
    tasks = [name for name in ("wnli", "cola", "stsb", "mrpc") if _has_test(folder, name)]
    assert tasks
    runs = [make_run(tmp_path / task, task, folder) for task in tasks]

    outcome = cli("submit", *runs, "--output", tmp_path / "s.zip", "--allow-partial")

    assert outcome.code == 0, outcome.stderr
    counts = {name: len(lines) - 1 for name, lines in read_zip(tmp_path / "s.zip").items()}
    assert counts == {file.name: file.rows for file in FILES if file.task in tasks}


def _has_test(folder: str, task: str) -> bool:
    from isobn_finetune.tasks import get_task

    return (Path(folder) / get_task(task).folder / "test.tsv").is_file()
