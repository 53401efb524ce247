"""Lanes and the one fixed binary tree in which their gradients are summed.

Floating-point addition is commutative but not associative, so a sum is reproducible exactly when
its tree is. The tree over lanes [lo, hi) splits at the largest power of two below its length;
nothing about workers enters it. A replica adds the subtrees it holds whole and sends one buffer for
each; whoever owns a piece of the gradient adds the rest in the same tree. Design:
docs/decisions/003-exact-reduction.md; the idea for plain data parallelism: EasyScale, SC'23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heapreplace
from typing import TypeVar

Node = tuple[int, int]
"""A subtree: the half-open range of lanes (lo, hi) it sums."""

T = TypeVar("T")


def split(node: Node) -> tuple[Node, Node]:
    """The two children of an inner node (hi - lo >= 2)."""
    lo, hi = node
    half = 1 << ((hi - lo - 1).bit_length() - 1)
    return (lo, lo + half), (lo + half, hi)


def blocks_of(lanes: Iterable[int], total: int) -> tuple[Node, ...]:
    """The largest subtrees whose lanes are all in `lanes`, in lane order.

    Args:
        lanes: the lanes that one replica computes.
        total: the number of lanes of the run.
    """
    mine = frozenset(lanes)

    def cover(node: Node) -> tuple[Node, ...]:
        held = sum(lane in mine for lane in range(*node))
        if held == node[1] - node[0]:
            return (node,)
        if held == 0:
            return ()
        left, right = split(node)
        return cover(left) + cover(right)

    return cover((0, total))


def sum_tree(parts: Mapping[Node, T], root: Node, add: Callable[[T, T], T]) -> T:
    """Adds the subtrees in `parts`, which together cover `root` once, in tree order."""
    if root in parts:
        return parts[root]
    left, right = split(root)
    return add(sum_tree(parts, left, add), sum_tree(parts, right, add))


def lane_buffers(dealt: Iterable[int], lanes: int) -> int:
    """The most buffers that a replica needs at once, its lanes computed in their order: those of
    the whole subtrees before, and one for the lane that is open. One of them is the reduced
    gradient's, which it has without a lane, too."""
    order = list(dealt)
    return max((len(blocks_of(order[:done], lanes)) + 1 for done in range(len(order))), default=1)


def plan_lane_buffers(asked: int | None, lanes: int, replicas: int, device: str) -> int | None:
    """The most buffers that a worker's device holds; None: no limit.

    Args:
        asked: `TrainConfig.lane_buffers`.
        lanes: of the run.
        replicas: that it has at most.
        device: of the workers.
    """
    if asked is not None or device == "cpu":
        return asked
    dealt = deal_lanes(lanes, tuple(range(replicas)))
    return lane_buffers(dealt[find_neediest(dealt, lanes)], lanes)


def find_neediest(dealt: Mapping[int, tuple[int, ...]], lanes: int) -> int:
    """The first of the replicas that need the most buffers. Of two with three lanes of six the
    second needs one more: when its last lane is open it has two blocks, the first one has one.

    Args:
        dealt: replica -> its lanes.
        lanes: of the run.
    """
    return max(dealt, key=lambda replica: lane_buffers(dealt[replica], lanes))


def deal_lanes(
    total: int, replicas: tuple[int, ...], before: Mapping[int, tuple[int, ...]] | None = None
) -> dict[int, tuple[int, ...]]:
    """Deals the lanes out over the replicas, as evenly as whole lanes allow.

    Args:
        total: the number of lanes of the run.
        replicas: indices of the replicas that compute, in order. More replicas than lanes: the last
            ones get none.
        before: what each replica had. Given after a fault: a replica keeps its lanes, whose
            gradients it may hold already, and only the lost ones are dealt, each to the replica
            with the fewest.

    Returns:
        replica index -> its lanes in rising order.
    """
    if before is None:
        base, extra = divmod(total, len(replicas))
        sizes = [base + (position < extra) for position in range(len(replicas))]
        starts = [sum(sizes[:position]) for position in range(len(replicas))]
        return {
            replica: tuple(range(start, start + size))
            for replica, start, size in zip(replicas, starts, sizes, strict=True)
        }
    dealt = {replica: list(before.get(replica, ())) for replica in replicas}
    kept = {lane for lanes in dealt.values() for lane in lanes}
    fewest = [(len(lanes), replica) for replica, lanes in dealt.items()]
    heapify(fewest)
    for lane in sorted(set(range(total)) - kept):
        held, replica = fewest[0]
        dealt[replica].append(lane)
        heapreplace(fewest, (held + 1, replica))
    return {replica: tuple(sorted(lanes)) for replica, lanes in dealt.items()}
