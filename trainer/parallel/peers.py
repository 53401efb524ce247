"""Who a worker's peers are in two levels, and the messages to them.

    position in the group = (local * nodes + node) * parts + part

A worker's place on its node is (local, part).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def plan_rounds(nodes: int, most: int) -> list[range]:
    """Distances between nodes, 0 to `nodes` - 1, in the rounds in which they are dealt with."""
    rounds = max(1, min(most, nodes - 1))
    ends = [0, *(1 + (nodes - 1) * done // rounds for done in range(1, rounds + 1))]
    return [range(ends[index], ends[index + 1]) for index in range(rounds)]


def plan_stretches(first: int, count: int, nodes: int) -> list[slice]:
    """`count` nodes from `first` on, going round, as rising stretches in that order."""
    first %= nodes
    end = min(first + count, nodes)
    both = slice(first, end), slice(0, count - (end - first))
    return [stretch for stretch in both if stretch.stop > stretch.start]


class Peers:
    """This worker's place in a group, and the messages to its peers.

    Args:
        group: FSDP2's.
        nodes: that it is meant to be on.
        parts: neighbours in it that share samples.
    """

    def __init__(self, group: dist.ProcessGroup, *, nodes: int, parts: int) -> None:
        self._group, self.nodes, self._parts = group, nodes, parts
        locals_ = group.size() // (nodes * parts)
        before, part = divmod(group.rank(), parts)
        local, self.node = divmod(before, nodes)
        self.own = local, part
        """Place on its node."""
        self.places = [(local, part) for local in range(locals_) for part in range(parts)]
        """Those on a node, by rank."""

    def pieces_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """A flat buffer as (local, part, node, numbers of a shard)."""
        return buffer.view(
            -1, self.nodes, self._parts, buffer.numel() // self._group.size()
        ).transpose(1, 2)

    @property
    def mates(self) -> list[tuple[int, int]]:
        """Places of the others on this node."""
        return [place for place in self.places if place != self.own]

    def send(self, tensor: torch.Tensor, node: int, place: tuple[int, int]) -> Iterator[Any]:
        """Messages of rows to the worker at a place of a node."""
        return self._messages(dist.isend, tensor, node, place)

    def receive(self, tensor: torch.Tensor, node: int, place: tuple[int, int]) -> Iterator[Any]:
        """What `send` sends, at the other end."""
        return self._messages(dist.irecv, tensor, node, place)

    def _messages(
        self, kind: Any, tensor: torch.Tensor, node: int, place: tuple[int, int]
    ) -> Iterator[dist.P2POp]:
        local, part = place
        peer = (local * self.nodes + node % self.nodes) * self._parts + part
        for piece in [tensor] if self._parts == 1 else tensor:  # else the rows lie apart
            yield dist.P2POp(kind, piece, group=self._group, group_peer=peer)
