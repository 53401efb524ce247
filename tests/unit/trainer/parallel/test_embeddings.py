"""Embeddings whose parameters are not gathered in backward, and those that need them there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.data_plane import full_gradients, run_layout
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.tasks.custom import CustomTask

WORDS, WIDTH = 32, 16


class Normed(nn.Embedding):
    """As some models of transformers have it: its own scale is a factor, which backward needs."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__(words, width)
        self.scale = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


class Squared(nn.Embedding):
    """Its only parameter is a factor."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.weight.mean(dim=0)


class Model(nn.Module):
    """Has what `ModelFamily.ends` asks for."""

    def __init__(self, table: type[nn.Embedding]) -> None:
        super().__init__()
        self.table = table(WORDS, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.table(ids)
        for block in self.blocks:
            out = torch.tanh(block(out))
        found: torch.Tensor = self.head(out)
        return found


def plain() -> nn.Module:
    return Model(nn.Embedding)


def normed() -> nn.Module:
    return Model(Normed)


def squared() -> nn.Module:
    return Model(Squared)


def loss_of(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), batch.numel()


@pytest.mark.parametrize("build", [plain, normed, squared])
@pytest.mark.parametrize("reshard", [True, 2])
def test_gradients_are_those_of_one_worker(build: object, reshard: bool | int) -> None:
    samples = torch.randint(0, WORDS, (16, 4), generator=torch.Generator().manual_seed(1))
    task = CustomTask(build_model=build, loss_function=loss_of, dataset=samples)  # type: ignore[arg-type]

    def gradients(parallel: ParallelConfig) -> dict[str, torch.Tensor]:
        train = TrainConfig(
            task=task,
            steps=2,
            global_batch=8,
            lanes=1,
            parallel=parallel,
            optimizer=OptimizerConfig(lr=1e-2, clip_norm=0.0),
        )
        return full_gradients(run_layout(task, train, replicas=1, lanes=1))

    one = gradients(ParallelConfig())
    several = gradients(ParallelConfig(shard=4, reshard_after_forward=reshard))
    assert one.keys() == several.keys()
    for name, expected in one.items():
        torch.testing.assert_close(several[name], expected, rtol=1e-4, atol=1e-6)
