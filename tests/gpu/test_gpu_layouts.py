"""Whole runs on a device: the same bits twice, and at one replica as at two and four; the CPU's
numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.data_plane import Run, WorkerResult, full_parameters, run_in_turn, run_layout
from tests.support.fabric import GLOO, NCCL, Fabric, on
from tests.support.member import LANES, REPLICAS, small_task, small_train


def bits(workers: list[WorkerResult]) -> list[object]:
    """What two runs of the same shard degree are compared by."""
    weights = full_parameters(workers)
    return [workers[0].losses, {name: weights[name].numpy().tobytes() for name in weights}]


@pytest.mark.parametrize("shard", [1, 2])
@on(GLOO, NCCL)
def test_two_replicas_have_the_bits_of_one(fabric: Fabric, shard: int) -> None:
    """Twice, on the same processes; and all of it is the CPU's run but for rounding."""
    task, train = small_task(), small_train(4, shard=shard)
    run = Run(task=task, train=train, replicas=REPLICAS, lanes=LANES)
    first, second = run_in_turn([run, run], fabric=fabric)
    one = run_layout(task, train, replicas=1, lanes=LANES, fabric=fabric)
    for replica in (first[:shard], first[shard:], second[:shard], second[shard:]):
        assert bits(replica) == bits(one)
    if fabric == GLOO:
        return
    cpu = run_layout(task, train, replicas=1, lanes=LANES)
    np.testing.assert_allclose(one[0].losses, cpu[0].losses, rtol=1e-4)
    expected = full_parameters(cpu)
    for name, weights in full_parameters(one).items():
        torch.testing.assert_close(weights, expected[name], rtol=1e-3, atol=1e-5)


@on(GLOO, NCCL)
def test_four_replicas_have_the_bits_of_two_and_of_one(fabric: Fabric) -> None:
    lanes = 2 * LANES
    task, train = small_task(), replace(small_train(4), lanes=lanes)
    four, two, one = run_in_turn(
        [Run(task=task, train=train, replicas=n, lanes=lanes) for n in (4, 2, 1)], fabric=fabric
    )
    assert [bits([worker]) for worker in (*four, *two)] == [bits(one)] * 6
