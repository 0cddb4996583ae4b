from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from safetensors.numpy import save_file

from isobn_finetune import hub
from isobn_finetune.errors import ConfigError


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing here may look further than the working directory, unless a test says so."""

    def refuse(*args: object) -> NoReturn:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "_cached_model", refuse)
    monkeypatch.setattr(hub, "_download_model", refuse)
    monkeypatch.chdir(tmp_path)


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    return folder


def refused(name: str, *parts: str) -> None:
    with pytest.raises(ConfigError) as error:
        hub.resolve_model(name)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_tiny_is_the_folder_in_the_package() -> None:
    assert hub.resolve_model("tiny") == Path(hub.__file__).parent / "demo" / "tiny"


def test_tiny_in_the_package_wins_over_a_folder_of_that_name(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    assert hub.resolve_model("tiny") == Path(hub.__file__).parent / "demo" / "tiny"
    assert hub.resolve_model("./tiny").resolve() == tmp_path / "tiny"


def test_model_folder_is_itself(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "models" / "mine")
    assert hub.resolve_model(str(folder)) == folder
    assert hub.resolve_model("models/mine") == Path("models/mine")


def test_model_folder_wins_over_a_hub_id_of_that_name(tmp_path: Path) -> None:
    make_model(tmp_path / "bert-base-cased")
    assert hub.resolve_model("bert-base-cased") == Path("bert-base-cased")


def test_folder_without_a_model_does_not_hide_the_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bert-base-cased").mkdir()
    cached = make_model(tmp_path / "cache")
    monkeypatch.setattr(hub, "_cached_model", lambda name: cached if name == "bert-base-cased" else None)
    assert hub.resolve_model("bert-base-cased") == cached


@pytest.mark.parametrize("mark", ["result.json", "config.yaml"])
def test_run_folder_means_its_model(tmp_path: Path, mark: str) -> None:
    folder = make_model(tmp_path / "run" / "model")
    (tmp_path / "run" / mark).write_text("{}")
    assert hub.resolve_model(str(tmp_path / "run")) == folder


def test_run_folder_without_a_model_names_the_missing_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("task: rte")
    refused(str(tmp_path / "run"), str(tmp_path / "run" / "model" / "config.json"))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_of_a_model_folder_is_named(tmp_path: Path, missing: str) -> None:
    folder = make_model(tmp_path / "mine")
    (folder / missing).unlink()
    refused(str(folder), str(folder / missing))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "mine")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    refused(str(folder), "model-00002-of-00002.safetensors")
    del shards["b"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert hub.resolve_model(str(folder)) == folder


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}'])
def test_unreadable_index_of_shards_is_named(tmp_path: Path, index: str) -> None:
    folder = make_model(tmp_path / "mine")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    refused(str(folder), "model.safetensors.index.json")


def test_weights_cut_short_are_found_before_loading(tmp_path: Path) -> None:
    weights = make_model(tmp_path / "mine") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    refused(str(tmp_path / "mine"), str(weights), "cannot be read")


@pytest.mark.parametrize("config", ["", "{", "[]", "\udcff"])
def test_unreadable_config_is_named(tmp_path: Path, config: str) -> None:
    folder = make_model(tmp_path / "mine")
    (folder / "config.json").write_bytes(config.encode("utf-8", "surrogateescape"))
    refused(str(folder), str(folder / "config.json"))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../models", "./none", "/none/there", "~/none-there", "a/b/c", "a//b", "a b", "a..b", "-x", "a\\b"],
)
def test_what_cannot_be_a_hub_id_is_refused_without_asking(name: str) -> None:
    refused(name, f"'{name}'", "hub id")


def test_file_in_the_place_of_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    refused("model.bin", "a file, not a folder")


@pytest.mark.parametrize("name", ["roberta-base", "FacebookAI/roberta-base", "org/a_b.c-1"])
def test_hub_ids_are_looked_up_in_the_cache_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cached = make_model(tmp_path / "cache")
    monkeypatch.setattr(hub, "_cached_model", lambda asked: cached if asked == name else None)
    assert hub.resolve_model(name) == cached
