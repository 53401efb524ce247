"""From a model on the meta device to this worker's sharded, filled model.

Order: further dimensions of the mesh, tensor parallelism, recomputation, compilation, offloading,
FSDP2 round each block, the embedding, the head and the root, then real memory for just the local
slices, then their initial values. All degrees 1 take the same road: FSDP2 over one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from checkpointing import TensorSlice
from trainer.models.family import ModelFamily
from trainer.models.init import WeightSource
from trainer.parallel.block_time import BlockTimes
from trainer.parallel.compiled import Compile, compile_blocks
from trainer.parallel.dims import MeshDim
from trainer.parallel.layout import Slot, local_box
from trainer.parallel.lone import leave_in_place
from trainer.parallel.mesh import ReplicaMesh
from trainer.parallel.offload import Offload
from trainer.parallel.own_gather import OwnGather, memory_of
from trainer.parallel.recompute import Recompute, recompute_blocks
from trainer.parallel.reshard import resharded
from trainer.parallel.tensor import apply_tensor_parallel
from trainer.parallel.together import gather_together
from trainer.parallel.two_level import Gather, TwoLevels


def warm_up() -> None:
    """Imports what the first engine of a process would import, for a third of a second."""
    import torch._dynamo  # for DTensor

    with torch.autograd.profiler.record_function("warm-up"):  # as an optimizer's step does
        pass


def parallelize(
    model: nn.Module,
    mesh: ReplicaMesh,
    *,
    others: Sequence[MeshDim] = (),
    family: ModelFamily,
    compute_dtype: torch.dtype,
    recompute: Recompute | float | None = None,
    compiled: Compile = "off",
    offload: Offload | None = None,
    gather_ahead: int = 1,
    levels: TwoLevels | None = None,
    reshard: bool = True,
    times: BlockTimes | None = None,
) -> nn.Module:
    """Makes `model` (parameters on meta) parallel over the replica's mesh, in place: what `others`
    do to it, then tensor parallel, then recomputation and compilation, then fully sharded.

    Gradients are summed over the ranks that it is sharded over, not averaged: the loop divides by
    the global token count.

    Args:
        model: the whole model.
        mesh: the replica's.
        others: its dimensions beside shard and tensor.
        family: knows the model's blocks, and its plan where the tensor degree is above 1.
        compute_dtype: number format of forward and backward; reductions stay float32.
        recompute: what its blocks compute again in backward; None: nothing. A fraction is for
            compiled ones.
        compiled: whether its blocks are compiled.
        offload: what its blocks keep for backward goes there; None: it stays.
        gather_ahead: blocks whose parameters are gathered ahead of the one at work.
        levels: over which parameters are gathered; None: FSDP2's own, flat. Gradients are
            `BackwardWatch`'s.
        reshard: whether a block's parameters are let go of between its forward and its backward.
        times: notes how long a block takes.
    """
    for dim in others:
        dim.convert(model, mesh.others[dim.name])
    if mesh.tensor is not None:
        apply_tensor_parallel(model, mesh.tensor, family)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    blocks = family.blocks(model)
    budget = recompute if isinstance(recompute, float) else None
    if recompute is not None and not isinstance(recompute, float):
        recompute_blocks(model, blocks, recompute)
    if compiled != "off":
        compile_blocks(model, blocks, required=compiled == "require", budget=budget)
    if offload is not None:
        offload.cover(model, blocks)
    if times is not None:
        times.cover(model, blocks)
    ends = family.ends(model)
    with resharded(mesh, reshard) as after_forward:
        for name in (*blocks, *ends[:1]):
            fully_shard(
                model.get_submodule(name),
                mesh=mesh.fsdp,
                mp_policy=policy,
                reshard_after_forward=after_forward,
            )
    for name in (*ends[1:], ""):  # the backward of head and root comes at once: they stay
        fully_shard(
            model.get_submodule(name),
            mesh=mesh.fsdp,
            mp_policy=policy,
            reshard_after_forward=False,
        )
    for embedding in map(model.get_submodule, ends[:1]):
        if mesh.regather is None and _is_table(embedding):
            cast(FSDPModule, embedding).set_unshard_in_backward(False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if mesh.fsdp.size() > 1:  # else the factor is 1, and setting it costs a copy
                module.set_gradient_divide_factor(1.0)
                gather_together(module)
            else:
                leave_in_place(module, compute_dtype)
            if levels is not None:
                module.set_custom_all_gather(cast(Any, Gather(levels)))
    if gather_ahead > 1 and mesh.fsdp.size() > 1:
        _gather_ahead([model.get_submodule(name) for name in blocks], gather_ahead)
    return model


def _is_table(module: nn.Module) -> bool:
    """Whether it looks rows up in its only parameter, and no more: the backward of that asks for no
    parameter. Subclasses may multiply by it, or have a norm of their own."""
    own = [name for name, _ in module.named_parameters()]
    return own == ["weight"] and type(module).forward is nn.Embedding.forward


def _gather_ahead(blocks: Sequence[nn.Module], ahead: int) -> None:
    """Has FSDP2 begin to gather so many blocks when one begins, in place of the one that follows by
    itself: that order is the model's forward, and the other way round its backward."""
    for index, block in enumerate(blocks):
        fsdp, before = cast(FSDPModule, block), blocks[max(0, index - ahead) : index]
        fsdp.set_modules_to_forward_prefetch(cast(Any, blocks[index + 1 :][:ahead]))
        fsdp.set_modules_to_backward_prefetch(cast(Any, before[::-1]))


def local_slices(model: nn.Module, slot: Slot) -> dict[str, TensorSlice]:
    """The box of each full parameter that the worker in `slot` holds, by parameter name."""
    slices = {}
    for name, param in model.named_parameters():
        offsets, sizes = local_box(tuple(param.shape), slot, tensor_dim=tensor_dim(param))
        slices[name] = TensorSlice(
            name=name,
            global_shape=tuple(param.shape),
            dtype=str(param.dtype).removeprefix("torch."),
            offsets=offsets,
            sizes=sizes,
        )
    return slices


def tensor_dim(param: nn.Parameter) -> int | None:
    """The dimension that tensor parallelism cuts, or None where every tensor rank holds the
    parameter."""
    if not isinstance(param, DTensor) or param.device_mesh.ndim < 2:
        return None
    placement = param.placements[-1]
    return placement.dim if isinstance(placement, Shard) else None


def materialize(
    model: nn.Module, device: torch.device, memory: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Gives the sharded meta parameters real, unset memory; buffers keep their values, and one that
    has several names stays one.

    Args:
        model: it.
        device: where.
        memory: local slices that some parameters are to have, by name; FSDP2 copies those that it
            pads.
    """
    # Held until the end, so that no other tensor gets the id of one.
    buffers = [buffer for _, buffer in model.named_buffers(remove_duplicate=False)]
    with torch.no_grad():
        there = {id(old): torch.empty_like(old, device=device).copy_(old) for old in buffers}
    given = {
        id(param): memory[name]
        for name, param in model.named_parameters()
        if memory is not None and name in memory
    }

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in there:
            return there[id(tensor)]
        local = given.get(id(tensor))
        if local is None:
            return torch.empty_like(tensor, device=device)
        if not isinstance(tensor, DTensor):
            return local
        shard = tensor.to_local()
        if isinstance(shard, OwnGather):
            local = shard.with_memory(local)
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    model._apply(real)


def fill(model: nn.Module, slices: dict[str, TensorSlice], source: WeightSource) -> None:
    """Sets every local slice to its initial value."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            box = slices[name]
            local = local_tensor(param)
            if local.numel():
                local.copy_(source.read(name, box.global_shape, box.offsets, box.sizes))


def forget_gathered(model: nn.Module) -> None:
    """Called where the local slices were filled anew, or may change before a backward. FSDP2 keeps
    the outermost group's parameters gathered after a forward without one, as of an evaluation, and
    would use those next."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a parameter or gradient that this worker holds, detached, sharing its memory."""
    return memory_of(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
