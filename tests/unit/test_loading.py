from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobn_finetune.errors import ConfigError
from isobn_finetune.loading import count_parameters, create_model, load_config, load_model
from isobn_finetune.tasks import TASKS

Make = Callable[..., Path]


@pytest.fixture
def saved(bert_dir: Path, tmp_path: Path) -> Path:
    """A model of ours with statistics, in the layout of a run folder."""
    model = create_model(bert_dir, TASKS["mnli"], {"name": "isobn"})
    model.train()(torch.randint(5, 60, (4, 6)))
    model.save_pretrained(tmp_path / "run" / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bert_dir / name, tmp_path / "run" / "model")
    return tmp_path / "run"


def test_encoder_and_pooler_are_those_of_the_checkpoint(bert_dir: Path) -> None:
    model, source = create_model(bert_dir, TASKS["rte"], {"name": "none"}), load_file(bert_dir / "model.safetensors")
    ours = model.state_dict()
    for name, tensor in source.items():
        assert torch.equal(ours[name if name.startswith("pooler") else f"encoder.{name}"], tensor), name
    assert count_parameters(model) == sum(tensor.numel() for tensor in source.values()) + 2 * 16 + 2


def test_the_head_is_drawn_from_the_seed(bert_dir: Path) -> None:
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        heads.append(create_model(bert_dir, TASKS["rte"], {"name": "none"}).classifier.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_checkpoint_in_half_precision_is_trained_in_float32(make_model: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model("bert"), tmp_path / "half"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    model = create_model(folder, TASKS["rte"], {"name": "batchnorm"})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert", "deberta-v2"])
def test_a_trained_head_is_not_taken_over_but_its_dense_layer_is(
    make_model: Make, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = {0: "bad", 1: "so-so", 2: "good"}
    folder = make_model(family, "AutoModelForSequenceClassification", id2label=names)
    with caplog.at_level("INFO"):
        model = create_model(folder, TASKS["rte"], {"name": "none"})
    assert model.classifier.out_features == 2 and model.config.id2label[0] == "entailment"
    assert "3 classes" in caplog.text and caplog.text.count("is not taken over") == 1
    assert "so-so" not in json.dumps(model.config.to_dict())


def test_a_model_of_ours_is_a_base_for_the_next_task(saved: Path) -> None:
    before, _ = load_model(saved)
    after = create_model(saved / "model", TASKS["stsb"], {"name": "isobn"})
    assert torch.equal(after.pooler.dense.weight, before.pooler.dense.weight)
    assert int(after.norm.num_batches_tracked) == 0 and after.classifier.out_features == 1
    assert list(after.config.id2label.values()) == ["score"] and after.config.problem_type == "regression"


def test_a_run_folder_and_its_model_folder_load_alike(saved: Path) -> None:
    x = torch.randint(5, 60, (4, 6))
    models = [load_model(folder)[0] for folder in (saved, saved / "model", str(saved))]
    assert not models[0].training and int(models[0].norm.num_batches_tracked) == 1
    assert torch.equal(models[0](x).logits, models[1](x).logits)
    assert torch.equal(models[0](x).logits, models[2](x).logits)


@pytest.mark.parametrize(
    "part",
    ["classifier.weight", "pooler.dense.bias", "norm.running_cov", "norm.running_std", "norm.num_batches_tracked",
     "encoder.encoder.layer.0.attention.self.query.weight"],
)  # fmt: skip
def test_b28_a_file_that_lacks_a_part_is_refused_and_the_part_named(saved: Path, part: str) -> None:
    path = saved / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(part)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=part.replace(".", r"\.")):
        load_model(saved)


def test_statistics_that_are_all_zero_are_refused(saved: Path) -> None:
    path = saved / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.running_cov"].zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="statistics"):
        load_model(saved)


def test_a_stock_model_is_not_loaded_as_one_of_ours(bert_dir: Path) -> None:
    with pytest.raises(ConfigError, match="not one that isobn-finetune saved"):
        load_model(bert_dir)


def test_a_folder_without_a_model_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"looked for config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '"bert"', '{"model_type": 5}', '{"model_type": "gpt2"}', "\x00"])
def test_a_config_that_is_none_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_other_shapes_than_the_config_says_are_refused(make_model: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model("bert"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ConfigError, match="cannot load this model"):
        create_model(folder, TASKS["rte"], {"name": "none"})
