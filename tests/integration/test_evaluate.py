"""``evaluate``: label order, splits, heads and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import create_classifier, make_run, read_json_lines, save_classifier
from conftest import Outcome, create_encoder_config, create_tokenizer

Cli = Callable[..., Outcome]

NLI_HEADER = "index\tsentence1\tsentence2\tgold_label\n"


def save_stock(folder: Path, labels: list[str], bias: list[float], **changes: Any) -> Path:
    """A stock checkpoint that says the same of every row."""
    from transformers import BertForSequenceClassification

    config = create_encoder_config("bert", num_labels=len(labels), **changes)
    config.id2label, config.label2id = dict(enumerate(labels)), {name: index for index, name in enumerate(labels)}
    with torch.random.fork_rng():
        model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor(bias))
    model.save_pretrained(folder)
    create_tokenizer("bert").save_pretrained(folder)
    return folder


def write_nli(folder: Path, **splits: list[str]) -> Path:
    (folder / "MNLI").mkdir(parents=True)
    for name, labels in splits.items():
        rows = [f"{index}\ta dog\ta cat\t{label}\n" for index, label in enumerate(labels)]
        (folder / "MNLI" / f"{name}.tsv").write_text(NLI_HEADER + "".join(rows))
    return folder


def test_label_order_is_the_models_own(cli: Cli, tmp_path: Path) -> None:  # B01
    model = save_stock(tmp_path / "m", ["contradiction", "ENTAILMENT", "neutral"], [0.0, 9.0, 0.0])
    gold = ["entailment"] * 4 + ["neutral", "contradiction"]
    data = write_nli(tmp_path / "data", dev_matched=gold)

    outcome = cli(
        *("evaluate", "--task", "mnli", "--model", model, "--data", data, "--split", "validation_matched"),
        *("--output-dir", tmp_path / "out"),
    )

    assert outcome.code == 0, outcome.stderr
    result = json.loads((tmp_path / "out/evaluate.json").read_text())
    assert result["metrics"]["validation_matched"]["accuracy"] == pytest.approx(4 / 6)
    assert result["collapsed"] and "collapsed" in outcome.stdout
    rows = read_json_lines((tmp_path / "out/predictions/validation_matched.jsonl").read_text())
    assert [row["label"] for row in rows] == gold
    assert {row["prediction"] for row in rows} == {"entailment"}
    assert list(rows[0]["probabilities"]) == ["entailment", "neutral", "contradiction"]
    assert rows[0]["probabilities"]["entailment"] > 0.99


def test_nameless_classes_are_taken_in_order_and_said(cli: Cli, tmp_path: Path) -> None:  # B01
    model = save_stock(tmp_path / "m", ["LABEL_0", "LABEL_1", "LABEL_2"], [9.0, 0.0, 0.0])
    data = write_nli(tmp_path / "data", dev_matched=["entailment", "neutral"])

    outcome = cli("evaluate", "--task", "mnli", "--model", model, "--data", data, "--split", "validation_matched")

    assert outcome.code == 0
    assert "warning: " in outcome.stderr and "cannot be matched by name" in outcome.stderr
    assert "0.5000" in outcome.stdout


def test_mnlis_two_sets_are_kept_apart(cli: Cli, tmp_path: Path) -> None:  # B08
    model = save_stock(tmp_path / "m", ["entailment", "neutral", "contradiction"], [9.0, 0.0, 0.0])
    data = write_nli(
        tmp_path / "data",
        dev_matched=["entailment"] * 3 + ["neutral"],
        dev_mismatched=["entailment"] + ["neutral"] * 4,
    )
    options = ("evaluate", "--task", "mnli", "--model", model, "--data", data, "--output-dir")

    outcome = cli(*options, tmp_path / "both")
    for split in ("validation_matched", "validation_mismatched"):
        assert cli(*options, tmp_path / "apart", "--split", split).code == 0

    assert outcome.code == 0
    assert "validation_matched is the one that chooses the best epoch" in outcome.stdout
    for folder in ("both", "apart"):
        result = json.loads((tmp_path / folder / "evaluate.json").read_text())
        accuracies = {split: values["accuracy"] for split, values in result["metrics"].items()}
        assert accuracies == {"validation_matched": 0.75, "validation_mismatched": 0.2}
        assert result["selection_split"] == "validation_matched" and result["score"] == 0.75
        assert sorted(path.name for path in (tmp_path / folder / "predictions").iterdir()) == [
            "validation_matched.jsonl",
            "validation_mismatched.jsonl",
        ]


def test_another_models_evaluation_is_replaced_not_mixed_in(cli: Cli, tmp_path: Path) -> None:
    data = write_nli(tmp_path / "data", dev_matched=["entailment"], dev_mismatched=["neutral"])
    for place, split in enumerate(("validation_matched", "validation_mismatched")):
        bias = [0.0, 0.0, 0.0]
        bias[place] = 9.0
        model = save_stock(tmp_path / f"m{place}", ["entailment", "neutral", "contradiction"], bias)
        options = ("--task", "mnli", "--data", data, "--output-dir", tmp_path / "out")
        assert cli("evaluate", "--model", model, "--split", split, *options).code == 0

    assert list(json.loads((tmp_path / "out/evaluate.json").read_text())["metrics"]) == ["validation_mismatched"]


def test_a_run_is_scored_on_its_own_data_without_being_told(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "run", "stsb", str(glue_dir))

    outcome = cli("evaluate", "--model", run, "--output-dir", tmp_path / "out", "--batch-size", 3)

    assert outcome.code == 0, outcome.stderr
    assert set(path.name for path in (tmp_path / "out").iterdir()) == {"evaluate.json", "predictions"}
    result = json.loads((tmp_path / "out/evaluate.json").read_text())
    assert set(result["metrics"]["validation"]) == {"spearmanr", "pearson"}
    rows = read_json_lines((tmp_path / "out/predictions/validation.jsonl").read_text())
    assert len(rows) == result["data"]["rows"]["validation"] and "probabilities" not in rows[0]


def test_a_correlation_without_spread_is_null_with_a_reason(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "run", "stsb", str(glue_dir), bias=[2.5])

    outcome = cli("evaluate", "--model", run, "--output-dir", tmp_path / "out")

    result = json.loads((tmp_path / "out/evaluate.json").read_text())
    assert outcome.code == 0
    assert result["metrics"]["validation"] == {"spearmanr": None, "pearson": None} and result["score"] is None
    assert "all predictions are equal" in result["reason"] and result["collapsed"]
    assert "undefined on validation" in outcome.stdout


def test_hidden_labels_are_refused(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "run", "rte", str(glue_dir))

    outcome = cli("evaluate", "--model", run, "--split", "test", "--output-dir", tmp_path / "out")

    assert outcome.code == 2
    assert "no labels in this split" in outcome.error
    assert not (tmp_path / "out").exists()


def test_heads_of_another_size_or_task_and_encoders_are_refused(
    cli: Cli, tmp_path: Path, glue_dir: Path, bert_dir: Path
) -> None:  # B09
    three = save_classifier(tmp_path / "three", create_classifier(task="mnli"))
    sentiment = save_classifier(tmp_path / "sst2", create_classifier(task="sst2"))
    for model, says in ((three, "3 outputs"), (sentiment, "another task"), (bert_dir, "no classification head")):
        outcome = cli("evaluate", "--task", "rte", "--model", model, "--data", glue_dir)
        assert outcome.code == 2
        assert says in outcome.error and str(model) in outcome.error


def test_a_runs_folder_is_no_place_for_an_evaluation(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "run", "rte", str(glue_dir))

    outcome = cli("evaluate", "--model", run, "--output-dir", run)

    assert outcome.code == 2 and "would be overwritten" in outcome.error


def test_a_run_without_a_model_is_said_to_be_one(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "run", "rte", str(glue_dir), status="diverged")

    outcome = cli("evaluate", "--model", run)

    assert outcome.code == 2 and "a diverged run" in outcome.error and "left no model" in outcome.error


def damage(weights: Path, how: str) -> None:
    from safetensors.torch import load_file, save_file

    data = bytearray(weights.read_bytes())
    if how == "cut":
        weights.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[-100] ^= 0x10
        weights.write_bytes(data)
    elif how == "garbage":
        weights.write_bytes(b"\xff" * 1000)
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "header":
        data[data.index(b"running_std")] ^= 0x01
        weights.write_bytes(data)
    else:
        tensors = load_file(weights)
        if how == "zeroed":
            tensors["norm.running_cov"].zero_()
            tensors["norm.running_std"].zero_()
        elif how == "no statistics":
            del tensors["norm.running_cov"], tensors["norm.running_std"]
        elif how == "no classifier":
            del tensors["classifier.weight"]
        elif how == "not finite":
            tensors["norm.running_std"][0] = float("nan")
        elif how == "too large":
            tensors["classifier.weight"].fill_(3e38)
        elif how == "more layers":
            tensors["encoder.encoder.layer.2.output.dense.weight"] = torch.ones(1)
        elif how == "another size":
            tensors["classifier.weight"] = torch.ones(3, 16)
        save_file(tensors, weights, {"format": "pt"})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("cut", "model.safetensors"),
        ("flipped", "does not match its digest"),
        ("garbage", "model.safetensors"),
        ("empty", "model.safetensors"),
        ("header", "model.safetensors"),
        ("zeroed", "no statistics for its norm 'isobn'"),
        ("no statistics", "norm.running_cov"),
        ("no classifier", "classifier.weight"),
        ("not finite", "not finite, in norm.running_std"),
        ("more layers", "does not know, such as encoder.encoder.layer.2"),
        ("another size", "other sizes than config.json says"),
    ],
)
def test_damaged_models_are_refused_by_name(cli: Cli, tmp_path: Path, glue_dir: Path, how: str, says: str) -> None:
    run = make_run(tmp_path / "run", "rte", str(glue_dir))
    damage(run / "model/model.safetensors", how)

    outcome = cli("evaluate", "--model", run, "--output-dir", tmp_path / "out")

    assert outcome.code == 2
    assert says in outcome.error and str(run) in outcome.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm": {"name": "evil"}}, "unknown norm 'evil'"),
        ({"norm": {"name": "isobn", "wat": 1}}, "wat"),
        ({"finetuning_max_length": -4}, "finetuning_max_length is -4"),
        ({"id2label": {"0": "a", "1": "b"}}, "another task"),
        ({"model_type": "gpt2"}, "gpt2"),
    ],
)
def test_altered_configs_are_refused_by_name(
    cli: Cli, tmp_path: Path, glue_dir: Path, change: dict[str, Any], says: str
) -> None:
    run = make_run(tmp_path / "run", "rte", str(glue_dir))
    path = run / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    outcome = cli("evaluate", "--model", run)

    assert outcome.code == 2
    assert says in outcome.error and str(run) in outcome.error


def test_output_that_is_not_finite_is_no_prediction(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:
    run = make_run(tmp_path / "run", "rte", str(glue_dir))
    damage(run / "model/model.safetensors", "too large")

    outcome = cli("evaluate", "--model", run, "--output-dir", tmp_path / "out")

    assert outcome.code == 1 and "not finite" in outcome.error
    assert not (tmp_path / "out/evaluate.json").exists()


def test_hidden_states_are_not_gathered(cli: Cli, tmp_path: Path, glue_dir: Path) -> None:  # B29
    from isobn_finetune.saved_model import open_model

    model = create_classifier(task="rte", output_hidden_states=True, output_attentions=True)
    folder = save_classifier(tmp_path / "m", model)
    stock = save_stock(tmp_path / "s", ["a", "b"], [0.0, 1.0], output_hidden_states=True, return_dict=False)

    assert cli("evaluate", "--model", folder, "--data", glue_dir).code == 0
    for place in (folder, stock):
        saved = open_model(str(place))
        features = saved.encode([("a dog", "a cat")] * 5)
        batch = {name: torch.tensor([feature[name] for feature in features]) for name in features[0]}
        output = saved.model(**batch)
        assert output.hidden_states is None and output.attentions is None
        assert saved.compute_logits(features, 2).shape == (5, 2)
