"""Times fine-tuning side by side on the same rows: the usual Trainer recipe, the Trainer tuned by its docs, and ours.

Recipes: ``usual`` pads every row to the maximum length and computes in float32; ``tuned`` pads to the longest row of a
batch, groups rows by length and computes in bfloat16; ``ours`` is what ``isobn-finetune run`` does; ``padded`` is ours
with ``train.packing: off``. In each round every recipe trains on the same rows, one recipe after another, and the
medians over the rounds and the ratios within them are reported.

Examples:
    python scripts/benchmark_training.py --model FOLDER --data GLUE_FOLDER --tasks rte mrpc stsb cola --output out.json
    python scripts/benchmark_training.py --random-bert 12x768 --model FOLDER --data GLUE_FOLDER --steps 3 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging as transformers_logging

from isobn_finetune.config import RunConfig
from isobn_finetune.data import load_splits
from isobn_finetune.encoding import encode
from isobn_finetune.hub import resolve_model
from isobn_finetune.loading import create_model, load_tokenizer
from isobn_finetune.precision import resolve_precision
from isobn_finetune.run_folder import RunFolder
from isobn_finetune.speed import create_collator, fast_cpu_layers
from isobn_finetune.tasks import get_task
from isobn_finetune.trainer import SentenceTrainer, create_training_arguments

RECIPES = ("usual", "tuned", "ours", "padded")

# Operations whose time is summed up under one head; what no head names is "other".
COSTS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "linear"),
    "random numbers": ("bernoulli_", "random_", "native_dropout"),
    "fused attention": ("_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward"),
    "softmax": ("_softmax", "_safe_softmax", "_softmax_backward_data"),
    "LayerNorm": ("native_layer_norm", "native_layer_norm_backward"),
    "GELU": ("gelu", "gelu_backward"),
    "copies and casts": ("copy_", "index_select", "cat", "clone"),
    "zero fills": ("fill_", "zero_"),
    "optimizer": ("_fused_adamw_",),
    "gradient norm": ("linalg_vector_norm", "_foreach_norm", "_foreach_mul_"),
    "other elementwise": ("mul", "mul_", "add", "add_", "sub_", "div_", "threshold_backward", "where", "sum", "tanh"),
}


class StepClock(TrainerCallback):
    """Seconds from the end of the first step to the end of the last: the first one also builds the optimizer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes when a step ended."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(self.clock())

    @property
    def seconds(self) -> float:
        """Of all steps but the first."""
        return self.times[-1] - self.times[0]


def main() -> None:
    """Runs the benchmark and prints one table a task."""
    options = parse_options()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if options.random_bert:
            options.model = create_random_bert(options.random_bert, options.model, Path(scratch))
        if options.memory_of:
            print(measure_peak_memory(options, options.tasks[0], options.memory_of, Path(scratch)))
            return
        report = {"machine": describe_machine(), "options": vars(options), "tasks": {}}
        print(" | ".join(f"{name}: {value}" for name, value in report["machine"].items()))
        for task in options.tasks:
            report["tasks"][task] = result = benchmark(options, task, Path(scratch))
            print_table(task, options, result)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--random-bert", help="LAYERSxWIDTH: a BERT with random weights and the tokenizer of --model")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--tasks", nargs="+", default=["rte"])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["usual", "tuned", "ours"])
    parser.add_argument("--steps", type=int, default=25, help="timed steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="of tuned and ours"
    )
    parser.add_argument("--norm", default="isobn", help="of ours and padded")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu for a busy machine and one thread"
    )
    parser.add_argument(
        "--memory", action="store_true", help="also measure each recipe's peak memory, in a process each"
    )
    parser.add_argument("--profile", action="store_true", help="also say where the time goes")
    parser.add_argument("--memory-of", choices=RECIPES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON")
    return parser.parse_args()


def create_random_bert(shape: str, tokenizer_of: str, scratch: Path) -> str:
    """Saves a BERT of that many layers and that width, and returns its folder."""
    layers, width = (int(number) for number in shape.split("x"))
    tokenizer = load_tokenizer(resolve_model(tokenizer_of))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        intermediate_size=4 * width,
    )
    folder = scratch / f"bert-{shape}"
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}


class Bench:
    """One task's rows and models, and a trainer for each recipe."""

    def __init__(self, options: argparse.Namespace, task: str, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.spec = get_task(task)
        self.model_dir = resolve_model(options.model)
        self.tokenizer = load_tokenizer(self.model_dir)
        train = load_splits(self.spec, options.data)["train"]
        self.features = encode(train, self.spec, self.tokenizer, options.max_length)
        self.precision = resolve_precision(options.precision)
        self.clock = time.perf_counter if options.clock == "wall" else time.process_time
        self.models: dict[str, nn.Module] = {}

    def draw_rows(self, number: int) -> list[dict[str, Any]]:
        """The rows of one round, one step more than is timed; in any order, with repetition if the task is small."""
        draw = random.Random(number)
        count = (self.options.steps + 1) * self.options.batch_size
        if count <= len(self.features):
            return draw.sample(self.features, count)
        return draw.choices(self.features, k=count)

    def train(self, recipe: str, rows: list[dict[str, Any]]) -> float:
        """Trains on the rows once and returns the seconds of all steps but the first."""
        clock = StepClock(self.clock)
        ours = recipe in ("ours", "padded")
        trainer = (self._create_ours if ours else self._create_stock)(recipe, rows, clock)
        with fast_cpu_layers(trainer.model, self.features, weight_decay=0.0) if ours else nullcontext():
            trainer.train()
        return clock.seconds

    def _create_stock(self, recipe: str, rows: list[dict[str, Any]], clock: StepClock) -> Trainer:
        """The plain Trainer on the stock model."""
        options, tuned = self.options, recipe == "tuned"
        if recipe not in self.models:
            kind = "regression" if self.spec.is_regression else "single_label_classification"
            labels = 1 if self.spec.is_regression else len(self.spec.labels)
            self.models[recipe] = AutoModelForSequenceClassification.from_pretrained(
                self.model_dir, num_labels=labels, problem_type=kind
            )
        half = self.precision if tuned else "fp32"
        arguments = TrainingArguments(
            output_dir=str(self.scratch / recipe),
            num_train_epochs=1,
            per_device_train_batch_size=options.batch_size,
            learning_rate=2e-5,
            weight_decay=0.0,
            train_sampling_strategy="group_by_length" if tuned else "random",
            use_cpu=not torch.cuda.is_available(),
            bf16=half == "bf16",
            fp16=half == "fp16",
            eval_strategy="no",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_drop_last=True,
        )
        padding = {"padding": True} if tuned else {"padding": "max_length", "max_length": options.max_length}
        collator = DataCollatorWithPadding(self.tokenizer, **padding)
        model = self.models[recipe]
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collator, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _create_ours(self, recipe: str, rows: list[dict[str, Any]], clock: StepClock) -> Trainer:
        """As ``isobn_finetune.training`` builds it, without evaluation."""
        options = self.options
        config = RunConfig(
            task=self.spec.name,
            model={"name": options.model},
            norm={"name": options.norm},
            data={"source": options.data, "max_length": options.max_length},
            train={"epochs": 1, "batch_size": options.batch_size, "weight_decay": 0.0, "logging_steps": 500},
        )
        if recipe not in self.models:
            self.models[recipe] = create_model(self.model_dir, self.spec, config.norm.model_dump())
        model: Any = self.models[recipe]
        arguments = create_training_arguments(config, self.scratch / recipe, self.precision, drop_last=True)
        arguments.eval_strategy = arguments.save_strategy = IntervalStrategy.NO
        collator = create_collator(model, self.tokenizer, "off" if recipe == "padded" else "auto")
        return SentenceTrainer(
            spec=self.spec,
            folder=RunFolder(self.scratch / recipe),
            dev={},
            best_metric=config.best_metric,
            eval_batch_size=64,
            eval_collator=collator,
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=collator,
            processing_class=self.tokenizer,
            callbacks=[clock],
        )


def benchmark(options: argparse.Namespace, task: str, scratch: Path) -> dict[str, Any]:
    """All rounds of one task."""
    bench = Bench(options, task, scratch)
    samples = options.steps * options.batch_size
    seconds: dict[str, list[float]] = {recipe: [] for recipe in options.recipes}
    for recipe in options.recipes:  # warms up caches and allocators, and loads the models
        bench.train(recipe, bench.draw_rows(-1)[: 3 * options.batch_size])
    peaks, tokens = [], []
    for number in range(options.rounds):
        rows = bench.draw_rows(number)
        tokens.append(sum(len(row["input_ids"]) for row in rows) / len(rows))
        peaks.append(measure_matmul_peak(bench, round(tokens[-1] * options.batch_size)))
        for recipe in options.recipes:
            seconds[recipe].append(bench.train(recipe, rows))
    first, mean_tokens = options.recipes[0], statistics.median(tokens)
    flops = count_flops(next(iter(bench.models.values())))
    result: dict[str, Any] = {
        "tokens_per_row": mean_tokens,
        "matmul_peak_flops": statistics.median(peaks),
        "recipes": {},
    }
    for recipe, times in seconds.items():
        rate = samples / statistics.median(times)
        result["recipes"][recipe] = {
            "samples_per_second": rate,
            "spread": [samples / max(times), samples / min(times)],
            "tokens_per_second": rate * mean_tokens,
            "share_of_peak": rate * mean_tokens * flops / result["matmul_peak_flops"],
            f"times_{first}": statistics.median(a / b for a, b in zip(seconds[first], times, strict=True)),
        }
        if "tuned" in seconds:
            ratios = [a / b for a, b in zip(seconds["tuned"], times, strict=True)]
            result["recipes"][recipe]["times_tuned"] = statistics.median(ratios)
        if options.memory:
            result["recipes"][recipe]["peak_memory_mb"] = peak_memory_in_a_process(task, recipe)
        if options.profile:
            result["recipes"][recipe]["shares"] = profile(bench, recipe)
    return result


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(inputs, outputs) of the encoder's linear layers; pooler and classifier see one token a row."""
    encoder: Any = getattr(model, "encoder", None) or model.base_model
    layers = [
        module for name, module in encoder.named_modules() if isinstance(module, nn.Linear) and "pooler" not in name
    ]
    return [(layer.in_features, layer.out_features) for layer in layers]


def count_flops(model: nn.Module) -> int:
    """Of one token's way through the linear layers, forward and backward."""
    return sum(6 * inputs * outputs for inputs, outputs in linear_shapes(model))


def measure_matmul_peak(bench: Bench, tokens: int) -> float:
    """Operations a second of the linear layers' own matrix products alone, each at its best of five."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(bench.precision, torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spent, work = 0.0, 0
    shapes = linear_shapes(next(iter(bench.models.values())))
    for inputs, outputs in set(shapes):
        x, dy = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
        x, dy, weight = (tensor.to(device, dtype) for tensor in (x, dy, torch.randn(outputs, inputs)))
        count = shapes.count((inputs, outputs))
        for left, right in ((x, weight.t()), (dy, weight), (dy.t(), x)):
            best = float("inf")
            for _ in range(5):
                started = bench.clock()
                left @ right
                if device == "cuda":
                    torch.cuda.synchronize()
                best = min(best, bench.clock() - started)
            spent += count * best
            work += count * 2 * tokens * inputs * outputs
    return work / spent


def profile(bench: Bench, recipe: str) -> dict[str, float]:
    """Shares of the time that a recipe's operations take themselves."""
    rows = bench.draw_rows(0)[: 5 * bench.options.batch_size]
    with torch.profiler.profile() as profiler:
        bench.train(recipe, rows)
    spent = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in profiler.key_averages()}
    shares = {head: sum(spent.pop(name, 0.0) for name in names) for head, names in COSTS.items()}
    shares["other"] = sum(spent.values())
    total = sum(shares.values())
    return {head: share / total for head, share in shares.items()}


def peak_memory_in_a_process(task: str, recipe: str) -> float:
    """Peak resident memory in MB of a process that does nothing but train by that recipe."""
    kept = [word for word in sys.argv if word not in ("--memory", "--profile")]
    command = [sys.executable, *kept, "--tasks", task, "--memory-of", recipe]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_peak_memory(options: argparse.Namespace, task: str, recipe: str, scratch: Path) -> float:
    """Trains by one recipe and returns this process's peak memory in MB, on a GPU that of the GPU."""
    bench = Bench(options, task, scratch)
    bench.train(recipe, bench.draw_rows(0))
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def print_table(task: str, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Prints a Markdown table of one task."""
    peak = result["matmul_peak_flops"] / 1e9
    print(
        f"\n{get_task(task).title}: {result['tokens_per_row']:.0f} tokens a row, "
        f"matrix products at {peak:.0f} GFLOP/s\n"
    )
    first = options.recipes[0]
    heads = ["recipe", "samples/s", "real tokens/s", "of the peak", f"times {first}", "times tuned", "peak MB"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for recipe, row in result["recipes"].items():
        cells = [
            recipe,
            f"{row['samples_per_second']:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['share_of_peak']:.0%}",
            f"{row[f'times_{first}']:.2f}",
            f"{row['times_tuned']:.2f}" if "times_tuned" in row else "",
            f"{row['peak_memory_mb']:.0f}" if "peak_memory_mb" in row else "",
        ]
        print("| " + " | ".join(cells) + " |")
    for recipe, row in result["recipes"].items():
        if "shares" in row:
            shares = sorted(row["shares"].items(), key=lambda item: -item[1])
            print(f"{recipe}: " + ", ".join(f"{head} {share:.0%}" for head, share in shares if share >= 0.01))


if __name__ == "__main__":
    main()
