"""The model of `benchmarks.collectives`, worked out by hand for one cluster, and what the manual
shows of it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks._collectives_model import (
    BLOCKS,
    Fabric,
    forecast,
    gains_by_nodes,
    ring_of_hops_s,
    ring_s,
    two_level_s,
)
from tests.support import ROOT

SLOW = Fabric(alpha_s=1.0, inside_alpha_s=0.125, node_bytes_s=100.0, inside_bytes_s=1000.0)


def test_latencies_and_bytes_of_three_nodes_with_four_workers() -> None:
    across_s = 600 * 2 / 3 / 100
    assert ring_s(3, 4, 600, SLOW) == pytest.approx(11 * 1.0 + across_s)
    assert ring_of_hops_s(3, 4, 600, SLOW) == pytest.approx(2 * 1.0 + 9 * 0.125 + across_s)
    # The last of two rounds: half of what comes from three of four workers.
    last_s = 600 * 3 / 4 / 2 / 1000
    assert two_level_s(3, 4, 600, SLOW) == pytest.approx(2 * 1.0 + 3 * 0.125 + across_s + last_s)


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "heads", "key_value_heads"),
    [
        ("7b", 4096, 11008, 32, 32),
        ("13b", 5120, 13824, 40, 40),
        ("70b", 8192, 28672, 64, 8),
    ],
)
def test_blocks_are_those_of_llama_2(
    name: str, hidden: int, inner: int, heads: int, key_value_heads: int
) -> None:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
    )
    with torch.device("meta"):
        block = LlamaDecoderLayer(config, 0)
    assert sum(param.numel() for param in block.parameters()) == BLOCKS[name]


@pytest.mark.parametrize("name", ["7b", "13b"])
def test_a_micro_batch_s_collectives_gain_what_is_aimed_at(name: str) -> None:
    """On 1,024 GPUs of p4d: 2.19 and 1.804. For 70B nothing is aimed at."""
    block = forecast(1024)[name]["block"]
    assert block["flat_ms"] / block["two_level_ms"] >= 1.8


def test_the_manual_shows_the_forecast() -> None:
    """Who changes the model, or how many rounds the code makes, is told to change the tables."""
    manual = (ROOT / "docs" / "two-levels.md").read_text("utf-8")
    found = forecast(1024)
    for name, kinds in found.items():
        times = [kinds[kind] for kind in ("all_gather", "reduce_scatter", "block")]
        cells = [f"{t['flat_ms']:.1f} → {t['two_level_ms']:.1f}, {t['gain']:.2f}×" for t in times]
        assert f"| {name.upper()} | {' | '.join(cells)} |" in manual
    hops = [f"{kinds['hops']['gain']:.2f}×" for kinds in found.values()]
    assert f"{hops[0]}, {hops[1]} and {hops[2]}" in manual
    for nodes, gains in gains_by_nodes().items():
        cells = [f"{gains[name]:.2f} ({gains[f'{name} hops']:.2f})" for name in BLOCKS]
        assert f"| {nodes} | {' | '.join(cells)} |" in manual
