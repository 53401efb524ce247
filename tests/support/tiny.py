"""A run small enough for tests: a two-layer Llama on generated text, and what is compared of its
outcome. Imports without Ray: tests on a machine with a GPU and without Ray use the task."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpointing import CheckpointConfig, Keys, Reader, newest, open_store, params_sha256
from elastic import (
    CausalLM,
    DataConfig,
    HealthConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScalingConfig,
    TrainConfig,
    parse_faults,
)
from elastic.reporting.event_log import read_steps
from trainer.backend.groups import Device
from trainer.data import TokenDataset
from trainer.loop.samples import samples_sha256

if TYPE_CHECKING:
    from ray.train import Result

    from elastic import Callback, ElasticTrainer

SEQ_LEN = 16
SETTINGS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}


def write_text(directory: Path, *, documents: int = 40, words: int = 300) -> Path:
    """Small documents, of so many made-up words each."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    known = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    for index in range(documents):
        text = " ".join(known[i] for i in rng.integers(0, len(known), words))
        (directory / f"{index:02}.txt").write_text(text)
    return directory


def tiny_task(text: Path, **settings: Any) -> CausalLM:
    """The task; `settings` change the model."""
    return CausalLM(
        model=ModelConfig(settings={**SETTINGS, **settings}),
        data=DataConfig(paths=(str(text),), vocab_size=300, holdout=0.2),
        seq_len=SEQ_LEN,
    )


def tiny_train(text: Path, *, shard: int = 1, tensor: int = 1, **changes: Any) -> TrainConfig:
    """Settings of a short run."""
    settings: dict[str, Any] = {
        "task": tiny_task(text),
        "steps": 12,
        "eval_samples": 16,
        "global_batch": 8,
        "lanes": 2,
        "parallel": ParallelConfig(shard=shard, tensor=tensor),
        "optimizer": OptimizerConfig(lr=1e-2, warmup_steps=2, clip_norm=0.5),
        "seed": 3,
    }
    return TrainConfig(**{**settings, **changes})


def tiny_trainer(
    text: Path,
    storage: Path,
    *,
    name: str = "run",
    train: TrainConfig | None = None,
    replicas: int = 2,
    min_replicas: int = 1,
    spares: int = 0,
    faults: str = "none",
    checkpoint: CheckpointConfig | None = None,
    health: HealthConfig | None = None,
    wait_s: float = 60.0,
    callbacks: tuple[Callback, ...] = (),
    device: Device = "cpu",
    gpus_per_worker: float = 1.0,
    **changes: Any,
) -> ElasticTrainer:
    """A run of the tiny task; `changes` go to `tiny_train`."""
    from ray.train import RunConfig

    from elastic import ElasticTrainer

    return ElasticTrainer(
        train or tiny_train(text, **changes),
        scaling=ScalingConfig(
            max_replicas=replicas,
            min_replicas=min_replicas,
            spares=spares,
            device=device,
            gpus_per_worker=gpus_per_worker,
            wait_s=wait_s,
        ),
        run_config=RunConfig(name=name, storage_path=str(storage)),
        checkpoint=checkpoint or CheckpointConfig(every_steps=None),
        health=health,
        faults=parse_faults(faults),
        callbacks=callbacks,
    )


@dataclass(frozen=True)
class Outcome:
    """What two runs are compared by, and what is asserted of one."""

    params: str
    """SHA-256 of the final parameters."""
    samples: str
    """SHA-256 of the committed samples, checked against the ledger."""
    losses: list[float]
    """Of every step."""
    report: dict[str, Any]
    """report.json."""


def numbers_of(result: Result) -> dict[str, Any]:
    """The numbers of a run's report."""
    assert result.metrics is not None
    return result.metrics


def fit(trainer: ElasticTrainer) -> Outcome:
    """Runs `trainer` to its end."""
    result = trainer.fit()
    return outcome_of(trainer, Path(str(result.path)), numbers_of(result)["task"]["train_path"])


def outcome_of(trainer: ElasticTrainer, root: Path, tokens: str) -> Outcome:
    """Reads the outcome of a finished run off its directory."""
    store = open_store(root / "checkpoints")
    manifest = newest(store, Keys())
    assert manifest is not None and manifest.step == trainer.train.steps
    names = [name for name in manifest.tensors if name.startswith("param/")]
    records = read_steps(root / "steps.jsonl")
    samples = len(TokenDataset(tokens, SEQ_LEN))
    return Outcome(
        params=params_sha256(Reader(store, manifest), names),
        samples=samples_sha256(
            trainer.train,
            trainer.lanes,
            samples,
            [(r.step, r.sample_digests) for r in records],
        ),
        losses=[record.loss for record in records],
        report=json.loads((root / "report.json").read_text()),
    )
