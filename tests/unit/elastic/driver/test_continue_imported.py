"""What a run compares a checkpoint with that it is to go on from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import RunConfig
from torch import nn

from checkpointing import CheckpointConfig, Manifest, TensorInfo, open_store
from checkpointing.stores.kinds import place_of
from elastic import ElasticTrainer, ScalingConfig
from elastic.driver.launch import Launch
from elastic.driver.resume import check_continues, warn_of_versions
from elastic.protocol.events import CheckpointCommitted, RunEnded
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import EventLog
from tests.support.slice_tables import slice_table
from tests.support.tiny import SETTINGS, tiny_task, write_text
from tests.support.tiny_checkpoint import NUMBERS, write_state
from trainer.config import ParallelConfig, TrainConfig
from trainer.data.config import DataConfig
from trainer.engine.state import state_table
from trainer.errors import ConfigError
from trainer.models.hf import ModelConfig
from trainer.tasks.causal_lm import CausalLM, PreparedCausalLM
from trainer.tasks.custom import CustomTask

TASK = CustomTask(
    build_model=lambda: nn.Linear(3, 2),
    loss_function=lambda model, batch: (model(batch).sum(), 1),
    dataset=[torch.zeros(3)] * 8,
)
TRAIN = TrainConfig(task=None, steps=10, global_batch=4, seed=1)
PATHS = RunPaths(root=Path("storage/run"))


def manifest(**state: Any) -> Manifest:
    tensors = {"weight": TensorInfo((2, 3), "float32"), "bias": TensorInfo((2,), "float32")}
    kinds = ("param", "exp_avg", "exp_avg_sq")
    table = {f"{kind}/{name}": info for kind in kinds for name, info in tensors.items()}
    return Manifest(
        step=4,
        generation=0,
        attempt=0,
        slices=slice_table(table, []),
        segments={},
        training_state={"step": 4, "optimizer_steps": 4, "skipped_in_a_row": 0, **state},
        versions={},
    )


OWN = {"seed": 1, "global_batch": 4, "lanes": 2, "samples": 8}


def test_its_own_and_an_imported_one_are_taken() -> None:
    check_continues(PATHS, manifest(**OWN), TRAIN, TASK)
    check_continues(PATHS, manifest(), TRAIN, TASK)


@pytest.mark.parametrize("name", OWN)
def test_another_runs_is_refused(name: str) -> None:
    train = dataclasses.replace(TRAIN, lanes=2)
    with pytest.raises(ConfigError, match="would not end with the same weights"):
        check_continues(PATHS, manifest(**{**OWN, name: 16}), train, TASK)


def test_another_number_of_samples_is_told_as_such() -> None:
    """The fix is no value to write: nobody sets the number."""
    with pytest.raises(ConfigError) as caught:
        check_continues(PATHS, manifest(**{**OWN, "lanes": 1, "samples": 2405}), TRAIN, TASK)
    assert (caught.value.field, caught.value.value) == ("train.task", "8 samples")
    assert "has 2,405, and would not" in caught.value.fact
    assert caught.value.fix.startswith("Use the same data, of text the same paths, seq_len, ")


def test_texts_stay_joined_or_apart() -> None:
    """Attention and positions follow from it: as other data would, it changes what is learned."""
    apart = CausalLM(data=DataConfig(paths=("text",)), seq_len=8, texts="apart")
    train = dataclasses.replace(TRAIN, task=apart)
    check_continues(PATHS, manifest(**OWN, task={"texts": "apart"}), train)
    check_continues(PATHS, manifest(**OWN, task={"vocab_size": 8}), train)  # of an older version
    with pytest.raises(ConfigError, match="joined, and would not end") as caught:
        check_continues(PATHS, manifest(**OWN, task={"texts": "joined"}), train)
    assert (caught.value.field, caught.value.value) == ("train.task.texts", "apart")


def test_data_that_are_not_prepared_yet_are_not_compared() -> None:
    check_continues(PATHS, manifest(**{**OWN, "samples": 16}), TRAIN)
    with pytest.raises(ConfigError, match=r"train\.seed"):
        check_continues(PATHS, manifest(**{**OWN, "seed": 2}), TRAIN)


MOE: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
}  # fmt: skip


def prepared(text: Path, **settings: Any) -> PreparedCausalLM:
    """A task on text, whose model is a small mixture of experts."""
    model = ModelConfig(architecture="mixtral", settings={**SETTINGS, **MOE, **settings})
    task = dataclasses.replace(tiny_task(text), model=model)
    return task.prepare(TRAIN, str(text.with_name("cache")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.mark.parametrize(
    ("settings", "has", "had"),
    [
        (
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
            "head_dim = 4, num_attention_heads = 8, num_key_value_heads = 4",
            "head_dim = 8, num_attention_heads = 4, num_key_value_heads = 2",
        ),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1", "num_experts_per_tok = 2"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'", "hidden_act = 'silu'"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps = 0.001", "rms_norm_eps = 1e-05"),
        ({"sliding_window": 8}, "sliding_window = 8", "sliding_window = None"),
        (
            {"rope_theta": 500.0},
            "rope_parameters.rope_theta = 500.0",
            "rope_parameters.rope_theta = 1000000.0",
        ),
    ],
)
def test_another_function_of_the_same_weights_is_refused(
    text: Path, settings: dict[str, Any], has: str, had: str
) -> None:
    """Names and shapes are alike, so nothing else tells."""
    same, changed = prepared(text), prepared(text, **settings)
    assert same.info["parameters"] == changed.info["parameters"]
    state = {**OWN, "samples": len(same.train_data()), "task": same.info}
    check_continues(PATHS, manifest(**state), TRAIN, same)
    with pytest.raises(ConfigError, match="another model") as caught:
        check_continues(PATHS, manifest(**state), TRAIN, changed)
    error = caught.value
    assert (error.field, error.value) == ("train.task.model", has)
    assert error.fact.startswith(f"the run to be continued has {had}: ")
    assert error.fix.endswith(", or another run_config.name or resume='never'")


def test_where_transformers_is_another_one_it_is_a_warning(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may fill in what was left open: the program cannot be as it was."""
    same, changed = prepared(text), prepared(text, sliding_window=8)
    info = {**same.info, "model": {**same.info["model"], "transformers_version": "5.1"}}
    state = {**OWN, "samples": len(same.train_data()), "task": info}
    check_continues(PATHS, manifest(**state), TRAIN, changed)
    assert (
        "has sliding_window = None, and this run has sliding_window = 8 (transformers 5.1 and"
        in (caplog.messages[-1])
    )


def test_a_state_of_other_versions_is_gone_on_from_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one line. What earlier records do not name has not changed."""
    before = {"torch": "2.11.0", "ray": "2.60.0", "numpy": "2.4.6", "safetensors": "0.8.0"}
    now = {"elastictrainer": "0.2.0", "torch": "2.13.0", "ray": "2.60.0", "numpy": "2.5.0"}
    of_a_run = dataclasses.replace(manifest(**OWN), versions=before)
    warn_of_versions(of_a_run, {**before, "elastictrainer": "0.2.0"})
    warn_of_versions(dataclasses.replace(manifest(), versions=before), now)
    assert not caplog.messages, "the same, and an imported one"
    warn_of_versions(of_a_run, now)
    (said,) = caplog.messages
    assert said.startswith(
        "the run goes on from step 4 with other versions: torch 2.11.0, now 2.13.0, "
        "numpy 2.4.6, now 2.5.0. From there on its bits may be others"
    )


def test_a_start_warns_of_the_versions_of_what_it_goes_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(root=tmp_path / "run")
    whole = state_table(TASK.build_model(), TRAIN.optimizer)
    tensors = {name: torch.zeros(info.shape) for name, info in whole.items()}
    with monkeypatch.context() as then:
        then.setattr(torch, "__version__", "1.0.0")
        write_state(open_store(paths.checkpoints), tensors, state={**NUMBERS, **OWN})
    trainer = ElasticTrainer(
        dataclasses.replace(TRAIN, task=TASK),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        scaling=ScalingConfig(device="cpu", max_replicas=2),
    )
    Launch(**vars(trainer))._prepare(paths)
    warned = [said for said in caplog.messages if "other versions" in said]
    assert len(warned) == 1 and "torch 1.0.0, now " in warned[0]
    assert not ray.is_initialized()


def test_text_in_another_order_is_refused(tmp_path: Path) -> None:
    """The files are sorted by their paths; the number of samples stays."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 500)
    data = DataConfig(paths=(str(tmp_path / "*.txt"),), vocab_size=300, holdout=0.0)
    task = dataclasses.replace(tiny_task(tmp_path), data=data)
    cache = str(tmp_path / "cache")
    first = task.prepare(TRAIN, cache)
    state = {**OWN, "samples": len(first.train_data()), "task": first.info}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in tmp_path.glob("*.txt"):
        path.rename(moved / path.name)
    data = dataclasses.replace(data, paths=(str(moved),))
    again = dataclasses.replace(task, data=data).prepare(TRAIN, cache)
    check_continues(PATHS, manifest(**state), TRAIN, again)
    (moved / "a.txt").rename(moved / "d.txt")
    renamed = dataclasses.replace(task, data=data).prepare(TRAIN, cache)
    assert len(renamed.train_data()) == state["samples"]
    with pytest.raises(ConfigError, match="some twice and others never") as caught:
        check_continues(PATHS, manifest(**state), TRAIN, renamed)
    error = caught.value
    before, now = first.info["train_sha256"], renamed.info["train_sha256"]
    assert (error.field, error.value) == ("train.task.data", f"tokens with sha256 {now[:12]}")
    assert f"(sha256 {before[:12]})" in error.fact and before != now
    older = {name: value for name, value in first.info.items() if name != "train_sha256"}
    otherwise_cut = {**first.info, "file_tokens": 64}  # its digest says nothing of the order
    for info in (older, otherwise_cut):
        check_continues(PATHS, manifest(**{**state, "task": info}), TRAIN, renamed)


def test_what_changes_nothing_of_the_function_may_differ(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = prepared(
        text,
        attention_dropout=0.1,
        router_aux_loss_coef=0.1,
        output_router_logits=True,
        initializer_range=0.1,
        pad_token_id=3,
    )
    before = dict(prepared(text).info["model"])
    del before["rms_norm_eps"]  # of a version that did not write it
    more = {"transformers_version": "4.1", "dtype": "float32", "rope_theta": 3.0}
    state = {**OWN, "samples": len(task.train_data()), "task": {"model": {**before, **more}}}
    check_continues(PATHS, manifest(**state), TRAIN, task)
    check_continues(PATHS, manifest(**{**state, "task": {"texts": "joined"}}), TRAIN, task)
    assert not caplog.records
    imported = manifest(task={"model": {**before, "sliding_window": 8}})
    check_continues(PATHS, imported, TRAIN, task)
    assert "has sliding_window = 8, and this run has sliding_window = None" in caplog.text


@pytest.mark.parametrize("changed", ["steps", "seed", "samples", "shard"])
def test_to_begin_anew_is_not_refused(tmp_path: Path, changed: str) -> None:
    """What lies in a store elsewhere cannot be set aside."""
    state = {**OWN, "seed": 2} if changed == "seed" else {**OWN, changed: 16}
    train = dataclasses.replace(
        TRAIN,
        steps=3 if changed == "steps" else 10,
        parallel=ParallelConfig(shard=4 if changed == "shard" else 1),
    )
    for store in (None, place_of(tmp_path)):
        with pytest.raises(ConfigError, match=rf"^train\..*{changed}") as caught:
            check_continues(dataclasses.replace(PATHS, store=store), manifest(**state), train, TASK)
        anew = "another run_config.name" + (" or resume='never'" if store is None else "")
        assert caught.value.fix.endswith(anew)


def test_degrees_that_go_with_the_lanes_of_a_continued_run(tmp_path: Path) -> None:
    """Another batch, which a new run would need, is refused to this one."""
    write_state(
        open_store(tmp_path / "run" / "checkpoints"),
        {"param/weight": torch.zeros(2, 3)},
        state={**NUMBERS, **OWN, "global_batch": 16, "lanes": 8},
    )
    trainer = ElasticTrainer(
        dataclasses.replace(
            TRAIN, task=TASK, global_batch=16, parallel=ParallelConfig(shard=4), lanes=None
        ),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        scaling=ScalingConfig(device="cpu", max_replicas=2),
    )
    with pytest.raises(ConfigError) as caught:
        trainer.fit()
    error = caught.value
    assert (error.field, error.value) == ("train.parallel.shard", 4)
    assert error.fact == (
        "it does not divide the 2 samples of a lane: the run to be continued has 8 lanes in a "
        "global batch of 16"
    )
    assert error.fix.startswith("Use 1 or 2, another run_config.name")
    assert not ray.is_initialized()


def test_facts_that_are_not_json_are_refused_before_the_run() -> None:
    task = dataclasses.replace(TASK, info={"model": nn.Linear(1, 1)})
    with pytest.raises(ConfigError, match=r"train\.task\.info"):
        task.prepare(TRAIN, "")


@pytest.mark.parametrize("long", [False, True], ids=["", "with a million events"])
def test_other_settings_are_refused_before_a_cluster_is_started_to_look_for_a_snapshot(
    tmp_path: Path, long: bool
) -> None:
    if long:  # most of them say what machines show, which no start need parse
        paths = RunPaths(root=tmp_path / "run")
        paths.root.mkdir()
        shown = '{"kind": "signs_changed", "time": 1.0, "node": "n1", "names": ' + "[" * 200_000
        paths.events.write_text(f"{shown}\n")
        with EventLog(paths.events) as log:
            log.append(RunEnded(time=2.0, step=5, outcome="stopped", error=None))
    state = {"step": 5, "optimizer_steps": 5, "skipped_in_a_row": 0, **OWN, "seed": 2}
    write_state(
        open_store(tmp_path / "run" / "checkpoints"),
        {"param/weight": torch.zeros(2, 3)},
        state=state,
    )
    trainer = ElasticTrainer(
        dataclasses.replace(TRAIN, task=TASK),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        checkpoint=CheckpointConfig(memory_every=1),
        scaling=ScalingConfig(device="cpu"),
    )
    with pytest.raises(ConfigError, match=r"train\.seed"):
        trainer.fit()
    assert not ray.is_initialized()


def test_that_a_newer_checkpoint_is_missing_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start looks for its state before its data are prepared, and again afterwards."""
    paths = RunPaths(root=tmp_path / "run")
    weights = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    kinds = ("param", "exp_avg", "exp_avg_sq")
    state = {f"{kind}/{name}": one for kind in kinds for name, one in weights.items()}
    write_state(open_store(paths.checkpoints), state, step=4, state={**NUMBERS, **OWN})
    with EventLog(paths.events) as log:
        log.append(CheckpointCommitted(time=1.0, step=6, generation=1, bytes=1, seconds=1.0))
    trainer = ElasticTrainer(
        dataclasses.replace(TRAIN, task=TASK),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        scaling=ScalingConfig(device="cpu"),
    )
    origin = Launch(**vars(trainer))._prepare(paths).origin
    assert origin.stored is not None and origin.stored.step == 4
    assert sum("tells of a checkpoint of step 6" in said for said in caplog.messages) == 1
