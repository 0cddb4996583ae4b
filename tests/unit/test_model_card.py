"""The card of a saved model: what the hub reads, and text that cannot break out of its place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from classifiers import make_run
from huggingface_hub import ModelCard

from isobn_finetune.config import create_run_config
from isobn_finetune.model_card import escape, write_model_card
from isobn_finetune.results import RunResult


def write_card(folder: Path, **changes: Any) -> tuple[str, ModelCard]:
    values = {"task": "stsb", "model": "org/bert", "data": {"source": "hub"}, "norm": {"name": "isobn", "beta": 0.25}}
    config = create_run_config(values | changes.pop("config", {}))
    place = {"ev1": 0.5, "ev2": 0.6, "ev3": 0.7, "isoscore": None}
    result = RunResult(
        "runs/x",
        "finished",
        "stsb",
        config.model.name,
        config.norm.model_dump(),
        seed=1,
        primary_metric="spearmanr",
        metrics={"validation": {"spearmanr": 0.8512345678, "pearson": None}},
        isotropy={"n": 640, "split": "train", "pooler_output": place, "normed_output": place},
        train={"steps": 10, "epochs": 2.0, "precision": "bf16"},
        environment={"isobn-finetune": "9.9", "torch": "2.13.0", "python": "3.11.7"},
        reason="validation: all predictions | are <equal>\n---\nx",
    )
    write_model_card(folder, config, dataclasses.replace(result, **changes))
    text = (folder / "README.md").read_text()
    return text, ModelCard(text)


def test_the_hub_reads_the_scores(tmp_path: Path) -> None:
    _, card = write_card(tmp_path)

    (result,) = card.data.eval_results  # the undefined one is no score
    assert (result.metric_type, result.metric_value) == ("spearmanr", 0.851235)
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("nyu-mll/glue", "stsb", "validation")
    assert card.data.base_model == "org/bert"
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.metrics == ["spearmanr", "pearsonr"]


def test_the_text_says_what_there_is_to_know(tmp_path: Path) -> None:
    text, _ = write_card(tmp_path)

    for words in (
        "| validation | spearmanr | 0.8512 |",
        "| validation | pearson | undefined |",
        "Undefined: validation: all predictions",
        "isobn (momentum 0.05, beta 0.25",
        "640 training rows",
        "| before the norm | 0.5000 | 0.6000 | 0.7000 | undefined |",
        "| seed | 1 |",
        "| torch | 2.13.0 |",
        "load_model(",
        "AutoModelForSequenceClassification",
        '"some text", "another text"',
        "One output: the score itself",
        "sentence1 and sentence2",
    ):
        assert words in text


def test_text_from_elsewhere_stays_in_its_place(tmp_path: Path) -> None:
    text, card = write_card(tmp_path, config={"model": 'x"`: |\n---\n<b>y</b>'})

    assert text.count("\n---\n") == 1  # the end of the metadata
    assert "<b>" not in text.replace("\\<b\\>", "")
    assert "are \\<equal\\> --- x" in text
    assert card.data.base_model is None
    assert isinstance(yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n")), dict)


@pytest.mark.parametrize("given", ["a|b", "<b>", "`x`", "[l](http://x)", "a\nb", "*_~#", "\\"])
def test_escaped_text_holds_no_markup(given: str) -> None:
    escaped = escape(given)

    assert "\n" not in escaped
    bare = [char for place, char in enumerate(escaped) if char in "|<>`[]()*_~#" and escaped[place - 1 : place] != "\\"]
    assert bare == []


def test_local_paths_stay_private(tmp_path: Path) -> None:
    model = tmp_path / "secret-project/model-x"
    model.mkdir(parents=True)

    text, card = write_card(tmp_path, config={"model": str(model), "data": {"source": str(tmp_path)}})

    assert str(tmp_path) not in text and "model-x" in text
    assert card.data.eval_results[0].dataset_name == "STS-B, from a local folder"
    assert card.data.base_model is None and card.data.datasets is None


def test_a_model_without_scores_has_no_model_index(tmp_path: Path) -> None:
    _, card = write_card(tmp_path, metrics={"validation": {"spearmanr": None, "pearson": None}})

    assert card.data.eval_results is None


def test_a_saved_run_has_its_card_and_keeps_no_path_of_this_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "rte", str(tmp_path))

    for path in (run / "model").glob("*.json"):
        assert str(tmp_path) not in path.read_text()
    assert "entailment, not\\_entailment" in (run / "model/README.md").read_text()
