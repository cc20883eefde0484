"""Products of bf16 operands on this CPU: torch's own, and those of the embedded engine, which widens operands to float32 first.

    python benchmarks/narrow_products.py [--seconds 0.2]

Layers of SmolLM2-135M, one thread, processor time, the two in turn. `speedup` is torch's time over that of the widened product, by
rows of the input; `over_float32` is the time of the widened product over that of a float32 layer with the same shape.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.policy.embedded import linear
from shoal.policy.embedded.linear import Linear, has_slow_products
from shoal.policy.embedded.widening import Widener

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outputs and inputs: query, key and value; attention's output; gate and up; down."""
ROWS = (1, 4, 8, 16, 64, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.2, help="per layer and number of rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    linear.FEWEST_WIDENED = 1  # also where the engine would not
    found = {str(rows): measure(rows, options.seconds) for rows in ROWS}
    print(
        json.dumps(
            {
                "benchmark": "narrow_products",
                "machine": platform.processor() or platform.machine(),
                "slow_products": has_slow_products(torch.bfloat16, torch.device("cpu")),
                "speedup": {rows: ratios["speedup"] for rows, ratios in found.items()},
                "over_float32": {rows: ratios["over_float32"] for rows, ratios in found.items()},
            }
        )
    )


@torch.inference_mode()
def measure(rows: int, seconds: float) -> dict[str, float]:
    """All four layers together."""
    totals = {"torch": 0.0, "widened": 0.0, "float32": 0.0}
    for outputs, inputs in SHAPES:
        weight, states = torch.randn(outputs, inputs), torch.randn(rows, inputs)
        narrow_weight, narrow_states = weight.bfloat16(), states.bfloat16()
        layers = {
            "torch": (Linear(narrow_weight, None), narrow_states),
            "widened": (Linear(narrow_weight, None, widener=Widener()), narrow_states),
            "float32": (Linear(weight, None), states),
        }
        for name, value in in_turn(layers, seconds).items():
            totals[name] += value
    return {
        "speedup": round(totals["torch"] / totals["widened"], 2),
        "over_float32": round(totals["widened"] / totals["float32"], 2),
    }


def in_turn(layers: Mapping[str, tuple[Callable[..., Any], torch.Tensor]], seconds: float) -> dict[str, float]:
    """Median processor seconds of a call of each."""
    samples: dict[str, list[float]] = {name: [] for name in layers}
    end = time.process_time() + seconds
    while time.process_time() < end or len(samples["torch"]) < 5:
        for name, (layer, states) in layers.items():
            started = time.process_time()
            layer(states)
            samples[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in samples.items()}


if __name__ == "__main__":
    main()
