from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.cli.dryrun import plan_machine
from elastic.cli.main import main
from tests.support import ROOT

PROGRAM = """
from elastic import ElasticTrainer, ScalingConfig
from tests.support.small_llama import small_train

trainer = ElasticTrainer(
    small_train(global_batch=8, lanes=None), scaling=ScalingConfig(max_replicas=2)
)
again = trainer
if __name__ == "__main__":
    raise AssertionError("it was run")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program, whose import is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dryrun", str(file), "--instance", "p4d", "--nodes", "1", "--json"]
    assert main(arguments) == 0
    found = shown(capsys)
    assert found["fits"] is True and found["verdict"] == "fits" and found["nearest"] is None
    parts = found["components"]
    assert set(parts) == {
        *("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "buckets"),
        *("evaluation", "fault_reserve", "device"),
    }
    assert found["needed_bytes"] == sum(parts.values()) <= found["memory_bytes"]
    beside = parts["evaluation"] + parts["fault_reserve"] + parts["device"]
    assert found["peak_bytes"] == found["needed_bytes"] - beside
    assert (found["workers"], found["gpus"]) == (2, 8)
    kinds = {(c["group"], c["kind"]): c for c in found["collectives"]}
    assert kinds["replicas", "all_to_all"]["ranks"] == 2
    assert kinds["replicas", "all_to_all"]["bytes"] > 0
    assert kinds["replicas", "all_reduce"]["count"] == 1
    assert found["host_syncs"] > 0


def test_without_a_machine_nothing_fits_or_does_not(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dryrun", f"{file}:again", "--json"]) == 0
    found = shown(capsys)
    assert found["fits"] is None and found["memory_bytes"] is None
    assert found["components"]["device"] == 0


def test_what_does_not_fit_names_a_change_that_does(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["dryrun", str(file), "--gpus-per-node", "2", "--memory-gb"]
    assert main([*options, "80", "--json"]) == 0
    memory_gb = (shown(capsys)["needed_bytes"] - 1_000_000) / 1e9
    assert main([*options, f"{memory_gb}"]) == 1
    out = capsys.readouterr().out
    assert "(1.00): tight" in out
    assert 'nearest change that fits: recompute="full"' in out
    assert "all_to_all" in out and "fault_reserve" in out


def test_what_is_offloaded_is_of_the_machine(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = 'recompute="full", offload=OffloadConfig(horizon=1, least_bytes=2**18)'
    text = PROGRAM.replace("lanes=None", f"lanes=None, {changes}")
    file.write_text(text.replace("import ElasticTrainer,", "import ElasticTrainer, OffloadConfig,"))
    assert main(["dryrun", str(file), "--instance", "p4d"]) == 0
    # Three of four blocks' inputs, of 4 x 128 tokens, 256 float32 each, on two workers.
    assert 2 * 3 * 4 * 128 * 256 * 4 == 3_145_728
    expected = "offloaded: 3.15 MB of a machine's own memory, 1.24 TB (0.00): fits"
    assert expected in capsys.readouterr().out


def test_compiled_blocks_are_counted_as_such(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for changes in ("", 'compile="on"', 'compile="on", recompute=0.5'):
        file.write_text(PROGRAM.replace("lanes=None", f"lanes=None, {changes}"))
        assert main(["dryrun", str(file), "--json"]) == 0
        found.append(shown(capsys))
    plain, compiled, half = (run["components"]["activations"] for run in found)
    assert half < compiled < plain
    assert found[1]["collectives"] == found[0]["collectives"]
    assert found[1]["host_syncs"] == found[0]["host_syncs"]


def test_a_program_is_read_up_to_its_fit(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = "try:\n    trainer.fit()\nexcept Exception:\n    pass\n"
    file.write_text(f'{PROGRAM}{end}raise AssertionError("it went on")\n')
    assert main(["dryrun", str(file), "--json"]) == 0
    assert shown(capsys)["workers"] == 2


@pytest.mark.parametrize("options", [["--json"], ["--json", "--memory-gb", "0.001"]])
def test_a_program_sees_no_command_line_but_its_own_and_prints_beside_the_result(
    file: Path,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1)
print("argv", sys.argv, parser.parse_args().steps)
"""
    file.write_text(reads + CUSTOM.format(build="print('builds')", loss="print('loses')"))
    ours = ["elastic", "dryrun", str(file), *options]
    monkeypatch.setattr(sys, "argv", ours)
    assert main(ours[1:]) == int(len(options) > 1)
    told = capsys.readouterr()
    assert json.loads(told.out)["workers"] == 1
    assert f"argv ['{file}'] 1\n" in told.err
    assert "builds\n" in told.err and "loses\n" in told.err
    assert sys.argv is ours


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("{}['x']", r"FILE = '.*program\.py': its import ends in line 11 with KeyError: 'x'"),
        ("raise SystemExit(1)", r"ends in line 11 with SystemExit: 1"),
        ("def", r"ends with SyntaxError: invalid syntax \(program\.py, line 11\)"),
        ("ScalingConfig(max_replicas='two')", r"elastic: scaling\.max_replicas = 'two': of type"),
    ],
)
def test_a_program_that_raises_is_bad_input(
    file: Path,
    last: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file.write_text(f"{PROGRAM}{last}\n")
    monkeypatch.chdir(file.parent)
    assert main(["dryrun", file.name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(why, error), error


CUSTOM = """
import torch
from elastic import CustomTask, ElasticTrainer, TrainConfig

def build():
    {build}
    return torch.nn.Linear(3, 2)

def loss(model, batch):
    {loss}
    return model(batch).sum(), len(batch)

task = CustomTask(build_model=build, loss_function=loss, dataset=[torch.ones(3)] * 4)
trainer = ElasticTrainer(TrainConfig(task=task, steps=1, global_batch=1))
"""


@pytest.mark.parametrize(
    ("command", "build", "loss", "why"),
    [
        ("dryrun", "", "batch['x']", "a step .* raised .*Error: .* \\(line 10 of program.py\\)"),
        ("dryrun", "", "{}['x']", "a step .* raised KeyError: 'x' \\(line 10 of program.py\\)"),
        ("dryrun", "{}['x']", "", "its model and loss raised KeyError: 'x' \\(line 6 of"),
        ("prepare", "{}['x']", "", "preparing its task raised KeyError: 'x' \\(line 6 of"),
    ],
)
def test_a_task_that_raises_is_bad_input(
    file: Path, command: str, build: str, loss: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(CUSTOM.format(build=build or "pass", loss=loss or "pass"))
    assert main([command, str(file)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(f"elastic: FILE = '.*program.py': {why}", error), error


def test_a_model_that_cannot_be_is_bad_input(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import dataclasses\n"
        + PROGRAM
        + """
task = trainer.train.task
settings = {**task.model.settings, "num_attention_heads": 4, "num_key_value_heads": 3}
model = dataclasses.replace(task.model, settings=settings)
train = dataclasses.replace(trainer.train, task=dataclasses.replace(task, model=model))
del trainer, again
trainer = ElasticTrainer(train, scaling=ScalingConfig(max_replicas=2))
"""
    )
    file.write_text(program)
    assert main(["dryrun", str(file)]) == 2
    assert "elastic: train.task.model.settings = " in capsys.readouterr().err


def test_too_few_machines(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dryrun", str(file), "--memory-gb", "80", "--gpus-per-node", "1", "--nodes", "1"]
    assert main(arguments) == 1
    assert "2 workers, but 1 GPUs: it does not fit" in capsys.readouterr().out


def test_groups_that_no_machine_holds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = "lanes=None, parallel=ParallelConfig(shard=4, workers_per_node=2)"
    text = PROGRAM.replace("lanes=None", layout)
    file.write_text(
        text.replace("import ElasticTrainer,", "import ElasticTrainer, ParallelConfig,")
    )
    options = ["dryrun", str(file), "--memory-gb", "80", "--gpus-per-node"]
    assert main([*options, "2"]) == 0
    assert "workers_per_node" not in capsys.readouterr().out
    assert main([*options, "4"]) == 0
    said = "beware: train.parallel.workers_per_node = 2: a node holds all 4 workers of a replica"
    assert said in capsys.readouterr().out
    assert main([*options, "1"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: train.parallel.workers_per_node = 2: no node holds more than 1" in out
    assert "nearest change" not in out
    assert main([*options, "1", "--json"]) == 1
    json_found = shown(capsys)
    assert json_found["fits"] is False and json_found["verdict"] == "fits"
    assert len(json_found["misfits"]) == 1


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("missing.py", "no such file"),
        ("folder", "folder': a directory. Name a Python file"),
        ("program.py:other", "no ElasticTrainer in .*: it has trainer, again"),
        ("empty.py", "no ElasticTrainer in it: it has none outside functions. Make one there"),
        ("empty.py:trainer", "it has none outside functions. Make one there"),
        ("two.py", "not one ElasticTrainer: it has a, b. Use FILE.py:NAME"),
        ("program.txt", "Name a file that ends in .py"),
    ],
)
def test_bad_names(file: Path, where: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "folder").mkdir()
    (file.parent / "empty.py").write_text("")
    (file.parent / "program.txt").write_text("")
    (file.parent / "two.py").write_text(
        PROGRAM.replace("again = trainer", "")
        + "import copy\na, b = trainer, copy.copy(trainer)\ndel trainer\n"
    )
    assert main(["dryrun", str(file.parent / where)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(why, error), error


def test_nodes_of_no_kind(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", str(file), "--nodes", "2"]) == 2
    assert "nothing says how much memory a GPU has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--instance", "p3", "invalid choice: 'p3'"),
        ("--nodes", "0", "--nodes: 0 is less than 1"),
        ("--gpus-per-node", "8.5", "--gpus-per-node: invalid number value: '8.5'"),
        ("--memory-gb", "-1", "--memory-gb: -1 is not above 0"),
        ("--memory-gb", "nan", "--memory-gb: nan is not above 0"),
        ("--memory-gb", "inf", "--memory-gb: inf is not finite"),
        ("--memory-gb", "1e999", "--memory-gb: 1e999 is not finite"),
    ],
)
def test_bad_options(option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["dryrun", "x.py", option, value])
    assert why in capsys.readouterr().err


def test_machines_may_be_corrected() -> None:
    machine = plan_machine("p5", 94.0, 4, 2)
    assert machine is not None
    assert (machine.gpus, machine.memory_bytes) == (4, 94_000_000_000)
    assert plan_machine(None, None, None, None) is None


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("llama_8b.py:in_float32 --instance p5e", marks=pytest.mark.slow),
        pytest.param("llama_8b.py:on_p5 --instance p5 --nodes 5", marks=pytest.mark.soak),
        pytest.param("llama_70b.py:on_p4d --instance p4d --nodes 128", marks=pytest.mark.soak),
        pytest.param("llama_70b.py:on_p5 --instance p5 --nodes 16", marks=pytest.mark.soak),
        pytest.param(
            "llama_70b.py:hybrid_on_p4d --instance p4d --nodes 128", marks=pytest.mark.soak
        ),
        pytest.param("llama_7b_32k.py:on_p4d --instance p4d --nodes 32", marks=pytest.mark.soak),
        pytest.param("llama_13b.py:on_p4d --instance p4d --nodes 16", marks=pytest.mark.soak),
    ],
)
def test_the_manual_shows_what_large_models_need(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    name, *options = arguments.split()
    assert main(["dryrun", f"{ROOT / 'examples' / name}", *options]) == 0
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "dryrun.md").read_text("utf-8")
