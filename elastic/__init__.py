"""ElasticTrainer: elastic, fault-tolerant training of large models on Ray.

The public names; everything else is an implementation detail. They load on first use, so that a
node agent, which imports this package too, carries neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpointing import CheckpointConfig, CheckpointConfigError, CheckpointError, S3Config
    from elastic.api import ElasticTrainer
    from elastic.config import HealthConfig, ScalingConfig
    from elastic.errors import ElasticError, ResourcesError, RunFailedError
    from elastic.protocol.faults import Fault, parse_faults
    from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
    from trainer.data.config import DataConfig
    from trainer.errors import ConfigError, TrainerError
    from trainer.models.hf import ModelConfig
    from trainer.tasks.causal_lm import CausalLM
    from trainer.tasks.custom import CustomTask

_HOMES = {
    "CausalLM": "trainer.tasks.causal_lm",
    "CheckpointConfig": "checkpointing",
    "CheckpointConfigError": "checkpointing",
    "CheckpointError": "checkpointing",
    "ConfigError": "trainer.errors",
    "CustomTask": "trainer.tasks.custom",
    "DataConfig": "trainer.data.config",
    "ElasticError": "elastic.errors",
    "ElasticTrainer": "elastic.api",
    "Fault": "elastic.protocol.faults",
    "HealthConfig": "elastic.config",
    "ModelConfig": "trainer.models.hf",
    "OptimizerConfig": "trainer.config",
    "ParallelConfig": "trainer.config",
    "ResourcesError": "elastic.errors",
    "RunFailedError": "elastic.errors",
    "S3Config": "checkpointing",
    "ScalingConfig": "elastic.config",
    "TrainConfig": "trainer.config",
    "TrainerError": "trainer.errors",
    "parse_faults": "elastic.protocol.faults",
}

__all__ = [
    "CausalLM",
    "CheckpointConfig",
    "CheckpointConfigError",
    "CheckpointError",
    "ConfigError",
    "CustomTask",
    "DataConfig",
    "ElasticError",
    "ElasticTrainer",
    "Fault",
    "HealthConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ResourcesError",
    "RunFailedError",
    "S3Config",
    "ScalingConfig",
    "TrainConfig",
    "TrainerError",
    "parse_faults",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
