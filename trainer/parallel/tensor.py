"""Tensor parallelism with sequence parallelism, from a transformers tensor-parallel plan.

Between the blocks each tensor rank holds its part of the sequence; a block gathers the sequence on
entry (before its column-wise layers) and scatters the sums on exit (after its row-wise layer), so
the norms and residuals work on 1/t of the tokens. transformers' plans name the column- and row-wise
layers; the rest follows from the structure that its decoder models share. Source: Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models, 2022.

Shapes: x_BSD is (batch, sequence, model dim).
"""

from __future__ import annotations

import fnmatch
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.models.family import HUGGING_FACE, ModelFamily

SEQUENCE = Shard(1)
DIVIDING = (ColwiseParallel, RowwiseParallel, SequenceParallel)
"""Styles that take charge of a module's own parameters; the others only move its inputs."""


class _Waiting:
    """Mixed into torch's styles: has them wait for their collectives as soon as these are started.

    Theirs are waited for where the result is used. If an exception comes first, because a peer was
    lost in another group, c10d keeps the collective for ever and with it the group and its sockets,
    so that the peers there are not woken. Nothing is gained by waiting later, as the modules use
    the result at once; on CUDA it is the stream that waits, not the host.
    """

    @staticmethod
    def _prepare_input_fn(
        layouts: tuple[Placement, ...],
        desired: tuple[Placement, ...],
        _module: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        mesh: DeviceMesh,
    ) -> torch.Tensor:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, layouts, run_check=False)
        return x if layouts == desired else x.redistribute(placements=desired)

    @staticmethod
    def _prepare_output_fn(
        layouts: tuple[Placement, ...],
        use_local_output: bool,
        _module: nn.Module,
        x: DTensor,
        _mesh: DeviceMesh,
    ) -> torch.Tensor:
        if x.placements != layouts:
            x = x.redistribute(placements=layouts)
        return x.to_local() if use_local_output else x


class Colwise(_Waiting, ColwiseParallel):
    """Splits a layer by its outputs."""


class Rowwise(_Waiting, RowwiseParallel):
    """Splits a layer by its inputs."""


class GatherSequence(ParallelStyle):
    """On entry to a module, gathers the full sequence of its first input, x_BSD or
    `hidden_states`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(x: torch.Tensor) -> DTensor:
            part = DTensor.from_local(x, device_mesh, (SEQUENCE,), run_check=False)
            return part.redistribute(placements=(Replicate(),))

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (gather(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": gather(kwargs["hidden_states"])}

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


def tensor_styles(model: nn.Module, family: ModelFamily = HUGGING_FACE) -> dict[str, ParallelStyle]:
    """Which parallel style each module gets.

    Args:
        model: a transformers decoder model.
        family: knows its plan and its blocks.
    """
    plan, layers = family.tensor_plan(model), family.blocks(model)
    norms = _norms(model, layers)
    embeddings = cast(Any, model).get_input_embeddings()  # some plans leave them out
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if fnmatch.fnmatch(name, pattern)), None)
        if style == "colwise":
            styles[name] = Colwise()
            styles.setdefault(name.rsplit(".", 1)[0], GatherSequence())
        elif style == "rowwise":
            styles[name] = Rowwise(output_layouts=SEQUENCE)
        elif style == "colwise_gather_output":
            styles[name] = Colwise(input_layouts=SEQUENCE, output_layouts=Replicate())
        elif style == "embedding_rowwise" or module is embeddings:
            styles[name] = Rowwise(input_layouts=Replicate(), output_layouts=Replicate())
        elif name in norms:
            styles[name] = SequenceParallel(use_local_output=True)
    # The first block splits the full embeddings: positions and masks need the full shapes.
    styles[layers[0]] = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(SEQUENCE,), use_local_output=True
    )
    return styles


def unsplit_modules(model: nn.Module, family: ModelFamily = HUGGING_FACE) -> list[str]:
    """Modules whose place in the scheme is unknown: norms, and modules with parameters of their
    own, that `tensor_styles` does not divide. Their gradients might cover a part of the sequence
    only, so a model with any cannot be split."""
    styles = tensor_styles(model, family)
    return [
        name
        for name, module in model.named_modules()
        if not isinstance(styles.get(name), DIVIDING)
        and (_is_norm(module) or next(module.parameters(recurse=False), None) is not None)
    ]


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, family: ModelFamily) -> None:
    """Makes `model` tensor parallel over the 1-D `mesh`, in place. Tied parameters stay tied.

    All ranks of the replica call it, with the parameters on the meta device.
    """
    tied = family.tied(model)
    parallelize_module(model, mesh, tensor_styles(model, family))
    for first, other in tied:
        owner, leaf = other.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


def _norms(model: nn.Module, layers: list[str]) -> set[str]:
    """The norms that work on parts of the sequence: those directly in a block, and the one beside
    the list of blocks. Where there are several beside it, some come before the first block."""
    parents = {n: n.rpartition(".")[0] for n, m in model.named_modules() if _is_norm(m)}
    beside = layers[0].rpartition(".")[0].rpartition(".")[0]
    final = {name for name, parent in parents.items() if parent == beside}
    inside = {name for name, parent in parents.items() if parent in layers}
    return inside | (final if len(final) == 1 else set())


def _is_norm(module: nn.Module) -> bool:
    parameters = module.parameters(recurse=False)
    return "Norm" in type(module).__name__ and all(param.dim() == 1 for param in parameters)
