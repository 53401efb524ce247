"""Context parallelism as a dimension of the mesh: its workers have a part of each sample's
tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.parallel.context.head_tail import stretches

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.data.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Divides the tokens of each sample. Implements MeshDim."""

    degree: int
    """Workers that share a sample."""
    name: str = "context"
    """In messages and records."""

    def check(self, train: Any) -> None:
        """See MeshDim. The model is looked at when the task is prepared
        (`trainer.parallel.check`)."""
        if self.degree == 1:
            return
        seq_len = getattr(train.task, "seq_len", None)
        if seq_len is None and train.task is not None:  # a job's task is apart from its settings
            raise ConfigError(
                "train.parallel.context",
                self.degree,
                f"a {type(train.task).__name__} does not say which of its tensors are sequences",
                "Use a CausalLM, or a dimension of your own (docs/extending.md)",
            )
        unit = 2 * self.degree * train.parallel.tensor
        if seq_len is not None and seq_len % unit:
            raise ConfigError(
                "train.parallel.context",
                self.degree,
                f"seq_len {seq_len} is no multiple of 2 x context {self.degree} x tensor "
                f"{train.parallel.tensor} = {unit}",
                f"Use a seq_len of {-(-seq_len // unit) * unit}",
            )

    def convert(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """See MeshDim."""
        from trainer.parallel.context.attention import put_ring_in
        from trainer.parallel.context.ring import Ring

        put_ring_in(model, Ring(mesh.get_group().group_name))

    def part(self, batch: torch.Tensor | TokenBatch, index: int) -> TokenBatch:
        """See MeshDim. Takes what `PreparedCausalLM.loss` takes."""
        from trainer.data.token_batch import TokenBatch

        whole = batch if isinstance(batch, TokenBatch) else TokenBatch.of(batch)
        return whole.select(stretches(index, self.degree, whole.inputs.shape[1]))
