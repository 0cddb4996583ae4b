"""What watches a run from the Trainer's side: history, the best model, interrupts, skipped steps, progress."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from isobn_finetune.errors import DivergedError
from isobn_finetune.run_folder import RunFolder, replace_folder

logger = logging.getLogger(__name__)

BEST_FOLDER = "best"
WEIGHTS_FILE = "model.safetensors"


class EvaluationMemory(TrainerCallback, ExportableState):
    """Keeps the best model, and stops the run after ``patience`` evaluations without gain.

    Saved with each checkpoint, so that a resumed run remembers. The best weights stand in a folder of their own, which
    the limit on kept checkpoints never touches.
    """

    def __init__(self, patience: int | None = None) -> None:
        self.patience = patience
        self.best_score: float | None = None
        self.best_step = 0
        self.best_epoch = 0.0
        self.last_score: float | None = None
        self.without_gain = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of this."""
        names = ("best_score", "best_step", "best_epoch", "last_score", "without_gain")
        return {"args": {"patience": self.patience}, "attributes": {name: getattr(self, name) for name in names}}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Has the last step evaluated, whatever ``eval_steps`` is."""
        if args.eval_strategy == "steps" and state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compares the evaluation's ``eval_score`` with the best so far. An undefined score is never best."""
        score = self.last_score = kwargs["metrics"]["eval_score"]
        first = self.best_step == 0
        # The first evaluation is kept even if undefined, so that there always is a model.
        if first or (score is not None and (self.best_score is None or score > self.best_score)):
            self.best_score, self.best_step, self.best_epoch = score, state.global_step, state.epoch or 0.0
            self.without_gain = 0
            weights = {name: tensor.contiguous() for name, tensor in kwargs["model"].state_dict().items()}
            replace_folder(
                Path(args.output_dir) / BEST_FOLDER, lambda folder: save_file(weights, folder / WEIGHTS_FILE)
            )
            return
        self.without_gain += 1
        if self.patience is not None and self.without_gain >= self.patience:
            logger.info("Stopped early: %d evaluations without gain.", self.without_gain)
            control.should_training_stop = True


class HistoryWriter(TrainerCallback):
    """Writes each training log into ``history.jsonl``. A loss that is not finite is ``null`` with a reason."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Takes the training loss; evaluations write their own, fuller line."""
        logs = kwargs["logs"]
        if "loss" not in logs:
            return
        line = {"event": "train", "step": state.global_step, "epoch": state.epoch}
        line |= {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(line.get(name, 0))]
        if bad:
            line["reason"] = f"{' and '.join(bad)} not finite"
        self.folder.append_history(line)


class SkippedSteps(TrainerCallback):
    """Stops an fp16 run whose optimizer steps are all skipped: its gradients overflow at any loss scale."""

    def __init__(self, max_skipped_steps: int) -> None:
        self.max_skipped_steps = max_skipped_steps
        self.total = 0
        self.in_a_row = 0
        self.trainer: Any = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Asks the loss scaler whether it skipped this step."""
        if not self.trainer.accelerator.optimizer_step_was_skipped:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= self.max_skipped_steps:
            raise DivergedError(
                f"{self.in_a_row} optimizer steps in a row were skipped up to step {state.global_step}: gradients "
                "overflow in fp16. Use --precision bf16 or fp32, or a smaller --learning-rate"
            )


class Interrupt(TrainerCallback):
    """On a signal, lets the step end, saves a checkpoint and stops. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Listens to SIGINT and SIGTERM for as long as the run lasts."""

        def take(number: int, frame: FrameType | None) -> None:
            if self.signal_name is not None:
                raise KeyboardInterrupt
            self.signal_name = signal.Signals(number).name
            logger.info("%s: saving after this step; again to stop at once.", self.signal_name)

        try:
            previous = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread, where signals cannot be taken
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the run after this step, and after the evaluation that is due with it. The last step ends it anyway."""
        if self.signal_name is not None and state.global_step < state.max_steps:
            control.should_training_stop = True
            control.should_save = not _is_epoch_end(state)  # there the Trainer evaluates first and then saves

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keeps the Trainer from taking the break for an epoch's end."""
        if self.signal_name is not None and not _is_epoch_end(state):
            control.should_evaluate = control.should_log = control.should_save = False


def _is_epoch_end(state: TrainerState) -> bool:
    epoch = state.epoch or 0.0
    return state.global_step >= state.max_steps or abs(epoch - round(epoch)) < 1e-9


class Progress(TrainerCallback):
    """A progress bar on a terminal, a line an evaluation elsewhere."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.bar: tqdm | None = None
        self.notes: dict[str, str] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Opens the bar."""
        # disable=None: no bar where stderr is not a terminal.
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.title, unit="step", disable=None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One step further."""
        if self.bar is not None:
            self.bar.update(1)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Shows loss and score beside the bar."""
        logs = kwargs["logs"]
        for name, label in (("loss", "loss"), ("eval_score", "score")):
            if logs.get(name) is not None:
                self.notes[label] = f"{logs[name]:.4f}"
        if self.bar is not None and not self.bar.disable:
            self.bar.set_postfix(self.notes)
        elif "eval_loss" in logs:
            score = logs.get("eval_score")
            shown = "undefined" if score is None else f"{score:.4f}"
            logger.info("Epoch %.4g, step %d: score %s.", state.epoch or 0, state.global_step, shown)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Closes the bar."""
        self.close()

    def close(self) -> None:
        """Closes the bar; harmless where it is closed."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
