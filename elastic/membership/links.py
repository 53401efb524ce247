"""Who is taken out where connections between workers fail, and all of them live. Pure.

The workers of a roster have tried their connections (`trainer/backend/link_test.py`), each to the
others of its cross group; or the agents of the nodes have, where a replica stands still. A
connection between two has two ends, and does not say which one is bad. What several have in common
does: mostly a machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from elastic.protocol.messages import LinkTest
from elastic.protocol.roster import Replica, Roster

_SHOWN = 4
"""Failed connections in a text."""

_NODE_DIGITS = 12
"""Of a node's id there; others are not like it."""


class FailedLink(NamedTuple):
    """A connection that did not carry what it should."""

    sender: str
    """Worker."""
    receiver: str
    """Worker, which says so."""
    came: str
    """What did come."""


def find_failed(roster: Roster, found: Mapping[str, LinkTest]) -> list[FailedLink]:
    """The connections that failed, by what each worker of a roster has found."""
    return [
        FailedLink(column[peer], receiver, _describe_short(count, found[receiver]))
        for rank in range(len(roster.replicas[0].workers))
        for column in [roster.column(rank)]
        for receiver in column
        for peer, count in sorted(found[receiver].short.items())
    ]


def between_workers(
    short: Mapping[tuple[str, str], int],
    nodes: Mapping[str, str],
    of_bytes: int,
    bound_s: float,
) -> list[FailedLink]:
    """The connections between workers that failed, by what their nodes have found.

    Args:
        short: node that sent, node that received -> bytes that came, of those that were too few.
        nodes: worker -> its node, of all that count.
        of_bytes: size of a message.
        bound_s: the time that it had.
    """
    on: dict[str, list[str]] = defaultdict(list)
    for worker, node in nodes.items():
        on[node].append(worker)
    return [
        FailedLink(sender, receiver, _came(count, of_bytes, bound_s))
        for (source, target), count in sorted(short.items())
        for sender in on[source]
        for receiver in on[target]
    ]


def _describe_short(count: int, test: LinkTest) -> str:
    return _came(count, test.of_bytes, test.bound_s)


def _came(count: int, of_bytes: int, bound_s: float) -> str:
    return f"{count:,} of {of_bytes:,} bytes in {bound_s:g} s"


def plan_removals(
    failed: Sequence[FailedLink],
    roster: Roster,
    nodes: Mapping[str, str],
    *,
    idle: Collection[str],
    least: int,
    forming: Collection[Replica] = (),
    lost_anyway: Collection[str] = (),
) -> set[str]:
    """The workers to take out, so that those who stay reach each other; none where too few replicas
    would be left, or none with state.

    Args:
        failed: connections.
        roster: of the run; before its first one it has no replicas.
        nodes: worker -> its node.
        idle: workers without a place, who may take those of others.
        least: fewest replicas to train with.
        forming: replicas that are being built: so may their workers.
        lost_anyway: workers who are ended otherwise: no state is lost in addition where only their
            replicas break.
    """
    culprits = find_culprits(failed, roster, nodes)
    kept = [replica for replica in roster.replicas if culprits.isdisjoint(replica.workers)]
    bad = {nodes[worker] for worker in culprits}
    seated = {worker for replica in kept for worker in replica.workers}
    staying = {*roster.workers, *roster.followers} - culprits
    others = [*idle, *(worker for replica in forming for worker in replica.workers)]
    free = staying.union(worker for worker in others if nodes[worker] not in bad) - seated
    size = len([*roster.replicas, *forming][0].workers)
    possible = len(kept) + len(free) // size
    with_state = any(roster.lanes[replica.index] for replica in kept)
    broken = [replica for replica in roster.replicas if replica not in kept]
    harmless = all(not {*lost_anyway}.isdisjoint(replica.workers) for replica in broken)
    return culprits if possible >= least and (with_state or harmless) else set()


def find_culprits(
    failed: Sequence[FailedLink], roster: Roster, nodes: Mapping[str, str]
) -> set[str]:
    """Workers without whom no failed connection is left: node by node, first those of the node in
    most of them. Of equals, of the one that fewer replicas break with, and then those with the
    highest position: who is not in the roster, and newcomers and followers, which have no lanes,
    before the lead.

    What fails inside a machine is no link, and takes nobody out.
    """
    columns = map(roster.column, range(len(roster.replicas[0].workers) if roster.replicas else 0))
    positions = {worker: at for column in columns for at, worker in enumerate(column)}
    outside = len(positions)
    peers: dict[str, set[str]] = defaultdict(set)
    for sender, receiver, _ in failed:
        if nodes[sender] != nodes[receiver]:
            peers[sender].add(receiver)
            peers[receiver].add(sender)
    culprits: set[str] = set()

    def whole(workers: Iterable[str]) -> set[int]:
        """Positions of the whole replicas that `workers` are in."""
        return {at for w in workers if (at := positions.get(w, outside)) < len(roster.replicas)}

    def weigh(item: tuple[str, list[str]]) -> tuple[int, int, int, str]:
        node, workers = item
        links, breaking = sum(len(peers[w]) for w in workers), whole(workers) - whole(culprits)
        return links, -len(breaking), max(positions.get(w, outside) for w in workers), node

    while peers:
        by_node: dict[str, list[str]] = defaultdict(list)
        for worker in peers:
            by_node[nodes[worker]].append(worker)
        _, taken = max(by_node.items(), key=weigh)
        culprits.update(taken)
        peers = {w: left for w in peers if w not in culprits and (left := peers[w] - culprits)}
    return culprits


def between_two(
    culprits: Collection[str], failed: Iterable[FailedLink], nodes: Mapping[str, str]
) -> set[str]:
    """Those of the culprits whose node has failed connections with one other node alone, apart from
    those of other culprits: that node explains them as well.

    Args:
        culprits: of `find_culprits`.
        failed: connections.
        nodes: worker -> its node.
    """
    bad = {nodes[worker] for worker in culprits}
    others: dict[str, set[str]] = defaultdict(set)
    for sender, receiver, _ in failed:
        for end, other in ((nodes[sender], nodes[receiver]), (nodes[receiver], nodes[sender])):
            if other not in bad:
                others[end].add(other)
    return {worker for worker in culprits if len(others[nodes[worker]]) == 1}


def describe(failed: Sequence[FailedLink], nodes: Mapping[str, str]) -> str:
    """Failed connections in words, some of many."""
    shown = ", ".join(
        f"{_describe_end(sender, nodes)} to {_describe_end(receiver, nodes)}: {came}"
        for sender, receiver, came in failed[:_SHOWN]
    )
    more = len(failed) - _SHOWN
    return f"{shown}, and {more} more" if more > 0 else shown


def _describe_end(worker: str, nodes: Mapping[str, str]) -> str:
    return f"{worker} (node {nodes[worker][:_NODE_DIGITS]})"
