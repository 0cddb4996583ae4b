"""The config of a run: YAML and overrides in, a checked ``RunConfig`` out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from isobn_finetune.errors import ConfigError, shorten
from isobn_finetune.tasks import TaskSpec, get_task, nearest

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Steps = Annotated[float, Field(gt=0)] | None


class Section(BaseModel):
    """A part of the config: unknown keys are errors, and NaN is no number."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_assignment=True)


class ModelConfig(Section):
    """Which encoder, and what of its output is the sentence vector."""

    name: str = Field(min_length=1, description="hub id, local folder, or 'tiny' (ships with the package)")
    pooling: Literal["pooler", "cls", "mean"] = Field(
        "pooler", description="pooler: dense layer on token 0; cls: token 0; mean: mean over the tokens"
    )
    trust_remote_code: bool = Field(False, description="run code that the model's repository brings along")


class DataConfig(Section):
    """Where the rows come from and how long they may be."""

    source: str = Field("hub", min_length=1, description="hub, demo, or a folder (original GLUE layout or parquet)")
    max_length: int = Field(128, ge=4, description="tokens a row; longer rows are cut")


class IdentityConfig(Section):
    """No norm."""

    name: Literal["none"] = "none"


class BatchNormConfig(Section):
    """Batch normalization."""

    name: Literal["batchnorm"] = "batchnorm"
    momentum: float = Field(0.1, gt=0, le=1, description="weight of the newest batch in the running values")
    eps: float = Field(1e-5, gt=0, description="added to the variance")
    sync: bool = Field(True, description="statistics over the batches of all processes")


class IsoBNConfig(Section):
    """Isotropic batch normalization."""

    name: Literal["isobn"] = "isobn"
    momentum: float = Field(0.05, gt=0, le=1, description="weight of the newest batch in the running values")
    beta: float = Field(0.5, ge=0, le=1, description="strength: 0 is the identity, 1 divides by gamma * std")
    eps: float = Field(1e-3, gt=0, description="keeps both denominators away from zero")
    bias_correction: bool = Field(False, description="correct the running values for their start at zero")
    sync: bool = Field(True, description="statistics over the batches of all processes")


NormConfig = Annotated[IdentityConfig | BatchNormConfig | IsoBNConfig, Field(discriminator="name")]
NORM_CONFIGS: dict[str, type[Section]] = {
    "none": IdentityConfig,
    "batchnorm": BatchNormConfig,
    "isobn": IsoBNConfig,
}


class TrainConfig(Section):
    """How long, how fast, and what is kept."""

    epochs: float = Field(5, gt=0, description="passes over the training rows")
    max_steps: int | None = Field(None, ge=1, description="stop after this many optimizer steps, whatever epochs says")
    batch_size: int = Field(16, ge=1, description="rows a step (times gradient_accumulation_steps)")
    eval_batch_size: int = Field(64, ge=1, description="rows at once in evaluation")
    learning_rate: float = Field(2e-5, ge=0, description="peak learning rate of AdamW")
    warmup_ratio: float = Field(0.1, ge=0, lt=1, description="share of the steps with rising learning rate")
    weight_decay: float = Field(0.01, ge=0, description="not applied to biases and norms")
    adam_epsilon: float = Field(1e-6, gt=0, description="as in the authors' code; BERT's pre-training has it too")
    max_grad_norm: float = Field(1.0, ge=0, description="clip gradients to this norm; 0 does not clip")
    gradient_accumulation_steps: int = Field(1, ge=1, description="batches a step; each is one batch for the norm")
    gradient_checkpointing: bool = Field(False, description="less memory, about a third more time")
    drop_last: bool = Field(True, description="leave an epoch's last, shorter batch out")
    eval_steps: Steps = Field(None, description="steps between evaluations, below 1 a share of all; null: each epoch")
    save_steps: Steps = Field(None, description="steps between checkpoints, a multiple of eval_steps; null: the same")
    logging_steps: int = Field(10, ge=1, description="steps between lines in history.jsonl")
    early_stopping_patience: int | None = Field(None, ge=1, description="stop after this many evaluations without gain")
    best_metric: str | None = Field(None, description="metric that chooses the best epoch; null: the task's primary")
    save_total_limit: int = Field(2, ge=1, description="checkpoints kept while training")
    packing: Literal["auto", "off"] = Field("auto", description="batches without padding tokens where the model can")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = Field("none", description="experiment tracker")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="classification: share of the target spread evenly")
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        None, description="classification: loss weight a class, or 'balanced' for the inverse frequency"
    )
    max_skipped_steps: int = Field(50, ge=1, description="fp16: stop after this many skipped steps in a row")

    @model_validator(mode="after")
    def _check_steps(self) -> TrainConfig:
        if self.save_steps is None:
            return self
        if self.eval_steps is None:
            raise ValueError("save_steps: needs eval_steps, of which it must be a multiple; or leave both out")
        # By their decimal text, so that 0.1 is a multiple of 0.02.
        ratio = Fraction(str(self.save_steps)) / Fraction(str(self.eval_steps))
        if ratio.denominator != 1 or (self.save_steps < 1) != (self.eval_steps < 1):
            raise ValueError(f"save_steps: {self.save_steps:g} is not a multiple of eval_steps ({self.eval_steps:g})")
        return self

    @field_validator("packing", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 reads a bare off as false

    @field_validator("eval_steps", "save_steps")
    @classmethod
    def _check_whole(cls, value: float | None) -> float | None:
        if value is not None and value >= 1 and value != int(value):
            raise ValueError(f"{value:g} must be a whole number of steps, or a share of all below 1")
        return value


TINY_DEFAULTS: dict[str, dict[str, Any]] = {"data": {"source": "demo"}, "train": {"learning_rate": 3e-4}}
"""The built-in encoder knows the words of the built-in corpus, and at a hundredth of BERT's size learns faster."""


class RunConfig(Section):
    """Everything that one run depends on. ``model: X`` and ``norm: isobn`` are short for their ``name``."""

    sections: ClassVar[tuple[str, ...]] = ("model", "data", "norm", "train")

    task: str
    seed: int = Field(1, ge=0, lt=2**32, description="of head, dropout and order of rows")
    precision: Precision = Field(
        "auto", description="auto: bf16 where the hardware has it, else fp16 on a GPU, else fp32"
    )
    output_dir: str | None = Field(
        None, min_length=1, description="run folder; null: runs/<model>/<task>/<norm>/seed_<n>"
    )
    model: ModelConfig = Field(default_factory=lambda: ModelConfig(name="roberta-base"))
    data: DataConfig = Field(default_factory=DataConfig)
    norm: NormConfig = Field(default_factory=IsoBNConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthands(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = expand_shorthands(values)
        if isinstance(values.get("norm"), dict):
            values["norm"] = {"name": "isobn", **values["norm"]}
        if isinstance(values.get("model"), dict) and values["model"].get("name") == "tiny":
            for key, defaults in TINY_DEFAULTS.items():
                given = values.get(key) or {}
                values[key] = {**defaults, **given} if isinstance(given, dict) else given
        return values

    @field_validator("task")
    @classmethod
    def _check_task(cls, value: str) -> str:
        try:
            spec = get_task(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if "train" not in spec.files:
            raise ValueError(f"{spec.title} has no training rows: train mnli and predict {spec.name} with it")
        return spec.name

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        spec, train = self.spec, self.train
        if train.best_metric is not None and train.best_metric not in spec.metrics:
            raise ValueError(
                f"train.best_metric: {spec.title} has no metric '{train.best_metric}'. Known: {', '.join(spec.metrics)}"
                f".{nearest(train.best_metric, spec.metrics)}"
            )
        if self.norm.name != "none" and train.batch_size == 1:
            raise ValueError(
                f"train.batch_size: norm {self.norm.name} needs the spread of a batch, and a batch of 1 has none. "
                "Use --batch-size 2 or more (16 is usual), or --norm none"
            )
        if spec.is_regression and (train.label_smoothing or train.class_weights):
            key = "label_smoothing" if train.label_smoothing else "class_weights"
            raise ValueError(f"train.{key}: {spec.title} is a regression and has no classes; leave it out")
        if isinstance(train.class_weights, dict) and set(train.class_weights) != set(spec.labels):
            raise ValueError(f"train.class_weights: name each class once: {', '.join(spec.labels)}")
        return self

    @property
    def spec(self) -> TaskSpec:
        """The task's row."""
        return get_task(self.task)

    @property
    def best_metric(self) -> str:
        """The metric that chooses the best epoch."""
        return self.train.best_metric or self.spec.primary_metric

    def resolve(self) -> RunConfig:
        """Returns a copy with ``output_dir`` filled in."""
        folder = self.output_dir or f"runs/{slugify(self.model.name)}/{self.task}/{self.norm.name}/seed_{self.seed}"
        return self.model_copy(update={"output_dir": folder})


def slugify(model_name: str) -> str:
    """Turns a hub id or a folder into one folder name: ``org/name`` becomes ``org--name``, a path its last part."""
    path = Path(model_name).expanduser()
    if path.exists():
        path = path.resolve()
        # What a run saves lies in a folder called model, which says nothing.
        model_name = path.parent.name if path.name == "model" else path.name
    return re.sub(r"[^\w.-]+", "--", model_name).strip(".-") or "model"


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping.

    Raises:
        ConfigError: There is no such file, it is not valid YAML, a key stands twice, or it is no mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path}: cannot read this config file: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{path}: {where}not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        found = {type(None): "nothing", list: "a list"}.get(type(values), f"'{shorten(values)}'")
        raise ConfigError(f"{path}: expected keys and values such as 'task: rte', found {found}")
    return values


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error, since the first would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"'{key_node.value}' stands twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """Turns ``["norm.beta=0.5"]`` into nested values, read as YAML.

    Raises:
        ConfigError: One has no ``=``, or its value is not YAML.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment}: expected section.key=value, such as norm.beta=0.5")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set {assignment}: '{text}' is not a YAML value") from None
        values = merge(values, nest(key.strip(), value))
    return values


def nest(dotted: str, value: Any) -> dict[str, Any]:
    """``("norm.beta", 1)`` becomes ``{"norm": {"beta": 1}}``."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"norm": {"beta": 1}}`` becomes ``{"norm.beta": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def expand_shorthands(values: Mapping[str, Any]) -> dict[str, Any]:
    """``model: X`` and ``norm: isobn`` become ``{"name": ...}``; ``norm: null`` is ``none``."""
    values = dict(values)
    for key in ("model", "norm"):
        if isinstance(values.get(key), str):
            values[key] = {"name": values[key]}
    if "norm" in values and values["norm"] is None:
        values["norm"] = {"name": "none"}
    return values


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lays ``over`` on ``base``, section by section. Another norm starts from that norm's own defaults."""
    base, over = expand_shorthands(base), expand_shorthands(over)
    norm, other = base.get("norm"), over.get("norm")
    if isinstance(norm, Mapping) and isinstance(other, Mapping) and norm.get("name") and other.get("name"):
        if norm["name"] != other["name"]:
            base["norm"] = {}
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def create_run_config(values: Mapping[str, Any], where: str = "") -> RunConfig:
    """Checks merged values.

    Args:
        values: Nested keys as in a config file.
        where: Name of the file, for the message.

    Raises:
        ConfigError: All that is wrong, in one line.
    """
    values = expand_shorthands(values)
    prefix = f"{where}: " if where else ""
    problems = _unknown_keys(values)
    if problems:
        raise ConfigError(prefix + "; ".join(problems))
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(prefix + "; ".join(_describe(problem) for problem in error.errors())) from None


def _unknown_keys(values: Mapping[str, Any]) -> list[str]:
    """Messages for unknown keys and sections that are no mapping, with the nearest known name."""
    problems = []
    known_sections: dict[str, type[BaseModel]] = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
    norm = values.get("norm")
    if isinstance(norm, Mapping):
        name = norm_name(norm)
        if name not in NORM_CONFIGS:
            problems.append(
                f"norm.name: unknown norm '{name}'. Known: {', '.join(NORM_CONFIGS)}.{nearest(name, NORM_CONFIGS)}"
            )
        else:
            known_sections["norm"] = NORM_CONFIGS[name]
    all_keys = [f"{section}.{key}" for section, model in known_sections.items() for key in model.model_fields]
    all_keys += list(RunConfig.model_fields)
    for key, value in values.items():
        if key not in RunConfig.model_fields:
            problems.append(f"unknown key '{shorten(key)}'.{_nearest_key(shorten(key), all_keys)}")
        elif key in RunConfig.sections and not isinstance(value, Mapping):
            problems.append(f"{key}: expected keys and values, found '{shorten(value)}'")
        elif key in known_sections:
            known = list(known_sections[key].model_fields)
            for inner in value:
                if inner in known:
                    continue
                if key == "norm" and any(inner in config.model_fields for config in NORM_CONFIGS.values()):
                    owners = [name for name, config in NORM_CONFIGS.items() if inner in config.model_fields]
                    problems.append(f"norm.{inner}: belongs to {' and '.join(owners)}, not to '{norm_name(value)}'")
                else:
                    full = f"{key}.{shorten(inner)}"
                    problems.append(f"unknown key '{full}'.{_nearest_key(full, all_keys)}")
    return problems


def norm_name(norm: Mapping[str, Any]) -> str:
    """The norm of a config section, ``isobn`` where none is named."""
    return shorten(norm.get("name", "isobn"))


def _nearest_key(key: str, known: list[str]) -> str:
    """Hint for a misspelt key; a key put at the top that belongs into a section is found by its last part."""
    section, _, last = key.rpartition(".")
    exact = [name for name in known if name.rpartition(".")[2] == last]
    matches = exact or difflib.get_close_matches(key, known, n=1)
    beside = ", ".join(name for name in known if name.rpartition(".")[0] == section)
    return f" Did you mean '{matches[0]}'?" if matches else f" Known: {beside}"


def _describe(problem: Mapping[str, Any]) -> str:
    """One pydantic error as ``where: message``."""
    where = ".".join(str(part) for part in problem["loc"] if part not in NORM_CONFIGS)
    if problem["type"] == "missing":
        return f"{where}: required" + (", such as --task rte" if where == "task" else "")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        if where in RunConfig.sections:  # the message of a section names its key
            return f"{where}.{message}"
        return f"{where}: {message}" if where else message
    given = problem.get("input")
    return f"{where}: {message[0].lower()}{message[1:]}, found '{shorten(given)}'"
