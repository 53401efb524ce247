"""What torch.compile makes into kernels of its own: blocks, a loss, an update.

A block's `forward` is compiled, whole, and in training only. Hooks on it (FSDP2's, and tensor
parallelism's at the first block) stay outside, recomputation is inside. Names of modules stay what
they are. Blocks that are alike share one graph. Shapes are static, so that a graph does not depend
on what else its worker has seen: all workers have the same graphs, and with them the same bits.

What a block's code makes impossible is so on every worker: each falls back by itself, and all do.
What goes wrong on one machine alone (no compiler, no space) raises there: that worker would
otherwise go on with other bits than its peers.
Source: torchtitan, `apply_compile` (recomputation, then compilation by block, then FSDP2).
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn

from trainer.errors import CompileError, CompilerFailed

log = logging.getLogger(__name__)

Compile = Literal["off", "on", "require"]
"""See `TrainConfig.compile`."""

Backend = str | Callable[..., Any]
"""One of torch.compile's."""

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Names the directory of what torch.compile has made."""


ROW = 16
"""Numbers: what Triton's vector loads need to divide a size."""

MESHES_IN_GRAPHS = "unsafe_treat_script_objects_as_zero_size"
"""A setting of torch's that has come with graphs which take the mesh of tensor ranks as an input.
Its partition counts them as memory, which fails without it."""


def compile_blocks(
    model: nn.Module,
    blocks: Sequence[str],
    *,
    required: bool,
    budget: float | None = None,
    backend: Backend = "inductor",
) -> None:
    """Has blocks compile themselves in their first call. In place, after recomputation, before
    FSDP2.

    Args:
        model: the model.
        blocks: names of its repeated blocks.
        required: a block that cannot be compiled raises, where it would fall back.
        budget: the fraction that is kept of what a block's graph would keep for backward; None:
            all of it.
        backend: torch.compile's.
    """
    global _most_graphs
    _most_graphs += 4 * len(blocks)
    for name in blocks:
        block: Any = model.get_submodule(name)
        block.forward = compile_function(
            f"block {name}",
            block.forward,
            required=required,
            wanted=partial(trains, block),
            budget=budget,
            backend=backend,
        )


def compile_function(
    name: str,
    function: Callable[..., Any],
    *,
    required: bool,
    wanted: Callable[[], bool] = torch.is_grad_enabled,
    dynamic: bool = False,
    budget: float | None = None,
    backend: Backend = "inductor",
) -> Callable[..., Any]:
    """A function of tensors that compiles itself, whole, in its first call where it is wanted.

    Args:
        name: what a warning calls it.
        function: it.
        required: where it cannot be compiled it raises, where it would fall back.
        wanted: whether a call is for the compiled one.
        dynamic: one graph for all sizes: of a function whose numbers do not depend on them.
        budget: see `compile_blocks`.
        backend: torch.compile's.
    """
    return _Compiled(
        name,
        function,
        wanted,
        required=required,
        dynamic=dynamic,
        budget=budget,
        backend=backend,
    )


def as_rows(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor, for a `dynamic` function: that `ROW` divides it is in the kernel, which then
    loads as many numbers at once as the device can. Otherwise it would load each by itself. `data`,
    as a graph depends on what a view is of."""
    rows = flat.view(-1, ROW).data
    torch._dynamo.mark_static(rows, 1)
    return rows


@dataclass(frozen=True, kw_only=True)
class _Instead:
    """Another backend, and the code that it has compiled."""

    backend: Callable[..., Any]
    codes: set[CodeType] = field(default_factory=set)


_instead: ContextVar[_Instead | None] = ContextVar("instead", default=None)


@contextmanager
def compiled_by(backend: Callable[..., Any]) -> Iterator[None]:
    """In the block, what compiles itself does so by another backend, whatever has been compiled
    before: a dry run's, which makes no code. What it has made is gone afterwards."""
    instead = _Instead(backend=backend)
    token = _instead.set(instead)
    try:
        yield
    finally:
        _instead.reset(token)
        for code in instead.codes:
            torch._C._dynamo.eval_frame.reset_code(code)


def trains(block: nn.Module) -> bool:
    """Whether a call of it has a backward in training."""
    return block.training and torch.is_grad_enabled()


_most_graphs = 8
"""Of the same code. Each block may need some of its own, which may name this model's groups; and
those of all models before it, which the worker has let go of, are still counted."""


_raised = threading.local()
"""To how many graphs this thread has the limits."""


def _raise_limits() -> None:
    """torch keeps its settings by thread: models are built on others than the one that computes,
    and what is recomputed in backward is on yet another one on CUDA."""
    if getattr(_raised, "to", 0) >= _most_graphs:
        return
    import torch._dynamo  # seconds, which the driver need not spend

    _raised.to = _most_graphs
    config: Any = torch._dynamo.config
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        if getattr(config, limit) < _most_graphs:
            setattr(config, limit, _most_graphs)


@dataclass(frozen=True, kw_only=True)
class _Budgeted:
    """A backend whose graphs keep a fraction of what they would keep for backward. Which part is
    decided by counts of operations, so alike on all workers. Equal ones are one to torch: a model
    that is built anew finds its graphs.

    Source: PyTorch blog, "Current and New Activation Checkpointing Techniques in PyTorch", 2025.
    """

    backend: Backend
    budget: float

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        import torch._functorch.config
        from torch._dynamo.backends.registry import lookup_backend

        settings: Any = torch._functorch.config
        patched: dict[str, Any] = {"activation_memory_budget": self.budget}
        if hasattr(settings, MESHES_IN_GRAPHS):
            patched[MESHES_IN_GRAPHS] = True  # the only objects there, and no memory
        with settings.patch(patched):
            return lookup_backend(self.backend)(graph, inputs)


class _Compiled:
    """A function that is compiled where it is `wanted`, and as it was elsewhere, and where its code
    cannot be compiled."""

    def __init__(
        self,
        name: str,
        plain: Callable[..., Any],
        wanted: Callable[[], bool],
        *,
        required: bool,
        dynamic: bool,
        budget: float | None,
        backend: Backend,
    ) -> None:
        self._name, self._wanted, self._required = name, wanted, required
        self._plain, self._dynamic, self._budget = plain, dynamic, budget
        self._compiled = self._by(backend)
        self._other: tuple[Backend | None, Callable[..., Any]] = (None, self._compiled)
        self._works: bool | None = None
        """None before the first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._works is False or not self._wanted():
            return self._plain(*args, **kwargs)
        _raise_limits()
        try:
            result = self._now()(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise self._refusal(error) from error
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            # Only in the first call: who has seen other shapes may have had no error yet.
            if self._required or self._works:
                raise self._refusal(error) from error
            self._works = False
            log.warning("not compiled, on any worker: %s", self._refusal(error))
            return self._plain(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if _instead.get() is not None:
                raise  # a dry run's, which is no compiler
            raise _failure(self._name, error) from error
        self._works = True
        return result

    def _by(self, backend: Backend) -> Callable[..., Any]:
        if self._budget is not None:
            backend = _Budgeted(backend=backend, budget=self._budget)
        return torch.compile(self._plain, fullgraph=True, dynamic=self._dynamic, backend=backend)

    def _now(self) -> Callable[..., Any]:
        """What to call; see `compiled_by`."""
        instead = _instead.get()
        if instead is None:
            return self._compiled
        backend, compiled = self._other
        if backend is not instead.backend:
            compiled = self._by(instead.backend)
            self._other = instead.backend, compiled
        instead.codes.add(_code_of(self._plain))
        return compiled

    def _refusal(self, error: Exception) -> CompileError:
        return CompileError(self._name, _first_line(error))


@contextmanager
def compiling_backward() -> Iterator[None]:
    """Round a backward. That of what is compiled is compiled in its first run, outside of any call
    of it, so which block it was is not known. Nothing falls back, as in forward.

    Raises:
        CompilerFailed: torch's compiler failed there.
    """
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise _failure("a compiled block's or the loss's backward", error) from error


def _failure(what: str, error: Any) -> CompilerFailed:
    """Of torch's BackendCompilerFailed, which goes to the log whole: what is raised says less."""
    log.exception("torch's compiler failed on %s", what)
    why = error.inner_exception
    return CompilerFailed(what, f"{type(why).__name__}: {_first_line(why)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _code_of(function: Any) -> CodeType:
    """What torch keeps a function's graphs with."""
    while isinstance(function, partial):
        function = function.func
    code: CodeType = function.__code__
    return code


def keep_compiled(environment: MutableMapping[str, str], threads: int) -> None:
    """Has this process share what it compiles with the other workers of its node, now and later.
    Called before the first model is built.

    Args:
        environment: of the process. A directory that it names already stays.
        threads: that may compile at once.

    Raises:
        PermissionError: somebody else may write there, and what lies there is run.
    """
    import torch._inductor.config

    settings: Any = torch._inductor.config
    settings.compile_threads = threads
    # Since torch 2.13 that is for this thread alone. Backward is compiled in its first run, on CUDA
    # on one of autograd's threads, which have the default.
    settings._config["compile_threads"].default = threads
    if CACHE not in environment:
        environment[CACHE] = str(private_directory(Path(tempfile.gettempdir())))


def private_directory(parent: Path) -> Path:
    """This user's own directory in one that others may write to."""
    path = parent / f"elastictrainer-compiled-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    private = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or not private:
        raise PermissionError(
            f"{path} belongs to user {found.st_uid} with mode {stat.filemode(found.st_mode)}: "
            f"others could put code there that workers run. Remove it, or name a directory of "
            f"your own in {CACHE}"
        )
    return path
