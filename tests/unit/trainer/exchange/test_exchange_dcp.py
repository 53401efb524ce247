from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from checkpointing import Reader, load_manifest, open_store
from tests.support.small_disk import small_disk
from tests.support.tiny_checkpoint import (
    KEYS,
    MOMENTS,
    STEP,
    Tiny,
    make_tiny,
    state_of,
    training_state,
    write_state,
    write_tiny,
)
from trainer.errors import ExchangeError
from trainer.exchange.dcp_export import export_dcp
from trainer.exchange.dcp_import import import_dcp
from trainer.exchange.dcp_metadata import read_metadata

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def params_of(tiny: Tiny) -> list[tuple[str, torch.Tensor]]:
    return list(tiny.model.named_parameters())


def exported(tiny: Tiny, tmp_path: Path) -> Path:
    store = write_tiny(tmp_path / "run", tiny)
    assert export_dcp(Reader(store, load_manifest(store, KEYS, STEP)), tmp_path / "dcp") == []
    return tmp_path / "dcp"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_fills(tmp_path: Path) -> None:
    """torch raises an error of its own over that of the system."""
    store = open_store(tmp_path / "run")
    reader = Reader(store, write_state(store, {"param/w": torch.zeros(256, 256)}))
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, 64 << 10):
        with pytest.raises(ExchangeError, match=r"No space left on device. Free space there"):
            export_dcp(reader, disk / "dcp")
        assert not list(disk.iterdir())


def saved_by_torch(tiny: Tiny, directory: Path, *, flat: bool, wrap: bool, done: int = 3) -> Path:
    """What a user of DCP has: torchtitan's form, or that of PyTorch's tutorials."""
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-2)
    for name, param in tiny.model.named_parameters():
        moments = {key: tiny.moments[f"{key}/{name}"].clone() for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(float(done)), **moments}
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimized = get_optimizer_state_dict(tiny.model, optimizer, options=options)
    weights: dict[str, Any] = dict(tiny.model.state_dict())
    state: dict[str, Any] = {
        **({"model": weights} if wrap else weights),
        ("optim" if wrap else "optimizer"): optimized,
        "train_state": {"step": 11 if wrap else torch.tensor(11)},
        "lr_scheduler": {"last_epoch": 11},
    }
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


@pytest.mark.parametrize("tied", [False, True])
def test_dcp_load_finds_everything(tmp_path: Path, tied: bool) -> None:
    tiny = make_tiny(tied=tied)
    directory = exported(tiny, tmp_path)
    fresh = make_tiny(tied=tied, steps=1)
    optimizer = torch.optim.AdamW(fresh.model.parameters(), lr=0.5, fused=True)
    for param in fresh.model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights = fresh.model.state_dict()
    optimized: dict[str, Any] = get_optimizer_state_dict(fresh.model, optimizer, options=options)
    train_state = {"step": 0}
    everything = {**weights, "optimizer": optimized, "train_state": train_state}
    dcp.load(everything, checkpoint_id=directory, no_dist=True)  # strict: every name must be there
    for name, tensor in tiny.model.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    for name, _ in tiny.model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimized[f"state.{name}.{key}"], tiny.moments[f"{key}/{name}"])
        assert float(optimized[f"state.{name}.step"]) == 3.0
        matrix = dict(tiny.model.named_parameters())[name].dim() == 2
        assert optimized[f"param_groups.{name}.weight_decay"] == (0.1 if matrix else 0.0)
        # The seventh of 20 steps: past 2 of warm-up, on the cosine from 1e-2 to 1e-3.
        wanted = 1e-3 + 9e-3 * 0.5 * (1 + torch.cos(torch.tensor(4 / 17 * torch.pi)).item())
        assert optimized[f"param_groups.{name}.lr"] == pytest.approx(wanted, rel=1e-6)
    assert everything["train_state"]["step"] == STEP


@pytest.mark.parametrize(("flat", "wrap"), [(True, False), (True, True), (False, True)])
def test_import_takes_equal_bits(tmp_path: Path, flat: bool, wrap: bool) -> None:
    tiny = make_tiny()
    source = saved_by_torch(tiny, tmp_path / "dcp", flat=flat, wrap=wrap)
    store = open_store(tmp_path / "run")
    manifest, remarks = import_dcp(store, KEYS, source, step=None, moments=MOMENTS)
    assert manifest.step == 11
    assert manifest.training_state["optimizer_steps"] == 3
    assert load_manifest(store, KEYS, 11) == manifest
    assert remarks == []
    reader, wanted = Reader(store, manifest), state_of(tiny)
    assert manifest.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(reader.read_full(name), tensor), name


def test_an_optimizer_that_has_done_no_step_has_done_none(tmp_path: Path) -> None:
    """Its moments are there, and 0: with another count they would be corrected for another bias."""
    source = saved_by_torch(make_tiny(), tmp_path / "dcp", flat=True, wrap=False, done=0)
    store = open_store(tmp_path / "run")
    manifest, _ = import_dcp(store, KEYS, source, step=None, moments=MOMENTS)
    assert (manifest.step, manifest.training_state["optimizer_steps"]) == (11, 0)


def test_moments_under_other_names_count_no_steps(tmp_path: Path) -> None:
    """An optimizer's own `state_dict` numbers its parameters: none of its moments has a place."""
    tiny = make_tiny()
    optimizer = torch.optim.AdamW(tiny.model.parameters())
    for name, param in params_of(tiny):
        moments = {key: tiny.moments[f"{key}/{name}"] for key in MOMENTS}
        optimizer.state[param] = {"step": torch.tensor(20_000.0), **moments}
    state = {"model": tiny.model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    store = open_store(tmp_path / "run")
    manifest, remarks = import_dcp(store, KEYS, tmp_path / "dcp", step=None, moments=MOMENTS)
    assert (manifest.step, manifest.training_state["optimizer_steps"]) == (20_000, 0)
    count = len(params_of(tiny))
    assert f"of {count} of {count} parameters start at 0" in remarks[0]
    assert remarks[1:] == [f"{2 * count} tensors were left behind, first optim.state.0.exp_avg."]
    reader = Reader(store, manifest)
    assert not any(reader.read_full(f"exp_avg/{name}").any() for name, _ in params_of(tiny))


def test_a_parameter_without_its_moments_is_told_of(tmp_path: Path) -> None:
    """The others keep theirs, and the number of steps that they are of."""
    tiny = make_tiny()
    state = {
        **dict(tiny.model.state_dict()),
        "optimizer": {
            f"state.{name}.{key}": tiny.moments[f"{key}/{name}"]
            for name, _ in params_of(tiny)
            for key in MOMENTS
            if (name, key) != ("lm_head.weight", "exp_avg_sq")
        },
        "train_state": {"step": 11},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    store = open_store(tmp_path / "run")
    manifest, remarks = import_dcp(store, KEYS, tmp_path / "dcp", step=None, moments=MOMENTS)
    assert manifest.training_state["optimizer_steps"] == 11
    count = len(params_of(tiny))
    assert f"of 1 of {count} parameters start at 0" in remarks[0]
    assert "in it, first lm_head.weight." in remarks[0]
    assert "11, is one for all parameters" in remarks[1]
    assert "1 tensors were left behind, first optimizer.state.lm_head.weight.exp_avg" in remarks[2]
    reader = Reader(store, manifest)
    assert not reader.read_full("exp_avg/lm_head.weight").any()
    assert reader.read_full("exp_avg/model.norm.weight").any()


def test_there_and_back_again(tmp_path: Path) -> None:
    tiny = make_tiny(tied=True)
    directory = exported(tiny, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny.config))
    store = open_store(tmp_path / "again")
    manifest, remarks = import_dcp(
        store, KEYS, directory, step=None, moments=MOMENTS, config_path=config
    )
    assert manifest.step == STEP
    assert manifest.training_state["optimizer_steps"] == 3
    assert manifest.training_state["task"]["model"] == json.loads(config.read_text())
    assert len(remarks) == 1 and "lm_head.weight" in remarks[0]
    for name, tensor in state_of(tiny).items():
        assert torch.equal(Reader(store, manifest).read_full(name), tensor)


def test_another_optimizers_moments_go_under_their_own_names(tmp_path: Path) -> None:
    """What wrote them is not imported: a checkpoint names no code."""
    tiny = make_tiny(steps=1)
    params = {f"param/{name}": p.detach() for name, p in tiny.model.named_parameters()}
    momenta = {name.replace("param", "momentum"): p + 1 for name, p in params.items()}
    told = {**training_state(tiny), "optimizer": {"name": "no_such_module.Lion", "lr": 1.0}}
    store = open_store(tmp_path / "run")
    write_state(store, {**params, **momenta}, state=told)
    reader = Reader(store, load_manifest(store, KEYS, STEP))
    (remark,) = export_dcp(reader, tmp_path / "dcp")
    assert "no param_groups" in remark
    loaded = {f"optimizer.state.{n}.momentum": torch.zeros_like(p) for n, p in params_of(tiny)}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, _ in params_of(tiny):
        assert torch.equal(loaded[f"optimizer.state.{name}.momentum"], momenta[f"momentum/{name}"])
    again = open_store(tmp_path / "again")
    manifest, remarks = import_dcp(again, KEYS, tmp_path / "dcp", step=None, moments=("momentum",))
    assert remarks == [] and manifest.tensors.keys() == {**params, **momenta}.keys()
    for name, tensor in {**params, **momenta}.items():
        assert torch.equal(Reader(again, manifest).read_full(name), tensor)
    wrong = open_store(tmp_path / "wrong")
    manifest, remarks = import_dcp(wrong, KEYS, tmp_path / "dcp", step=None, moments=MOMENTS)
    assert "not all of theirs are in it" in remarks[0] and "--moments" in remarks[0]
    assert "were left behind" in remarks[1] and ".momentum" in remarks[1]
    weights, _ = import_dcp(
        open_store(tmp_path / "weights"), KEYS, tmp_path / "dcp", step=None, moments=()
    )
    assert weights.tensors.keys() == params.keys()


def test_a_schedule_of_ones_own_is_not_made_up(tmp_path: Path) -> None:
    tiny = make_tiny(steps=1)
    told = training_state(tiny)
    told["optimizer"]["schedule"] = {"class": "no_such_module.Schedule"}
    store = open_store(tmp_path / "run")
    write_state(store, state_of(tiny), state=told)
    reader = Reader(store, load_manifest(store, KEYS, STEP))
    (remark,) = export_dcp(reader, tmp_path / "dcp")
    assert "no param_groups" in remark


def test_weights_alone_get_a_new_optimizer(tmp_path: Path) -> None:
    tiny = make_tiny(steps=1)
    dcp.save(tiny.model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    store = open_store(tmp_path / "run")
    with pytest.raises(ExchangeError, match="--step"):
        import_dcp(store, KEYS, tmp_path / "dcp", step=None, moments=MOMENTS)
    manifest, (remark,) = import_dcp(store, KEYS, tmp_path / "dcp", step=5, moments=MOMENTS)
    assert "moments" in remark
    assert manifest.training_state["optimizer_steps"] == 0
    reader = Reader(store, manifest)
    for name, param in tiny.model.named_parameters():
        assert torch.equal(reader.read_full(f"param/{name}"), param)
        assert not reader.read_full(f"exp_avg/{name}").any()


def test_import_refuses_another_model(tmp_path: Path) -> None:
    tiny = make_tiny(steps=1)
    dcp.save(tiny.model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**tiny.config, "num_hidden_layers": 3}))
    with pytest.raises(ExchangeError, match=r"model\.layers\.2\S+ of the model .* absent"):
        import_dcp(
            open_store(tmp_path / "run"),
            KEYS,
            tmp_path / "dcp",
            step=5,
            moments=MOMENTS,
            config_path=config,
        )
    assert not (tmp_path / "run").exists()


class _Evil:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (self.target,)


def test_no_pickle_runs(tmp_path: Path) -> None:
    tiny = make_tiny(steps=1)
    directory = tmp_path / "dcp"
    dcp.save(tiny.model.state_dict(), checkpoint_id=directory, no_dist=True)
    good = (directory / ".metadata").read_bytes()
    assert len(read_metadata(directory).tensors) == len(tiny.model.state_dict())
    owned = tmp_path / "owned"
    (directory / ".metadata").write_bytes(pickle.dumps(_Evil(str(owned))))
    with pytest.raises(ExchangeError, match=r"names posix\.mkdir.*nothing of it was run"):
        read_metadata(directory)
    metadata = pickle.loads(good)
    info = next(iter(metadata.storage_data.values()))
    for path in ("../x", "/etc/passwd"):
        info.relative_path = path
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ExchangeError, match="outside of the directory"):
            read_metadata(directory)
    for raw in (b"", b"hello", good[:-20], pickle.dumps({"a": 1})):
        (directory / ".metadata").write_bytes(raw)
        with pytest.raises(ExchangeError, match="not the metadata of a DCP"):
            read_metadata(directory)
    (directory / ".metadata").write_bytes(good)
    (file,) = directory.glob("*.distcp")
    torch.save(_Evil(str(owned)), file)
    with pytest.raises(ExchangeError, match=r"distcp: \S+ cannot be read at byte"):
        import_dcp(open_store(tmp_path / "run"), KEYS, directory, step=5, moments=MOMENTS)
    assert not owned.exists()


def test_tensors_in_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.exchange import dcp_export, pieces

    monkeypatch.setattr(pieces, "PIECE_BYTES", 256)
    monkeypatch.setattr(dcp_export, "_FILE_BYTES", 20_000)
    tiny = make_tiny(steps=1)
    directory = exported(tiny, tmp_path)
    assert len(list(directory.glob("*.distcp"))) > 3
    chunks = [tensor.chunks for tensor in read_metadata(directory).tensors.values()]
    assert max(map(len, chunks)) > 8
    weights = {name: torch.zeros_like(t) for name, t in tiny.model.state_dict().items()}
    dcp.load(weights, checkpoint_id=directory, no_dist=True)
    for name, tensor in tiny.model.state_dict().items():
        assert torch.equal(weights[name], tensor)
    manifest, _ = import_dcp(
        open_store(tmp_path / "again"), KEYS, directory, step=None, moments=MOMENTS
    )
    reader = Reader(open_store(tmp_path / "again"), manifest)
    for name, tensor in state_of(tiny).items():
        assert torch.equal(reader.read_full(name), tensor)


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    """Also where torch would load it without a word."""
    tiny = make_tiny(steps=1)
    directory = tmp_path / "dcp"
    dcp.save(tiny.model.state_dict(), checkpoint_id=directory, no_dist=True)
    (file,) = directory.glob("*.distcp")
    good = file.read_bytes()
    values = tiny.model.lm_head.weight.detach().numpy().tobytes()
    at = good.index(values) + 100
    flipped = good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]
    for raw, fact in ((flipped, "CRC32"), (good[: len(good) // 2], "cannot be read at byte")):
        file.write_bytes(raw)
        with pytest.raises(ExchangeError, match=rf"__0_0\.distcp: .*{fact}"):
            import_dcp(open_store(tmp_path / "again"), KEYS, directory, step=3, moments=MOMENTS)
    assert open_store(tmp_path / "again").list("m/") == []
