"""Each wrong setting gives one clear error before any worker starts, naming the field, the value
and the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

from elastic import (
    CausalLM,
    ConfigError,
    CustomTask,
    DataConfig,
    ElasticTrainer,
    ModelConfig,
    ParallelConfig,
    ResourcesError,
    ScalingConfig,
)
from elastic.driver.resources import check_nodes, check_spares
from tests.support.tiny import tiny_task, tiny_train, tiny_trainer

Build = Callable[[Path, Path], ElasticTrainer]


def with_text(content: str) -> Build:
    def build(text: Path, tmp: Path) -> ElasticTrainer:
        (tmp / "data").mkdir()
        (tmp / "data" / "a.txt").write_text(content)
        return tiny_trainer(tmp / "data", tmp)

    return build


def with_model(**settings: int) -> Build:
    return lambda text, tmp: tiny_trainer(
        text,
        tmp,
        task=tiny_task(text, **settings),
        parallel=ParallelConfig(tensor=2),
    )


def with_task(**changes: Any) -> Build:
    def build(text: Path, tmp: Path) -> ElasticTrainer:
        return tiny_trainer(text, tmp, task=replace(tiny_task(text), **changes))

    return build


def a_task_of_means() -> CustomTask:
    def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()

    loss: Any = mean_loss
    return CustomTask(
        build_model=lambda: nn.Linear(1, 1), loss_function=loss, dataset=[torch.ones(1)] * 8
    )


def in_a_file(text: Path, tmp: Path) -> ElasticTrainer:
    (tmp / "file").touch()
    return tiny_trainer(text, tmp / "file" / "below")


CASES: dict[str, tuple[Build, str]] = {
    "heads": (
        with_model(num_attention_heads=3, num_key_value_heads=3, hidden_size=48),
        r"train\.parallel\.tensor = 2: it does not divide num_attention_heads = 3\. Use",
    ),
    "sequence": (
        lambda text, tmp: tiny_trainer(
            text,
            tmp,
            task=CausalLM(data=tiny_task(text).data, model=tiny_task(text).model, seq_len=15),
            parallel=ParallelConfig(tensor=2),
        ),
        r"does not divide seq_len = 15",
    ),
    "no plan": (
        lambda text, tmp: tiny_trainer(
            text,
            tmp,
            task=CausalLM(
                data=tiny_task(text).data,
                model=ModelConfig(
                    architecture="gpt2", settings={"n_embd": 32, "n_layer": 2, "n_head": 2}
                ),
                seq_len=16,
            ),
            parallel=ParallelConfig(tensor=2),
        ),
        r"gpt2 cannot be split over tensor ranks here.*Use tensor = 1",
    ),
    "global batch": (
        lambda text, tmp: tiny_trainer(text, tmp, global_batch=6, shard=2),
        r"train\.global_batch = 6: 2 lanes x 2 shard ranks = 4 .*Use a multiple of 4",
    ),
    "micro batch": (
        lambda text, tmp: tiny_trainer(text, tmp, micro_batch=3),
        r"train\.micro_batch = 3: it does not divide the 4 samples.*Use a divisor of 4",
    ),
    "zero degree": (
        lambda text, tmp: tiny_trainer(text, tmp, shard=0),
        r"train\.parallel\.shard = 0: must be at least 1",
    ),
    "no data": (
        lambda text, tmp: tiny_trainer(tmp / "nowhere", tmp),
        r"train\.task\.data\.paths.*nowhere",
    ),
    "empty data": (with_text(""), r"train\.task\.data\.paths"),
    "too little data": (with_text("alpha beta\n" * 2), r"train\.task\.data"),
    "vocabulary": (
        with_model(vocab_size=128),
        r"train\.task\.model\.settings = 'vocab_size = 128': .* has \d+ tokens.*Set vocab_size",
    ),
    "architecture": (
        lambda text, tmp: tiny_trainer(
            text,
            tmp,
            task=CausalLM(
                data=DataConfig(paths=(str(text),), vocab_size=300),
                model=ModelConfig(architecture="lama"),
                seq_len=16,
            ),
        ),
        r"train\.task\.model\.architecture = 'lama'",
    ),
    "encoder": (
        with_task(model=ModelConfig(architecture="bert", settings={"num_hidden_layers": 2})),
        r"train\.task\.model\.architecture = 'bert': it is not causal.*Use a decoder",
    ),
    "misspelled setting": (
        with_model(num_hiden_layers=3),
        r"train\.task\.model\.settings = 'num_hiden_layers': .*Use 'num_hidden_layers'",
    ),
    "sequence beyond the positions": (
        with_task(seq_len=65),
        r"train\.task\.seq_len = 65: the model has 64 positions\. Use 64 or fewer",
    ),
    "warm-up": (
        lambda text, tmp: tiny_trainer(text, tmp, steps=2),
        r"train\.optimizer\.warmup_steps = 2: the run has 2 steps.*Use 1 or fewer",
    ),
    "binary": (
        with_text("\0" * 9999),
        r"train\.task\.data\.paths = '.*a\.txt': it holds no text.*Leave it out",
    ),
    "loss": (
        lambda text, tmp: tiny_trainer(text, tmp, task=a_task_of_means()),
        r"train\.task\.loss_function = .*: it returns Tensor, not a sum and a count",
    ),
    "name": (
        lambda text, tmp: tiny_trainer(text, tmp, name="../run"),
        r"run_config\.name = '\.\./run': not one segment of a path",
    ),
    "storage": (in_a_file, r"run_config\.storage_path = .*cannot be written.*Use a directory"),
    "storage scheme": (
        lambda text, tmp: ElasticTrainer(
            tiny_train(text),
            run_config=ray.train.RunConfig(name="x", storage_path="s3://bucket/x"),
        ),
        r"run_config\.storage_path = 's3://bucket/x': this version stores",
    ),
    "replicas": (
        lambda text, tmp: tiny_trainer(text, tmp, replicas=1, min_replicas=2),
        r"scaling\.min_replicas = 2: not between 1 and max_replicas = 1",
    ),
    "fault step": (
        lambda text, tmp: tiny_trainer(text, tmp, faults="kill@99"),
        r"fault = 'kill@99': the run has steps 0 to 11",
    ),
    "fault worker": (
        lambda text, tmp: tiny_trainer(text, tmp, faults="kill@1:7"),
        r"fault = 'kill@1:7': the layout has workers 0 to 1",
    ),
    "fault text": (
        lambda text, tmp: tiny_trainer(text, tmp, faults="burn@1"),
        r"fault = 'burn@1': .*Write none or KIND@STEP",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_error_before_any_worker_starts(case: str, text: Path, tmp_path: Path) -> None:
    build, message = CASES[case]
    with pytest.raises(ConfigError, match=message) as caught:
        build(text, tmp_path).fit()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*/events.jsonl"))


def test_gpus_that_cannot_come_are_not_waited_for(
    cluster: None, text: Path, tmp_path: Path
) -> None:
    trainer = tiny_trainer(text, tmp_path)
    trainer.scaling = ScalingConfig(device="cuda", max_replicas=2)
    with pytest.raises(ConfigError, match=r"scaling\.device = 'cuda': no node .* has a GPU"):
        trainer.fit()
    assert not (tmp_path / ".data").exists()


def test_levels_that_are_no_nodes(cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    """On the CPUs of one node, and on GPUs that no node has."""
    layout = ParallelConfig(shard=4, workers_per_node=2)
    check_nodes(ScalingConfig(), layout)
    assert "workers_per_node = 2: a node holds all 4 workers of a replica" in caplog.text
    with pytest.raises(ConfigError, match="workers_per_node = 2: no node holds more than 0 wor"):
        check_nodes(ScalingConfig(device="cuda"), layout)


def test_spares_without_room(cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    check_spares(ScalingConfig(max_replicas=11, spares=1), ParallelConfig())
    assert "spares" not in caplog.text
    check_spares(ScalingConfig(max_replicas=11, spares=2), ParallelConfig())
    assert "scaling.spares = 2: 1 of them will not be there: the cluster has room for 12" in (
        caplog.text
    )


def test_too_few_resources_after_a_stated_wait(cluster: None, text: Path, tmp_path: Path) -> None:
    trainer = tiny_trainer(text, tmp_path, replicas=40, min_replicas=20, lanes=40, global_batch=40)
    trainer.scaling = ScalingConfig(max_replicas=40, min_replicas=20, wait_s=1.0)
    told = r"needs 20 workers.*12 CPU, room for 12 of this run.s workers \(waited 1 s.*Add nodes"
    with pytest.raises(ResourcesError, match=told):
        trainer.fit()
