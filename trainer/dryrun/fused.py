"""What compiled code keeps, without making it: a backend for torch.compile that runs a graph's
operations as they are, on fake tensors, and has `Watch` count what its kernels would write.

The graphs are those that a worker's compiler gets: traced, decomposed and divided into forward and
backward by torch. What inductor makes of one is foretold by a rule of its own: operations that work
number by number, sums over some of them, and views go into one kernel with what comes before and
after; so a result of theirs is written only where an operation of another kind reads it, or the
graph returns it. Until then what it is computed from is kept.
Source: torch/_inductor/lowering.py (what is inlined, and what realizes its inputs).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainer.dryrun.watch import Watch, tensors_in

_aten = torch.ops.aten
_INLINED = {
    _aten.arange, _aten.cat, _aten.constant_pad_nd, _aten.embedding, _aten.full, _aten.gather,
    _aten.index, _aten.index_select, _aten.select_scatter, _aten.slice_scatter,
    torch.ops.prims.iota,
}  # fmt: skip
"""Go into one kernel with others, and have no tag that says so."""

_SAVING_STATE = torch.ops.higher_order.run_and_save_rng_state
_WITH_STATE = torch.ops.higher_order.run_with_rng_state


@cache
def make_backend() -> Callable[..., Any]:
    """One for all dry runs of a process."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    divide = partial(min_cut_rematerialization_partition, compiler="inductor")
    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=_counted,
        bw_compiler=_counted,
        decompositions=select_decomp_table(),
        partition_fn=divide,
    )
    return backend


def _counted(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        return _Kernels(graph).boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]  # lets go of what nobody reads again
    return run


class _Kernels(torch.fx.Interpreter):
    """One run of a graph."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self._watch = next(
            mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Watch)
        )

    def run_node(self, n: torch.fx.Node) -> Any:
        """See Interpreter."""
        if n.target is operator.getitem:  # reads nothing: takes one of several results
            return super().run_node(n)
        read = tensors_in(self.fetch_args_kwargs_from_env(n))
        if n.op == "call_function" and _inlined(n):
            with self._watch.unseen():
                result = super().run_node(n)
            for tensor in tensors_in(result):
                if all(tensor is not other for other in read):  # else it was written to
                    tensor.reads = list(read)
            return result
        for tensor in read:
            self._write(tensor)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See Interpreter. Where a random operation may be done again, what is random waits."""
        if target is _SAVING_STATE:
            operation, *rest = args
            return torch.empty(0, dtype=torch.uint8), operation(*rest, **kwargs)
        if target is _WITH_STATE:
            _, operation, *rest = args
            return operation(*rest, **kwargs)
        return super().call_function(target, args, kwargs)

    def _write(self, tensor: Any) -> None:
        """Counts a result that is in memory from here on. It takes the place of one of its size
        that nobody else reads; the others are let go of when it is there."""
        place = tensor.untyped_storage()
        sources: list[Any] = tensor.__dict__.pop("reads", [])
        for source in sources:
            if source.untyped_storage()._cdata == place._cdata:  # it is a view
                self._write(source)
        sizes = [source.untyped_storage().nbytes() for source in sources]
        if place.nbytes() in sizes:
            del sources[sizes.index(place.nbytes())]
        self._watch.see(tensor)


def _inlined(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is _aten.scatter.value:  # into a constant: inductor compares positions
        made = node.args[0]
        return isinstance(made, torch.fx.Node) and made.target is _aten.full.default
    tags = {torch.Tag.pointwise, torch.Tag.reduction} & set(target.tags)
    return bool(tags) or target.is_view or target.overloadpacket in _INLINED
