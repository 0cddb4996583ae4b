"""The Hugging Face Trainer, with our evaluation, and numbers that are not finite seen at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerControl, TrainingArguments

from isobn_finetune.config import RunConfig, TrainConfig
from isobn_finetune.encoding import Feature
from isobn_finetune.errors import DivergedError
from isobn_finetune.inference import IsotropyProbe, compute_logits
from isobn_finetune.metrics import MetricResult, compute_metrics
from isobn_finetune.modeling import compute_loss
from isobn_finetune.norms import StatisticsNorm
from isobn_finetune.run_folder import RunFolder
from isobn_finetune.tasks import TaskSpec

logger = logging.getLogger(__name__)


class SentenceTrainer(Trainer):
    """Trains a sentence classifier.

    Evaluation differs from the Trainer's: every row is scored once, in float32, in batches of like length, and the
    isotropy of the sentence vectors is measured on the way.

    Args:
        spec: The task.
        folder: Where history lines go.
        dev: Selection split first, to features.
        best_metric: Metric that chooses the best epoch.
        eval_batch_size: Rows at once in evaluation.
        eval_collator: Makes their batches.
        label_smoothing: See ``compute_loss``.
        class_weights: See ``compute_loss``.
        **kwargs: What the Trainer takes.
    """

    def __init__(
        self,
        *,
        spec: TaskSpec,
        folder: RunFolder,
        dev: dict[str, list[Feature]],
        best_metric: str,
        eval_batch_size: int,
        eval_collator: Callable[[list[Feature]], dict[str, Any]],
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.control: TrainerControl
        self.remove_callback(PrinterCallback)  # it prints every log to stdout; callbacks.Progress shows them
        self.spec = spec
        self.folder = folder
        self.dev = dev
        self.best_metric = best_metric
        self.eval_batch_size = eval_batch_size
        self.label_smoothing = label_smoothing
        self.class_weights = None if class_weights is None else class_weights.to(self.args.device)
        self.eval_collator = eval_collator
        # Step of the first loss that was not finite, 0 for none. A tensor: asking a GPU each step would stall it.
        self._first_bad_step = torch.zeros((), dtype=torch.long, device=self.args.device)
        self._said_skipped = False

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of a training batch."""
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = compute_loss(output.logits, labels, self.label_smoothing, self.class_weights)
        bad = (~loss.detach().isfinite()) & (self._first_bad_step == 0)
        self._first_bad_step += bad * (self.state.global_step + 1)
        return (loss, output) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, then stops the run where a number of it is not finite."""
        super().log(logs, start_time)
        if "loss" in logs:
            self.check_finite(logs.get("loss"), logs.get("grad_norm"))
            self._say_skipped_batches()

    def check_finite(self, loss: float | None, grad_norm: float | None = None) -> None:
        """Raises DivergedError where training has produced a number that is not finite."""
        if self.args.fp16:
            return  # the loss scaler meets overflows by design and skips those steps
        step = int(self._first_bad_step)
        if step:
            raise DivergedError(f"step {step}: the training loss is not finite{self._advice()}")
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if value is not None and not math.isfinite(value):
                raise DivergedError(f"step {self.state.global_step}: the {name} is not finite{self._advice()}")

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Scores all dev splits, writes history, and tells the callbacks."""
        self.check_finite(None)  # a run may have fewer steps than train.logging_steps
        metrics: dict[str, Any] = {}
        for number, (split, features) in enumerate(self.dev.items()):
            probe = IsotropyProbe()
            logits = compute_logits(self.model, features, self.eval_collator, self.eval_batch_size, probe)
            if not np.isfinite(logits).all():
                raise DivergedError(f"step {self.state.global_step}: the model's output is not finite{self._advice()}")
            scores, loss = score_logits(self.spec, logits, features)
            isotropy = probe.measure(self.model.norm)
            line = {"event": "evaluation", "step": self.state.global_step, "epoch": self.state.epoch, "split": split}
            line |= {"loss": loss, "metrics": scores.values, "isotropy": isotropy}
            if scores.reasons:
                line["reason"] = "; ".join(scores.reasons.values())
            self.folder.append_history(line)
            prefix = "eval" if number == 0 else f"eval_{split}"
            if number == 0:
                metrics["eval_score"] = scores.values[self.best_metric]
            metrics |= {f"{prefix}_{name}": value for name, value in scores.values.items()}
            metrics[f"{prefix}_loss"] = loss
            for place in ("pooler_output", "normed_output"):
                measures = ((name, isotropy[place][name]) for name in ("ev1", "ev2", "ev3", "isoscore"))
                metrics |= {f"{prefix}_{place}_{name}": value for name, value in measures}
        # Trackers take numbers only.
        self.log({name: value for name, value in metrics.items() if value is not None})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: the Trainer would walk through all modules at every step, for a number that nobody reads."""
        return 0

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """No weight decay on biases, LayerNorms, and whatever our norm learns."""
        return [name for name in super().get_decay_parameter_names(model) if not name.startswith("norm.")]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Weights alone. The Trainer would add its arguments as a pickle."""
        self.model.save_pretrained(output_dir, state_dict=state_dict)

    def _advice(self) -> str:
        return ". Try a smaller --learning-rate, or train.max_grad_norm above 0; no model of this run was saved"

    def _say_skipped_batches(self) -> None:
        norm = self.model.norm
        if isinstance(norm, StatisticsNorm) and not self._said_skipped and int(norm.num_batches_skipped):
            self._said_skipped = True
            logger.warning(
                "Batches with values that are not finite do not enter the norm's statistics: %d so far.",
                int(norm.num_batches_skipped),
            )


def score_logits(spec: TaskSpec, logits: np.ndarray, features: Sequence[Feature]) -> tuple[MetricResult, float]:
    """Computes the task's metrics and the mean loss.

    Args:
        spec: The task.
        logits: ``(rows, num_labels)``.
        features: With ``labels``.
    """
    labels = np.array([feature["labels"] for feature in features])
    loss = float(compute_loss(torch.from_numpy(logits), torch.from_numpy(labels)))
    return compute_metrics(spec.metrics, predict_labels(spec, logits), labels), loss


def predict_labels(spec: TaskSpec, logits: np.ndarray) -> np.ndarray:
    """Class indices ``(rows,)``, or the scores themselves for regression."""
    return logits[:, 0] if spec.is_regression else logits.argmax(axis=1)


def create_training_arguments(config: RunConfig, folder: Path, precision: str, drop_last: bool) -> TrainingArguments:
    """Maps our config to the Trainer's arguments; the one place that knows both."""
    train: TrainConfig = config.train
    cadence = _cadence(train)
    arguments = TrainingArguments(
        output_dir=str(folder),
        seed=config.seed,
        data_seed=config.seed,
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,
        per_device_train_batch_size=train.batch_size,
        per_device_eval_batch_size=train.eval_batch_size,
        learning_rate=train.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=train.warmup_ratio,  # below 1 it is a share of all steps
        weight_decay=train.weight_decay,
        adam_epsilon=train.adam_epsilon,
        max_grad_norm=train.max_grad_norm,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        dataloader_drop_last=drop_last,
        save_total_limit=train.save_total_limit,
        logging_steps=train.logging_steps,
        logging_nan_inf_filter=False,  # it would replace NaN by the average of earlier losses
        use_cpu=precision == "bf16" and not torch.cuda.is_available(),
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        # TensorBoard gets a writer of our own: the Trainer would put its files among the checkpoints, which go.
        report_to="none" if train.report_to == "tensorboard" else train.report_to,
        run_name=f"{config.task}-{config.norm.name}-seed_{config.seed}",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),  # else torch warns at every epoch
        disable_tqdm=True,  # we have a bar of our own
        restore_callback_states_from_checkpoint=True,
        **cadence,
    )
    # Two visible GPUs would make the Trainer use DataParallel, which loses the norm's statistics.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _cadence(train: TrainConfig) -> dict[str, Any]:
    if train.eval_steps is None:
        return {"eval_strategy": "epoch", "save_strategy": "epoch"}
    return {
        "eval_strategy": "steps",
        "eval_steps": train.eval_steps,
        "save_strategy": "steps",
        "save_steps": train.save_steps or train.eval_steps,
    }
