"""Optimizers and schedules that are added from outside the package, and those that are refused."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpointing import IncompatibleError, Reader, TensorInfo, check_compatible, open_store
from tests.support.data_plane import WorkerResult, full_parameters, run_layout
from tests.support.lion import InverseRoot, Lion
from tests.support.tiny_checkpoint import commit_shares
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.data import sample_ids
from trainer.engine.build import build_model as build_model_of_run
from trainer.engine.engine import Engine
from trainer.engine.optimizer import try_optimizer
from trainer.engine.state import state_table
from trainer.errors import ConfigError
from trainer.optimizer import Optimizer, WarmupCosine
from trainer.parallel.layout import ParallelDims, Slot
from trainer.parallel.mesh import ReplicaMesh
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import Meeting
from trainer.replication.step_commit import Commit
from trainer.tasks.custom import CustomTask

STEPS, BATCH, SAMPLES, SEED = 4, 4, 16, 3
ROUNDED = OptimizerConfig(lr=0.1, moment_dtype="bfloat16")
NARROW = replace(ROUNDED, master_dtype="bfloat16")
WIDE_MOMENTS = OptimizerConfig(lr=0.1, master_dtype="bfloat16")
LION = Lion(schedule=InverseRoot(lr=0.02), weight_decay=0.1, clip_norm=0.5)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(batch) - batch[:, :2]).square().sum(), len(batch)


DATA = list(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)))
TASK = CustomTask(build_model=build_model, loss_function=loss_of, dataset=DATA)


def train_with(optimizer: Optimizer, shard: int = 1) -> TrainConfig:
    return TrainConfig(
        task=TASK,
        steps=STEPS,
        global_batch=BATCH,
        parallel=ParallelConfig(shard=shard),
        optimizer=optimizer,
        seed=SEED,
    )


def run(replicas: int, shard: int = 1, optimizer: Optimizer = LION) -> list[WorkerResult]:
    results = run_layout(TASK, train_with(optimizer, shard), replicas=replicas, lanes=2)
    assert all(isinstance(result, WorkerResult) for result in results), results
    return results


# -- one from outside trains ----------------------------------------------------------------------


def lion_by_hand() -> dict[str, torch.Tensor]:
    """The whole run by the paper's formulas."""
    torch.manual_seed(SEED)
    model = build_model()
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(STEPS):
        ids = sample_ids(SEED, step * BATCH, BATCH, SAMPLES)
        loss, terms = loss_of(model, torch.stack([DATA[i] for i in ids]))
        model.zero_grad()
        (loss / terms).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        rate = 0.02 / (step + 1) ** 0.5
        for name, param in model.named_parameters():
            grad, momentum = param.grad, momenta[name]
            assert grad is not None
            sign = (0.9 * momentum + 0.1 * grad).sign()
            param.data -= rate * (sign + 0.1 * param.data)
            momenta[name] = 0.99 * momentum + 0.01 * grad
    return {name: param.detach() for name, param in model.named_parameters()}


def test_lion_does_what_its_paper_says_in_each_layout() -> None:
    expected, whole = lion_by_hand(), run(1)
    for workers in (whole, run(1, shard=2)):
        for name, value in full_parameters(workers).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    for worker in run(2):
        assert worker.losses == whole[0].losses
        for name, (_, _, value) in worker.local.items():
            assert torch.equal(value, whole[0].local[name][2])


@pytest.mark.parametrize("optimizer", [ROUNDED, NARROW])
def test_rounded_numbers_are_alike_at_any_number_of_replicas(optimizer: Optimizer) -> None:
    (alone,) = run(1, optimizer=optimizer)
    for worker in run(2, optimizer=optimizer):
        assert worker.losses == alone.losses
        for name, (_, _, value) in worker.local.items():
            assert torch.equal(value, alone.local[name][2])


def test_other_moments_are_another_state(
    replica: tuple[Rendezvous, ReplicaMesh], tmp_path: Path
) -> None:
    """A run does not go on with moments of another kind: the names say which."""
    store = open_store(tmp_path)
    share = make_engine(replica[1], ROUNDED).state.share(0, 1)
    parts = list(zip(share.slices, share.tensors, strict=True))
    manifest = commit_shares(store, [parts], segment_bytes=4096, block_bytes=512)
    with pytest.raises(IncompatibleError, match=r"exp_avg.*bfloat16 .* float32"):
        check_compatible(manifest, table_of(OptimizerConfig()))
    with pytest.raises(IncompatibleError, match=r"param/.*float32 .* bfloat16"):
        check_compatible(manifest, table_of(NARROW))


def table_of(optimizer: Optimizer) -> dict[str, TensorInfo]:
    return state_table(build_model_of_run(TASK, train_with(optimizer))[0], optimizer)


def make_engine(mesh: ReplicaMesh, optimizer: Optimizer) -> Engine:
    slot = Slot(replica=0, rank=0, dims=ParallelDims())
    return Engine(TASK, train_with(optimizer), slot=slot, mesh=mesh, device="cpu", max_replicas=1)


def train_on(engine: Engine, steps: range) -> None:
    for step in steps:
        engine.gradient.copy_(torch.sin(torch.arange(engine.gradient.numel()) + 10.0 * step))
        engine.apply(step, scale=0.5)


@pytest.mark.parametrize(
    "optimizer",
    [LION, OptimizerConfig(schedule=InverseRoot(lr=0.1)), ROUNDED, NARROW, WIDE_MOMENTS],
)
def test_a_saved_state_goes_on_with_the_same_bits(
    replica: tuple[Rendezvous, ReplicaMesh], tmp_path: Path, optimizer: Optimizer
) -> None:
    whole, restored = (make_engine(replica[1], optimizer) for _ in range(2))
    whole.initialize()
    train_on(whole, range(3))
    store = open_store(tmp_path)
    share = whole.state.share(0, 1)
    parts = list(zip(share.slices, share.tensors, strict=True))
    manifest = commit_shares(store, [parts], segment_bytes=4096, block_bytes=512)
    assert manifest.tensors == table_of(optimizer)
    reader = Reader(store, manifest)
    values = {p.name: reader.read(p.name, p.offsets, p.sizes) for p in restored.state.to_read()}
    assert any(values[f"{optimizer.moments[0]}/0.weight"].flatten() != 0)
    restored.load(values, optimizer_steps=3)
    for engine in (whole, restored):
        train_on(engine, range(3, 5))
    assert restored.state.digest() == whole.state.digest()
    assert restored.state.optimizer_steps == whole.state.optimizer_steps == 5


@pytest.mark.parametrize(
    "optimizer", [LION, *(replace(each, clip_norm=LION.clip_norm) for each in (ROUNDED, NARROW))]
)
def test_a_newcomer_goes_on_with_the_same_bits(
    replica: tuple[Rendezvous, ReplicaMesh], optimizer: Optimizer
) -> None:
    meet, mesh = replica
    giver, taker = (make_engine(mesh, optimizer) for _ in range(2))
    giver.initialize()
    train_on(giver, range(2))
    meeting = Meeting(rendezvous=meet, prefix="heal", secret=b"of the run")
    source = Source(giver, 0, meeting)
    newcomer = Newcomer(taker, meeting, clip_norm=LION.clip_norm)
    source.await_copy()
    commit = Commit(step=2, loss=1.0, grad_norm=2.0, tokens=4, digests=b"", boundary=False)
    for engine in (giver, taker):
        engine.gradient.fill_(3.0)
    giver.apply(2, scale=commit.scale(LION.clip_norm))
    newcomer.keep(commit)
    deadline = time.monotonic() + 30
    while not newcomer.finish():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for engine in (giver, taker):
        train_on(engine, range(3, 4))
    assert taker.state.digest() == giver.state.digest()
    assert taker.state.optimizer_steps == 4
    source.close()
    newcomer.close()


def test_a_start_from_the_seed_forgets_the_moments(
    replica: tuple[Rendezvous, ReplicaMesh],
) -> None:
    engine = make_engine(replica[1], LION)
    engine.initialize()
    fresh = engine.state.digest()
    train_on(engine, range(2))
    engine._source = None
    engine.initialize()
    assert engine.state.digest() == fresh and engine.state.optimizer_steps == 0


# -- what AdamW's settings were, they are ---------------------------------------------------------


def test_adamw_is_recorded_as_ever() -> None:
    """Checkpoints of before there were others say no more, and exports go by that."""
    assert OptimizerConfig(lr=1e-2, betas=(0.8, 0.9)).info == {
        "lr": 1e-2,
        "min_lr_ratio": 0.1,
        "warmup_steps": 0,
        "betas": (0.8, 0.9),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
    }


def test_a_schedule_of_ones_own_takes_the_place_of_the_three_fields() -> None:
    mine = OptimizerConfig(lr=5.0, schedule=InverseRoot(lr=1.0))
    assert [mine.rate(step, 9) for step in (0, 3)] == [1.0, 0.5]
    assert mine.info["schedule"] == {"class": "tests.support.lion.InverseRoot", "lr": 1.0}
    assert pickle.loads(pickle.dumps(mine)) == mine
    ours = OptimizerConfig(lr=0.5, min_lr_ratio=0.2, warmup_steps=2)
    same = WarmupCosine(lr=0.5, min_lr_ratio=0.2, warmup_steps=2)
    assert [ours.rate(s, 9) for s in range(9)] == [same.rate(s, 9) for s in range(9)]


# -- what is refused ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Made:
    """What `made` returns, as an optimizer of a run."""

    made: Callable[..., Any]
    moments: tuple[str, ...] = ("m",)
    clip_norm = 1.0
    info: Mapping[str, Any] = ()  # type: ignore[assignment]

    def check(self) -> None: ...

    def rate(self, step: int, steps: int) -> float:
        return 0.1

    def make(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return self.made(params.values(), lr=0.1)


class Momentum(torch.optim.Optimizer):
    """Sound; what is refused differs from it in one thing."""

    def __init__(self, params: Any, *, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "m" not in state:
                    self.begin(param, state)
                self.update(param, param.grad, state, group["lr"])

    def begin(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        state["m"] = torch.zeros_like(param)

    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        state["m"].mul_(0.9).add_(grad)
        param.sub_(lr * state["m"])


class OfNorms(Momentum):
    """As LAMB: the step goes by the norms of parameter and update."""

    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        state["m"].mul_(0.9).add_(grad)
        param.sub_(lr * state["m"] * (param.norm() / (state["m"].norm() + 1e-6)))


class OfRows(Momentum):
    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        super().update(param, grad / (1 + grad.norm(dim=-1, keepdim=True)), state, lr)


class WithMore(Momentum):
    def begin(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        super().begin(param, state)
        state["slow"] = param.clone()


class OfOneRow(Momentum):
    def begin(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        state["m"] = torch.zeros_like(param[:1])

    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        param.sub_(lr * grad)


class InDoubles(Momentum):
    def begin(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        state["m"] = torch.zeros_like(param, dtype=torch.float64)


class FromOne(Momentum):
    def begin(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        state["m"] = torch.ones_like(param)


class Replacing(Momentum):
    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        state["m"] = state["m"] * 0.9 + grad
        param.sub_(lr * state["m"])


class ReplacingWeights(Momentum):
    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        state["m"].mul_(0.9).add_(grad)
        param.data = param.data - lr * state["m"]


class WithRateOfItsOwn(Momentum):
    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        super().update(param, grad, state, 0.1)


class Counting(Momentum):
    """In a place that no checkpoint has."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        super().update(param, grad, state, lr / self.count)


class CountingOddly(Momentum):
    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        super().update(param, grad, state, lr)
        state["step"] = state.get("step", torch.zeros(())) + 2


class CountingInInts(Momentum):
    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        super().update(param, grad, state, lr)
        state["step"] = state.get("step", 0) + 1


class Standing(Momentum):
    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        super().update(param, grad, state, lr if param.dim() > 1 else 0.0)


class Failing(Momentum):
    def update(self, param: Any, grad: Any, state: dict[str, Any], lr: float) -> None:
        raise ValueError("no such kernel")


def of_matrices(params: Any, *, lr: float) -> torch.optim.Optimizer:
    return Momentum([param for param in params if param.dim() > 1], lr=lr)


def of_two_rates(params: Any, *, lr: float) -> torch.optim.Optimizer:
    all_of_them = list(params)
    matrices = [param for param in all_of_them if param.dim() > 1]
    others = [param for param in all_of_them if param.dim() <= 1]
    return Momentum([{"params": matrices}, {"params": others, "lr": lr / 10}], lr=lr)


REFUSED: list[tuple[Any, str]] = [
    (OfNorms, "its update is not elementwise"),
    (OfRows, "its update is not elementwise"),
    (WithMore, r"its state for a parameter has \['m', 'slow'\], its moments are \['m'\]"),
    (OfOneRow, r"its moment 'm' is \(\(1, 32\), 'torch.float32'\)"),
    (InDoubles, r"its moment 'm' is \(\(32, 32\), 'torch.float64'\)"),
    (FromOne, "its moments do not begin at zero"),
    (Replacing, "puts other tensors in the place"),
    (ReplacingWeights, "puts other tensors in the place"),
    (WithRateOfItsOwn, "at a learning rate of 0 the weights move"),
    (Counting, "from a copy of parameters, moments and step counter it goes on otherwise"),
    (CountingOddly, r"state\['step'\] is tensor\(2.\) after one step"),
    (CountingInInts, r"state\['step'\] is 1 after one step"),
    (Standing, "leaves a parameter as it is"),
    (Failing, "raised ValueError: no such kernel"),
    (of_matrices, "its groups have 1 tensors, of 3 parameters given; vector is in none"),
    (of_two_rates, r"its groups have the learning rates 0\.01, 0\.1, and a run has one"),
]


@pytest.mark.parametrize(
    ("made", "fact"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_a_run_cannot_live_with_is_refused(made: Any, fact: str) -> None:
    assert try_optimizer(Made(made=Momentum)) is None, "it differs from a sound one"
    with pytest.raises(ConfigError, match=fact) as raised:
        try_optimizer(Made(made=made))
    assert raised.value.field == "train.optimizer"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -1.0}, r"train\.optimizer\.lr = -1\.0: .*Use a positive learning rate"),
        ({"betas": (0.9, 1.0)}, r"train\.optimizer\.betas\[1\] = 1\.0: .*Use 0 or more, below 1"),
    ],
)
def test_a_number_out_of_its_range_is_named_before_a_trial(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        try_optimizer(OptimizerConfig(**settings))


def torch_made(kind: Any, **settings: Any) -> Callable[..., Any]:
    return lambda params, lr: kind(list(params), lr=lr, **settings)


@pytest.mark.parametrize(
    ("made", "moments", "fact"),
    [
        (torch_made(torch.optim.SGD), (), None),
        (torch_made(torch.optim.SGD, momentum=0.9), ("momentum_buffer",), None),
        (torch_made(torch.optim.SGD, momentum=0.9, dampening=0.5), ("momentum_buffer",), "zero"),
        (torch_made(torch.optim.Adam), ("exp_avg", "exp_avg_sq"), None),
        (torch_made(torch.optim.Adam, amsgrad=True), ("exp_avg", "exp_avg_sq"), "max_exp_avg_sq"),
        (torch_made(torch.optim.RMSprop), ("square_avg",), None),
        (torch_made(torch.optim.NAdam), ("exp_avg", "exp_avg_sq"), "mu_product"),
        (torch_made(torch.optim.Adafactor), ("row_var", "col_var"), r"\(1, 32\)"),
        (torch_made(torch.optim.LBFGS), (), "TypeError"),
    ],
)
def test_of_torchs_own_the_trial_tells_them_apart(
    made: Any, moments: tuple[str, ...], fact: str | None
) -> None:
    if fact is None:
        try_optimizer(Made(made=made, moments=moments))
    else:
        with pytest.raises(ConfigError, match=fact):
            try_optimizer(Made(made=made, moments=moments))


def test_the_engine_tries_it_too(replica: tuple[Rendezvous, ReplicaMesh]) -> None:
    with pytest.raises(ConfigError, match="not elementwise"):
        make_engine(replica[1], Made(made=OfNorms))


class ByName(Made):
    """Made of what `made` makes of the parameters by their names."""

    def make(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """See Optimizer."""
        return self.made(params)


def without_biases(params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return Momentum([p for name, p in params.items() if not name.endswith("bias")], lr=0.1)


def with_slow_biases(params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    biases = [p for name, p in params.items() if name.endswith("bias")]
    others = [p for name, p in params.items() if not name.endswith("bias")]
    slow = [{"params": biases, "lr": 0.01}] if biases else []
    return Momentum([{"params": others}, *slow], lr=0.1)


def without_empty_slices(params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return Momentum([param for param in params.values() if param.numel()], lr=0.1)


@pytest.mark.parametrize(
    ("made", "fact"),
    [
        (without_biases, "2 tensors, of 4 parameters given; .*bias is in none"),
        (with_slow_biases, r"the learning rates 0\.01, 0\.1"),
    ],
)
def test_groups_by_names_are_held_against_those_of_the_model(
    replica: tuple[Rendezvous, ReplicaMesh], made: Any, fact: str
) -> None:
    """The trial's parameters have other names."""
    assert try_optimizer(ByName(made=made)) is None
    with pytest.raises(ConfigError, match=fact):
        make_engine(replica[1], ByName(made=made))


def test_a_slice_without_numbers_may_be_left_out() -> None:
    assert try_optimizer(ByName(made=without_empty_slices)) is None


@pytest.mark.parametrize(
    ("optimizer", "field", "fact"),
    [
        (object(), "train.optimizer", "it has no moments, clip_norm, info, check, make, rate"),
        (Lion, "train.optimizer", "a class"),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), "train.optimizer", "it has no moments"),
        (Made(made=Momentum, moments="m"), "train.optimizer.moments", "tuple"),  # type: ignore[arg-type]
        (Made(made=Momentum, moments=("m", "m")), "train.optimizer.moments", "'m'"),
        (Made(made=Momentum, moments=("param",)), "train.optimizer.moments", "'param'"),
        (Made(made=Momentum, moments=("a/b",)), "train.optimizer.moments", "'a/b'"),
        (replace(LION, clip_norm="1"), "train.optimizer.clip_norm", "not a number"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_optimizer_is_refused_at_once(optimizer: Any, field: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact) as raised:
        train_with(optimizer)
    assert raised.value.field == field


@pytest.mark.parametrize("schedule", ["cosine", InverseRoot, lambda step, steps: 0.1])
def test_what_is_no_schedule_is_refused_at_once(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="not a schedule") as raised:
        OptimizerConfig(schedule=schedule)
    assert raised.value.field == "train.optimizer.schedule"
    with pytest.raises(ConfigError, match="positive learning rate"):
        WarmupCosine(lr=0.0)


@dataclass(frozen=True)
class Odd:
    """No learning rate from a step on."""

    step: int
    value: str

    def rate(self, step: int, steps: int) -> float:
        return float(self.value) if step >= self.step else 0.1


@pytest.mark.parametrize(
    ("optimizer", "fact"),
    [
        (Made(made=Momentum, info={"of": {1, 2}}), "not JSON"),
        (Made(made=Momentum, info={"of": math.nan}), "not JSON"),
        (Lion(schedule=Odd(0, "-1")), "the learning rate of step 0 of 4 is -1.0"),
        (Lion(schedule=Odd(3, "nan")), "the learning rate of step 3 of 4 is nan"),
        (Lion(schedule=Odd(0, "inf")), "is inf"),
        (replace(LION, weight_decay=-1.0), "Use 0 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_run(optimizer: Any, fact: str) -> None:
    train_with(LION).check(lanes=2)
    assert asdict(LION)["schedule"] == {"lr": 0.02}
    with pytest.raises(ConfigError, match=fact):
        train_with(optimizer).check(lanes=2)
