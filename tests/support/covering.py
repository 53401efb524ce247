"""Cases in which every few values of different features meet: every pair of them, or every triple.
Pure.

Most faults of combinations are of two things that do not go together, so that one case shows many
pairs at once. Which cases is found greedily: of some random ones that hold what is missing first,
the one that holds most of what is missing. Source: Cohen et al., The AETG System, 1997.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Case = dict[str, str]
"""The name of a value, by its feature's."""

Part = frozenset[tuple[str, str]]
"""Values of some features that meet."""

_TRIES = 40
"""Random cases that are compared for each that is taken."""


def cover(
    features: Mapping[str, Sequence[str]],
    strength: int,
    *,
    allowed: Callable[[Case], bool],
    cost: Callable[[Case], float],
) -> list[Case]:
    """Cases that hold all that can be of so many values: the same ones each time.

    Args:
        features: names of the values, by the feature's.
        strength: how many values are to meet: 1, 2 (pairs) or more.
        allowed: whether a case can be, by the features that it has: some, or all. With more of them
            it may turn out that it cannot, but never the other way round.
        cost: of a case: cheap ones are preferred.
    """
    rng, cases = random.Random(0), list[Case]()
    missing = dict.fromkeys(_all_parts(features, strength))  # in an order, unlike a set
    while missing:
        first = dict(next(iter(missing)))
        if _complete(first, features, allowed, rng) is None:
            del missing[frozenset(first.items())]
            continue
        tried = [_complete(first, features, allowed, rng) for _ in range(_TRIES)]
        taken = max(
            (case for case in tried if case is not None),
            key=lambda case: sum(part in missing for part in parts_of(case, strength)) / cost(case),
        )
        for part in parts_of(taken, strength):
            missing.pop(part, None)
        cases.append(taken)
    return cases


def parts_of(case: Case, strength: int) -> Iterator[Part]:
    """What so many values of a case are, each with each."""
    return map(frozenset, combinations(sorted(case.items()), strength))


def _all_parts(features: Mapping[str, Sequence[str]], strength: int) -> Iterator[Part]:
    for names in combinations(features, strength):
        for values in product(*(features[name] for name in names)):
            yield frozenset(zip(names, values, strict=True))


def _complete(
    part: Case,
    features: Mapping[str, Sequence[str]],
    allowed: Callable[[Case], bool],
    rng: random.Random,
) -> Case | None:
    """A random case that holds a part; None where there is none."""
    if not allowed(part):
        return None
    missing = [name for name in features if name not in part]
    if not missing:
        return {name: part[name] for name in features}
    values = list(features[missing[0]])
    for value in rng.sample(values, len(values)):
        found = _complete({**part, missing[0]: value}, features, allowed, rng)
        if found is not None:
            return found
    return None
