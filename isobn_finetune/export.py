"""Folds the norm into the classifier and writes a stock checkpoint, checked before it takes its place.

In evaluation every norm is affine, ``y = x * weight + shift``, so the classifier that follows takes it in:
``W' = W diag(weight)`` and ``b' = b + W shift``. What remains is the function of the family's stock
``...ForSequenceClassification``, since our pooler is the dense part of its head.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from isobn_finetune.data import DEMO, load_splits
from isobn_finetune.encoding import PaddingCollator
from isobn_finetune.errors import ConfigError, IsobnError
from isobn_finetune.loading import load_config, load_tokenizer
from isobn_finetune.model_card import write_export_card
from isobn_finetune.modeling import IsobnConfig, IsobnForSequenceClassification, takes_token_types
from isobn_finetune.norms import create_norm
from isobn_finetune.run_folder import RunFolder, replace_folder
from isobn_finetune.saved_model import SavedModel, forget_local_paths, load_stock_classifier, open_model
from isobn_finetune.tasks import get_task
from isobn_finetune.text_files import TextRow
from isobn_finetune.weights_file import seal_weights
from isobn_finetune.whole_files import clean_interrupt

logger = logging.getLogger(__name__)

TOLERANCE = 1e-5
"""Largest difference between logits of the stock model and ours, in float32."""

_CHECKED_ROWS = 64
_BATCH_SIZE = 8  # several batches of several lengths, so that padding is part of the check


def export_checkpoint(model: str, output_dir: Path) -> str:
    """Writes what stock transformers loads by itself: weights with the norm folded in, config, tokenizer, card.

    Args:
        model: Run folder, model folder, or hub id of a model of ours.
        output_dir: New or empty.

    Returns:
        One line that says what was written and how far apart the logits were.

    Raises:
        ConfigError: Nothing was started: not a model of ours, no stock twin, or the folder cannot be used.
        IsobnError: The stock model gives other logits than ours; nothing was written.
    """
    check_export_folder(output_dir)
    saved = open_model(model)
    config = saved.model.config
    if not isinstance(config, IsobnConfig):
        raise ConfigError(f"--model {model}: a stock {config.model_type} checkpoint already, with no norm to fold in")
    if config.pooling != "pooler":
        raise ConfigError(
            f"--model {model}: model.pooling is {config.pooling}, and no stock {config.family.title} classifier pools "
            "like that; --format onnx exports it"
        )
    dtype = getattr(torch, str(_saved_dtype(saved.folder)).removeprefix("torch."))
    stock = create_stock_model(saved.model, dtype)
    rows, origin = find_rows(saved)
    differences: list[float] = []

    def fill(folder: Path) -> None:
        save_stock_model(folder, stock, saved)
        difference = compare_with_stock(saved, folder, rows)
        # Half precision rounds the folded weights themselves; the fold is then judged before that rounding.
        if dtype != torch.float32:
            logger.info("As stored, in %s, logits are at most %.1e apart.", dtype, difference)
            difference = _difference(saved, create_stock_model(saved.model, torch.float32), rows)
        if not difference <= TOLERANCE:
            raise IsobnError(
                f"{output_dir}: not written: logits of the stock model differ from ours by up to {difference:.1e} on "
                f"{len(rows)} rows of {origin}, more than {TOLERANCE:.0e}"
            )
        differences.append(difference)
        write_export_card(
            folder, saved, f"a stock `{type(stock).__name__}`", difference, f"{len(rows)} rows of {origin}"
        )

    with clean_interrupt():
        replace_folder(output_dir, fill)
    return (
        f"{type(stock).__name__}, norm {saved.norm} folded in; on {len(rows)} rows of {origin} its logits are "
        f"at most {differences[0]:.1e} from ours"
    )


def check_export_folder(output_dir: Path) -> None:
    """Refuses a folder that holds something or cannot be made.

    Raises:
        ConfigError: It cannot be used.
    """
    RunFolder(output_dir).check_usable()
    if output_dir.is_dir() and any(output_dir.iterdir()):
        raise ConfigError(f"--output-dir {output_dir}: not empty; choose a new folder")
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}."):
            pass
    except OSError as error:
        raise ConfigError(f"--output-dir {output_dir}: cannot be written ({error.strerror})") from error


def fold_classifier(classifier: nn.Linear, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the classifier with the norm before it taken in, in float64.

    Args:
        classifier: ``hidden_size`` to ``num_labels``.
        weight: ``(hidden_size,)``, or ``(hidden_size, hidden_size)`` for a norm that mixes dimensions: ``x @ weight``.
        shift: ``(hidden_size,)``.
    """
    matrix, bias = classifier.weight.detach().double(), classifier.bias.detach().double()
    weight, shift = weight.detach().to(matrix), shift.detach().to(matrix)
    folded = matrix * weight if weight.dim() == 1 else matrix @ weight.T
    return folded, bias + matrix @ shift


def fold_norm(model: IsobnForSequenceClassification) -> IsobnForSequenceClassification:
    """Returns a copy with norm ``none`` that gives the same logits in eval mode."""
    folded = copy.deepcopy(model)
    norm: Any = model.norm
    weight, bias = fold_classifier(model.classifier, *norm.affine())
    with torch.no_grad():
        folded.classifier.weight.copy_(weight)
        folded.classifier.bias.copy_(bias)
    folded.norm = create_norm("none", model.config.hidden_size)
    folded.config.norm = {"name": "none"}
    return folded.eval()


def create_stock_model(model: IsobnForSequenceClassification, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds the family's stock ``...ForSequenceClassification`` with our weights, on our model's device.

    Args:
        model: With ``pooling: pooler``.
        dtype: Of the stock model.
    """
    family = model.config.family
    pooler: Any = model.pooler
    norm: Any = model.norm
    with torch.random.fork_rng():  # its weights are drawn first, and then replaced
        # float32 first, whatever the config says: rounding comes last.
        stock = AutoModelForSequenceClassification.from_config(create_stock_config(model.config), dtype=torch.float32)
    left_out = stock.base_model.load_state_dict(model.encoder.state_dict(), strict=False)
    own_head = [name for name in left_out.missing_keys if not name.startswith("pooler.")]
    if own_head or left_out.unexpected_keys:
        raise IsobnError(
            f"{family.title}: transformers' encoder has changed: {(own_head + left_out.unexpected_keys)[0]}"
        )
    stock.get_submodule(family.dense).load_state_dict(pooler.dense.state_dict())
    if family.layer_norm is not None:
        stock.get_submodule(family.layer_norm).load_state_dict(pooler.LayerNorm.state_dict())
    weight, bias = fold_classifier(model.classifier, *norm.affine())
    classifier = stock.get_submodule(family.classifier)
    with torch.no_grad():
        classifier.weight.copy_(weight)
        classifier.bias.copy_(bias)
    return stock.to(device=model.device, dtype=dtype).eval()


def create_stock_config(config: IsobnConfig) -> Any:
    """The encoder's config with our labels, problem type and task."""
    stock = copy.deepcopy(config.encoder_config)
    for key in ("id2label", "label2id", "problem_type", "finetuning_task", "finetuning_max_length"):
        if getattr(config, key, None) is not None:
            setattr(stock, key, copy.deepcopy(getattr(config, key)))
    stock.architectures = None  # set anew when the model is saved
    forget_local_paths(stock)
    # What our pooler does, where the family offers a choice.
    if hasattr(stock, "classifier_pooling"):
        stock.classifier_pooling = "cls"
    if hasattr(stock, "pooler_hidden_size"):
        stock.pooler_hidden_size = stock.hidden_size
    return stock


def save_stock_model(folder: Path, stock: PreTrainedModel, saved: SavedModel) -> None:
    """Saves model and tokenizer; the tokenizer gives only what the model takes."""
    try:
        stock.save_pretrained(folder)
    except SafetensorError as error:
        raise IsobnError(f"{folder}: the weights cannot be written ({' '.join(str(error).split())[:120]})") from error
    seal_weights(folder)
    known = ("input_ids", "attention_mask", *(["token_type_ids"] if takes_token_types(stock.base_model) else []))
    save_tokenizer(folder, saved.tokenizer, known)


def save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, known: Sequence[str]) -> None:
    """Saves a tokenizer so that it gives only what the model beside it takes."""
    names = [name for name in tokenizer.model_input_names if name in known]
    if names != tokenizer.model_input_names:
        tokenizer = copy.deepcopy(tokenizer)
        # The first for this object, the second for whoever loads it.
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    tokenizer.save_pretrained(folder)


def compare_with_stock(saved: SavedModel, folder: Path, rows: list[TextRow]) -> float:
    """Largest difference of logits between a saved stock model, loaded as anybody would, and ours."""
    config = load_config(folder)
    if isinstance(config, IsobnConfig):
        raise IsobnError(f"{folder}: not a stock model")
    return _difference(saved, load_stock_classifier(folder).to(saved.model.device), rows, load_tokenizer(folder))


@torch.inference_mode()
def _difference(saved: SavedModel, stock: PreTrainedModel, rows: list[TextRow], tokenizer: Any = None) -> float:
    """The stock model reads what its own tokenizer gives, where it has one; ours goes its usual way."""
    drop_token_types = tokenizer is None and not takes_token_types(stock.base_model)
    tokenizer = tokenizer or saved.tokenizer
    collate = PaddingCollator(saved.tokenizer)
    worst = 0.0
    for start in range(0, len(rows), _BATCH_SIZE):
        texts = [row.texts for row in rows[start : start + _BATCH_SIZE]]
        batch = tokenizer(
            *map(list, zip(*texts, strict=True)),
            truncation=True,
            max_length=saved.max_length,
            padding=True,
            return_tensors="pt",
        )
        if drop_token_types:
            batch.pop("token_type_ids", None)
        theirs = stock(**batch.to(stock.device)).logits
        ours = saved.model(**{key: value.to(saved.model.device) for key, value in collate(saved.encode(texts)).items()})
        difference = (theirs.double() - ours.logits.double()).abs().max().item()
        worst = max(worst, difference) if difference == difference else float("nan")
    return worst


def find_rows(saved: SavedModel, limit: int = _CHECKED_ROWS) -> tuple[list[TextRow], str]:
    """Rows to check an export on: the run's own data, else the demo's; and where they came from."""
    config = saved.config
    attempts: list[tuple[Any, str, str]] = []
    if config is not None:
        attempts.append((config.spec, config.data.source, config.spec.selection_split))
    width = len(saved.spec.text_columns)
    demo = [saved.spec.name] if saved.spec.files else []
    demo += ["sst2"] if width == 1 else ["rte"] if width == 2 else ["rte", "sst2"]
    for name in demo:
        spec = get_task(name)
        attempts.append((spec, DEMO, spec.selection_split))
    for spec, source, split in attempts:
        try:
            dataset = load_splits(spec, source, [split])[split]
        except IsobnError as error:
            logger.info("%s; rows of the demo take their place.", error)
            continue
        # Evenly over the split: it may be sorted.
        chosen = [row * len(dataset) // limit for row in range(limit)] if len(dataset) > limit else range(len(dataset))
        texts = [TextRow(tuple(dataset[row][column] for column in spec.text_columns), None) for row in chosen]
        # An empty text is short, and a long one is cut.
        longest = max(texts, key=lambda row: sum(map(len, row.texts)))
        texts += [TextRow(("",) * len(longest.texts), None), TextRow(tuple(text * 40 for text in longest.texts), None)]
        return texts, f"{spec.name} {split} ({'demo' if source == DEMO else 'the data of the run'})"
    raise ConfigError("no rows to check the export on")


def _saved_dtype(folder: Path) -> Any:
    """Precision of the weights as they were saved."""
    return getattr(load_config(folder), "dtype", None) or torch.float32
