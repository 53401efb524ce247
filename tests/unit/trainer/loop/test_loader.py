"""Reading ahead: what is hidden by it, and that nothing else changes."""

from __future__ import annotations

import errno
import gc
import itertools
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import manual_seed, nn

from tests.support.data_plane import train_at
from tests.support.fabric import GLOO
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous, close_connections
from trainer.config import OptimizerConfig, TrainConfig
from trainer.data.order import Ids
from trainer.errors import ConfigError, RateError
from trainer.loop.loader import Loader, read
from trainer.loop.samples import lane_ids, micro_batches
from trainer.optimizer import check_settings
from trainer.tasks.custom import CustomTask

SAMPLES, STEPS = 64, 6
PATIENCE_S, READ_S = 30.0, 0.002
STATE = torch.get_rng_state()


class Watched:
    """Samples of their own number, those in `noisy` with noise. Notes who reads what."""

    def __init__(self, noisy: Container[int] = ()) -> None:
        self.noisy, self.readers, self.read = noisy, set[str](), dict[int, threading.Event]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.readers.add(threading.current_thread().name)
        sample = torch.full((4,), float(index))
        self.event(index).set()
        return sample + torch.rand(4) if index in self.noisy else sample

    def event(self, index: int) -> threading.Event:
        """Set once the sample has been read."""
        return self.read.setdefault(index, threading.Event())


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(batch) - 1).square().sum(), len(batch)


def settings(dataset: Any, prefetch: int, **changes: Any) -> TrainConfig:
    task = CustomTask(build_model=build_model, loss_function=loss_of, dataset=dataset)
    given = {
        "task": task,
        "steps": STEPS,
        "global_batch": 4,
        "micro_batch": 2,
        "bucket_bytes": 1024,
    }
    return TrainConfig(prefetch=prefetch, **{**given, **changes})


@pytest.fixture
def train() -> Iterator[Callable[[TrainConfig], Any]]:
    """Trains in this process, as the only worker."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    numbers = itertools.count()

    def run(config: TrainConfig) -> Any:
        meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=PATIENCE_S)
        number = next(numbers)
        try:
            return train_at(0, number, meet, GLOO, config.task, config, 1, 1, False)
        finally:
            leave_replica_group()

    yield run
    close_connections()


def outcome(result: Any) -> tuple[Any, ...]:
    weights = {name: value.tolist() for name, (_, _, value) in result.local.items()}
    return result.losses, result.norms, result.digests, weights


@pytest.mark.parametrize("noisy", ["none", "all", "some"])
def test_the_bits_are_the_same_however_far_ahead_it_reads(
    train: Callable[[TrainConfig], Any], noisy: str
) -> None:
    """Also those of dropout, and of a dataset that draws from the same generator, be it for a few
    items that nobody has met in the first micro-batch."""
    order = order_of(settings(Watched(), 0))
    ids = {"none": (), "all": range(SAMPLES), "some": [int(micro[0]) for micro in order[3::4]]}
    results = [train(settings(Watched(ids[noisy]), prefetch)) for prefetch in (0, 5)]
    assert outcome(results[0]) == outcome(results[1])


def test_what_draws_is_read_when_it_is_due_whatever_the_dataset_makes_of_being_refused() -> None:
    class Stubborn(Watched):
        def batch(self, ids: Ids) -> Any:
            try:
                return self[int(ids[0])]
            except BaseException:
                return None

    loader = Loader(Stubborn([2]), iter(np.arange(4)[:, None]), ahead=2, pin=False)
    taken = []
    for seed in range(4):
        torch.manual_seed(seed)
        taken.append(loader.take()[1].tolist())
    torch.manual_seed(2)
    assert taken == [[0.0] * 4, [1.0] * 4, (2 + torch.rand(4)).tolist(), [3.0] * 4]


def test_a_dataset_with_a_generator_of_its_own_is_read_ahead() -> None:
    class Owner(Gated):
        def batch(self, ids: Ids) -> Any:
            torch.rand(1, generator=torch.Generator())
            return super().batch(ids)

    data = Owner()
    loader = Loader(data, iter(np.arange(2)[:, None]), ahead=1, pin=False)
    data.gate.set()
    loader.take()
    assert data.begun.wait(PATIENCE_S)
    assert loader.take()[0].tolist() == [1] and data.read == [0, 1]


def order_of(config: TrainConfig) -> list[Ids]:
    """Ids of all micro-batches of the run, on its one worker."""
    return list(
        micro_batches(
            config, 1, SAMPLES, 0, steps=range(config.steps), missing=[0], dealt=lambda _: [0]
        )
    )


def test_a_read_is_hidden_behind_the_computation(train: Callable[[TrainConfig], Any]) -> None:
    """The loss of each micro-batch is not there before the next one has been read."""
    data = Watched()
    config = settings(data, 1)
    following = dict(
        (int(now[0]), int(then[0])) for now, then in itertools.pairwise(order_of(config))
    )
    hidden = []

    def loss_after_the_next_read(model: nn.Module, batch: torch.Tensor) -> Any:
        then = following.get(int(batch[0, 0]))
        if model.training and then is not None:
            hidden.append(data.event(then).wait(PATIENCE_S))
        return loss_of(model, batch)

    task = CustomTask(build_model=build_model, loss_function=loss_after_the_next_read, dataset=data)
    train(settings(data, 1, task=task))
    assert hidden == [True] * (2 * STEPS - 1)


def test_the_parts_of_a_real_step_show_a_read_that_is_waited_for(
    train: Callable[[TrainConfig], Any],
) -> None:
    """Without reading ahead. They are part of the time that the whole took."""

    class Slow(Watched):
        def __getitem__(self, index: int) -> torch.Tensor:
            end = time.perf_counter() + READ_S
            while time.perf_counter() < end:
                pass
            return super().__getitem__(index)

    begin = time.perf_counter()
    result = train(settings(Slow(), 0))
    wall_s = time.perf_counter() - begin
    (times,) = result.times
    assert (times.step, times.steps) == (STEPS - 2, STEPS - 2)
    assert times.seconds["data"] >= 4 * READ_S
    assert all(times.seconds[part] > 0 for part in ("compute", "commit", "optimizer"))
    assert times.steps * sum(times.seconds.values()) <= wall_s


def test_one_thread_reads_the_samples_of_training_and_evaluation(
    train: Callable[[TrainConfig], Any],
) -> None:
    data = Watched()
    task = CustomTask(
        build_model=build_model, loss_function=loss_of, dataset=data, eval_dataset=data
    )
    result = train(settings(data, 2, task=task, eval_every=2))
    assert len(result.evaluations) == STEPS // 2
    assert len(data.readers) == 1 and threading.current_thread().name not in data.readers


class Spoilt(Watched):
    """One sample cannot be read."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise RuntimeError(f"sample {index} is spoilt")
        return super().__getitem__(index)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_of_the_dataset_comes_in_the_step_that_takes_the_sample(
    train: Callable[[TrainConfig], Any], prefetch: int
) -> None:
    bad_step = 3
    order = order_of(settings(Watched(), prefetch))
    data = Spoilt(int(order[2 * bad_step][0]))
    losses: list[int] = []

    def counted(model: nn.Module, batch: torch.Tensor) -> Any:
        losses.append(len(batch))
        return loss_of(model, batch)

    task = CustomTask(build_model=build_model, loss_function=counted, dataset=data)
    error = train(settings(data, prefetch, task=task))
    assert isinstance(error, RuntimeError) and "is spoilt" in str(error)
    assert "__getitem__" in "".join(traceback.format_exception(error))
    assert len(losses) == 2 * bad_step


class Gated:
    """Batches of their ids; the first one that is read ahead waits for `gate`."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, ids: Ids) -> Any:
        if self.read == [0]:
            self.begun.set()
            assert self.gate.wait(PATIENCE_S)
        self.read.append(int(ids[0]))
        return ids


class Batched(Watched):
    def batch(self, ids: Ids) -> torch.Tensor:
        return torch.stack([self[int(index)] for index in ids])


class Seeded(Batched):
    """Noise of its own for each sample, by the generator of all, which it leaves as it was."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return sample + torch.rand(4)


class SeedsAll(Batched):
    """Seeds whatever there is, and draws by NumPy."""

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        return super().__getitem__(index) + float(np.random.default_rng(index).random())


@pytest.mark.parametrize("kind", [Seeded, SeedsAll])
def test_what_seeds_the_generator_of_all_is_read_when_it_is_due(kind: type[Batched]) -> None:
    """Others draw from it meanwhile."""
    torch.manual_seed(99)  # as a step does, and as no sample: to seed it alike changes nothing
    data = kind()
    loader = Loader(data, iter(np.arange(9)[:, None]), ahead=3, pin=False)
    for index in range(4):
        loader.take()
        assert list(data.read) == list(range(index + 1))


def by_name() -> Any:
    """`torch.random.default_generator`, which torch does not declare."""
    return vars(torch.random)["default_generator"]


class Rare(Batched):
    """Item 2 asks for the generator of all, in a way of its own. Item 1 does not."""

    def __init__(self, augment: Callable[[Rare], torch.Tensor]) -> None:
        super().__init__()
        self._augment = augment
        self.within, self.drawn, self.ended = (threading.Event() for _ in range(3))

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index != 2:
            return sample
        try:
            return sample + self._augment(self)
        finally:
            self.within.set()
            self.ended.set()

    def wait(self) -> None:
        """Until the step has drawn."""
        self.within.set()
        assert self.drawn.wait(PATIENCE_S)


def _forks(data: Rare) -> torch.Tensor:
    with torch.random.fork_rng():
        data.wait()
        return torch.rand(4)


def _forks_and_seeds(data: Rare) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        data.wait()
        return torch.rand(4)


def _seeds_and_draws_by_numpy(data: Rare) -> torch.Tensor:
    data.wait()
    manual_seed(2)  # by a name that was bound before
    return torch.from_numpy(np.random.default_rng(2).random(4))


def _seeds_the_generator_itself(data: Rare) -> torch.Tensor:
    data.wait()
    by_name().manual_seed(2)
    return torch.zeros(4)


def _seeds_whatever_is_refused(data: Rare) -> torch.Tensor:
    data.wait()
    with suppress(BaseException):
        torch.seed()
    with suppress(BaseException):
        torch.set_rng_state(STATE)
    return torch.zeros(4)


def _compiles(data: Rare) -> torch.Tensor:
    """The compiler saves the generator's state and puts it back."""

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        data.wait()
        return module.forward

    compiled = torch.compile(lambda sample: 2 * sample, backend=backend)
    return cast("torch.Tensor", compiled(torch.ones(4)))


@pytest.mark.parametrize(
    "augment",
    [
        _forks,
        _forks_and_seeds,
        _seeds_and_draws_by_numpy,
        _seeds_the_generator_itself,
        _seeds_whatever_is_refused,
        _compiles,
    ],
)
def test_a_rare_item_that_seeds_or_forks_is_read_when_it_is_due(
    augment: Callable[[Rare], torch.Tensor],
) -> None:
    """The step draws what it would have drawn, and so does the item."""
    torch.manual_seed(98)
    expected = torch.rand(2)
    data = Rare(augment)
    loader = Loader(data, iter(np.arange(9)[:, None]), ahead=2, pin=False)
    loader.take()
    torch.manual_seed(98)
    assert data.within.wait(PATIENCE_S), "the item is read ahead"
    drawn = [torch.rand(1)]
    data.drawn.set()
    assert data.ended.wait(PATIENCE_S)
    drawn.append(torch.rand(1))
    assert torch.equal(torch.cat(drawn), expected)
    loader.take()
    torch.manual_seed(97)
    found = loader.take()[1][0]
    torch.manual_seed(97)
    assert torch.equal(found, 2 + augment(data))


def test_others_seed_and_draw_as_ever_while_one_reads_ahead() -> None:
    def seeded() -> list[Any]:
        torch.manual_seed(5)
        with torch.random.fork_rng():
            torch.rand(1)
        state = torch.get_rng_state()
        drawn = torch.rand(3)
        torch.set_rng_state(state)
        return [torch.initial_seed(), drawn.tolist(), torch.rand(3).tolist()]

    data = Gated()
    loader = Loader(data, iter(np.arange(9)[:, None]), ahead=1, pin=False)
    expected = seeded()
    loader.take()
    assert data.begun.wait(PATIENCE_S)
    assert by_name() is not torch.default_generator, "it stands in"
    assert seeded() == expected
    loader.close()
    data.gate.set()
    read(data, np.array([8]))
    assert by_name() is torch.default_generator
    assert data.read == [0, 1, 8], "what was read ahead was not refused"


def test_an_item_may_be_computed_by_what_was_compiled() -> None:
    double = torch.compile(lambda sample: 2 * sample, backend="eager", fullgraph=True)

    class Compiled(Batched):
        def __getitem__(self, index: int) -> torch.Tensor:
            doubled: torch.Tensor = double(super().__getitem__(index))
            return doubled

    data = Compiled()
    loader = Loader(data, iter(np.arange(9)[:, None]), ahead=2, pin=False)
    assert [int(loader.take()[1][0, 0]) for _ in range(3)] == [0, 2, 4]
    assert data.event(4).wait(PATIENCE_S)


def test_a_read_ahead_that_fails_is_done_again_and_others_are_read_ahead_still() -> None:
    class Hiccup(Batched):
        failed = False

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 2 and not self.failed:
                self.failed = True
                raise OSError("the file system does not answer")
            return super().__getitem__(index)

    data = Hiccup()
    loader = Loader(data, iter(np.arange(9)[:, None]), ahead=3, pin=False)
    assert [int(loader.take()[1][0, 0]) for _ in range(4)] == [0, 1, 2, 3]
    assert data.failed and data.event(6).wait(PATIENCE_S)


class Faltering(Watched):
    """Items with noise, on a server that is away for the first two reads of each third one: the
    noise is drawn by then."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES))
        self.failed: dict[int, int] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index % 3 == 0 and self.failed.setdefault(index, 0) < 2:
            self.failed[index] += 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return sample


@pytest.mark.parametrize("prefetch", [0, 3])
def test_storage_that_falters_changes_no_bits(
    train: Callable[[TrainConfig], Any], prefetch: int
) -> None:
    data = Faltering()
    results = [train(settings(one, prefetch)) for one in (Watched(range(SAMPLES)), data)]
    assert outcome(results[0]) == outcome(results[1])
    assert data.failed and set(data.failed.values()) == {2}


def test_who_leaves_does_not_wait_for_a_read_and_the_next_generation_has_its_own_lanes() -> None:
    data = Gated()
    before = Loader(data, iter(np.arange(9)[:, None]), ahead=3, pin=False)
    assert before.take()[0].tolist() == [0]
    assert data.begun.wait(PATIENCE_S)
    before.close()
    after = Loader(data, iter(np.arange(20, 22)[:, None]), ahead=3, pin=False)
    data.gate.set()
    assert [after.take()[1].tolist() for _ in range(2)] == [[20], [21]]
    assert data.read == [0, 1, 20, 21], "what was asked for and not begun is not read"


def test_a_read_under_way_does_not_keep_what_deals_the_ids() -> None:
    """That is the loop, with the engine and its buffers."""

    class Loop:
        lanes = (0,)

    def dealt_by(loop: Loop) -> Iterator[Ids]:
        for index in range(9):
            yield np.array([index + loop.lanes[0]])

    data, loop = Gated(), Loop()
    loader = Loader(data, dealt_by(loop), ahead=3, pin=False)
    held = weakref.ref(loop)
    del loop
    loader.take()
    assert data.begun.wait(PATIENCE_S)
    loader.close()
    gc.collect()
    freed = held() is None
    data.gate.set()
    assert freed


def test_a_generation_reads_what_its_replica_lacks_and_then_all_its_lanes() -> None:
    config = settings(Watched(), 1, task=None, global_batch=24, micro_batch=2)
    found = list(
        micro_batches(config, 3, SAMPLES, 0, steps=range(4, 6), missing=[2], dealt=lambda _: [0, 2])
    )
    expected = [
        lane_ids(config, 3, SAMPLES, step, lane, 0).tolist()
        for step, lane in [(4, 2), (5, 0), (5, 2)]
    ]
    assert {len(ids) for ids in found} == {2}
    assert np.concatenate(found).tolist() == list(itertools.chain(*expected))


def test_less_than_nothing_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.prefetch"):
        settings(Watched(), -1, task=None, micro_batch=None).check(1)


@dataclass(frozen=True)
class Between:
    """A learning rate at both ends of a run."""

    value: str

    def rate(self, step: int, steps: int) -> float:
        return 0.1 if step in (0, steps - 1) else float(self.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-0.5"])
def test_a_step_without_a_learning_rate_is_not_begun(
    train: Callable[[TrainConfig], Any], value: str
) -> None:
    """Only the ends are tried before the run. All would fail in it alike: once it is committed that
    would cost each copy of the state."""
    data = Watched()
    optimizer = OptimizerConfig(schedule=Between(value))
    config = settings(data, 0, optimizer=optimizer)
    check_settings(optimizer, STEPS)
    error = train(config)
    assert isinstance(error, RateError)
    assert error.fact == f"the learning rate of step 1 of {STEPS} is {value}"
    first, *later = [
        {int(i) for micro in order_of(config)[n : n + 2] for i in micro} for n in (0, 2)
    ]
    assert all(data.event(index).is_set() for index in first)
    assert not any(data.event(index).is_set() for index in later[0] - first)
