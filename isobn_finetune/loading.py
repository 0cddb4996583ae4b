"""Models and tokenizers from folders: a new classifier on a pre-trained encoder, or a saved one as it was."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from isobn_finetune.errors import ConfigError
from isobn_finetune.families import Family, get_family
from isobn_finetune.modeling import IsobnConfig, IsobnForSequenceClassification
from isobn_finetune.tasks import TaskSpec
from isobn_finetune.weights_file import check_weights

logger = logging.getLogger(__name__)


def create_model(
    model_dir: Path, spec: TaskSpec, norm: dict[str, Any], pooling: str = "pooler", trust_remote_code: bool = False
) -> IsobnForSequenceClassification:
    """Builds a classifier with a new norm and head on a pre-trained encoder, in float32.

    The head is drawn from torch's global generator: seed it first.

    Args:
        model_dir: Local folder of an encoder, of any stock model built on it, or of a classifier of ours.
        spec: The task, for the number and names of the labels.
        norm: ``{"name": ..., **options}``.
        pooling: ``pooler``, ``cls`` or ``mean``.
        trust_remote_code: Run code from the model's folder.

    Raises:
        ConfigError: The folder holds no readable model of a supported family.
    """
    encoder, pooler = _load_encoder(model_dir, trust_remote_code)
    encoder.config._name_or_path = ""  # a folder of this machine, of no use to whoever loads the model
    encoder.config.num_labels, encoder.config.problem_type = 2, None  # the defaults: labels of an earlier head are gone
    config = IsobnConfig(encoder.config, norm, pooling, **_describe_labels(spec))
    model = IsobnForSequenceClassification(config, encoder=encoder)
    if pooling == "pooler":
        if pooler:
            model.pooler.load_state_dict(pooler)
        else:
            logger.info(
                "%s has no trained pooler: its dense layer is new and learned with the head.", config.family.title
            )
    return model


def load_model(run_or_model_dir: str | Path) -> tuple[IsobnForSequenceClassification, PreTrainedTokenizerBase]:
    """Loads a saved classifier for prediction.

    Args:
        run_or_model_dir: A run folder, or the ``model`` folder in it.

    Returns:
        The model in eval mode, with ``model(**inputs).logits``, and its tokenizer.

    Raises:
        ConfigError: No model of ours, or its file lacks weights or statistics.
    """
    folder = _model_folder(Path(run_or_model_dir))
    config = load_config(folder)
    if not isinstance(config, IsobnConfig):
        raise ConfigError(f"{folder}: a model of type '{config.model_type}', not one that isobn-finetune saved")
    check_weights(folder)
    load = IsobnForSequenceClassification.from_pretrained
    model, info = read_pretrained(folder, load, folder, local_files_only=True, output_loading_info=True)
    if info["unexpected_keys"]:
        first = min(info["unexpected_keys"])
        raise ConfigError(f"{folder}: the model file holds weights that config.json does not know, such as {first}")
    check_finite(folder, model)
    return model.eval(), load_tokenizer(folder)


def check_finite(folder: Path, model: nn.Module) -> None:
    """Refuses weights and statistics that are no numbers: a norm may hide them, and predictions would be wrong.

    Raises:
        ConfigError: Some are not.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ConfigError(f"{folder}: the model file holds numbers that are not finite, in {name}; get it again")


def load_config(model_dir: Path, trust_remote_code: bool = False) -> Any:
    """Reads a model's config.

    Raises:
        ConfigError: It cannot be read.
    """
    path = model_dir / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable model config ({_first_line(error)})") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"{path}: names no model_type, so this is not a model of transformers")
    if values["model_type"] == IsobnConfig.model_type:
        return read_pretrained(model_dir, IsobnConfig.from_pretrained, model_dir)
    if not trust_remote_code:
        try:
            get_family(values["model_type"])
        except ConfigError as error:
            raise ConfigError(f"{model_dir}: {error}. Choose another --model") from None
    return read_pretrained(
        model_dir, AutoConfig.from_pretrained, model_dir, local_files_only=True, trust_remote_code=trust_remote_code
    )


def load_tokenizer(model_dir: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the fast tokenizer of a model folder.

    Raises:
        ConfigError: It cannot be read.
    """
    return read_pretrained(
        model_dir, AutoTokenizer.from_pretrained, model_dir, local_files_only=True, trust_remote_code=trust_remote_code
    )


def _model_folder(folder: Path) -> Path:
    for candidate in (folder, folder / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    raise ConfigError(f"{folder}: no model here; looked for config.json in it and in its folder 'model'")


def _load_encoder(model_dir: Path, trust_remote_code: bool) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Returns the encoder and the trained weights for our pooler, empty where the checkpoint has none."""
    config = load_config(model_dir, trust_remote_code)
    if isinstance(config, IsobnConfig):
        logger.info("The head (%s) and the norm of %s are not taken over: both are new.", _labels(config), model_dir)
        source = read_pretrained(
            model_dir, IsobnForSequenceClassification.from_pretrained, model_dir, local_files_only=True
        )
        return source.encoder, source.pooler.state_dict() if config.pooling == "pooler" else {}
    family = get_family(config.model_type)
    # float32: the default takes the checkpoint's own precision, and half precision is no master copy.
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code, "dtype": torch.float32}
    encoder, info = read_pretrained(
        model_dir, AutoModel.from_pretrained, model_dir, output_loading_info=True, **options
    )
    missing = sorted(info["missing_keys"])
    without_pooler = [name for name in missing if not name.startswith("pooler.")]
    if without_pooler:
        raise ConfigError(
            f"{model_dir}: the model file lacks {len(without_pooler)} weights of the encoder, the first is "
            f"{without_pooler[0]}; get it again"
        )
    unexpected = set(info["unexpected_keys"])
    if any(name.startswith("classifier.") for name in unexpected):
        logger.info("The head of %s (%s) is not taken over: a new one is drawn.", model_dir, _labels(config))
    if f"{family.dense}.weight" in unexpected:
        return encoder, _read_head(model_dir, family, options)
    own_pooler = getattr(encoder, "pooler", None)
    if own_pooler is None or missing:
        return encoder, {}
    dense = getattr(own_pooler, "dense", own_pooler)
    return encoder, {f"dense.{name}": tensor for name, tensor in dense.state_dict().items()}


def _read_head(model_dir: Path, family: Family, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights for our pooler from the head of a stock classification checkpoint."""
    stock = read_pretrained(
        model_dir,
        AutoModelForSequenceClassification.from_pretrained,
        model_dir,
        ignore_mismatched_sizes=True,
        **options,
    )
    parts = {"dense": family.dense, "LayerNorm": family.layer_norm}
    return {
        f"{ours}.{name}": tensor
        for ours, theirs in parts.items()
        if theirs is not None
        for name, tensor in stock.get_submodule(theirs).state_dict().items()
    }


def _describe_labels(spec: TaskSpec) -> dict[str, Any]:
    """Label names and the kind of problem, as a config of transformers holds them."""
    names = ("score",) if spec.is_regression else spec.labels
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": "regression" if spec.is_regression else "single_label_classification",
        "finetuning_task": spec.name,
    }


def _labels(config: Any) -> str:
    names = list(config.id2label.values())
    return "one score" if len(names) == 1 else f"{len(names)} classes"


def read_pretrained(model_dir: Path, load: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a loader of transformers and turns what it raises about a file into one line."""
    try:
        return load(*args, **kwargs)
    except ConfigError as error:
        raise error if str(model_dir) in str(error) else ConfigError(f"{model_dir}: {error}") from None
    # Damaged files surface as many kinds: OSError, ValueError, SafetensorError, KeyError, RuntimeError.
    except Exception as error:
        if "ignore_mismatched_sizes" in str(error):
            raise ConfigError(
                f"{model_dir}: cannot load this model: its weights have other sizes than config.json says; get it again"
            ) from error
        raise ConfigError(
            f"{model_dir}: cannot load this model ({type(error).__name__}: {_first_line(error)}); "
            "check the folder, or get it again"
        ) from error


def _first_line(error: BaseException, limit: int = 200) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:limit]


def count_parameters(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
