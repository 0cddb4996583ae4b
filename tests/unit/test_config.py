from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isobn_finetune.config import (
    NORM_CONFIGS,
    RunConfig,
    create_run_config,
    load_yaml,
    merge,
    nest,
    parse_overrides,
    slugify,
)
from isobn_finetune.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def refused(values: dict[str, Any], *parts: str) -> str:
    with pytest.raises(ConfigError) as error:
        create_run_config(values)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


def test_defaults_are_those_of_the_contract() -> None:
    config = create_run_config({"task": "rte", "model": "roberta-base"})
    assert config.model_dump() == {
        "task": "rte",
        "seed": 1,
        "precision": "auto",
        "output_dir": None,
        "model": {"name": "roberta-base", "pooling": "pooler", "trust_remote_code": False},
        "data": {"source": "hub", "max_length": 128},
        "norm": {"name": "isobn", "momentum": 0.05, "beta": 0.5, "eps": 1e-3, "bias_correction": False, "sync": True},
        "train": {
            "epochs": 5,
            "max_steps": None,
            "batch_size": 16,
            "eval_batch_size": 64,
            "learning_rate": 2e-5,
            "warmup_ratio": 0.1,
            "weight_decay": 0.01,
            "adam_epsilon": 1e-6,
            "max_grad_norm": 1.0,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": False,
            "drop_last": True,
            "eval_steps": None,
            "save_steps": None,
            "logging_steps": 10,
            "early_stopping_patience": None,
            "best_metric": None,
            "save_total_limit": 2,
            "packing": "auto",
            "report_to": "none",
            "label_smoothing": 0.0,
            "class_weights": None,
            "max_skipped_steps": 50,
        },
    }


def test_batchnorm_has_its_own_defaults() -> None:
    norm = create_run_config({"task": "rte", "norm": "batchnorm"}).norm
    assert norm.model_dump() == {"name": "batchnorm", "momentum": 0.1, "eps": 1e-5, "sync": True}


def test_every_field_has_help_text() -> None:
    for section in (*NORM_CONFIGS.values(), *(RunConfig.model_fields[key].annotation for key in ("model", "train"))):
        for name, field in section.model_fields.items():
            assert name == "name" or field.description, (section, name)


def test_options_of_the_wrong_norm_are_refused_by_their_owner() -> None:
    refused({"task": "rte", "norm": {"name": "batchnorm", "beta": 0.5}}, "norm.beta", "belongs to isobn")
    refused({"task": "rte", "norm": {"name": "batchnorm", "bias_correction": True}}, "belongs to isobn")
    refused({"task": "rte", "norm": {"name": "none", "eps": 0.1}}, "norm.eps", "batchnorm and isobn", "not to 'none'")


def test_norm_options_without_a_name_are_those_of_isobn() -> None:
    assert create_run_config({"task": "rte", "norm": {"beta": 0.25}}).norm.name == "isobn"


def test_a_null_norm_is_none() -> None:
    assert create_run_config({"task": "rte", "norm": None}).norm.name == "none"


def test_unknown_keys_are_errors_with_the_nearest_known_name() -> None:
    refused({"task": "rte", "norm": {"betta": 1}}, "norm.betta", "Did you mean 'norm.beta'?")
    refused({"task": "rte", "train": {"epoch": 1}}, "train.epoch", "'train.epochs'")
    refused({"task": "rte", "epochs": 3}, "unknown key 'epochs'", "Did you mean 'train.epochs'?")
    refused({"task": "rte", "norm": "iso_bn"}, "unknown norm 'iso_bn'", "Known: none, batchnorm, isobn", "'isobn'?")


def test_all_problems_are_told_at_once() -> None:
    message = refused(
        {"task": "mnlli", "precision": "fp64", "train": {"epochs": 0, "batch_size": -1}},
        "unknown task 'mnlli'",
        "Did you mean 'mnli'?",
        "precision",
        "train.epochs",
        "train.batch_size",
    )
    assert message.count(";") >= 3


@pytest.mark.parametrize("given_name", ["STS-B", "stsb", "sts_b", " StsB "])
def test_spellings_of_a_task_are_one_task(given_name: str) -> None:
    assert create_run_config({"task": given_name}).task == "stsb"


def test_a_task_without_training_rows_is_refused() -> None:
    refused({"task": "ax"}, "no training rows", "mnli")


def test_a_missing_task_is_named_with_an_example() -> None:
    refused({}, "task: required", "--task rte")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.epochs", 0),
        ("train.epochs", float("nan")),
        ("train.epochs", float("inf")),
        ("train.batch_size", 0),
        ("train.batch_size", 2.5),
        ("train.learning_rate", -1e-5),
        ("train.learning_rate", float("inf")),
        ("train.warmup_ratio", 1.0),
        ("train.max_steps", 0),
        ("train.eval_steps", 0),
        ("train.eval_steps", 2.5),
        ("train.label_smoothing", 1.0),
        ("train.packing", "on"),
        ("train.report_to", "all"),
        ("train.early_stopping_patience", 0),
        ("data.max_length", 3),
        ("data.source", ""),
        ("model.name", ""),
        ("output_dir", ""),
        ("model.pooling", "max"),
        ("norm.beta", 1.5),
        ("norm.momentum", 0),
        ("norm.eps", 0),
        ("norm.eps", -1.0),
        ("seed", -1),
        ("seed", 2**32),
        ("precision", "half"),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(key: str, value: Any) -> None:
    refused(merge({"task": "rte"}, nest(key, value)), key)


def test_a_best_metric_that_the_task_has_not_lists_those_it_has() -> None:
    refused({"task": "cola", "train": {"best_metric": "f1"}}, "train.best_metric", "matthews_correlation")
    assert create_run_config({"task": "mrpc", "train": {"best_metric": "accuracy"}}).best_metric == "accuracy"
    assert create_run_config({"task": "mrpc"}).best_metric == "f1"


def test_saving_must_fall_on_evaluations() -> None:
    refused({"task": "rte", "train": {"eval_steps": 30, "save_steps": 50}}, "train.save_steps", "not a multiple")
    refused({"task": "rte", "train": {"save_steps": 50}}, "train.save_steps", "needs eval_steps")
    refused({"task": "rte", "train": {"eval_steps": 0.5, "save_steps": 2}}, "train.save_steps")
    create_run_config({"task": "rte", "train": {"eval_steps": 30, "save_steps": 60}})
    # 0.1 % 0.02 is not 0 in binary floats.
    create_run_config({"task": "rte", "train": {"eval_steps": 0.02, "save_steps": 0.1}})


@pytest.mark.parametrize("norm", ["isobn", "batchnorm"])
def test_a_batch_of_one_is_refused_for_norms_that_need_its_spread(norm: str) -> None:
    refused({"task": "rte", "norm": norm, "train": {"batch_size": 1}}, "train.batch_size", norm, "--batch-size 2")
    create_run_config({"task": "rte", "norm": "none", "train": {"batch_size": 1}})


def test_class_options_are_refused_for_a_regression() -> None:
    refused({"task": "stsb", "train": {"label_smoothing": 0.1}}, "train.label_smoothing", "STS-B")
    refused({"task": "stsb", "train": {"class_weights": "balanced"}}, "train.class_weights", "STS-B")


def test_class_weights_must_name_each_class() -> None:
    refused({"task": "rte", "train": {"class_weights": {"entailment": 2.0}}}, "train.class_weights", "not_entailment")
    weights = {"entailment": 2.0, "not_entailment": 1.0}
    assert create_run_config({"task": "rte", "train": {"class_weights": weights}}).train.class_weights == weights


@pytest.mark.parametrize("weight", [-1.0, 0.0, float("nan"), float("inf"), "heavy"])
def test_class_weights_must_be_finite_and_positive(weight: Any) -> None:
    weights = {"entailment": weight, "not_entailment": 1.0}
    refused({"task": "rte", "train": {"class_weights": weights}}, "train.class_weights")


def test_tiny_defaults_to_the_corpus_it_knows() -> None:
    config = create_run_config({"task": "rte", "model": "tiny"})
    assert config.data.source == "demo" and config.train.learning_rate == 3e-4
    given_values = {"task": "rte", "model": "tiny", "data": {"source": "hub"}, "train": {"learning_rate": 1e-4}}
    config = create_run_config(given_values)
    assert config.data.source == "hub" and config.train.learning_rate == 1e-4


def test_overrides_are_read_as_yaml() -> None:
    values = parse_overrides(["norm.beta=0.25", "train.max_steps=null", "train.drop_last=false", "norm.eps=1.0e-5"])
    assert values == {"norm": {"beta": 0.25, "eps": 1e-5}, "train": {"max_steps": None, "drop_last": False}}
    # YAML 1.1 takes 1e-5 for a text; it must still come out as a number.
    assert create_run_config(merge({"task": "rte"}, parse_overrides(["norm.eps=1e-5"]))).norm.eps == 1e-5


@pytest.mark.parametrize("bad", ["norm.beta", "=1", "norm.beta=[", "norm.beta={a: b: c}"])
def test_a_malformed_override_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_overrides([bad])


@pytest.mark.parametrize("dotted", [".", "a..b", ".norm", "norm."])
def test_a_malformed_key_of_an_override_is_refused(dotted: str) -> None:
    with pytest.raises(ConfigError):
        create_run_config(merge({"task": "rte"}, parse_overrides([f"{dotted}=1"])))


def test_another_norm_drops_the_options_of_the_one_before() -> None:
    base = {"task": "rte", "norm": {"name": "isobn", "beta": 0.25}}
    assert create_run_config(merge(base, {"norm": "batchnorm"})).norm.name == "batchnorm"
    assert create_run_config(merge(base, {"norm": {"eps": 0.1}})).norm.model_dump()["beta"] == 0.25
    assert create_run_config(merge(base, {"norm": {"name": "isobn", "eps": 0.1}})).norm.model_dump()["beta"] == 0.25


def test_merge_changes_neither_side() -> None:
    base, over = {"norm": {"name": "isobn"}}, {"norm": {"beta": 0.1}}
    merge(base, over)
    assert base == {"norm": {"name": "isobn"}} and over == {"norm": {"beta": 0.1}}


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "found nothing"),
        ("- task: rte\n", "found a list"),
        ("rte", "found"),
        ("task: [rte", "not valid YAML"),
        ("task: rte\ntask: cola\n", "'task' stands twice"),
        ("train:\n  epochs: 1\n  epochs: 2\n", "line 3: "),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("task: !!python/object/apply:os.system [true]\n", "not valid YAML"),
        ("? [a, b]\n: 1\n", "YAML"),
        ("? {a: b}\n: 1\n", "YAML"),
        ("task: \x07rte\n", "not valid YAML"),
        ("a: &a [x]\n<<: *a\n", "YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_the_place(tmp_path: Path, text: str | bytes, part: str) -> None:
    path = write(tmp_path / "config.yaml", text)
    with pytest.raises(ConfigError) as error:
        load_yaml(path)
    assert str(path) in str(error.value) and part in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_yaml(tmp_path)


def test_a_yaml_bomb_does_not_blow_up(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path = write(tmp_path / "bomb.yaml", "\n".join(["task: rte", *lines, "norm: *a11", "model: *a11"]))
    with pytest.raises(ConfigError) as error:
        create_run_config(load_yaml(path), str(path))
    assert len(str(error.value)) < 4000


@pytest.mark.parametrize(
    "values",
    [
        {"task": ["rte"]},
        {"task": {"name": "rte"}},
        {"task": 5},
        {"task": None},
        {"task": "rte", "train": ["epochs"]},
        {"task": "rte", "train": None},
        {"task": "rte", "train": "fast"},
        {"task": "rte", "data": 3},
        {"task": "rte", "model": ["tiny"]},
        {"task": "rte", "model": None},
        {"task": "rte", "model": {"name": ["tiny"]}},
        {"task": "rte", "model": {"name": None}},
        {"task": "rte", "norm": ["isobn"]},
        {"task": "rte", "norm": 5},
        {"task": "rte", "norm": {"name": ["isobn"]}},
        {"task": "rte", "norm": {"name": {"a": 1}}},
        {"task": "rte", "norm": {"name": None}},
        {"task": "rte", "norm": {5: 1}},
        {"task": "rte", 5: 1},
        {"task": "rte", None: 1},
        {"task": "rte", "seed": "one"},
        {"task": "rte", "output_dir": ["runs"]},
        {"task": "rte", "train": {"learning_rate": {"a": 1}}},
        {"task": "rte", "train": {"class_weights": ["a"]}},
        {"task": "rte", "train": {True: 1}},
    ],
)
def test_values_of_the_wrong_shape_are_refused_in_one_line(values: dict[Any, Any]) -> None:
    refused(values)


def test_a_long_value_is_not_printed_whole() -> None:
    assert len(refused({"task": "rte", "train": {"learning_rate": "x" * 100_000}})) < 1000
    assert len(refused({"task": "x" * 100_000})) < 1000
    assert len(refused({"task": "rte", "x" * 100_000: 1})) < 2000


def test_numbers_written_as_text_are_numbers() -> None:
    config = create_run_config({"task": "rte", "seed": "7", "train": {"learning_rate": "1e-5"}})
    assert config.seed == 7 and config.train.learning_rate == 1e-5


def test_resolve_names_a_folder_by_model_task_norm_and_seed() -> None:
    values = {"task": "STS-B", "model": "org/name", "norm": "none", "seed": 4}
    assert create_run_config(values).resolve().output_dir == "runs/org--name/stsb/none/seed_4"
    assert create_run_config({**values, "output_dir": "here"}).resolve().output_dir == "here"


def test_a_model_folder_gives_its_last_part_as_name(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    assert slugify(str(tmp_path / "my model")) == "my--model"
    assert slugify("../..") != ".." and slugify("///") == "model"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.name)
def test_each_shipped_config_is_valid(path: Path) -> None:
    values = load_yaml(path)
    if "grid" in values or "zip" in values or "base" in values:
        pytest.skip("a sweep, which has its own test")
    create_run_config(values, str(path))


def test_there_are_shipped_configs() -> None:
    assert len(list(CONFIGS.rglob("*.yaml"))) >= 2


def test_released_code_holds_the_authors_values() -> None:
    config = create_run_config(load_yaml(CONFIGS / "released_code.yaml"))
    train = config.train
    assert (train.batch_size, train.learning_rate, train.adam_epsilon, train.weight_decay) == (16, 5e-5, 1e-6, 0)
    assert (train.max_grad_norm, train.warmup_ratio, train.epochs, config.data.max_length) == (0, 0.06, 10, 256)
    assert train.drop_last and train.gradient_checkpointing and config.precision == "fp32"
    assert config.norm.model_dump() == NORM_CONFIGS["isobn"]().model_dump()


run_configs = st.fixed_dictionaries(
    {"task": st.sampled_from(["rte", "STS-B", "mnli", "cola"])},
    optional={
        "seed": st.integers(0, 2**32 - 1),
        "precision": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
        "output_dir": st.none() | st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()),
        "model": st.text(min_size=1, max_size=20),
        "norm": st.sampled_from(["none", "batchnorm", "isobn"])
        | st.fixed_dictionaries(
            {"name": st.just("isobn")}, optional={"beta": st.floats(0, 1), "eps": st.floats(1e-9, 1)}
        ),
        "train": st.fixed_dictionaries(
            {},
            optional={
                "epochs": st.floats(0.01, 100),
                "batch_size": st.integers(2, 512),
                "learning_rate": st.floats(0, 1),
                "eval_steps": st.none() | st.integers(1, 1000) | st.floats(0.01, 0.99),
            },
        ),
    },
)


@given(values=run_configs)
@settings(max_examples=60, deadline=None)
def test_a_config_written_as_yaml_and_read_again_is_the_same(values: dict[str, Any]) -> None:
    config = create_run_config(values)
    text = yaml.safe_dump(config.model_dump(), allow_unicode=True)
    assert create_run_config(yaml.safe_load(text)) == config
    assert create_run_config(json.loads(config.model_dump_json())) == config


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    values=st.dictionaries(
        st.sampled_from(["task", "seed", "model", "norm", "data", "train", "output_dir", "precision"]) | st.text(),
        anything,
        max_size=4,
    )
)
@settings(max_examples=150, deadline=None)
def test_whatever_stands_in_a_config_is_either_valid_or_refused_in_one_line(values: dict[str, Any]) -> None:
    try:
        create_run_config({"task": "rte", **values})
    except ConfigError as error:
        assert str(error)


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_whatever_is_given_to_set_is_read_or_refused(text: str) -> None:
    try:
        create_run_config(merge({"task": "rte"}, parse_overrides([text, f"norm.{text}", f"norm.beta={text}"])))
    except ConfigError as error:
        assert str(error)
