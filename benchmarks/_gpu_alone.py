"""Kernels of a step by themselves: its matrix products, which no step can be faster than, and the
sums of gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks._gpu_loops import Tell
from benchmarks._gpu_models import SIZES
from trainer.parallel import wide_sums

LEAST_S = 0.1
"""That a kernel is repeated for, after WARM calls."""
WARM = 3
LIBRARIES = {"cuda": ("cublas", "cublaslt"), "cpu": ("torch's own",)}


def measure_alone(tell: Tell, size: str, tokens: int, device: str) -> None:
    """Tells TFLOP/s of the products of a model's blocks, by the library that computes them, and
    TB/s of the sums of gradients as torch and as the compiled kernel makes them.

    Args:
        tell: gets what is found.
        size: of the model.
        tokens: that go through it at once.
        device: "cuda" or "cpu".
    """
    shapes = list(_products(size))
    found = {}
    for library in LIBRARIES[device]:
        if device == "cuda":
            torch.backends.cuda.preferred_blas_library(library)
        found[library] = _product_rates(shapes, tokens, device)
        tell({"tflops": dict(found)})
    add = wide_sums.make_add("require" if device == "cuda" else "off", torch.device(device))
    rates = {}
    for count in sorted({out * width for _, out, width, _ in shapes}):
        sums = torch.zeros(count, device=device)
        given = torch.randn(count, device=device).bfloat16()
        rates[str(count)] = {
            name: _bytes_of(sums, given) / _seconds(partial(one, [sums], [given]), device) / 1e12
            for name, one in (("torch", wide_sums.add_wide), ("compiled", add))
        }
    tell({"sums, TB/s": rates})


def _products(size: str) -> Iterator[tuple[str, int, int, int]]:
    """A block's layers that are alike: what they are called, their outputs and inputs, and how
    many they are."""
    model = SIZES[size]
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    narrow = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    yield "gate, up", inner, hidden, 2
    yield "down", hidden, inner, 1
    yield "query, output", hidden, hidden, 2
    yield "key, value", narrow, hidden, 2


def _product_rates(
    shapes: list[tuple[str, int, int, int]], tokens: int, device: str
) -> dict[str, float]:
    """TFLOP/s of each, and of `all`: a forward, another one where it is recomputed, and the two
    products of a backward."""
    rates, work, seconds = {}, 0.0, 0.0
    for name, outputs, inputs, count in shapes:
        x = torch.randn(tokens, inputs, device=device).bfloat16()
        weight = (torch.randn(outputs, inputs, device=device) * 0.02).bfloat16()
        y = torch.randn(tokens, outputs, device=device).bfloat16()
        kinds: dict[str, Callable[[], torch.Tensor]] = {
            "forward": partial(torch.mm, x, weight.t()),
            "of inputs": partial(torch.mm, y, weight),
            "of weights": partial(torch.mm, y.t(), x),
        }
        for kind, call in kinds.items():
            taken, flops = _seconds(call, device), 2.0 * tokens * outputs * inputs
            rates[f"{name}: {kind}"] = flops / taken / 1e12
            times = count * (2 if kind == "forward" else 1)
            work, seconds = work + times * flops, seconds + times * taken
    return {"all": work / seconds / 1e12, **rates}


def _bytes_of(sums: torch.Tensor, given: torch.Tensor) -> int:
    """Read and written."""
    return 2 * sums.nbytes + given.nbytes


def _seconds(call: Callable[[], object], device: str) -> float:
    """Of one call, of as many as LEAST_S takes."""
    streams = torch.get_device_module(device)
    for _ in range(WARM):
        call()
    streams.synchronize()
    begun = time.perf_counter()
    call()
    streams.synchronize()
    repeats = max(WARM, int(LEAST_S / (time.perf_counter() - begun)))
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    streams.synchronize()
    return (time.perf_counter() - begun) / repeats
