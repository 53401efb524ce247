"""What a run of the soak asks of the trainer beside its degrees, drawn from a seed. Pure.

Only what the product accepts is drawn: what goes together with what is in `draw_features` alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from elastic import Float8, ParallelConfig, Steps
from tests.support.te_stand_in import OnCpu
from trainer.parallel.strategy import Strategy

if TYPE_CHECKING:
    from benchmarks._chaos import Layout

Dtype = Literal["float32", "bfloat16"]
Recipe = Literal["tensorwise", "rowwise"]
Library = Literal["bfloat16", "current"]

FEWEST_ROWS = 32
"""Of a linear layer's weight, in the model of a run with features."""
HIDDEN_OF_BLOCKS = 256
"""With this the state of a worker is up to 35 MB."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """What the trainer is asked for. Names and defaults are those of the product's settings, where
    nothing else is said."""

    strategy: Strategy | None = None
    reshard_after_forward: bool | int | None = None
    workers_per_node: int | None = None
    recompute: Literal["full", "selective"] | int | None = None
    horizon: int | None = None
    """Of the offloading; None: none."""
    texts: Literal["joined", "apart"] = "joined"
    precision: Dtype = "float32"
    recipe: Recipe | None = None
    """Of 8-bit products; None: none."""
    gather: bool = False
    """Whether weights are gathered in 8 bits."""
    library: Library | None = None
    """How the stand-in for Transformer Engine multiplies; None: torch does."""
    moment_dtype: Dtype = "float32"
    master_dtype: Dtype = "float32"
    reduce_dtype: Dtype = "float32"
    lane_buffers: int | None = None
    prefetch: int = 0
    """0, other than the product's: samples pace the steps, those read ahead a little later."""
    gather_ahead: int = 1
    loss_chunk: int | None = None
    profile: Steps | None = None
    """A few: what the profiler has seen is written while the run stands still."""
    bucket_bytes: int | None = None
    """None: the whole model is one bucket, whose sum begins when backward is over."""
    micro_batch: int | None = None
    compare_every: int | None = 100
    witness_every: int | None = 250
    hidden_size: int = 64
    """The larger one makes a state of several blocks, which a heal sends one after the other."""
    heal_bytes_per_s: float | None = None

    def __str__(self) -> str:
        asked = [(field, getattr(self, field.name)) for field in fields(self)]
        told = [f"{field.name} {value}" for field, value in asked if value != field.default]
        return ", ".join(told) or "no features"

    @property
    def converters(self) -> tuple[Float8 | OnCpu, ...]:
        """Of the model."""
        if self.library is not None:
            return (OnCpu(float8=None if self.library == "bfloat16" else self.library),)
        return () if self.recipe is None else (Float8(recipe=self.recipe, gather=self.gather),)

    @property
    def alone(self) -> Features:
        """What one replica is asked for that is to end with the same bits."""
        return replace(self, strategy="FULL_SHARD") if self.strategy == "HYBRID_SHARD" else self

    def parallel(self, layout: Layout) -> ParallelConfig:
        """How a replica is split."""
        return ParallelConfig(
            shard=layout.shard,
            context=layout.context,
            tensor=layout.tensor,
            strategy=self.strategy,
            reshard_after_forward=self.reshard_after_forward,
            workers_per_node=self.workers_per_node,
        )


def draw_features(rng: random.Random, layout: Layout) -> Features:
    """What the trainer of a run with these degrees is asked for. What came to be drawn later is
    drawn last, so that a seed keeps the rest."""
    sharded = layout.shard * layout.context
    here = _draw_workers_per_node(rng, layout)
    halves = sharded > 2 and sharded % 2 == 0 and layout.tensor == 1
    between = [sharded // 2] if halves and here is None else []
    reshard = rng.choice([None, True, False, False, *between * 4]) if sharded > 1 else None
    precision, recipe = rng.choice(_PRODUCTS)
    even = sharded > 1 and FEWEST_ROWS % (sharded * layout.tensor) == 0
    gathers = recipe == "tensorwise" and even and reshard not in between
    features = Features(
        reshard_after_forward=reshard,
        workers_per_node=here,
        recompute=rng.choice(_RECOMPUTED),
        horizon=rng.choice([None, None, 1, 2]),
        texts="apart" if rng.random() < 0.4 else "joined",
        precision=precision,
        recipe=recipe,
        gather=gathers and rng.random() < 0.6,
        moment_dtype=_draw_dtype(rng),
        master_dtype=_draw_dtype(rng),
        reduce_dtype=_draw_dtype(rng),
        lane_buffers=rng.choice([None, 1, 2]),
        prefetch=rng.choice([0, 2]),
        gather_ahead=rng.choice([1, 2, 3]) if sharded > 1 else 1,
    )
    features = _draw_name(rng, features, layout)
    chunk = rng.choice([None, None, 3, 8])
    in_bfloat16 = precision == "bfloat16" and recipe is None
    library = rng.choice(_LIBRARIES) if in_bfloat16 else None
    first = rng.randint(1, 34)
    profile = Steps(first, first + 4) if rng.random() < 0.4 else None
    hidden_size = rng.choice([64, 64, HIDDEN_OF_BLOCKS])
    return replace(
        features,
        loss_chunk=chunk,
        library=library,
        profile=profile,
        bucket_bytes=rng.choice([None, 12_000, 100_000]),
        micro_batch=rng.choice([None, 1]) if layout.shard == 1 else None,
        compare_every=rng.choice([100, 5]),
        witness_every=rng.choice([250, 4]),
        hidden_size=hidden_size,
        heal_bytes_per_s=rng.choice([None, 1e7]) if hidden_size == HIDDEN_OF_BLOCKS else None,
    )


_PRODUCTS: tuple[tuple[Dtype, Recipe | None], ...] = (
    ("float32", None),
    ("float32", None),
    ("bfloat16", None),
    ("float32", "tensorwise"),
    ("bfloat16", "tensorwise"),
    ("bfloat16", "rowwise"),
)
_LIBRARIES: tuple[Library | None, ...] = (None, "bfloat16", "current")
_RECOMPUTED: tuple[Literal["full", "selective"] | int | None, ...] = (None, "full", "selective", 2)


def _draw_workers_per_node(rng: random.Random, layout: Layout) -> int | None:
    """Half of a replica's workers, where two levels have two or more on either."""
    here = layout.workers // 2
    cuts = layout.shard % 2 == 0 and here > layout.tensor
    return here if cuts and rng.random() < 0.6 else None


def _draw_name(rng: random.Random, features: Features, layout: Layout) -> Features:
    """The same layout, sometimes called by the strategy's name, which may say whether parameters
    are kept, too."""
    if rng.random() < 0.4:
        return features
    strategy = features.parallel(layout).layout(layout.replicas).strategy
    said = strategy == "SHARD_GRAD_OP" and rng.random() < 0.5
    reshard = None if said else features.reshard_after_forward
    return replace(features, strategy=strategy, reshard_after_forward=reshard)


def _draw_dtype(rng: random.Random) -> Dtype:
    return "bfloat16" if rng.random() < 0.35 else "float32"
