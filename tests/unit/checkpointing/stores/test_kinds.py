"""The kind of a store follows from its URL's scheme, and others can be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing import (
    CheckpointConfig,
    CheckpointConfigError,
    S3Config,
    StoreError,
    is_local,
    open_store,
    place_of,
)
from tests.support import ROOT
from tests.support.plugins import install_plugin

PLUGIN = '''
from dataclasses import dataclass
from pathlib import Path

from checkpointing import StoreKind, StorePlace
from checkpointing.stores.local import LocalStore


@dataclass(frozen=True)
class Shelf(StorePlace):
    """shelf://NAME lies in the directory that SHELF names."""

    name: str

    def __str__(self):
        return f"shelf://{self.name}"

    def below(self, name):
        return Shelf(f"{self.name}/{name}")


def open_shelf(place):
    import os

    return LocalStore(Path(os.environ["SHELF"], place.name))


KIND = StoreKind(at=lambda url: Shelf(url.removeprefix("shelf://")), open=open_shelf)
'''

SAVE = """
import pickle, sys
import torch
from checkpointing import CheckpointConfig, Keys, Reader, load_manifest, open_store
from tests.support.tiny_checkpoint import write_state

place = CheckpointConfig(store="shelf://models").place("run")
there = pickle.loads(pickle.dumps(place))  # as it goes to a worker
assert str(there) == "shelf://models/run"
store = open_store(there)
write_state(store, {"w": torch.arange(6.0)}, step=4)
reader = Reader(store, load_manifest(store, Keys(), 4))
print(reader.read_full("w").tolist())
"""


def test_a_run_on_a_store_of_a_plugin(tmp_path: Path) -> None:
    """A real save, read back, and found by `elastic checkpoints list`."""
    plugin = {"elastictrainer.stores": {"shelf": "shelves:KIND"}}
    install_plugin(tmp_path, "shelves", PLUGIN, plugin)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "SHELF": str(tmp_path / "shelf"),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", SAVE) == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]\n"
    assert (tmp_path / "shelf" / "models" / "run").is_dir()
    assert '"step": 4' in run(
        "-m", "elastic.cli.main", "checkpoints", "list", "shelf://models/run", "--json"
    )


def test_the_kinds_that_are_built_in(tmp_path: Path) -> None:
    assert place_of("s3://bucket/runs") == S3Config(url="s3://bucket/runs")
    for where in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        place = place_of(where).below("run")
        assert str(place) == f"{tmp_path}/run" and is_local(str(where))
        store = open_store(place)
        store.put("k", [b"here"])
        assert (tmp_path / "run" / "k").read_bytes() == b"here"
    assert not is_local("s3://bucket/runs") and not is_local("shelf://models")


def test_a_directory_of_the_driver_is_one_on_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(CheckpointConfig(store="stores").place("run")) == f"{tmp_path}/stores/run"


def test_an_unknown_scheme_names_those_that_are_known() -> None:
    with pytest.raises(StoreError, match="gs://bucket: not a store: write s3://BUCKET/PREFIX"):
        open_store("gs://bucket")
    with pytest.raises(
        CheckpointConfigError, match=r"^checkpoint\.store = 'gs://bucket': not a store"
    ):
        CheckpointConfig(store="gs://bucket")
    with pytest.raises(StoreError, match=r"gs://\.\.\.: not a store") as error:
        open_store("gs://user:secret@bucket")
    assert "secret" not in str(error.value)
