"""NCCL's own log as a worker has it written and reads it. The unit tests have lines that others
published; here NCCL writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.fabric import NCCL, Fabric, share_a_gpu
from tests.support.processes import TIMEOUT_S, play
from trainer.backend.efa_facts import EfaFacts
from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.nccl_log import parse_nccl_log
from trainer.backend.node_network import NodeNetwork
from trainer.backend.rendezvous import Rendezvous
from trainer.errors import NetworkError
from trainer.parallel.layout import ParallelDims


def meet_on_a_machine_with_efa(rank: int, port: int, fabric: Fabric, folder: str) -> None:
    """So this worker believes. NCCL finds no device there, and takes sockets."""
    fabric.enter(rank, 2)
    os.environ.update(share_a_gpu(rank))  # hosts of their own: no other way goes round the network
    os.environ.pop("NCCL_DEBUG", None)  # whoever runs the tests may have set it
    facts = EfaFacts(devices=("0000:00:06.0",))
    network = NodeNetwork(Path(folder) / f"{rank}.log", allow_tcp=False, facts=facts)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
    make_replica_group(meet, "replica", rank=rank, dims=ParallelDims(shard=2), device="cuda")
    numbers = torch.ones(8, device="cuda")
    dist.all_reduce(numbers)
    assert numbers.tolist() == [2.0] * 8
    with pytest.raises(NetworkError, match="TCP"):
        network.check()
    leave_replica_group()


@pytest.mark.gpu
def test_nccl_s_log_tells_that_it_goes_over_tcp(tmp_path: Path) -> None:
    play(meet_on_a_machine_with_efa, NCCL, str(tmp_path), processes=2)
    for rank in range(2):
        text = (tmp_path / f"{rank}.log").read_text()
        assert "via NET/Socket" in text
        found = parse_nccl_log(text)
        assert (found.name, found.provider, found.gpu_direct) == ("Socket", None, False)
