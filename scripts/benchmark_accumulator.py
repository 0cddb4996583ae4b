"""Speed and memory of the covariance accumulator beside the bare float64 matrix product.

    python scripts/benchmark_accumulator.py --rows 1000000 --width 1024 --batch-size 4096

Prints the share of the bare product's speed (1.0: as fast) and the peak memory above the input batch. The bare
product is ``x.T @ x`` over rows that are float64 already, in the same process and in turns.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from isobn_finetune.accumulator import CovarianceAccumulator


def peak_megabytes() -> float:
    """Returns the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--block-rows", type=int, default=4096, help="rows of one bare product")
    args = parser.parse_args()

    batch = np.random.default_rng(0).standard_normal((args.batch_size, args.width), dtype=np.float32) + 3
    # The library's threads and buffers are no part of the comparison: wake them before the first reading.
    warm = np.ones((256, args.width))
    warm.T @ warm
    before = peak_megabytes()
    accumulator = CovarianceAccumulator()
    for _ in range(-(-10_000 // args.batch_size)):  # more than two blocks, so that all buffers are in use
        accumulator.update(batch)
    _ = accumulator.count
    memory = peak_megabytes() - before

    block = np.random.default_rng(1).standard_normal((args.block_rows, args.width))
    block.T @ block
    accumulator_seconds = product_seconds = 0.0
    accumulated = multiplied = 0
    # In turns, so that whatever else the machine does falls on both.
    while accumulated < args.rows:
        start = time.perf_counter()
        while accumulated <= multiplied:
            accumulator.update(batch)
            accumulated += len(batch)
        count = accumulator.count
        middle = time.perf_counter()
        while multiplied < accumulated:
            block.T @ block
            multiplied += len(block)
        accumulator_seconds += middle - start
        product_seconds += time.perf_counter() - middle
    product_seconds *= accumulated / multiplied

    print(f"{count} rows x {args.width} in batches of {args.batch_size}")
    print(f"accumulator {accumulator_seconds:.2f} s, bare float64 product {product_seconds:.2f} s")
    print(f"share of the bare product's speed: {product_seconds / accumulator_seconds:.2f}")
    print(f"memory above the input batch: {memory:.0f} MB")


if __name__ == "__main__":
    main()
