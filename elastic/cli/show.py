"""A checkpoint in words, and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from checkpointing import Keys, Manifest, Segment
from checkpointing.format.dtypes import item_bytes
from health.digits import three_digits


def human_bytes(size: float) -> str:
    """A size with a unit, three digits: 1.25 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{three_digits(size)} {unit}"
        size /= 1000
    return f"{three_digits(size)} TB"


def human_time(seconds: float | None) -> str:
    """A point in time in UTC."""
    if seconds is None:
        return "unknown"
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first row as the head; numbers go to the right."""
    return "\n".join(table_lines(rows))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of such a table, one for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(f"{c:>{w}}" if c[:1].isdigit() else f"{c:<{w}}" for c, w in cells))
    return [line.rstrip() for line in lines]


def summary(manifest: Manifest) -> dict[str, Any]:
    """The facts about a checkpoint that `list` shows; JSON values."""
    return {
        "step": manifest.step,
        "committed_at": manifest.committed_at,
        "generation": manifest.generation,
        "bytes": sum(segment.size_bytes for segment in manifest.segments.values()),
        "writers": len(writers(manifest)),
        "segments": len(manifest.segments),
        "earlier_bytes": sum(segment.size_bytes for segment in _earlier(manifest)),
    }


def _earlier(manifest: Manifest) -> list[Segment]:
    """Segments that earlier checkpoints have written."""
    return [one for key, one in manifest.segments.items() if Keys().step_of(key) != manifest.step]


def writers(manifest: Manifest) -> set[str]:
    """The parts of the segments' keys that tell the writing ranks apart."""
    return {key.rpartition("/")[0].rpartition("/")[0] for key in manifest.segments}


def details(manifest: Manifest) -> dict[str, Any]:
    """All of a manifest but the checksums; JSON values."""
    return {
        **summary(manifest),
        "attempt": manifest.attempt,
        "training_state": manifest.training_state,
        "versions": manifest.versions,
        "tensors": {
            name: {
                "shape": list(info.shape),
                "dtype": info.dtype,
                "slices": [
                    {"offsets": list(part.offsets), "sizes": list(part.sizes), "key": part.segment}
                    for part in manifest.parts_of(name)
                ],
            }
            for name, info in sorted(manifest.tensors.items())
        },
    }


def describe(manifest: Manifest, *, tensors: bool) -> str:
    """A manifest in words; `tensors` adds a line for each."""
    facts = summary(manifest)
    lines = [
        f"step {facts['step']}, committed {human_time(facts['committed_at'])} by generation "
        f"{facts['generation']}, attempt {manifest.attempt}",
        f"{human_bytes(facts['bytes'])} in {facts['segments']} segments by {facts['writers']} "
        f"writers",
        *_describe_earlier(manifest, facts["earlier_bytes"]),
        *_describe_kinds(manifest),
        f"layout: {_describe_layout(manifest)}",
        "training state:",
        *_indent(manifest.training_state),
        "versions: " + ", ".join(f"{k} {v}" for k, v in sorted(manifest.versions.items())),
    ]
    if tensors:
        lines.append(table([("tensor", "dtype", "shape", "cut into"), *_tensor_rows(manifest)]))
    return "\n".join(lines)


def _describe_earlier(manifest: Manifest, size_bytes: int) -> Iterator[str]:
    if size_bytes:
        steps = sorted({str(Keys().step_of(one.key)) for one in _earlier(manifest)}, key=int)
        yield f"  of that {human_bytes(size_bytes)} unchanged since step {', '.join(steps)}"


def _describe_kinds(manifest: Manifest) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[int]] = {}
    for name, info in manifest.tensors.items():
        kind = name.split("/", 1)[0] if "/" in name else "other"
        kinds.setdefault((kind, info.dtype), []).append(math.prod(info.shape))
    for (kind, dtype), counts in sorted(kinds.items()):
        size = human_bytes(sum(counts) * item_bytes(dtype))
        yield f"  {kind}: {len(counts)} {dtype} tensors, {sum(counts):,} numbers, {size}"


def _describe_layout(manifest: Manifest) -> str:
    cuts = Counter(_cut(manifest, name) for name in manifest.tensors)
    return ", ".join(f"{count} tensors {cut}" for cut, count in cuts.most_common())


def _cut(manifest: Manifest, name: str) -> str:
    """How a tensor was cut: parts along each dimension."""
    parts = manifest.parts_of(name)
    shape = manifest.tensors[name].shape
    counts = [len(set(parts.offsets[:, axis].tolist())) for axis in range(len(shape))]
    cut = [f"{count} along dimension {axis}" for axis, count in enumerate(counts) if count > 1]
    return " × ".join(cut) if cut else "whole"


def _tensor_rows(manifest: Manifest) -> Iterator[tuple[str, str, str, str]]:
    for name, info in sorted(manifest.tensors.items()):
        yield name, info.dtype, f"{list(info.shape)}", _cut(manifest, name)


def _indent(state: Mapping[str, Any]) -> Iterable[str]:
    for key, value in sorted(state.items()):
        if isinstance(value, Mapping):
            inner = ", ".join(f"{k} = {v}" for k, v in sorted(value.items()) if _is_short(v))
            yield f"  {key}: {inner}"
        else:
            yield f"  {key}: {value}"


def _is_short(value: object) -> bool:
    return not isinstance(value, (Mapping, list))
