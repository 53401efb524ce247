"""How fast one device copies its own memory, and, of a GPU, how fast the host's comes and goes.

python -m elastic.doctor.loads.copies --device cuda:0
"""

from __future__ import annotations

import argparse
import json
import time

import torch

SIZES_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_TRIES = 5


def measure(device: torch.device) -> dict[str, float]:
    """Bytes per second, the best of `_TRIES`: `memory`, reads and writes together; of a GPU also
    `to_device` and `to_host`, from and to pinned memory."""
    size = SIZES_BYTES[device.type]
    here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    found = {"memory": 2 * _best(there, here)}
    if device.type == "cuda":
        host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        found |= {"to_device": _best(here, host), "to_host": _best(host, here)}
    return found


def _best(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second of a copy."""
    return source.nbytes / min(_copy_s(target, source) for _ in range(_TRIES))


def _copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    cuda = "cuda" in (target.device.type, source.device.type)
    begin_s = time.perf_counter()
    target.copy_(source, non_blocking=True)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, required=True)
    device = parser.parse_args().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    print(json.dumps({"result": measure(device)}))
