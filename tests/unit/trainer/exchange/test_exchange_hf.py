from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from checkpointing import AlreadyCommittedError, MissingError, Reader, load_manifest, open_store
from tests.support import ROOT
from tests.support.small_disk import small_disk
from tests.support.tiny_checkpoint import (
    FALCON_H1,
    KEYS,
    MOMENTS,
    STEP,
    Tiny,
    make_tiny,
    state_of,
    write_state,
    write_tiny,
)
from trainer.data.text import Document
from trainer.data.tokenizer import train_tokenizer
from trainer.errors import ExchangeError
from trainer.exchange.dcp_export import export_dcp
from trainer.exchange.dcp_import import import_dcp
from trainer.exchange.hf_export import export_hf
from trainer.exchange.hf_import import import_hf
from trainer.exchange.pieces import finished_directory


def export(tiny: Tiny, tmp_path: Path, **options: Any) -> tuple[Path, list[str]]:
    store = write_tiny(tmp_path / "run", tiny)
    reader = Reader(store, load_manifest(store, KEYS, STEP))
    return tmp_path / "hf", export_hf(reader, tmp_path / "hf", **options)


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_gives_equal_logits(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    tiny = make_tiny(tied=tied)
    target, remarks = export(tiny, tmp_path, shard_bytes=5000)
    assert len(list(target.glob("model-*.safetensors"))) > 2
    assert len(remarks) == 1 and "No tokenizer" in remarks[0]
    pair: Any = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    loaded, report = pair
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert type(loaded) is type(tiny.model)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, tiny.model(tokens).logits)
    shared = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "use_cache" not in config


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = train_tokenizer(
        [Document(text="one two three two one", source="here")], 300
    )
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    tiny = make_tiny(steps=1)
    store = write_tiny(tmp_path / "run", tiny, task={"model": tiny.config, "tokenizer": str(file)})
    remarks = export_hf(Reader(store, load_manifest(store, KEYS, STEP)), tmp_path / "hf")
    assert remarks == []
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded("two one")["input_ids"] == tokenizer.encode("two one").ids
    assert loaded.eos_token == "<|endoftext|>"
    file.write_text("{}")
    (remark,) = export_hf(Reader(store, load_manifest(store, KEYS, STEP)), tmp_path / "again")
    assert str(file) in remark


def test_the_settings_of_a_given_tokenizer_come_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    own: Tokenizer = train_tokenizer([Document(text="one two three", source="here")], 300)
    prepared, origin = tmp_path / "tokenizer.json", tmp_path / "origin"
    own.save(str(prepared))
    given = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="one", pad_token="two")
    given.chat_template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    given.save_pretrained(origin)
    tiny = make_tiny(steps=1)
    task = {"model": tiny.config, "tokenizer": str(prepared), "tokenizer_from": str(origin)}
    store = write_tiny(tmp_path / "run", tiny, task=task)
    reader = Reader(store, load_manifest(store, KEYS, STEP))
    assert export_hf(reader, tmp_path / "hf") == []
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (loaded.eos_token, loaded.pad_token) == ("one", "two")
    said = loaded.apply_chat_template([{"role": "user", "content": "two"}], tokenize=False)
    assert said == "<two>"
    origin.rename(tmp_path / "elsewhere")
    (remark,) = export_hf(reader, tmp_path / "again")
    assert str(origin) in remark


def test_pieces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.exchange import pieces

    monkeypatch.setattr(pieces, "PIECE_BYTES", 256)
    largest = 0

    class Watched(Reader):
        def read(self, *box: Any) -> torch.Tensor:
            nonlocal largest
            tensor = super().read(*box)
            largest = max(largest, tensor.nbytes)
            return tensor

    tiny = make_tiny(steps=1)
    store = write_tiny(tmp_path / "run", tiny)
    export_hf(Watched(store, load_manifest(store, KEYS, STEP)), tmp_path / "hf")
    assert 0 < largest <= 256
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, param in tiny.model.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], param)


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    tiny = make_tiny(steps=1)
    store = open_store(tmp_path / "run")
    write_state(store, state_of(tiny), state={})
    reader = Reader(store, load_manifest(store, KEYS, STEP))
    with pytest.raises(ExchangeError, match=r"--config"):
        export_hf(reader, tmp_path / "hf")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ExchangeError, match=r"bad.json: not a transformers"):
        export_hf(reader, tmp_path / "hf", config_path=tmp_path / "bad.json")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    with pytest.raises(ExchangeError, match="not empty"):
        export_hf(reader, tmp_path / "full", config_path=tmp_path / "config.json")
    key = KEYS.segment(rank=0, step=STEP, generation=0, attempt=0, index=0)
    store.delete(key)
    with pytest.raises(MissingError, match=key):
        export_hf(reader, tmp_path / "hf", config_path=tmp_path / "config.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.json", "config.json", "full", "run"]


def test_a_link_to_an_empty_directory_is_followed(tmp_path: Path) -> None:
    place, link = tmp_path / "place", tmp_path / "link"
    place.mkdir()
    link.symlink_to(place)
    with finished_directory(link) as part:
        (part / "file").touch()
    assert link.is_symlink() and (place / "file").exists()


def test_an_empty_directory_of_a_container_s_image_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """overlayfs does not move it, and puts another in its place."""
    place, rename = tmp_path / "place", os.rename
    place.mkdir()

    def overlay(old: Path, new: Path) -> None:
        if old == place:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(old, new)

    monkeypatch.setattr(os, "rename", overlay)
    with finished_directory(place) as part:
        (part / "file").touch()
    assert (place / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_mount_point_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """No directory can be renamed onto it."""
    refused = pytest.raises(ExchangeError, match=r"busy\. Name a directory that is not there")
    with small_disk(tmp_path, 64 << 10), refused, finished_directory(tmp_path):
        pytest.fail("it was entered")


def test_what_a_killed_export_has_left_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writing = """
import os, pathlib, signal, sys
from trainer.exchange.pieces import finished_directory
with finished_directory(pathlib.Path(sys.argv[1])) as part:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", writing, str(tmp_path / "h[f]")], cwd=ROOT)
    (left,) = tmp_path.iterdir()
    for name in ("h[f]", "hf"):
        with finished_directory(tmp_path / name):
            pass
    (told,) = caplog.messages
    assert told.startswith(f"{left} was left by an export that was killed")


def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync, rename = set[int](), os.fsync, os.rename

    def noted_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def checked_rename(part: Path, target: Path) -> None:
        assert {file.stat().st_ino for file in part.iterdir()} <= synced
        rename(part, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", checked_rename)
    target, _ = export(make_tiny(steps=1), tmp_path)
    assert {target.stat().st_ino, tmp_path.stat().st_ino} <= synced


def test_a_number_that_json_has_not_comes_in_and_goes_out(tmp_path: Path) -> None:
    """Falcon H1 bounds a time by infinity, which transformers tags now; once it did not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("falcon_h1", vocab_size=64, **FALCON_H1)
    origin = tmp_path / "origin"
    AutoModelForCausalLM.from_config(config).save_pretrained(origin)
    tagged = (origin / "config.json").read_text()
    bare = re.sub(r'{\s*"__float__": "Infinity"\s*}', "Infinity", tagged)
    assert bare != tagged
    for name, text in (("tagged", tagged), ("bare", bare)):
        (origin / "config.json").write_text(text)
        store = open_store(tmp_path / name)
        manifest, _ = import_hf(store, KEYS, origin, step=4, moments=MOMENTS)
        export_hf(Reader(store, manifest), tmp_path / f"{name}-hf")
        out = AutoConfig.from_pretrained(tmp_path / f"{name}-hf")
        assert out.time_step_limit == (0.0, float("inf"))
        export_dcp(Reader(store, manifest), tmp_path / f"{name}-dcp")
        again, _ = import_dcp(
            open_store(tmp_path / f"{name}-again"),
            KEYS,
            tmp_path / f"{name}-dcp",
            step=None,
            moments=MOMENTS,
            config_path=origin,
        )
        assert again.training_state["task"] == {"model": manifest.training_state["task"]["model"]}


@pytest.mark.parametrize("tied", [False, True])
def test_import_takes_the_weights_and_a_new_optimizer(tmp_path: Path, tied: bool) -> None:
    tiny = make_tiny(tied=tied)
    tiny.model.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    store = open_store(tmp_path / "run")
    manifest, remarks = import_hf(store, KEYS, tmp_path / "hf", step=4, moments=MOMENTS)
    assert remarks == []
    assert load_manifest(store, KEYS, 4) == manifest
    reader = Reader(store, manifest)
    wanted = state_of(tiny)
    assert manifest.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        zero = not name.startswith("param/")
        assert torch.equal(reader.read_full(name), torch.zeros_like(tensor) if zero else tensor)
    assert manifest.training_state["optimizer_steps"] == 0
    assert manifest.training_state["task"]["model"]["hidden_size"] == 16
    with pytest.raises(AlreadyCommittedError):
        import_hf(store, KEYS, tmp_path / "hf", step=4, moments=MOMENTS)
    with pytest.raises(ExchangeError, match="from its seed"):
        import_hf(store, KEYS, tmp_path / "hf", step=0, moments=MOMENTS)


def test_import_puts_experts_together(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=3, vocab_size=64,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    store = open_store(tmp_path / "run")
    reader = Reader(store, import_hf(store, KEYS, tmp_path / "hf", step=1, moments=MOMENTS)[0])
    for name, param in model.named_parameters():
        assert torch.equal(reader.read_full(f"param/{name}"), param)


def test_import_widens_half_precision(tmp_path: Path) -> None:
    tiny = make_tiny(steps=1)
    wanted = {n: p.detach().bfloat16().float() for n, p in tiny.model.named_parameters()}
    tiny.model.bfloat16().save_pretrained(tmp_path / "hf")
    store = open_store(tmp_path / "run")
    reader = Reader(store, import_hf(store, KEYS, tmp_path / "hf", step=1, moments=MOMENTS)[0])
    for name, tensor in wanted.items():
        assert torch.equal(reader.read_full(f"param/{name}"), tensor)


def test_buffers_that_were_learned_come_from_the_models_directory(tmp_path: Path) -> None:
    """Gemma 4 multiplies what each block says by one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gemma4_text",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=8,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.5)
    origin = tmp_path / "origin"
    model.save_pretrained(origin)
    store = open_store(tmp_path / "run")
    manifest, (remark,) = import_hf(store, KEYS, origin, step=4, moments=MOMENTS)
    assert "model.layers.0.layer_scalar" in remark and str(origin) in remark
    export_hf(Reader(store, manifest), tmp_path / "hf")
    tokens = torch.arange(24).reshape(2, 12)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    origin.rename(tmp_path / "elsewhere")
    with pytest.raises(ExchangeError, match=f"{origin}: the model's buffers"):
        export_hf(Reader(store, manifest), tmp_path / "again")
