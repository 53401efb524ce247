"""All-gather and reduce-scatter of FSDP2's flat buffers in two levels: between the workers of the
same place on all nodes, and between those of one node, both at once and in rounds.

    position in the group = (local * nodes + node) * parts + part
    buffer                = (local, node, part, numbers of one shard)

What a worker hands on inside its node, pieces of several nodes, is one stretch of such a buffer,
and every piece is sent from its place and received into its place: nothing is copied. On n nodes
with g workers a ring is n * g - 1 hops long; here everybody is one hop across nodes and one inside
away.

Sends and receives go in batches on FSDP2's own group: there is no further group to be made or
aborted, and NCCL, which makes one kernel of a batch, uses network and NVLink at once. The nodes are
dealt with in rounds, of those at some distances from each, so that as many are sent to as received
from. In an all-gather, what a round brings from other nodes is handed on inside the node two
batches later; in a reduce-scatter, what a round has summed inside the node goes to other nodes two
batches later. So there is always one batch on its way while another is waited for.

The sum of a shard that belongs to node b: in each node its workers' addends by rank, from the left,
((x0 + x1) + x2) ...; then the nodes' sums, from the left: that of b, then b - 1, b - 2, ..., b + 1
(mod nodes). It depends on the layout alone. All additions are torch's, in the buffers' own number
format, so they are the same ones on Gloo and on NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.parallel.layout import ParallelDims
from trainer.parallel.peers import Peers, plan_rounds, plan_stretches

ROUNDS = 8
"""At most. More of them hide more of what goes on inside nodes, and a reduce-scatter keeps addends
of two; each costs a latency, and a call for each message inside the node."""


@dataclass(frozen=True, kw_only=True)
class TwoLevels:
    """How a replica's workers lie in two levels. All workers of an FSDP2 group call its methods in
    the same order. On CUDA the current stream waits for what they do, the host does not."""

    nodes: int
    """That the group is meant to be on."""
    parts: int = 1
    """Neighbours in the group that share samples, on one node."""
    rounds: int = ROUNDS
    """At most."""

    @classmethod
    def of(cls, dims: ParallelDims) -> TwoLevels | None:
        """A layout's; None where its collectives are flat."""
        return None if dims.nodes == 1 else cls(nodes=dims.nodes, parts=dims.parts)

    def node_of(self, position: int) -> int:
        """The node of a position in the group."""
        return position // self.parts % self.nodes

    def all_gather(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Fills a flat buffer, of which each worker has its own shard at its place already."""
        peers = Peers(group, nodes=self.nodes, parts=self.parts)
        pieces = peers.pieces_of(buffer)
        rounds, batches = plan_rounds(self.nodes, self.rounds), _Batches()
        for new, arrived in zip([*rounds, *_LATER], [*_LATER, *rounds], strict=True):
            batches.finish_but(1)
            batches.begin([*_spread(peers, pieces, new), *_hand_on(peers, pieces, arrived)])
        batches.finish_but(0)

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        """Each worker gets in `output` the sum of all workers' pieces of its shard. The flat
        `buffer` is written over."""
        peers = Peers(group, nodes=self.nodes, parts=self.parts)
        rounds = [
            _Sums(peers, buffer, distances) for distances in plan_rounds(self.nodes, self.rounds)
        ]
        batches = _Batches()
        new, collected = [*rounds, *_LATER, *_LATER], [*_LATER, *rounds, *_LATER]
        for one, two, three in zip(new, collected, [*_LATER, *_LATER, *rounds], strict=True):
            batches.finish_but(1)
            if three:
                three.add_to(output)
            if two:
                two.sum_up(output)
            batches.begin([*(one.collect() if one else ()), *(two.exchange() if two else ())])


_LATER = (None, None)
"""Batches between one use of a round's data and the next."""

_count = 0
"""Batches that were begun."""


def batches_begun() -> int:
    """Batches of sends and receives that this process has begun. Called from any thread."""
    return _count


class _Batches:
    """Batches of sends and receives that are on their way."""

    def __init__(self) -> None:
        self._begun: list[list[dist.Work]] = []

    def begin(self, messages: list[dist.P2POp]) -> None:
        """Sends them, if there are any."""
        global _count
        _count += bool(messages)
        self._begun.append(dist.batch_isend_irecv(messages) if messages else [])

    def finish_but(self, left: int) -> None:
        """Waits for all but the last `left`."""
        while len(self._begun) > left:
            for work in self._begun.pop(0):
                work.wait()


class Gather:
    """The all-gather of FSDP2's parameter groups (torch's `AllGather` interface)."""

    def __init__(self, levels: TwoLevels) -> None:
        self._levels = levels

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for a flat buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gathers on the current stream, as FSDP2 has it by default.

        Raises:
            AssertionError: this worker's shard is not at its place.
        """
        if async_op or input_tensor.storage_offset() != group.rank() * input_tensor.numel():
            raise AssertionError(
                f"FSDP2 of torch {torch.__version__} gathers in another way than "
                "trainer/parallel/two_level.py"
            )
        self._levels.all_gather(output_tensor, group)


def _hand_on(peers: Peers, pieces: torch.Tensor, distances: range | None) -> Iterator[dist.P2POp]:
    """To the others on this node the shards that have come from nodes at these distances, and from
    them theirs."""
    if distances is None:
        return
    first = peers.node - distances.stop + 1
    for nodes in plan_stretches(first, len(distances), peers.nodes):
        for mate in peers.mates:
            yield from peers.send(pieces[peers.own][nodes], peers.node, mate)
            yield from peers.receive(pieces[mate][nodes], peers.node, mate)


def _spread(peers: Peers, pieces: torch.Tensor, distances: range | None) -> Iterator[dist.P2POp]:
    """This worker's shard to the nodes at these distances, and from as many others theirs."""
    shards = pieces[peers.own]
    for distance in distances or ():
        if distance:
            source = (peers.node - distance) % peers.nodes
            yield from peers.send(shards[peers.node, None], peers.node + distance, peers.own)
            yield from peers.receive(shards[source, None], source, peers.own)


class _Sums:
    """The sums of a round of a reduce-scatter: for the nodes at some distances.

    Args:
        peers: this worker's.
        buffer: its addends.
        distances: the round's.
    """

    def __init__(self, peers: Peers, buffer: torch.Tensor, distances: range) -> None:
        self._peers, self._pieces, self._distances = peers, peers.pieces_of(buffer), distances
        first = peers.node + distances.start
        self._stretches = plan_stretches(first, len(distances), peers.nodes)
        self._addends: list[list[torch.Tensor]] = []
        self._sums: list[torch.Tensor] = []
        self._came: list[torch.Tensor] = []

    def collect(self) -> Iterator[dist.P2POp]:
        """To the others on this node the addends of their shards, and from them those of this
        worker's."""
        peers, pieces = self._peers, self._pieces
        for nodes in self._stretches:
            own = pieces[peers.own][nodes]
            self._addends.append([])
            for place in peers.places:
                room = own if place == peers.own else own.new_empty(own.shape)
                self._addends[-1].append(room)
                if place != peers.own:
                    yield from peers.send(pieces[place][nodes], peers.node, place)
                    yield from peers.receive(room, peers.node, place)

    def sum_up(self, output: torch.Tensor) -> None:
        """Adds up what was collected, over the first addends; `output` gets this node's own."""
        for total, *others in self._addends:
            for addend in others:
                total.add_(addend)
            self._sums.extend(total)
        self._addends.clear()
        if self._distances[0] == 0:
            output.copy_(self._sums.pop(0))
            self._distances = self._distances[1:]

    def exchange(self) -> Iterator[dist.P2POp]:
        """To the other nodes their sums, and from as many those of this worker's shard."""
        peers = self._peers
        for distance, total in zip(self._distances, self._sums, strict=True):
            self._came.append(torch.empty_like(total))
            yield from peers.send(total[None], peers.node + distance, peers.own)
            yield from peers.receive(self._came[-1][None], peers.node - distance, peers.own)

    def add_to(self, output: torch.Tensor) -> None:
        """Adds what has come from other nodes."""
        for total in self._came:
            output.add_(total)
        self._came.clear()
        self._sums.clear()
