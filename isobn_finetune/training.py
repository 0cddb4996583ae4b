"""One run: from a config to a run folder."""

from __future__ import annotations

import logging
import shutil
import time
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from isobn_finetune.callbacks import (
    BEST_FOLDER,
    WEIGHTS_FILE,
    EvaluationMemory,
    HistoryWriter,
    Interrupt,
    Progress,
    SkippedSteps,
)
from isobn_finetune.config import RunConfig, slugify
from isobn_finetune.encoding import EncodeRows, Feature, encode
from isobn_finetune.errors import ConfigError, DivergedError, InterruptedRunError
from isobn_finetune.inference import IsotropyProbe, compute_logits
from isobn_finetune.inputs import Inputs, load_inputs
from isobn_finetune.metrics import is_collapsed
from isobn_finetune.model_card import write_model_card
from isobn_finetune.plots import plot_curves
from isobn_finetune.results import RunResult, explain_failure, write_predictions, write_result_if_possible
from isobn_finetune.run_folder import RunFolder, replace_folder, write_json
from isobn_finetune.saved_model import save_model
from isobn_finetune.speed import create_collator, fast_cpu_layers
from isobn_finetune.trackers import create_tracker_callbacks
from isobn_finetune.trainer import SentenceTrainer, create_training_arguments, predict_labels, score_logits

logger = logging.getLogger(__name__)


def fine_tune(
    config: RunConfig, *, resume: bool = False, overwrite: bool = False, encode_rows: EncodeRows = encode
) -> RunResult:
    """Fine-tunes one model on one task with one norm and writes a run folder.

    Args:
        config: What to do; ``output_dir`` is filled in where it is missing.
        resume: Go on with the run in the folder. A finished one is returned as it is.
        overwrite: Remove the run in the folder and start afresh.
        encode_rows: Tokenizes a split; a sweep's runs share what it returns.

    Raises:
        ConfigError: Nothing was started: model, data, options or output folder cannot be used.
        DataError: A bad row in the data.
        DivergedError: A number was no longer finite; ``result.json`` says so.
        InterruptedRunError: A signal came; a checkpoint was saved.
    """
    config = config.resolve()
    folder = RunFolder(str(config.output_dir))
    finished = _check_folder(folder, config, resume, overwrite)
    if finished is not None:
        return finished
    inputs = load_inputs(config, encode_rows)
    checkpoint = _prepare_folder(folder, config, inputs, resume, overwrite)
    data = {"source": config.data.source, "rows": inputs.rows, "fingerprint": inputs.fingerprint}
    result = RunResult.begin(config, folder.path, data=data)
    try:
        _train_and_score(config, folder, inputs, checkpoint, result)
    except (InterruptedRunError, KeyboardInterrupt):
        raise
    except Exception as error:
        result.status = "diverged" if isinstance(error, DivergedError) else "failed"
        result.reason = explain_failure(error)
        write_result_if_possible(folder, result)
        raise
    return result


def _check_folder(folder: RunFolder, config: RunConfig, resume: bool, overwrite: bool) -> RunResult | None:
    """Returns the finished run that ``resume`` finds, and refuses a folder that cannot be used."""
    folder.check_usable()
    if not folder.is_occupied():
        if resume and folder.path.exists() and any(folder.path.iterdir()):
            raise ConfigError(f"{folder.path}: nothing to resume here, and the folder is not empty")
        return None
    if overwrite:
        return None
    if not resume:
        raise ConfigError(
            f"{folder.path} holds {folder.describe()}. Choose another --output-dir, --resume to go on with it, "
            "or --overwrite to start afresh"
        )
    values = folder.read_result()
    finished = values is not None and values["status"] == "finished"
    if not folder.config.is_file():
        raise ConfigError(
            f"{folder.path}: config.yaml is missing, so nobody can tell whether this is the same run; choose another "
            "--output-dir, or --overwrite to start afresh"
        )
    # A run that is not over cannot take other settings either: it would be neither the old run nor the new one.
    differences = folder.differences(config, everything=not finished)
    if differences:
        raise ConfigError(
            f"{folder.path} holds another run: {'; '.join(differences)}. Choose another --output-dir, "
            "or --overwrite to start afresh"
        )
    if values is None or not finished:
        return None
    logger.info("%s: this run was finished; nothing to do.", folder.path)
    return RunResult.from_json(folder.path, values)


def _prepare_folder(folder: RunFolder, config: RunConfig, inputs: Inputs, resume: bool, overwrite: bool) -> Path | None:
    """Makes the folder ready and returns the checkpoint to go on from."""
    data_file = folder.checkpoints / "data.json"
    checkpoint = None
    if overwrite:
        folder.clear()
    elif resume and folder.checkpoints.is_dir():
        if data_file.is_file() and inputs.fingerprint not in data_file.read_text(encoding="utf-8"):
            raise ConfigError(
                f"{folder.path} holds another run: the rows of {config.data.source} have changed since it began. "
                "Choose another --output-dir, or --overwrite to start afresh"
            )
        checkpoint = folder.find_checkpoint()
    folder.start(config)
    folder.result.unlink(missing_ok=True)
    if checkpoint is None:
        shutil.rmtree(folder.checkpoints, ignore_errors=True)
        folder.history.unlink(missing_ok=True)
        if resume:
            logger.info("%s: no checkpoint yet; starting from the beginning.", folder.path)
    else:
        step = int(checkpoint.name.rpartition("-")[2])
        folder.cut_history(step)
        logger.info("Going on from step %d.", step)
    write_json(data_file, {"fingerprint": inputs.fingerprint})
    return checkpoint


def _train_and_score(
    config: RunConfig, folder: RunFolder, inputs: Inputs, checkpoint: Path | None, result: RunResult
) -> None:
    spec, model, features = config.spec, inputs.model, inputs.features
    _say_plan(config, inputs)

    interrupt, skipped = Interrupt(), SkippedSteps(config.train.max_skipped_steps)
    progress = Progress(f"{spec.title}, {config.norm.name}")
    trackers = create_tracker_callbacks(config.train.report_to, folder)
    trainer = _create_trainer(config, folder, inputs, [skipped, interrupt, progress, *trackers])
    skipped.trainer = trainer
    started = time.perf_counter()
    try:
        with interrupt.watch(), fast_cpu_layers(model, features["train"], config.train.weight_decay):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        progress.close()
    if interrupt.signal_name and trainer.state.global_step < trainer.state.max_steps:
        raise InterruptedRunError(
            f"{folder.path}: interrupted by {interrupt.signal_name} and saved at step {trainer.state.global_step}; "
            "--resume goes on"
        )
    seconds = time.perf_counter() - started
    collator = trainer.data_collator
    result.train = {
        "steps": trainer.state.global_step,
        "epochs": round(trainer.state.epoch or 0, 4),
        "seconds": round(seconds, 3),
        "samples_per_second": round(_rows_seen(trainer, config, len(features["train"])) / seconds, 3),
        "precision": inputs.precision,
        "real_token_fraction": round(collator.real_tokens / max(collator.all_tokens, 1), 4),
    }
    if inputs.precision == "fp16":
        result.train["skipped_steps"] = skipped.total
    memory = next(c for c in trainer.callback_handler.callbacks if isinstance(c, EvaluationMemory))
    result.best = {"epoch": round(memory.best_epoch, 4), "step": memory.best_step}
    result.last_score = memory.last_score
    model.load_state_dict(load_file(folder.checkpoints / BEST_FOLDER / WEIGHTS_FILE))
    _write_results(config, folder, inputs, trainer, result)


def _create_trainer(
    config: RunConfig, folder: RunFolder, inputs: Inputs, callbacks: list[TrainerCallback]
) -> SentenceTrainer:
    spec, features = config.spec, inputs.features
    collator = create_collator(inputs.model, inputs.tokenizer, config.train.packing)
    memory = EvaluationMemory(config.train.early_stopping_patience)
    return SentenceTrainer(
        spec=spec,
        folder=folder,
        dev=inputs.dev(spec),
        best_metric=config.best_metric,
        eval_batch_size=config.train.eval_batch_size,
        eval_collator=copy(collator),  # which counts tokens of its own
        label_smoothing=config.train.label_smoothing,
        class_weights=inputs.class_weights,
        model=inputs.model,
        args=create_training_arguments(config, folder.checkpoints, inputs.precision, _drop_last(config, features)),
        train_dataset=features["train"],
        eval_dataset=features[spec.selection_split],
        data_collator=collator,
        processing_class=inputs.tokenizer,
        callbacks=[memory, HistoryWriter(folder), *callbacks],
    )


def _write_results(
    config: RunConfig,
    folder: RunFolder,
    inputs: Inputs,
    trainer: SentenceTrainer,
    result: RunResult,
) -> None:
    """Scores the best model and writes everything, ``result.json`` last."""
    spec, model = config.spec, trainer.model
    collate, batch_size = trainer.eval_collator, config.train.eval_batch_size
    reasons = []
    for split, rows in inputs.dev(spec).items():
        logits = compute_logits(model, rows, collate, batch_size)
        scores, _ = score_logits(spec, logits, rows)
        result.metrics[split] = scores.values
        reasons += [f"{split}: {reason}" for reason in scores.reasons.values()]
        write_predictions(folder.predictions / f"{split}.jsonl", spec, logits, inputs.splits[split])
        if split == spec.selection_split:
            result.score = scores.values[config.best_metric]
            result.collapsed = is_collapsed(predict_labels(spec, logits), spec.is_regression)
    result.isotropy = _measure_isotropy(trainer, inputs.features["train"])
    result.reason = "; ".join(dict.fromkeys(reasons)) or None
    result.status = "finished"
    plot_curves(
        folder.read_history(),
        folder.curves,
        f"{spec.title}, {slugify(config.model.name)}, {config.norm.name}, seed {config.seed}",
        primary_metric=config.best_metric,
        best_step=int((result.best or {})["step"]),
    )

    def save(target: Path) -> None:
        save_model(target, model, inputs.tokenizer)
        write_model_card(target, config, result)

    replace_folder(folder.model, save)
    write_json(folder.result, result.to_json())
    shutil.rmtree(folder.checkpoints, ignore_errors=True)


def _measure_isotropy(trainer: SentenceTrainer, train: list[Feature]) -> dict[str, Any]:
    """Isotropy on training rows: dev sets are often smaller than the model is wide, and that biases it."""
    # Evenly over the file: it may be sorted.
    count = min(len(train), 5 * trainer.model.config.hidden_size)
    chosen = np.linspace(0, len(train) - 1, count).round().astype(int)
    probe = IsotropyProbe()
    compute_logits(trainer.model, [train[row] for row in chosen], trainer.eval_collator, trainer.eval_batch_size, probe)
    measured = probe.measure(trainer.model.norm)
    return {"n": measured.pop("n"), "split": "train", **measured}


def _drop_last(config: RunConfig, features: dict[str, list[Feature]]) -> bool:
    """Whether an epoch leaves its last, shorter batch out; never its only one."""
    rows, batch_size = len(features["train"]), config.train.batch_size
    return config.train.drop_last and rows >= batch_size


def _rows_seen(trainer: SentenceTrainer, config: RunConfig, rows: int) -> int:
    steps = trainer.state.global_step - trainer._initial_global_step
    return min(
        steps * config.train.batch_size * config.train.gradient_accumulation_steps, round(config.train.epochs * rows)
    )


def _say_plan(config: RunConfig, inputs: Inputs) -> None:
    """What is about to happen, in two lines, and the rule for a last short batch where there is one."""
    spec, train, model, features = config.spec, config.train, inputs.model, inputs.features
    rows = ", ".join(f"{count} {split}" for split, count in inputs.rows.items())
    logger.info("%s: %s rows from %s.", spec.title, rows, config.data.source)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    logger.info(
        "%s: %s, %.1fM parameters; norm %s; %s on %s.",
        config.model.name,
        model.config.family.title,
        millions,
        config.norm.name,
        inputs.precision,
        "GPU" if torch.cuda.is_available() else "CPU",
    )
    if torch.cuda.device_count() > 1:
        logger.info("%d GPUs are visible; this run uses the first.", torch.cuda.device_count())
    rest = len(features["train"]) % train.batch_size
    if rest and _drop_last(config, features):
        logger.info("Each epoch leaves %d of its rows out, too few for a last batch (train.drop_last).", rest)
    elif rest == 1 and config.norm.name != "none":
        logger.info("An epoch's last batch has one row: the norm applies its running values to it.")
