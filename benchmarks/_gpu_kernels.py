"""Where the time of a step on a GPU goes, by classes of kernels, from a trace."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.loop.device_time import merge, on_device, span_of

_CLASSES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("collectives", r"nccl"),
        ("loss", r"^triton_(?!tem)\w*(softmax|nll_loss|cross_entropy)"),
        ("compiled", r"^triton_(?!tem)"),
        ("attention", r"flash|fmha|sdpa|mem_eff|flex_attention"),
        ("products", r"gemm|nvjet|cutlass|xmma|cublas|split_?[kK]|triton_tem_\w*mm"),
        ("loss", r"soft_?max|SoftMax|nll_loss|cross_entropy"),
        ("AdamW", r"FusedAdam"),
        ("copies and casts", r"[cC]opy|CatArray|chunk_cat|Memcpy|Memset|FillFunctor"),
        ("sums and norms", r"reduce_kernel|LpNorm"),
    )
)
"""What the first pattern that is found in a kernel's name makes it. `compiled` are inductor's own
kernels but for its templates (products, attention) and its loss: norms, activations, and the update
of bfloat16 state. They come first: each is named by the operations that it comes from, so that a
copy before attention has attention's name."""
OTHERS = "others"
_LONGEST = 15
_NAME_CHARACTERS = 100


def class_of(kernel: str) -> str:
    """Of a kernel, a copy or a fill, by its name."""
    return next((name for name, pattern in _CLASSES if pattern.search(kernel)), OTHERS)


def kernel_times(events: Iterable[Any]) -> dict[str, Any]:
    """Where the device's time went, in milliseconds: the sum of each class, the longest first; how
    long anything ran (kernels beside each other count once: the rest of a step the device was
    idle); the longest kernels by name, each with its calls, for what the classes do not tell; and
    the longest spans in which nothing ran, with what came before and after.

    Args:
        events: of `torch.profiler`, from the device and others: `profile.events()`.
    """
    here = on_device(events)
    by_class, by_name = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in here:
        begin, end = span_of(event)
        by_class[class_of(event.name)] += end - begin
        by_name[event.name] += end - begin
    calls = Counter(event.name for event in here)
    return {
        "busy_ms": _ms(sum(end - begin for begin, end in merge(map(span_of, here)))),
        "classes_ms": {name: _ms(time_us) for name, time_us in _longest_first(by_class)},
        "longest": [
            {"name": name[:_NAME_CHARACTERS], "ms": _ms(time_us), "calls": calls[name]}
            for name, time_us in _longest_first(by_name)[:_LONGEST]
        ],
        "gaps": [
            {
                "ms": _ms(time_us),
                "after": last[:_NAME_CHARACTERS],
                "before": name[:_NAME_CHARACTERS],
            }
            for time_us, last, name in sorted(_gaps(here), reverse=True)[:_LONGEST]
        ],
    }


def _gaps(events: Iterable[Any]) -> Iterator[tuple[float, str, str]]:
    """Of each span without a kernel: how long it was, the kernel before it, that after it."""
    last, until_us = "", -math.inf
    for event in sorted(events, key=span_of):
        begin_us, end_us = span_of(event)
        if last and begin_us > until_us:
            yield begin_us - until_us, last, event.name
        if end_us > until_us:
            last, until_us = event.name, end_us


def _longest_first(times_us: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(times_us.items(), key=lambda found: found[1], reverse=True)


def _ms(time_us: float) -> float:
    return round(time_us / 1e3, 3)
