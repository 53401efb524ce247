"""ElasticTrainer: elastic, fault-tolerant training of large models on Ray.

The public names; everything else is an implementation detail.
"""

from checkpointing import CheckpointConfig, CheckpointError
from elastic.api import ElasticTrainer
from elastic.config import HealthConfig, ScalingConfig
from elastic.errors import ElasticError, ResourcesError, RunFailedError
from elastic.faults import Fault, parse_faults
from trainer.config import OptimizerConfig, ParallelConfig, TrainConfig
from trainer.data.config import DataConfig
from trainer.errors import ConfigError, TrainerError
from trainer.models.hf import ModelConfig
from trainer.task import CausalLM, CustomTask

__all__ = [
    "CausalLM",
    "CheckpointConfig",
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
    "ScalingConfig",
    "TrainConfig",
    "TrainerError",
    "parse_faults",
]
