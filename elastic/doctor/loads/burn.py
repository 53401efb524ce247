"""Multiplies matrices whose products are known exactly, again and again, on one device.

The entries are whole numbers from -8 to 7. So each sum is below 2^24 and float32 holds it exactly,
in whatever order the device adds it up: any difference is a fault of the device. On a GPU the
entries are bfloat16, which tensor cores multiply, and the known sums are rounded as it rounds them.

    python -m elastic.doctor.loads.burn --device cuda:0 --seconds 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

SIZES = {"cpu": 512, "cuda": 4096}
"""Rows and columns."""

_BLOCK = 8
"""Products between two looks at the clock."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def burn(
    device: torch.device, seconds: float, multiply: Multiply = torch.matmul
) -> dict[str, float]:
    """Burns one device. Returns `products`, how many of them were `wrong`, and the median of
    operations per second, `flops`.

    Args:
        device: it.
        seconds: for how long; one block of products at least.
        multiply: what is tried.
    """
    size = SIZES[device.type]
    left, right = _matrices(size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    exact = (left.double() @ right.double()).float().to(dtype).to(device)
    left, right = left.to(device, dtype), right.to(device, dtype)
    multiply(left, right)  # the first one loads libraries
    speeds: list[float] = []
    wrong, begin_s = 0, time.monotonic()
    while not speeds or time.monotonic() - begin_s < seconds:
        _settle(device)
        block_s = time.monotonic()
        products = [multiply(left, right) for _ in range(_BLOCK)]
        _settle(device)
        speeds.append(_BLOCK * 2 * size**3 / (time.monotonic() - block_s))
        wrong += sum(not torch.equal(product, exact) for product in products)
    return {
        "products": _BLOCK * len(speeds),
        "wrong": wrong,
        "flops": statistics.median(speeds),
    }


def _matrices(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every machine."""
    generator = torch.Generator().manual_seed(size)
    made = torch.randint(-8, 8, (2, size, size), generator=generator).float()
    return made[0], made[1]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    print(json.dumps({"result": burn(options.device, options.seconds)}))
