"""8-bit products and Transformer Engine's place in every layout: the same bits at any number of
replicas, gathered in 8 bits or not, with what backward computes again; and gradients near those of
a float32 reference, tensor by tensor."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from checkpointing import tensors_sha256
from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from tests.support.te_stand_in import STAND_INS, OnCpu
from tests.support.tiny import tiny_task, tiny_train
from trainer.config import TrainConfig
from trainer.data import sample_ids
from trainer.float8.config import Float8
from trainer.tasks.causal_lm import PreparedCausalLM

LANES, STEPS = 4, 3
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Layers whose parts over two tensor ranks still have sides that 16 divides."""


RATE = 1024.0
"""So large that the weight's own rounding is small beside it."""


@dataclass(frozen=True)
class PlainSgd:
    """What a step takes off a weight is RATE times its gradient."""

    clip_norm: float = 0.0
    moments = ()

    @property
    def info(self) -> dict[str, Any]:
        return {"name": "plain_sgd", **asdict(self)}

    def check(self) -> None:
        pass

    def rate(self, step: int, steps: int) -> float:
        return RATE

    def make(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params.values(), lr=0.0)


@pytest.fixture(scope="module")
def lab(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(text, str(tmp_path_factory.mktemp("cache")))


class Lab:
    """Runs of one small model, each made once."""

    def __init__(self, text: Path, cache: str) -> None:
        self.text = text
        self.task: PreparedCausalLM = tiny_task(text, **WIDE).prepare(self.train(), cache)
        self.weights = functools.cache(self._weights)
        self.reference = functools.cache(self._reference)

    def train(self, shard: int = 1, tensor: int = 1, **changes: Any) -> TrainConfig:
        settings = {"steps": STEPS, "lanes": LANES, "micro_batch": 1, **changes}
        return tiny_train(self.text, shard=shard, tensor=tensor, **settings)

    def run(self, train: TrainConfig, replicas: int = 1) -> list[WorkerResult]:
        results = run_layout(self.task, train, replicas=replicas, lanes=LANES)
        for worker in results:
            assert isinstance(worker, WorkerResult), worker
        return results

    def _weights(
        self, replicas: int = 1, shard: int = 1, tensor: int = 1, **changes: Any
    ) -> tuple[str, ...]:
        """SHA-256 of the final weights of each replica."""
        train = self.train(shard, tensor, **changes)
        results, size = self.run(train, replicas), shard * tensor
        parts = [results[at : at + size] for at in range(0, len(results), size)]
        return tuple(tensors_sha256(sorted(full_parameters(part).items())) for part in parts)

    def gradients(self, shard: int, tensor: int, **changes: Any) -> dict[str, torch.Tensor]:
        """Of the first step's mean loss, by the parameter's name."""
        train = self.train(shard, tensor, steps=1, optimizer=PlainSgd(), **changes)
        after = full_parameters(self.run(train))
        return {name: (value - after[name]) / RATE for name, value in self.initial().items()}

    def initial(self) -> dict[str, torch.Tensor]:
        model, source = self.task.build(self.train().seed)
        return {
            n: source.read(n, tuple(p.shape), (0,) * p.dim(), tuple(p.shape))
            for n, p in model.named_parameters()
        }

    def _reference(self) -> dict[str, torch.Tensor]:
        """The same gradients in plain PyTorch, in float32."""
        model, _ = self.task.build(0)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to_empty(device="cpu")
        model.load_state_dict(self.initial(), strict=False)
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])
        train, data = self.train(), self.task.train_data()
        batch: Any = data.batch(sample_ids(train.seed, 0, train.global_batch, len(data)))
        network: Any = model
        logits = network(input_ids=batch[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


TENSORWISE = {"converters": (Float8(),)}
GATHERED = {"converters": (Float8(gather=True),)}
ROWWISE = {"converters": (Float8(recipe="rowwise"),), "precision": "bfloat16"}
LIBRARY = {"converters": (OnCpu(),), "precision": "bfloat16"}
LIBRARY_8 = {"converters": (OnCpu(float8="current"),), "precision": "bfloat16"}
"""By what stands in for Transformer Engine."""

SLOW, SOAK = pytest.mark.slow, pytest.mark.soak


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a run get the path, too."""
    monkeypatch.syspath_prepend(STAND_INS)


def test_gathering_in_8_bits_changes_no_bit_nor_does_a_second_replica(lab: Lab) -> None:
    """Which is what shows that the scale of the shards' common maximum is that of the whole."""
    plain = lab.weights(shard=2, **TENSORWISE)
    gathered = lab.weights(replicas=2, shard=2, **GATHERED)
    assert gathered == plain * 2


@SOAK
@pytest.mark.parametrize(
    ("how", "replicas"),
    [(GATHERED, (1, 2, 4)), (ROWWISE, (1, 2)), (LIBRARY_8, (1, 2))],
    ids=["tensorwise-gathered", "rowwise", "library"],
)
def test_the_number_of_replicas_does_not_change_a_bit(
    lab: Lab, how: dict[str, Any], replicas: tuple[int, ...]
) -> None:
    runs = [weights for n in replicas for weights in lab.weights(replicas=n, **how)]
    assert len(runs) == sum(replicas) and len(set(runs)) == 1


@SLOW
@pytest.mark.parametrize("tensor", [1, 2])
def test_gathering_in_8_bits_changes_no_bit_in_bfloat16(lab: Lab, tensor: int) -> None:
    layout = {"shard": 2, "tensor": tensor, "precision": "bfloat16"}
    plain, gathered, without = (lab.weights(**layout, **how) for how in (TENSORWISE, GATHERED, {}))
    assert gathered == plain != without


@SOAK
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_computed_again_has_the_same_bits(lab: Lab, recompute: str) -> None:
    assert lab.weights(recompute=recompute, **GATHERED) == lab.weights(**GATHERED)


@SOAK
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_compiled_blocks_are_the_same_with_a_second_replica(lab: Lab) -> None:
    alone = lab.weights(steps=1, compile="require", **GATHERED)
    assert lab.weights(replicas=2, steps=1, compile="require", **GATHERED) == alone * 2


SHARES = {"float32": 2e-6, "bfloat16": 0.02, "8 bits": 0.15}
"""The most that a gradient may be off: the norm of the difference over the norm. As
docs/precision.md has them."""


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        pytest.param({}, "float32", marks=SOAK),
        pytest.param({"precision": "bfloat16"}, "bfloat16", marks=SOAK),
        pytest.param(GATHERED, "8 bits"),
        pytest.param(ROWWISE, "8 bits", marks=SLOW),
        pytest.param(LIBRARY, "bfloat16"),
        pytest.param(LIBRARY_8, "8 bits", marks=SOAK),
    ],
    ids=["float32", "bfloat16", "tensorwise", "rowwise", "library", "library-8"],
)
def test_each_gradient_is_near_the_reference(lab: Lab, how: dict[str, Any], kind: str) -> None:
    """At shard x tensor 2 x 2."""
    got, wanted = lab.gradients(2, 2, **how), lab.reference()
    assert got.keys() == wanted.keys()
    shares = {n: float((got[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted}
    worst = max(shares, key=lambda name: shares[name])
    assert shares[worst] < SHARES[kind], (worst, shares[worst])


@SLOW
def test_a_checkpoint_of_the_library_is_the_plain_one(lab: Lab) -> None:
    """The same tensors, with the same boxes on each worker: names, shapes and placements."""
    boxes = [
        [
            {name: value[:2] for name, value in worker.local.items()}
            for worker in lab.run(lab.train(2, 2, steps=1, **how))
        ]
        for how in ({}, LIBRARY, GATHERED)
    ]
    assert boxes[0] == boxes[1] == boxes[2]
