from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from checkpointing import CheckpointConfig, CheckpointConfigError, S3Config


def test_defaults() -> None:
    config = CheckpointConfig()
    assert (config.every_steps, config.keep_last, config.keep_every) == (100, 2, None)
    assert config.memory_every is None
    assert (config.resume, config.segment_bytes) == ("auto", 512 * 1024 * 1024)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"every_steps": 0}, "every_steps"),
        ({"every_steps": 1.5}, "every_steps"),
        ({"every_steps": "often"}, "every_steps"),
        ({"auto_mtbf_s": 0}, "auto_mtbf_s"),
        ({"auto_most_s": "long"}, "auto_most_s"),
        ({"auto_least_s": 7200.0}, "auto_least_s"),
        ({"keep_every": 100, "every_steps": "auto"}, "keep_every"),
        ({"memory_every": 0}, "memory_every"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_last": True}, "keep_last"),
        ({"keep_every": -100}, "keep_every"),
        ({"keep_every": 250}, "keep_every"),
        ({"resume": "maybe"}, "resume"),
        ({"segment_bytes": 1000}, "segment_bytes"),
        ({"store": 7}, "store"),
    ],
)
def test_refuses_what_cannot_work(given: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointConfigError) as caught:
        CheckpointConfig(**given)
    assert caught.value.field == f"checkpoint.{field}"
    assert caught.value.value == given[field]


def test_accepts_no_checkpoints_and_multiples() -> None:
    assert CheckpointConfig(every_steps=None, keep_every=7).every_steps is None
    assert CheckpointConfig(every_steps=50, keep_every=250).keep_every == 250


def test_every_run_has_its_place_in_the_store() -> None:
    assert CheckpointConfig().place("run") is None
    for store in ("s3://bucket/base", S3Config(url="s3://bucket/base/")):
        assert CheckpointConfig(store=store).place("run") == S3Config(url="s3://bucket/base/run")
    assert str(CheckpointConfig(store="/a/path").place("run")) == "/a/path/run"
    for wrong in ("gs://bucket/x", "s3://"):
        with pytest.raises(CheckpointConfigError, match=r"checkpoint\.store.* = .*rite s3://"):
            CheckpointConfig(store=wrong)


def test_package_and_config_import_without_torch() -> None:
    code = (
        "import sys; import checkpointing; from checkpointing.config import CheckpointConfig; "
        "CheckpointConfig(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_public_names_resolve() -> None:
    import checkpointing

    assert sorted(checkpointing.__all__) == checkpointing.__all__
    assert all(getattr(checkpointing, name) for name in checkpointing.__all__)
    with pytest.raises(AttributeError, match="nothing_here"):
        checkpointing.nothing_here  # noqa: B018
