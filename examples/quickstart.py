"""Trains a small Llama on the source text of Python's standard library, and shows a recovery.

    python examples/quickstart.py --fault kill@60

Real text, found on every machine; a tokenizer of its own; 1% held out. The last line is `RESULT `
and a JSON object. Works on a laptop (it starts Ray by itself) and on a cluster (`ray job submit
--working-dir . -- python examples/quickstart.py …` uses the cluster that the job runs on).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import ray
from ray.train import Result, RunConfig

from checkpointing import Keys, Reader, newest, open_store, params_sha256
from elastic import (
    CausalLM,
    CheckpointConfig,
    DataConfig,
    ElasticTrainer,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScalingConfig,
    TrainConfig,
    parse_faults,
)
from elastic.reporting.event_log import read_steps
from trainer.data import TokenDataset, TokenSet, unigram_cross_entropy
from trainer.engine.names import PARAMETERS
from trainer.loop.samples import samples_sha256

MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=120, help="optimizer steps")
    add("--replicas", type=int, default=2, help="replicas with all machines there")
    add("--min-replicas", type=int, default=1, help="fewest replicas to go on with")
    add("--lanes", type=int, default=None, help="lanes of the global batch (default: --replicas)")
    add("--shard", type=int, default=1, help="sharding degree (FSDP2) of a replica")
    add("--tensor", type=int, default=1, help="tensor parallel degree of a replica")
    add("--spares", type=int, default=1, help="workers waiting to take a lost one's place")
    add("--global-batch", type=int, default=16, help="samples in a step")
    add("--seq-len", type=int, default=128, help="tokens in a sample")
    add("--seed", type=int, default=0, help="seeds weights, data order and dropout")
    add("--storage", default="runs", help="directory for runs, seen by all nodes")
    add("--name", default="quickstart", help="name of the run; the same name continues it")
    add("--resume", choices=["auto", "never", "must"], default="auto", help="never starts anew")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add(
        "--fault",
        default="none",
        help="none, or KIND@STEP[.PHASE][:WORKER[+WORKER]], several with commas; KIND is kill, "
        "freeze, raise, flip, glitch or loop (elastic/protocol/faults.py says more)",
    )
    add("--device", choices=["cpu", "cuda"], default="cpu", help="what workers compute on")
    add("--cpus-per-worker", type=float, default=1.0, help="CPUs that Ray reserves for a worker")
    add("--wait", type=float, default=60.0, help="seconds to wait for the cluster's resources")
    return parser.parse_args(arguments)


def build_trainer(options: argparse.Namespace) -> ElasticTrainer:
    """The run that the command line asks for."""
    task = CausalLM(
        model=ModelConfig(architecture="llama", settings=MODEL),
        data=DataConfig(
            paths=(sysconfig.get_paths()["stdlib"],), pattern="*.py", vocab_size=4096, holdout=0.01
        ),
        seq_len=options.seq_len,
    )
    return ElasticTrainer(
        TrainConfig(
            task=task,
            steps=options.steps,
            global_batch=options.global_batch,
            lanes=options.lanes,
            parallel=ParallelConfig(shard=options.shard, tensor=options.tensor),
            optimizer=OptimizerConfig(lr=3e-3, warmup_steps=min(20, options.steps // 5)),
            precision="bfloat16" if options.device == "cuda" else "float32",
            seed=options.seed,
        ),
        scaling=ScalingConfig(
            max_replicas=options.replicas,
            min_replicas=options.min_replicas,
            spares=options.spares,
            device=options.device,
            cpus_per_worker=options.cpus_per_worker,
            wait_s=options.wait,
        ),
        run_config=RunConfig(name=options.name, storage_path=str(Path(options.storage).absolute())),
        checkpoint=CheckpointConfig(every_steps=options.checkpoint_every, resume=options.resume),
        faults=parse_faults(options.fault),
    )


def start_ray(options: argparse.Namespace) -> None:
    """Joins the cluster that this is a job of, or starts a small one on this machine."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
        return
    workers = options.replicas * options.shard * options.tensor + options.spares
    cpus = None if options.device == "cuda" else max(1, round(workers * options.cpus_per_worker))
    if "KUBERNETES_SERVICE_HOST" not in os.environ:  # the kernel's chooses better, but in a pod
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)


def summarize(trainer: ElasticTrainer, result: Result) -> dict[str, Any]:
    """The numbers of the RESULT line; the hashes are computed from what the run left behind."""
    metrics = dict(result.metrics or {})
    store = open_store(Path(str(result.path)) / "checkpoints")
    manifest = newest(store, Keys())
    assert manifest is not None
    parameters = [name for name in manifest.tensors if name.startswith(PARAMETERS)]
    info, seq_len = metrics["task"], trainer.train.task.seq_len
    train, val = TokenSet.open(info["train_path"]), TokenSet.open(info["val_path"])
    held_out = min(len(TokenDataset(info["val_path"], seq_len)), trainer.train.eval_samples)
    records = read_steps(Path(str(result.path)) / "steps.jsonl")
    return {
        **{
            key: metrics[key]
            for key in ("steps", "first_loss", "final_loss", "val_loss", "faults_fired", "regroups")
        },
        "val_loss_unigram": unigram_cross_entropy(train, val, held_out * seq_len),
        **{
            key: metrics[key]
            for key in (
                "repeated_steps",
                "lost_steps",
                "longest_stall_s",
                "tokens_per_s",
                "effective_time",
            )
        },
        "params_sha256": params_sha256(Reader(store, manifest), parameters),
        "samples_sha256": samples_sha256(
            trainer.train,
            trainer.lanes,
            len(TokenDataset(info["train_path"], seq_len)),
            [(record.step, record.sample_digests) for record in records],
        ),
    }


def main(arguments: list[str]) -> None:
    """Runs the example. No error is caught: one that no retry can help gives exit status 93."""
    options = parse_arguments(arguments)
    trainer = build_trainer(options)
    start_ray(options)
    result = trainer.fit()
    print("RESULT " + json.dumps(summarize(trainer, result)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
