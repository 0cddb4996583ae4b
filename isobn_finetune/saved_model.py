"""Saved classifiers, ours or stock ones, opened for use: weights checked, label names matched, lengths known."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from isobn_finetune.config import RunConfig, create_run_config, load_yaml
from isobn_finetune.encoding import Feature, PaddingCollator, encode
from isobn_finetune.errors import ConfigError, IsobnError
from isobn_finetune.families import get_family
from isobn_finetune.hub import resolve_model
from isobn_finetune.inference import compute_logits
from isobn_finetune.loading import check_finite, load_config, load_model, load_tokenizer, read_pretrained
from isobn_finetune.modeling import IsobnConfig, IsobnForSequenceClassification, takes_token_types
from isobn_finetune.run_folder import RunFolder
from isobn_finetune.tasks import TaskSpec, get_task
from isobn_finetune.weights_file import check_weights, seal_weights

logger = logging.getLogger(__name__)

_STOCK_MAX_LENGTH = 512
"""Tokens a row for a model that does not say with how many it was trained."""

_NAMELESS = re.compile(r"(label_?)?\d+", re.IGNORECASE)
"""Label names that say nothing, as transformers makes them up."""


@dataclass
class SavedModel:
    """A classifier that is ready to predict.

    Attributes:
        name: As the user gave it.
        folder: Where its files are.
        model: In eval mode, float32; of our class or a stock ``...ForSequenceClassification``.
        tokenizer: Its tokenizer.
        spec: The task, with ``labels`` in the order of our output; made up from the model where nothing names one.
        order: For each label of ``spec`` the column of the model's logits.
        max_length: Tokens a row.
        config: Of the run that made the model, where its folder is there.
    """

    name: str
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: TaskSpec
    order: list[int]
    max_length: int
    config: RunConfig | None = None

    @property
    def norm(self) -> str:
        """Name of the norm; ``folded or none`` for a stock model."""
        return self.model.config.norm["name"] if isinstance(self.model.config, IsobnConfig) else "folded or none"

    def encode(self, texts: Sequence[Sequence[str]]) -> list[Feature]:
        """Tokenizes rows of one or two texts."""
        names = tuple(f"text {place}" for place in range(len(texts[0]) if texts else 1))
        columns: dict[str, Any] = {name: [row[place] for row in texts] for place, name in enumerate(names)}
        spec = replace(self.spec, text_columns=names)
        features = encode({**columns, "label": [None] * len(texts)}, spec, self.tokenizer, self.max_length)
        kept = ("input_ids", "token_type_ids") if self._takes_token_types() else ("input_ids",)
        return [{name: feature[name] for name in kept if name in feature} for feature in features]

    def compute_logits(self, features: Sequence[Feature], batch_size: int, advance: Any = None) -> np.ndarray:
        """Logits ``(rows, num_labels)``, columns in the order of ``spec.labels``.

        Raises:
            IsobnError: The model gives something that is not a finite number.
        """
        collate = PaddingCollator(self.tokenizer)
        logits = compute_logits(self.model, features, collate, batch_size, advance=advance)
        if not np.isfinite(logits).all():
            raise IsobnError(f"{self.folder}: the model's output is not finite; its weights are damaged or diverged")
        return logits[:, self.order]

    def _takes_token_types(self) -> bool:
        ours = isinstance(self.model, IsobnForSequenceClassification)
        return takes_token_types(self.model.encoder if ours else self.model.base_model)


def save_model(folder: Path, model: IsobnForSequenceClassification, tokenizer: PreTrainedTokenizerBase) -> None:
    """Saves model and tokenizer into a folder, with a digest in the weights."""
    forget_local_paths(model.config.encoder_config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seal_weights(folder)


def forget_local_paths(config: Any) -> None:
    """Where the encoder lay on this machine is nobody else's business."""
    if Path(config._name_or_path).is_absolute():
        config._name_or_path = ""


def open_model(name: str, task: str | None = None) -> SavedModel:
    """Opens a classifier for prediction: a run folder, a model folder or a hub id; one of ours or a stock one.

    Args:
        name: What the user calls it.
        task: Needed where neither run folder nor model names one and its labels alone do not suffice.

    Raises:
        ConfigError: It cannot be read, is damaged, has no classification head, or its head does not fit the task.
    """
    asked = get_task(task) if task is not None else None
    _check_run(name)
    folder = resolve_model(name)
    model, tokenizer = _load(folder)
    run_config = read_run_config(folder)
    spec, order = match_labels(name, model.config, asked or _find_task(model.config, run_config))
    if torch.cuda.is_available():
        model.to("cuda")
    return SavedModel(name, folder, model, tokenizer, spec, order, _get_max_length(folder, model.config), run_config)


def _check_run(name: str) -> None:
    """A run folder without a model is said to be one; its name is no hub id."""
    folder = RunFolder(Path(name).expanduser())
    if folder.path.is_dir() and folder.is_occupied() and not (folder.path / "config.json").exists():
        if not (folder.model / "config.json").exists():
            raise ConfigError(f"--model {name}: {folder.describe()} that left no model; finish it, or choose another")


def read_run_config(model_dir: Path) -> RunConfig | None:
    """Config of the run whose ``model`` folder this is; ``None`` where there is none, or it cannot be read."""
    path = model_dir.parent / "config.yaml"
    if model_dir.name != "model" or not path.is_file():
        return None
    try:
        return create_run_config(load_yaml(path), str(path))
    except ConfigError as error:
        logger.warning("%s; going on without what it says.", error)
        return None


def _load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = load_config(folder)
    if isinstance(config, IsobnConfig):
        model: Any
        model, tokenizer = load_model(folder)
        parts = [model.config, model.encoder.config]
    else:
        check_weights(folder)
        model, tokenizer = load_stock_classifier(folder), load_tokenizer(folder)
        parts = [model.config]
    for part in parts:
        # Old configs ask for tuples, and some for the hidden states of every layer.
        part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
    return model.float().eval(), tokenizer


def load_stock_classifier(folder: Path) -> PreTrainedModel:
    """Loads a ``...ForSequenceClassification`` of transformers in float32, never with a head drawn at random.

    Raises:
        ConfigError: Weights are missing.
    """
    load = AutoModelForSequenceClassification.from_pretrained
    model, info = read_pretrained(
        folder, load, folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    missing = sorted(info["missing_keys"])
    if missing:
        if any(key.startswith(("classifier", "score")) for key in missing):
            raise ConfigError(f"{folder}: no classification head in this model; fine-tune it with 'run' first")
        raise ConfigError(f"{folder}: the model file lacks {len(missing)} of its weights, the first is {missing[0]}")
    check_finite(folder, model)
    return model.eval()


def _find_task(config: Any, run_config: RunConfig | None) -> TaskSpec | None:
    if run_config is not None:
        return run_config.spec
    try:
        return get_task(str(getattr(config, "finetuning_task", None) or ""))
    except ConfigError:
        return None


def _get_max_length(folder: Path, config: Any) -> int:
    encoder = config.encoder_config if isinstance(config, IsobnConfig) else config
    asked = getattr(config, "finetuning_max_length", None) or _STOCK_MAX_LENGTH
    if not isinstance(asked, int) or asked < 4:
        raise ConfigError(f"{folder / 'config.json'}: finetuning_max_length is {asked!r}, no number of tokens")
    limit = get_family(encoder.model_type).get_max_length(encoder)
    return asked if limit is None else min(asked, limit)


def match_labels(name: str, config: Any, spec: TaskSpec | None) -> tuple[TaskSpec, list[int]]:
    """Matches the model's label names with the task's, and refuses a head that cannot be for it."""
    names = [str(config.id2label[index]) for index in range(config.num_labels)]
    if spec is None:
        labels = () if len(names) == 1 else tuple(names)
        return TaskSpec("custom", "no task named", (), labels, (), ""), list(range(len(names)))
    if len(names) != spec.num_labels:
        raise ConfigError(
            f"--model {name}: its head has {len(names)} output{'' if len(names) == 1 else 's'} ({', '.join(names[:5])})"
            f", and {spec.title} needs {spec.num_labels}. Choose a model fine-tuned on {spec.title}, or another --task"
        )
    if spec.is_regression:
        return spec, [0]
    columns = {_normalize_label(label): column for column, label in enumerate(names)}
    wanted = [_normalize_label(label) for label in spec.labels]
    if set(wanted) == set(columns):
        return spec, [columns[label] for label in wanted]
    if all(_NAMELESS.fullmatch(label) for label in names):
        logger.warning(
            "%s calls its classes %s, which cannot be matched by name: their order is taken to be %s.",
            name,
            ", ".join(names),
            ", ".join(spec.labels),
        )
        return spec, list(range(len(names)))
    raise ConfigError(
        f"--model {name}: a model of another task: its classes are {', '.join(names)}, and those of {spec.title} are "
        f"{', '.join(spec.labels)}"
    )


def _normalize_label(label: str) -> str:
    return re.sub(r"[\s_-]+", "_", label.strip()).casefold()
