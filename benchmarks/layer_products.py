"""Float32 products of layers on this CPU, by MKL as torch makes them and by oneDNN: for a new number of rows, and for one it knows.

    python benchmarks/layer_products.py [--repeats 40]

Layers of the bundled policy and of SmolLM2-135M, one thread, processor time, the ways in turn, every time with one row more.
`speedup_new` is torch's time over oneDNN's when it meets the number of rows for the first time, `speedup_again` when it has met it.
`chosen` says what `shoal.policy.products` does with that shape on this machine.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.policy.products import has_onednn, has_slow_mkl, is_faster_by_onednn, onednn_product

SHAPES = ((128, 128), (768, 128), (128, 384), (960, 576), (3072, 576), (576, 1536))
"""Outputs and inputs."""
ROWS = (64, 512, 2048)


def seconds(work: Callable[[], Tensor]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


@torch.inference_mode()
def measure(outputs: int, inputs: int, rows: int, repeats: int) -> dict[str, Any]:
    weight, taken = torch.randn(outputs, inputs), dict[str, list[float]](mkl=[], new=[], again=[])
    for number in range(repeats):
        states = torch.randn(rows + number, inputs)
        F.linear(states, weight)  # memory of this size is there now, for all
        taken["mkl"].append(seconds(lambda states=states: F.linear(states, weight)))  # type: ignore[misc]
        for name in ("new", "again"):
            taken[name].append(seconds(lambda states=states: onednn_product(states, weight)))  # type: ignore[misc]
    middle = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "torch_us": round(1e6 * middle["mkl"], 1),
        "speedup_new": round(middle["mkl"] / middle["new"], 2),
        "speedup_again": round(middle["mkl"] / middle["again"], 2),
        "chosen": "onednn" if is_faster_by_onednn(torch.empty(rows, inputs), weight) else "torch",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not has_onednn():
        raise SystemExit("This build of torch has no oneDNN.")
    found = {
        f"{rows} x {inputs} x {outputs}": measure(outputs, inputs, rows, options.repeats)
        for outputs, inputs in SHAPES
        for rows in ROWS
    }
    machine = platform.processor() or platform.machine()
    print(
        json.dumps({"benchmark": "layer_products", "machine": machine, "slow_mkl": has_slow_mkl(), "products": found})
    )


if __name__ == "__main__":
    main()
