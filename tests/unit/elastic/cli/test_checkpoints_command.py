from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from checkpointing import (
    MissingError,
    Reader,
    delete_checkpoint,
    list_steps,
    newest,
    open_store,
)
from checkpointing.stores.local import LocalStore
from elastic.cli.main import main, parser
from elastic.protocol.events import RunStarted
from elastic.protocol.run_paths import RunPaths, hold_run
from elastic.reporting.event_log import EventLog
from tests.support import ROOT
from tests.support.tiny_checkpoint import (
    KEYS,
    STEP,
    Tiny,
    make_tiny,
    state_of,
    write_state,
    write_tiny,
)

INSTALLED = Path(sys.executable).with_name("elastic")


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make_tiny()


@pytest.fixture
def run(tmp_path: Path, tiny: Tiny) -> Path:
    write_tiny(tmp_path / "run", tiny)
    return tmp_path / "run"


def add_step(run: Path, step: int) -> None:
    write_state(open_store(run / "checkpoints"), {"param/w": torch.arange(6.0)}, step=step)


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["checkpoints", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_installed_command(run: Path) -> None:
    command = [str(INSTALLED)] if INSTALLED.exists() else [sys.executable, "-m", "elastic.cli.main"]
    done = subprocess.run(
        [*command, "checkpoints", "verify", str(run), "newest", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    total = sum(
        (run / "checkpoints" / k).stat().st_size for k in open_store(run / "checkpoints").list("d/")
    )
    assert json.loads(done.stdout) == {"step": STEP, "bytes": total, "findings": []}


_INTERRUPTED_EXPORT = """
import os, signal, sys
from pathlib import Path
from checkpointing import Reader
from elastic.cli.main import main

run, target, number = *sys.argv[1:3], int(sys.argv[3])
read = Reader.read

def interrupted(*asked):
    assert list(Path(target).parent.glob(".*.part")), "it has begun"
    for _ in range(1 + (number == signal.SIGTERM)):  # `timeout` sends two
        os.kill(os.getpid(), number)
    return read(*asked)

Reader.read = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.exit(main(["checkpoints", "export", run, "newest", target, "--to", "dcp"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_export_that_is_interrupted_leaves_nothing(
    run: Path, tmp_path: Path, number: signal.Signals
) -> None:
    target = tmp_path / "there" / "exported"
    target.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_EXPORT, str(run), str(target), str(int(number))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert list(target.parent.iterdir()) == []


_HANGING_EXPORT = """
import os, shutil, signal, sys, threading
from checkpointing import Reader
from elastic.cli import main as module

def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)

def hang(*_, **__):
    threading.Timer(0.1, terminate).start()
    threading.Event().wait()

Reader.read, shutil.rmtree, module._AT_ONCE_S = terminate, hang, 0.0
module.main(["checkpoints", "export", sys.argv[1], "newest", sys.argv[2], "--to", "dcp"])
"""


def test_a_later_sigterm_ends_an_export_whose_storage_hangs(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HANGING_EXPORT, str(run), str(tmp_path / "exported")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


def test_the_entry_point_names_a_function() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (entry,) = [line for line in text.splitlines() if line.startswith("elastic = ")]
    module, _, name = entry.split('"')[1].partition(":")
    assert getattr(import_module(module), name) is main


def test_looking_needs_neither_torch_nor_ray(run: Path) -> None:
    code = (
        "import sys; from elastic.cli.main import main; "
        "main(['checkpoints', 'list', sys.argv[1]]); "
        "main(['checkpoints', 'verify', sys.argv[1], '7']); "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], cwd=ROOT, timeout=120)
    assert done.returncode == 0


def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_step(run, 8)
    add_step(run, 9)
    open_store(run / "checkpoints").put(KEYS.commit(9), [b"{"])
    assert ask(capsys, "pin", run, 7)[:2] == (0, "step 7 is pinned\n")
    assert ask(capsys, "verify", run, 8)[0] == 0
    status, out, _ = ask(capsys, "list", run)
    head, first, second, third = out.splitlines()
    assert status == 0
    assert head.split() == [
        "step",
        "committed",
        "generation",
        "size",
        "writers",
        "pinned",
        "verified",
    ]
    assert first.split()[0] == "7" and first.split()[-2:] == ["pinned", "no"]
    assert second.split()[0] == "8" and second.count("Z") == 2  # committed and verified
    assert "cannot be read" in third
    rows = json.loads(ask(capsys, "list", run, "--json")[1])["checkpoints"]
    assert [(row["step"], row["pinned"]) for row in rows] == [(7, True), (8, False), (9, False)]
    assert rows[0]["writers"] == 2
    assert rows[0]["bytes"] > 10_000
    assert rows[0]["verified_at"] is None and rows[1]["verified_at"] > rows[1]["committed_at"]
    assert KEYS.commit(9) in rows[2]["error"]


def test_list_passes_over_what_is_deleted_meanwhile(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = run / "checkpoints" / KEYS.commit(9)
    gone.symlink_to(run / "nothing")  # in the listing, and not there
    assert list_steps(open_store(run / "checkpoints"), KEYS) == [7, 9]
    status, out, err = ask(capsys, "list", run, "--json")
    assert (status, err) == (0, "")
    assert [row["step"] for row in json.loads(out)["checkpoints"]] == [7]


def test_show(run: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, "show", run, "newest", "--tensors")
    numbers = sum(param.numel() for param in tiny.model.parameters())
    assert status == 0
    assert f"step {STEP}, committed 20" in out
    assert (
        f"param: {len(list(tiny.model.parameters()))} float32 tensors, {numbers:,} numbers" in out
    )
    assert "2 along dimension 0" in out
    assert "optimizer_steps: 3" in out
    assert "param/model.layers.1.mlp.up_proj.weight" in out
    shown = json.loads(ask(capsys, "show", run, STEP, "--json")[1])
    entry = shown["tensors"]["param/lm_head.weight"]
    assert (entry["shape"], entry["dtype"], len(entry["slices"])) == ([40, 16], "float32", 2)
    assert shown["training_state"]["task"]["model"]["hidden_size"] == 16


def test_a_failed_verify_exits_with_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(run / "checkpoints")
    assert ask(capsys, "verify", run, 7)[0] == 0
    key = store.list("d/")[0]
    raw = bytearray(store.get(key))
    raw[8] ^= 1
    store.put(key, [bytes(raw)])
    status, out, err = ask(capsys, "verify", run, 7)
    assert status == 1
    assert f"elastic: {key}: crc32: block" in err
    assert "1 checks failed" in out
    assert (
        json.loads(ask(capsys, "list", run, "--json")[1])["checkpoints"][0]["verified_at"] is None
    )
    status, out, _ = ask(capsys, "verify", run, 7, "--json")
    assert (status, json.loads(out)["findings"][0]["check"]) == (1, "crc32")


def test_fates(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_step(run, 8)
    ask(capsys, "pin", run, 7)
    status, _, err = ask(capsys, "delete", run, 7)
    assert (status, err) == (2, "elastic: step 7 was not deleted: it is pinned. Unpin it first.\n")
    assert ask(capsys, "unpin", run, 7)[1] == "step 7 is no longer pinned\n"
    assert ask(capsys, "unpin", run, 7)[1] == "step 7 is not pinned\n"
    assert ask(capsys, "delete", run, 7)[1] == "step 7 is deleted\n"
    status, _, err = ask(capsys, "delete", run, "newest")
    assert status == 2 and "Use --force" in err
    assert ask(capsys, "delete", run, "newest", "--force")[0] == 0
    assert open_store(run / "checkpoints").list("") == []


def test_the_records_say_where_the_checkpoints_are(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = RunStarted(time=1.0, name="r", layout={}, steps=9, start_step=0, versions={})
    root = tmp_path / "elsewhere"
    with EventLog(root / "events.jsonl") as records:
        records.append(replace(started, store=str(tmp_path / "before")))
        records.append(replace(started, store=f"file://{run}/checkpoints"))
    (row,) = json.loads(ask(capsys, "list", root, "--json")[1])["checkpoints"]
    assert row["step"] == STEP
    with EventLog(root / "events.jsonl") as records:
        records.append(replace(started, store=str(tmp_path / "later")))
    status, _, err = ask(capsys, "list", root)
    assert status == 2
    assert f"{root}: there are no checkpoints in it, nor in {tmp_path}/later, where they go" in err
    (root / "checkpoints").symlink_to(run / "checkpoints")
    (row,) = json.loads(ask(capsys, "list", root, "--json")[1])["checkpoints"]
    assert row["step"] == STEP, "of starts before the last"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "nowhere"], "there are no checkpoints in it, nor in nowhere/checkpoints"),
        (["show", "{run}", "5"], "step 5 is not committed: the run has 7"),
        (["list", "gopher://x/y"], "gopher://x/y"),
        (
            ["export", "{run}", "7", "--to", "hf", "{run}"],
            "it exists and cannot be replaced: Directory not empty",
        ),
        (["import", "{run}", "--from", "hf", "nowhere"], "Give one with --step"),
        (
            ["import", "{run}", "--from", "hf", "nowhere", "--step", "9"],
            "nowhere: not a transformers configuration",
        ),
        (["import", "{run}", "--from", "dcp", "nowhere"], "nowhere/.metadata: it cannot be read"),
        (
            ["import", "{run}", "--from", "dcp", "nowhere", "--moments", "momentum,a/b"],
            "'a/b' cannot be the name of a moment",
        ),
    ],
)
def test_bad_input_is_one_line_and_2(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    status, out, err = ask(capsys, *(argument.format(run=run) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("elastic: ") and err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    "arguments", [["show", "x", "soon"], ["verify", "x", "1", "--threads", "0"]]
)
def test_what_argparse_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoints", *arguments])
    assert caught.value.code == 2


def test_help_says_what_a_run_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["checkpoints", "--help"])
    out = capsys.readouterr().out
    assert "RUN is a run's directory" in out
    for verb in ("list", "show", "verify", "export", "import", "pin", "unpin", "delete"):
        assert verb in out


def test_out_and_in_again(run: Path, tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    for form, options in (("dcp", []), ("hf", ["--step", 7])):
        target, other = run.parent / form, run.parent / f"from-{form}"
        assert ask(capsys, "export", run, "newest", target, "--to", form)[0] == 0
        assert ask(capsys, "import", other, target, "--from", form, *options)[0] == 0
        store = open_store(other / "checkpoints")
        assert list_steps(store, KEYS) == [STEP]
        manifest = newest(store, KEYS)
        assert manifest is not None
        for name, tensor in state_of(tiny).items():
            if form == "dcp" or name.startswith("param/"):
                assert torch.equal(Reader(store, manifest).read_full(name), tensor)
        assert ask(capsys, "verify", other, "newest")[0] == 0


def test_what_the_run_deletes_meanwhile_is_not_called_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_range(self: LocalStore, key: str, start: int, length: int) -> bytes:
        delete_checkpoint(self, KEYS, STEP, force=True)
        raise MissingError(key, "no such object")

    monkeypatch.setattr(LocalStore, "get_range", get_range)
    status, _, err = ask(capsys, "export", run, "newest", run.parent / "hf", "--to", "hf")
    assert status == 2
    assert f"step {STEP} is not committed: it was deleted while it was read; pin it first" in err


def test_a_server_that_cannot_be_one_is_no_damage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # of one alone it would tell first
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    status, _, err = ask(capsys, "verify", "s3://bucket/run", "newest")
    assert (status, err.count("\n")) == (2, 1) and "AWS_ENDPOINT_URL" in err


@pytest.mark.parametrize(("option", "moments"), [("a,b", {"a", "b"}), ("", set())])
def test_an_import_makes_the_moments_that_are_named(
    run: Path, capsys: pytest.CaptureFixture[str], option: str, moments: set[str]
) -> None:
    target, other = run.parent / "hf", run.parent / "other"
    assert ask(capsys, "export", run, "newest", target, "--to", "hf")[0] == 0
    done = ask(capsys, "import", other, target, "--from", "hf", "--step", 3, "--moments", option)
    assert done[0] == 0
    manifest = newest(open_store(other / "checkpoints"), KEYS)
    assert manifest is not None
    assert {name.split("/")[0] for name in manifest.tensors} == {"param", *moments}


def test_import_waits_for_no_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hold_run(RunPaths(root=run)):
        status, _, err = ask(capsys, "import", run, run.parent, "--from", "dcp")
    assert status == 2 and "a run of this name is going on" in err


def test_import_into_a_checkpoint_directory_that_is_not_there_yet(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp, target = run.parent / "dcp", run.parent / "next" / "checkpoints"
    assert ask(capsys, "export", run, "newest", dcp, "--to", "dcp")[0] == 0
    assert ask(capsys, "import", target, dcp, "--from", "dcp")[0] == 0
    assert list_steps(open_store(target), KEYS) == [STEP]


def test_unpin_takes_away_what_a_killed_import_has_left(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = run / "checkpoints" / KEYS.claim(9)
    claim.write_text(json.dumps({"claim": "importing", "by": "somebody", "until": 1e12}))
    assert ask(capsys, "unpin", run, 9)[:2] == (0, "step 9 is no longer pinned\n")
    assert not claim.exists()
    status, _, err = ask(capsys, "unpin", run, 9)
    assert status == 2 and "step 9 is not committed" in err


def test_a_checkpoint_directory_is_a_run_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (run / "checkpoints", f"file://{run}", f"file://{run}/checkpoints"):
        assert ask(capsys, "show", name, "newest")[0] == 0
