"""From signs to verdicts: what is wrong, and with whom? Pure.

    worker lost ──► what its machine shows explains it, or its own cause stands
    no worker lost ──► one decisive sign, or two sources that agree; else the verdict is weak
    what follows from a fault elsewhere (cascade) blames nobody while there is a root
    what most show is nobody's fault: the others are the outliers
    of a group in which the outlier cannot be told, all go together

A line of a log never makes a verdict more than weak by itself, however often it is written: there
must be a loss or a reading beside it. Nor does what an exception says change what it was.

Sources: the roles are those of nvidia-resiliency-ext's restart agent; the dominant group, and that
a group may go together, are ByteRobust's (arXiv 2509.16293).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from health.reading import UNREACHED
from health.verdict import STEPS, Confidence, Sign, Step, Verdict

_MACHINE_CAUSES = frozenset({"gpu_error", "node"})
"""Causes of machine signs that may explain the loss of a worker."""

_UNEXPLAINED = frozenset(
    {"crash", "hang", "ray_node", "gpu_error", "gpu_memory", "collective", "heal"}
)
"""Causes of losses that do not say yet what was behind them."""

_OF_THE_NODE = frozenset({"node", "link", "network"})
"""Causes of losses that are about a machine themselves."""

_REPORTERS = 2
"""Machines that must name the same peer."""

_LEAST_NODES = 3
"""Of fewer there is no majority."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of an incident, or of a moment."""

    signs: Sequence[Sign]
    """What was seen, by all."""
    nodes: Mapping[str, str]
    """Worker -> its node, of all workers of the run."""
    replicas: Mapping[str, str]
    """Worker -> the replica it is in, where it is in one."""
    names: Mapping[str, str]
    """What a node is called by others, such as its instance id -> the node."""


def diagnose(facts: Facts) -> list[Verdict]:
    """All that is wrong, the surest first."""
    signs = _without_common(facts)
    lost = {sign.worker: sign for sign in signs if sign.source == "loss" and sign.worker}
    named = _find_named(signs, facts.names)
    verdicts = _of_losses(lost, signs, named, facts)
    blamed = {node for verdict in verdicts for node in verdict.nodes}
    verdicts += _of_machines(signs, blamed, {facts.nodes.get(worker) for worker in lost})
    verdicts += _of_peers(named, signs, {facts.nodes.get(v) for x in verdicts for v in x.workers})
    if all(verdict.confidence == "weak" for verdict in verdicts):
        verdicts += _of_cascades(lost)
    if not lost:  # what workers show of waiting is of the time before, and explains none
        verdicts += _of_slow(signs, facts)
    order: tuple[Confidence, ...] = ("certain", "likely", "weak")
    return sorted(verdicts, key=lambda verdict: order.index(verdict.confidence))


def _without_common(facts: Facts) -> list[Sign]:
    """Leaves out root signs of machines that more than half of them show: a driver, a switch, a
    file server that they share. A decisive one stays, and what accuses no machine: memory runs out
    on all of them alike."""
    nodes = set(facts.nodes.values())
    shown: dict[str, set[str | None]] = defaultdict(set)
    for sign in facts.signs:
        shown[sign.name].add(sign.node)
    return [
        sign
        for sign in facts.signs
        if sign.source == "loss"
        or sign.decisive
        or sign.role != "root"
        or sign.cause not in _MACHINE_CAUSES
        or sign.peer is not None
        or len(nodes) < _LEAST_NODES
        or 2 * len(shown[sign.name]) <= len(nodes)
    ]


# -- workers that were lost ------------------------------------------------------------------------


def _of_losses(
    lost: Mapping[str, Sign],
    signs: Sequence[Sign],
    named: Mapping[str, Sequence[Sign]],
    facts: Facts,
) -> list[Verdict]:
    """A verdict for each loss that does not follow from another; those of one machine, or of one
    replica, with the same explanation are one."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = defaultdict(list)
    behind: dict[str, list[Sign]] = {}
    for worker, loss in lost.items():
        behind[worker] = _explanation(worker, loss, signs, facts)
        cause = _cause(loss, behind[worker])
        if loss.role != "root" and not behind[worker]:
            continue
        roots = tuple(sorted({s.name for s in behind[worker] if s.role == "root"}))
        place = facts.nodes.get(worker, "")
        if not _is_of_machine(cause, behind[worker]):
            place = facts.replicas.get(worker, worker)
        groups[cause, place, roots].append(worker)
    return [
        _verdict_of_losses(cause, workers, lost, behind, signs, named, facts)
        for (cause, _, _), workers in groups.items()
    ]


def _explanation(worker: str, loss: Sign, signs: Sequence[Sign], facts: Facts) -> list[Sign]:
    """Root signs that may be behind a loss: those of its machine, and those about the worker."""
    if loss.cause not in _UNEXPLAINED:
        return []
    return [
        sign
        for sign in signs
        if sign.source != "loss"
        and sign.role == "root"
        and sign.peer is None
        and _is_about(sign, worker, facts)
        and (sign.cause in _MACHINE_CAUSES or sign.worker == worker)
        and (loss.cause == "crash" or not _is_count_of_kills(sign))
    ]


def _is_count_of_kills(sign: Sign) -> bool:
    """Whether it only says that the kernel ended some process of a machine when a worker's ended.
    One that was lost for anything else was not that."""
    return sign.name == "oom_killed" and sign.source == "reading"


def _tells_of_the_machine(sign: Sign) -> bool:
    """Whether it only says that the machine's memory ran out: who took it may be another. Ray's
    monitor ends the newest process."""
    return _is_count_of_kills(sign) or sign.name == "ray_oom_killed"


def _is_about(sign: Sign, worker: str, facts: Facts) -> bool:
    """Whether a sign is about a worker, or about its machine and it is not known whom there."""
    return sign.worker == worker or (
        sign.worker is None and sign.node is not None and sign.node == facts.nodes.get(worker)
    )


def _cause(loss: Sign, behind: Sequence[Sign]) -> str:
    return max(behind, key=_weight).cause if behind else loss.cause


def _weight(sign: Sign) -> tuple[bool, bool, bool, int]:
    """What counts first. The count of kills names nobody: any sign of a machine says more."""
    counted = _is_count_of_kills(sign)
    return sign.decisive, not counted, sign.source == "reading", _height(sign.remedy)


def _height(step: Step | None) -> int:
    return -1 if step is None else STEPS.index(step)


def _is_of_machine(cause: str, behind: Iterable[Sign]) -> bool:
    return cause in _OF_THE_NODE or any(sign.cause in _MACHINE_CAUSES for sign in behind)


def _verdict_of_losses(
    cause: str,
    workers: Sequence[str],
    lost: Mapping[str, Sign],
    behind: Mapping[str, Sequence[Sign]],
    signs: Sequence[Sign],
    named: Mapping[str, Sequence[Sign]],
    facts: Facts,
) -> Verdict:
    roots = list({sign: None for worker in workers for sign in behind[worker]})
    counted = bool(roots) and all(map(_tells_of_the_machine, roots))
    confidence: Confidence = "likely" if counted else "certain"
    if cause == "hang" and len(workers) > 1:
        outliers = _find_outliers(workers, signs)
        workers, confidence = outliers or workers, "certain" if outliers else "likely"
    nodes = _nodes_of(workers, facts) if _is_of_machine(cause, roots) else ()
    places = {facts.nodes.get(worker) for worker in workers}
    beside = [
        sign
        for sign in signs
        if sign.source != "loss"
        and sign not in roots
        and sign.role == "confirmation"
        and any(_is_about(sign, worker, facts) for worker in workers)
    ]
    beside += [sign for node in places if node for sign in named.get(node, ())]
    losses = [lost[worker] for worker in workers]
    return Verdict(
        cause=cause,
        workers=tuple(workers),
        nodes=nodes,
        links=_links(roots),
        evidence=_words([*roots, *losses, *beside]),
        confidence=confidence,
        signs=tuple(sorted({sign.name for sign in roots or losses})),
        remedy=_remedy([*roots, *losses]),
    )


def _find_outliers(workers: Sequence[str], signs: Sequence[Sign]) -> list[str]:
    """Of workers that got nowhere together, those that differ from the rest of the run; none where
    that cannot be told.

    One that the kernel holds differs. Otherwise most of the run does the same, be it idle or busy:
    it waits.
    """
    held = {sign.worker for sign in signs if sign.name == "in_kernel"}
    found = [worker for worker in workers if worker in held]
    if not found:
        does = {s.worker: s.name for s in signs if s.name in ("idle", "busy") and s.worker}
        count = Counter(does.values())
        if count["idle"] != count["busy"]:
            most = "idle" if count["idle"] > count["busy"] else "busy"
            found = [worker for worker in workers if does.get(worker, most) != most]
    return found if len(found) < len(workers) else []


def _of_cascades(lost: Mapping[str, Sign]) -> list[Verdict]:
    """Where nothing else is to be seen, what failed is a collective, and nobody knows why."""
    if not lost:
        return []
    losses = list(lost.values())
    return [
        Verdict(
            cause=losses[0].cause,
            workers=tuple(lost),
            evidence=_words(losses),
            confidence="likely",
            signs=tuple(sorted({sign.name for sign in losses})),
        )
    ]


# -- machines that lost nobody ---------------------------------------------------------------------


def _of_machines(
    signs: Sequence[Sign], blamed: Iterable[str], explained: set[str | None]
) -> list[Verdict]:
    """A verdict for each machine with a root sign of its own that explains no loss yet."""
    known = {*blamed, *explained}
    by_node: dict[str, list[Sign]] = defaultdict(list)
    for sign in signs:
        if sign.source != "loss" and sign.node and sign.peer is None and sign.role != "cascade":
            by_node[sign.node].append(sign)
    return [
        _verdict_of_machine(node, found)
        for node, found in by_node.items()
        if any(s.role == "root" and s.cause in _MACHINE_CAUSES for s in found)
        and (node not in known or (node not in blamed and any(s.decisive for s in found)))
    ]


def _verdict_of_machine(node: str, found: Sequence[Sign]) -> Verdict:
    roots = sorted(
        (s for s in found if s.role == "root" and s.cause in _MACHINE_CAUSES),
        key=_weight,
        reverse=True,
    )
    cause = roots[0].cause
    same = [sign for sign in found if sign.cause == cause]
    return Verdict(
        cause=cause,
        workers=tuple(sorted({sign.worker for sign in roots if sign.worker})),
        nodes=(node,),
        links=_links(roots),
        evidence=_words([*roots, *(sign for sign in same if sign not in roots)]),
        confidence=_confidence(roots, same),
        signs=tuple(sorted({sign.name for sign in roots})),
        remedy=_remedy(roots),
    )


def _confidence(roots: Sequence[Sign], same: Sequence[Sign]) -> Confidence:
    """Decisive, corroborated by another source, or read again and again; lines that are written
    again and again are still lines, and what the driver says in the log and as an event, which have
    one name, it has said once."""
    if any(sign.decisive for sign in roots):
        return "certain"
    mine = [sign for sign in same if sign.role == "root"]
    if any(_corroborates(s, root) for root in mine for s in same):
        return "likely"
    again = any(sign.repeated and sign.source == "reading" for sign in roots)
    return "likely" if again else "weak"


def _corroborates(sign: Sign, root: Sign) -> bool:
    return sign.source != root.source and sign.name != root.name and _may_be_of(sign, root)


def _may_be_of(sign: Sign, root: Sign) -> bool:
    """Whether a sign may come from what `root` shows. One of another GPU does not, where the kernel
    and NVML call both by their addresses; a switch shows in any, and of storage and networks each
    source has names of its own."""
    known = all(one.of and not one.of.startswith(UNREACHED) for one in (sign, root))
    return root.subject != "gpu" or not known or sign.of == root.of


# -- machines that others name ---------------------------------------------------------------------


def _find_named(signs: Sequence[Sign], names: Mapping[str, str]) -> dict[str, list[Sign]]:
    """Node -> what others say of it, of nodes that more others name than they name themselves."""
    by_node: dict[str, list[Sign]] = defaultdict(list)
    names_others: Counter[str] = Counter()
    for sign in signs:
        node = names.get(sign.peer) if sign.peer else None
        if node is None or sign.node is None or node == sign.node:
            continue
        by_node[node].append(sign)
        names_others[sign.node] += 1
    return {
        node: said
        for node, said in by_node.items()
        if len({sign.node for sign in said}) > names_others[node]
    }


def _of_peers(
    named: Mapping[str, Sequence[Sign]], signs: Sequence[Sign], explained: set[str | None]
) -> list[Verdict]:
    """A verdict for each machine that others name, where no loss there explains it."""
    return [
        _verdict_of_peer(node, said, signs) for node, said in named.items() if node not in explained
    ]


def _verdict_of_peer(node: str, said: Sequence[Sign], signs: Sequence[Sign]) -> Verdict:
    reporters = {sign.node for sign in said}
    beside = [
        sign
        for sign in signs
        if sign.source != "log"
        and sign.cause in ("link", "collective")
        and (sign.node == node or (sign.node in reporters and sign.role == "cascade"))
    ]
    likely = len(reporters) >= _REPORTERS and bool(beside)
    return Verdict(
        cause="link",
        nodes=(node,),
        evidence=_words([*said, *beside]),
        confidence="likely" if likely else "weak",
        signs=tuple(sorted({sign.name for sign in said})),
    )


# -- workers that are slow -------------------------------------------------------------------------


def _of_slow(signs: Sequence[Sign], facts: Facts) -> list[Verdict]:
    """The stragglers that were found by their own time. Where there are none: the one replica that
    waits for nobody while most others wait much; where its machine shows why, only the workers
    there."""
    found = [sign for sign in signs if sign.name == "straggler"]
    if found:
        return _of_stragglers(found, signs)
    does = {s.worker: s for s in signs if s.name in ("waits_little", "waits_much") and s.worker}
    little = [worker for worker, sign in does.items() if sign.name == "waits_little"]
    groups = {facts.replicas.get(worker, worker) for worker in little}
    others = [w for w in facts.replicas if facts.replicas[w] not in groups]
    much = [worker for worker in others if worker in does]
    if len(groups) != 1 or not 2 * len(much) > len(others):
        return []
    slowed = [sign for sign in signs if sign.cause == "slow" and sign.subject == "gpu"]
    shown = [w for w in little if any(_is_about(sign, w, facts) for sign in slowed)]
    why = [sign for sign in slowed if any(_is_about(sign, w, facts) for w in shown)]
    workers = shown or little
    return [
        Verdict(
            cause="slow",
            workers=tuple(workers),
            nodes=_nodes_of(shown, facts),
            evidence=_words([*why, *(does[worker] for worker in workers)]),
            confidence="likely",
            signs=("waits_little",),
        )
    ]


def _of_stragglers(found: Sequence[Sign], signs: Sequence[Sign]) -> list[Verdict]:
    """A verdict for those that belong together: of one machine, or a replica that cannot be told
    from its slow worker. What else a machine shows of slowness, and of its storage, is evidence."""
    groups: dict[str, list[Sign]] = defaultdict(list)
    for sign in found:
        groups[sign.of].append(sign)
    return [
        Verdict(
            cause="slow",
            workers=tuple(sign.worker for sign in group if sign.worker),
            nodes=tuple({sign.node: None for sign in group if sign.node}),
            evidence=_words([*group, *_beside(group, signs)]),
            confidence="likely",
            signs=("straggler",),
        )
        for group in groups.values()
    ]


def _beside(group: Sequence[Sign], signs: Sequence[Sign]) -> list[Sign]:
    nodes = {sign.node for sign in group}
    return [
        sign
        for sign in signs
        if sign.node in nodes
        and sign.name != "straggler"
        and ((sign.cause == "slow" and sign.subject == "gpu") or sign.subject == "storage")
    ]


# -- words -----------------------------------------------------------------------------------------


def _nodes_of(workers: Iterable[str], facts: Facts) -> tuple[str, ...]:
    return tuple(sorted({facts.nodes[worker] for worker in workers if worker in facts.nodes}))


def _links(signs: Iterable[Sign]) -> tuple[str, ...]:
    return tuple(sorted({sign.of for sign in signs if sign.subject == "link" and sign.of}))


def _words(signs: Iterable[Sign]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sign.detail for sign in signs))


def _remedy(signs: Iterable[Sign]) -> Step | None:
    """The most of what the signs ask for."""
    return max((sign.remedy for sign in signs), key=_height, default=None)
