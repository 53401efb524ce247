"""Over one rank no parameter is copied, and at most one kernel casts a group; no bit changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from trainer.float8.shard import Float8Shard
from trainer.parallel import lone
from trainer.parallel.apply import forget_gathered, local_tensor
from trainer.parallel.backward import BackwardWatch
from trainer.parallel.lone import leave_in_place
from trainer.parallel.param_group import param_group

WIDTH, WORDS = 64, 32
NUMBERS = WORDS * WIDTH
"""In the smallest parameter."""


class Model(nn.Module):
    """A table whose rows backward does not need, blocks that are computed again, and a frozen one;
    the first block is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(3)
        )
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(checkpoint(block, x, use_reentrant=False))
        found: torch.Tensor = self.head(x)
        return found


class Copies(TorchDispatchMode):
    """Counts what copies or casts a parameter, or more."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        onto_itself = len(args) > 1 and args[0] is args[1]  # as a reduce-scatter over one rank
        if name in ("copy_", "_to_copy", "_foreach_copy_", "clone") and not onto_itself:
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.counts[name] += any(t.numel() >= NUMBERS and not t.requires_grad for t in tensors)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(dtype: torch.dtype, compute: torch.dtype, *, own: bool) -> Model:
    """`own`: ours, else FSDP2's own way."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (model.table, *model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if own:
            leave_in_place(module, compute)
    cast(FSDPModule, model.table).set_unshard_in_backward(False)
    return model


def micro_batch(number: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (1, 5), generator=torch.Generator().manual_seed(number))


def train(model: Model) -> tuple[list[float], list[torch.Tensor]]:
    """Three steps of two micro-batches, and an evaluation after each.

    Returns:
        The losses; gradients and, at last, parameters.
    """
    watch, losses, tensors = BackwardWatch(model, 1), list[float](), list[torch.Tensor]()
    for step in range(3):
        for micro in range(2):
            loss = model(micro_batch(2 * step + micro)).float().square().sum()
            with watch.backward():
                loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    gradient = local_tensor(param.grad)
                    tensors.append(gradient.clone())
                    local_tensor(param).add_(gradient, alpha=-0.01)
            model.zero_grad(set_to_none=True)
            losses.append(model.eval()(micro_batch(99)).float().square().sum().item())
            model.train()
            forget_gathered(model)
    return losses, [*tensors, *(local_tensor(param).clone() for param in model.parameters())]


FORMATS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("dtype", "compute"), FORMATS, ids=str)
def test_no_bit_changes(dtype: torch.dtype, compute: torch.dtype) -> None:
    losses, tensors = train(shard(dtype, compute, own=True))
    expected_losses, expected = train(shard(dtype, compute, own=False))
    assert losses == expected_losses and len(tensors) == len(expected) == 3 * 6 + 8
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize(("dtype", "compute"), FORMATS, ids=str)
def test_nothing_is_copied_and_a_group_is_cast_at_once(
    dtype: torch.dtype, compute: torch.dtype
) -> None:
    """Forward enters table, root and four blocks, backward the blocks, and the root stays. The
    gradients of four groups are copied once, and added from then on."""
    model = shard(dtype, compute, own=True)
    watch = BackwardWatch(model, 1)
    for number in range(2):
        with Copies() as copies:
            loss = model(micro_batch(number)).float().sum()
            with watch.backward():
                loss.backward()
        del copies.counts["_to_copy"]  # those of the loss
        casts, firsts = 0 if dtype == compute else 6 + 4, 0 if number else 4
        assert copies.counts == Counter({"_foreach_copy_": casts + firsts})


def test_a_module_computes_with_the_parameters_memory_and_lets_go_of_what_is_cast() -> None:
    for dtype, held in (torch.bfloat16, WIDTH * WIDTH * 2), (torch.float32, 0):
        model = shard(dtype, torch.bfloat16, own=True)
        model(micro_batch(0)).float().sum().backward()
        for param in param_group(model.blocks[0]).fsdp_params:
            whole, part = param._unsharded_param, local_tensor(param.sharded_param)
            assert whole.untyped_storage().nbytes() == held
            assert (whole.data_ptr() == part.data_ptr()) == (held > 0)


def test_parts_of_a_larger_memory_are_copied() -> None:
    """FSDP2 takes a parameter for the start of its storage."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    leave_in_place(model, torch.float32)
    memory = torch.arange(32.0)
    (param,) = param_group(model).fsdp_params
    param.sharded_param._local_tensor = memory[16:].view(4, 4)
    x = torch.eye(4)
    assert torch.equal(model(x), memory[16:].view(4, 4).T)


def test_without_a_name_of_fsdp2_all_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """This torch has them all: else this fails, and each parameter is copied again."""
    assert "wait_for_unshard" in vars(param_group(shard(*FORMATS[0], own=True).blocks[0]))
    for names in ("OF_GROUP", "OF_PARAM"):
        with monkeypatch.context() as patch:
            patch.setattr(lone, names, ("gone",))
            assert "wait_for_unshard" not in vars(param_group(shard(*FORMATS[0], own=True)))


def test_a_shard_that_gathers_itself_is_left_to_fsdp2() -> None:
    block = nn.Linear(16, 16, bias=False)
    block.weight = nn.Parameter(Float8Shard(block.weight.detach()))
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    leave_in_place(block, torch.bfloat16)
    assert "wait_for_unshard" not in vars(param_group(block))
