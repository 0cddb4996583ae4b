"""Isotropy of a model's sentence embeddings on real rows: what ``isobn-finetune analyze`` calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm

from isobn_finetune.analysis import Analysis, EmbeddedTask, measure_embeddings, note_comparison
from isobn_finetune.data import DEMO, HUB, load_splits
from isobn_finetune.encoding import Feature, PaddingCollator, encode, limit_length
from isobn_finetune.errors import ConfigError, IsobnError
from isobn_finetune.hub import resolve_model
from isobn_finetune.isotropy import CovarianceAccumulator, compute_measures
from isobn_finetune.loading import create_model, load_config, load_model, load_tokenizer
from isobn_finetune.modeling import IsobnConfig, IsobnForSequenceClassification
from isobn_finetune.norms import create_norm
from isobn_finetune.run_folder import RunFolder
from isobn_finetune.saved_model import read_run_config
from isobn_finetune.tasks import TaskSpec, get_task, nearest

REPRESENTATIONS = ("pooler", "cls", "mean")
"""Pooler output; last hidden state of token 0; mean of the last hidden states over the tokens."""

DEFAULT_NORMS = ("none", "batchnorm", "isobn")


def analyze(
    model: str,
    tasks: Sequence[str],
    norms: Sequence[str | Mapping[str, Any]] = DEFAULT_NORMS,
    source: str | None = None,
    split: str = "train",
    max_rows: int | None = None,
    representation: str | None = None,
    output_dir: str | Path | None = None,
    top_k: int = 3,
    max_length: int = 128,
    batch_size: int = 64,
    compare_to: str | None = None,
    trust_remote_code: bool = False,
) -> Analysis:
    """Embeds a split of each task in float32 and measures isotropy before and after each norm.

    Args:
        model: ``tiny``, a folder with an encoder or a saved classifier, a run folder, or a hub id.
        tasks: Task names.
        norms: Names, or ``{"name": ..., **options}``; ``none`` is always among them.
        source: ``hub``, ``demo`` or a folder; the default is a run's own data, ``demo`` for ``tiny``, else ``hub``.
        split: Which split to embed.
        max_rows: Embed the first rows only.
        representation: ``pooler``, ``cls`` or ``mean``; the default is the model's own pooling, and ``cls`` beside it.
        output_dir: Where ``analyze.{json,csv,md,html}`` and ``plots`` go; nothing is written if not given.
        top_k: EV_1 to EV_k are reported, at least three.
        max_length: Tokens a row.
        batch_size: Rows at once; does not change the result beyond rounding.
        compare_to: Another model to embed the same rows with, such as the encoder that a run began from.
        trust_remote_code: Run code that the model's folder brings along.

    Raises:
        ConfigError: Nothing was started: a name, model, data folder, split or output folder cannot be used.
        DataError: A bad row in the data.
    """
    specs = [get_task(name) for name in dict.fromkeys(get_task(task).name for task in tasks)]
    norm_options = _check_norms(norms)
    _check_options(specs, split, max_rows, representation, top_k, max_length, batch_size)
    if output_dir is not None:
        RunFolder(output_dir).check_usable()
    encoder = Encoder(model, specs[0], representation, trust_remote_code)
    source = source or encoder.source
    other = _open_other(compare_to, specs[0], representation, trust_remote_code)
    width = encoder.model.config.hidden_size
    if top_k > width:
        raise ConfigError(f"--top-k {top_k}: {model} has {width} dimensions. Choose {width} or less.")
    rows = {spec.name: _load_rows(spec, source, split, max_rows) for spec in specs}

    result = Analysis(model, split, source, max(top_k, 3), compare_to, [])
    for spec in specs:
        compared = other.embed(rows[spec.name], spec, max_length, batch_size) if other is not None else {}
        labels = np.array(rows[spec.name]["label"])
        for name, embeddings in encoder.embed(rows[spec.name], spec, max_length, batch_size).items():
            if not np.isfinite(embeddings).all(axis=1).any():
                raise IsobnError(f"{model}: no embedding of {spec.title} is finite; its weights are damaged")
            trained = encoder.trained_norm if name == encoder.pooling else None
            task = measure_embeddings(spec, name, embeddings, labels, norm_options, trained, result.top_k)
            if name in compared:
                _compare(task, compared[name], str(compare_to), result.top_k)
            if encoder.pooler_is_new and name == "pooler":
                task.notes.insert(0, encoder.note_new_pooler())
            result.tasks.append(task)
    result.tasks.sort(key=lambda task: encoder.representations.index(task.representation))
    if output_dir is not None:
        # Imported here: matplotlib takes a while, and only files need it.
        from isobn_finetune.analyze_report import write_analysis

        write_analysis(result, Path(output_dir))
    return result


class Encoder:
    """A pre-trained encoder or a saved classifier, ready to embed rows.

    Attributes:
        representations: What it gives, the main one first.
        pooling: Which of them a classifier's norm stands on.
        trained_norm: Options and norm of a saved classifier; ``None`` for an encoder, and where there is no norm.
        source: Where a run's own rows came from; ``demo`` for ``tiny``, else ``hub``.
        pooler_is_new: True where no checkpoint holds weights for the pooler.
    """

    def __init__(self, name: str, spec: TaskSpec, representation: str | None, trust_remote_code: bool = False) -> None:
        folder = resolve_model(name)
        config = load_config(folder, trust_remote_code)
        is_saved = isinstance(config, IsobnConfig)
        self.name = name
        run_config = read_run_config(folder)
        own = DEMO if name == "tiny" else HUB
        self.source = run_config.data.source if run_config is not None else own
        self.model: IsobnForSequenceClassification
        self.trained_norm: tuple[dict[str, Any], nn.Module] | None = None
        if is_saved:
            self.model, self.tokenizer = load_model(folder)
            if config.norm["name"] != "none":
                self.trained_norm = (dict(config.norm), self.model.norm)
        else:
            self.model = _create_seeded(folder, spec, trust_remote_code, seed=0)
            self.tokenizer = load_tokenizer(folder, trust_remote_code)
        self.pooling: str = self.model.config.pooling
        if representation == "pooler" and self.pooling != "pooler":
            raise ConfigError(
                f"--representation pooler: {name} was trained with pooling '{self.pooling}' and has no pooler. "
                "Use cls or mean."
            )
        wanted = (self.pooling, "cls") if representation is None else (representation,)
        self.representations = list(dict.fromkeys(wanted))
        self.pooler_is_new = not is_saved and self._draws_pooler(folder, spec, trust_remote_code)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def embed(self, rows: Dataset, spec: TaskSpec, max_length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns embeddings ``(rows, hidden_size)`` float32 by representation, in the order of the rows."""
        config = self.model.config
        features = encode(rows, spec, self.tokenizer, limit_length(max_length, config.family, config.encoder_config))
        shape = (len(features), config.hidden_size)
        result = {name: np.empty(shape, dtype=np.float32) for name in self.representations}
        collate = PaddingCollator(self.tokenizer)
        encoded: dict[str, Any] = {}
        hook = self.model.encoder.register_forward_hook(lambda _, __, output: encoded.update(output=output))
        bar = tqdm(total=len(features), desc=f"{Path(self.name).name}, {spec.title}", unit="row", disable=None)
        try:
            with bar, torch.inference_mode():
                for chosen in _batches_by_length(features, batch_size):
                    batch = collate([_without_labels(features[row]) for row in chosen])
                    batch = {name: tensor.to(self.model.device) for name, tensor in batch.items()}
                    pooled = self.model(**batch).pooler_output
                    hidden = encoded.pop("output").last_hidden_state
                    for name, matrix in result.items():
                        vectors = pooled if name == self.pooling else _pool(hidden, batch["attention_mask"], name)
                        matrix[chosen] = vectors.float().cpu().numpy()
                    bar.update(len(chosen))
        finally:
            hook.remove()
        return result

    def _draws_pooler(self, folder: Path, spec: TaskSpec, trust_remote_code: bool) -> bool:
        """True where another seed gives another pooler. Drawn biases are zero, so one that is not spares the try."""
        parameters = dict(self.model.pooler.named_parameters())
        if any(bool(value.any()) for name, value in parameters.items() if name.endswith("bias")):
            return False
        other = _create_seeded(folder, spec, trust_remote_code, seed=1).pooler.state_dict()
        return any(not torch.equal(value, other[name]) for name, value in parameters.items())

    def note_new_pooler(self) -> str:
        """What a new pooler means for the numbers."""
        return (
            f"{self.name} has no trained pooler: its dense layer is freshly drawn, so the pooler output tells of "
            "random weights too. Look at cls or mean."
        )


def _open_other(
    name: str | None, spec: TaskSpec, representation: str | None, trust_remote_code: bool
) -> Encoder | None:
    """The model of ``--compare-to``; what is wrong with it is said of that option."""
    if name is None:
        return None
    try:
        return Encoder(name, spec, representation, trust_remote_code)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--model", "--compare-to", 1)) from error


def _compare(task: EmbeddedTask, embeddings: np.ndarray, model: str, top_k: int) -> None:
    """Adds the other model's measures, and what they say."""
    moments = CovarianceAccumulator(embeddings.shape[1])
    moments.update(embeddings)
    task.compared = compute_measures(moments, top_k)
    task.notes += note_comparison(task, model)


def _check_norms(norms: Sequence[str | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Norms with their options, ``none`` first and each name once."""
    options = [{"name": norm} if isinstance(norm, str) else dict(norm) for norm in norms]
    options = [{"name": "none"}, *(norm for norm in options if norm["name"] != "none")]
    names = [norm["name"] for norm in options]
    for norm in options:
        if names.count(norm["name"]) > 1:
            raise ConfigError(f"--norm {norm['name']} is given twice. Name each norm once.")
        try:
            create_norm(hidden_size=2, **norm)
        except TypeError:
            given = ", ".join(sorted(set(norm) - {"name"}))
            raise ConfigError(f"--norm {norm['name']}: does not take all of these options: {given}.") from None
    return options


def _check_options(
    specs: Sequence[TaskSpec],
    split: str,
    max_rows: int | None,
    representation: str | None,
    top_k: int,
    max_length: int,
    batch_size: int,
) -> None:
    if not specs:
        raise ConfigError("--task: name at least one task, such as --task rte.")
    for spec in specs:
        if split not in spec.splits:
            known = ", ".join(spec.splits)
            raise ConfigError(
                f"--split {split}: {spec.title} has no such split. Known: {known}.{nearest(split, spec.splits)}"
            )
    if representation is not None and representation not in REPRESENTATIONS:
        known = ", ".join(REPRESENTATIONS)
        hint = nearest(representation, REPRESENTATIONS)
        raise ConfigError(f"--representation {representation}: unknown. Known: {known}.{hint}")
    minima = {
        "max-rows": (max_rows, 2),
        "top-k": (top_k, 1),
        "max-length": (max_length, 4),
        "batch-size": (batch_size, 1),
    }
    for name, (value, least) in minima.items():
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: must be {least} or more.")


def _load_rows(spec: TaskSpec, source: str, split: str, max_rows: int | None) -> Dataset:
    rows = load_splits(spec, source, [split])[split]
    if len(rows) == 0:
        raise ConfigError(f"--data {source}: split '{split}' of {spec.title} has no rows.")
    return rows if max_rows is None else rows.select(range(min(max_rows, len(rows))))


def _create_seeded(folder: Path, spec: TaskSpec, trust_remote_code: bool, seed: int) -> IsobnForSequenceClassification:
    """A classifier on a pre-trained encoder; what no checkpoint holds is drawn alike in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return create_model(folder, spec, {"name": "none"}, "pooler", trust_remote_code)


def _batches_by_length(features: Sequence[Feature], batch_size: int) -> list[list[int]]:
    """Rows of like length share a batch, so little is padded; the longest come first, to fail early on memory."""
    order = sorted(range(len(features)), key=lambda row: len(features[row]["input_ids"]), reverse=True)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _without_labels(feature: Feature) -> Feature:
    return {name: value for name, value in feature.items() if name != "labels"}


def _pool(hidden: torch.Tensor, attention_mask: torch.Tensor, representation: str) -> torch.Tensor:
    """``(batch, length, hidden_size)`` to ``(batch, hidden_size)``."""
    if representation == "cls":
        return hidden[:, 0]
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1)
