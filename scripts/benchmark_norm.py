"""What a norm adds to a training step of a 6-layer, 384-wide encoder at batch 16, as ratios within one run.

    python scripts/benchmark_norm.py [--rounds 30] [--length 64]

Steps of the norms are interleaved, so that a busy machine slows all of them alike. Beside the ratio of whole steps, in
which a per cent drowns on a noisy machine, stands the norm's own time (update, scale, product and its backward) as a
share of the step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import BertConfig

from isobn_finetune.modeling import IsobnConfig, IsobnForSequenceClassification
from isobn_finetune.norms import NORMS, create_norm

HIDDEN_SIZE = 384


def create_step(norm: str, batch_size: int, length: int) -> Callable[[], None]:
    """Returns a function that does one whole training step."""
    torch.manual_seed(0)
    encoder = BertConfig(
        hidden_size=HIDDEN_SIZE, num_hidden_layers=6, num_attention_heads=12, intermediate_size=4 * HIDDEN_SIZE
    )
    model = IsobnForSequenceClassification(IsobnConfig(encoder, {"name": norm}, num_labels=2)).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    input_ids = torch.randint(1000, 20000, (batch_size, length))
    labels = torch.randint(0, 2, (batch_size,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def create_norm_step(norm: str, batch_size: int) -> Callable[[], None]:
    """Returns a function that does the norm's part of a step alone."""
    module = create_norm(norm, HIDDEN_SIZE).train()
    x = torch.randn(batch_size, HIDDEN_SIZE, requires_grad=True)

    def step() -> None:
        module(x).sum().backward()

    return step


def measure(step: Callable[[], None]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()

    steps = {norm: create_step(norm, options.batch_size, options.length) for norm in NORMS}
    alone = {norm: create_norm_step(norm, options.batch_size) for norm in NORMS}
    times: dict[str, list[float]] = {norm: [] for norm in NORMS}
    norm_times: dict[str, list[float]] = {norm: [] for norm in NORMS}
    for number in range(options.rounds + 3):
        for norm in NORMS:
            whole, part = measure(steps[norm]), measure(alone[norm])
            if number >= 3:  # the first rounds warm up
                times[norm].append(whole)
                norm_times[norm].append(part)
    base = statistics.median(times["none"])
    idle = statistics.median(norm_times["none"])
    print(f"{'norm':<10} {'step ms':>9} {'to none':>8} {'norm ms':>8} {'share of step':>14}")
    for norm in NORMS:
        whole = statistics.median(times[norm])
        part = statistics.median(norm_times[norm]) - idle
        print(f"{norm:<10} {whole * 1e3:9.2f} {whole / base:8.3f} {part * 1e3:8.3f} {part / base:13.2%}")


if __name__ == "__main__":
    main()
