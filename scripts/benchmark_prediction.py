"""Rows a second of ``isobn-finetune predict``, against a bare loop over sorted batches with stock transformers.

    python scripts/benchmark_prediction.py MODEL_DIR ROWS.tsv [--rows 10000] [--rounds 3]

MODEL_DIR is an encoder; a classifier with IsoBN and its stock export are made of it. ROWS.tsv has a column
``sentence``. Both sides read the file, tokenize, predict in fp32 and write label names and probabilities; they take
turns, since the machine's speed drifts, and what is printed is the ratio; that of CPU time counts where other work
shares the cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from isobn_finetune.export import export_checkpoint
from isobn_finetune.loading import create_model, load_tokenizer
from isobn_finetune.predict import predict_opened
from isobn_finetune.saved_model import open_model, save_model
from isobn_finetune.tasks import get_task

BATCH_SIZE = 64
MAX_LENGTH = 128


def make_models(source: Path, folder: Path) -> tuple[Path, Path]:
    """Our classifier, its norm filled by a few random batches, and the stock model that it folds into."""
    torch.manual_seed(0)
    model = create_model(source, get_task("sst2"), {"name": "isobn"})
    model.norm.train()
    for _ in range(4):
        model.norm(torch.randn(16, model.config.hidden_size).tanh())
    model.config.finetuning_max_length = MAX_LENGTH
    ours = folder / "ours"
    ours.mkdir()
    save_model(ours, model, load_tokenizer(source))
    export_checkpoint(str(ours), folder / "stock")
    return ours, folder / "stock"


@torch.inference_mode()
def run_bare_loop(model: torch.nn.Module, tokenizer: object, source: Path, output: Path) -> None:
    """The loop that one would write by hand: sort by length, pad each batch, put back in order."""
    texts = source.read_text(encoding="utf-8").split("\n")[1:-1]
    encoded = tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]  # type: ignore[operator]
    order = sorted(range(len(texts)), key=lambda row: -len(encoded[row]))
    logits = torch.empty(len(texts), 2)
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        batch = tokenizer.pad({"input_ids": [encoded[row] for row in rows]}, return_tensors="pt")  # type: ignore[attr-defined]
        logits[rows] = model(**batch).logits
    names = ("negative", "positive")
    with output.open("w", encoding="utf-8") as file:
        for index, shares in enumerate(logits.softmax(-1).tolist()):
            prediction = names[shares[1] > shares[0]]
            row = {"idx": index, "prediction": prediction, "probabilities": dict(zip(names, shares, strict=True))}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measures both in turns and prints the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours_dir, stock_dir = make_models(options.model, folder)
        header, *lines = options.file.read_text(encoding="utf-8").split("\n")
        place = header.split("\t").index("sentence")
        texts = [line.split("\t")[place] for line in lines if line][: options.rows]
        source = folder / "rows.tsv"
        source.write_text("sentence\n" + "".join(text + "\n" for text in texts), encoding="utf-8")
        saved = open_model(str(ours_dir))
        stock = AutoModelForSequenceClassification.from_pretrained(stock_dir).eval()
        tokenizer = AutoTokenizer.from_pretrained(stock_dir)
        seconds: dict[str, list[tuple[float, float]]] = {"predict": [], "bare loop": []}
        sides = {
            "predict": lambda: predict_opened(saved, str(source), str(folder / "ours.jsonl"), batch_size=BATCH_SIZE),
            "bare loop": lambda: run_bare_loop(stock, tokenizer, source, folder / "bare.jsonl"),
        }
        for turn in range(options.rounds + 1):
            for side, run in sides.items():
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                if turn:  # the first warms up
                    seconds[side].append((time.perf_counter() - wall, time.process_time() - cpu))
        rows = [[json.loads(line) for line in (folder / f"{side}.jsonl").open()] for side in ("ours", "bare")]
        worst = max(
            abs(ours["probabilities"]["positive"] - bare["probabilities"]["positive"])
            for ours, bare in zip(*rows, strict=True)
        )
    for place, kind in enumerate(("wall clock", "CPU time")):
        for side, pairs in seconds.items():
            median = statistics.median(pair[place] for pair in pairs)
            print(f"{kind:<11}{side:<10}{len(texts) / median:8.1f} rows/s   median {median:.2f} s of {len(pairs)}")
        ratios = [bare[place] / ours[place] for ours, bare in zip(*seconds.values(), strict=True)]
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{kind:<11}speed of predict / bare loop: {statistics.median(ratios):.3f} (rounds: {shown})")
    print(f"largest difference of a probability: {worst:.1e}; {torch.get_num_threads()} thread(s)")


if __name__ == "__main__":
    main()
