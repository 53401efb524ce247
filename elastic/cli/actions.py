"""What each subcommand of `elastic checkpoints` does. Each returns the exit status."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from checkpointing import (
    CheckpointError,
    CorruptError,
    Keys,
    NotCommittedError,
    Store,
    StoreError,
    Verification,
    check_kept,
    delete_checkpoint,
    list_steps,
    load_manifest,
    note_verified,
    pinned_steps,
    verified_at,
    verify_checkpoint,
)
from checkpointing import pin as pin_checkpoint
from checkpointing import unpin as unpin_checkpoint
from checkpointing.retention.verified_mark import forget_verified
from elastic.cli.runs import find_step, open_run, open_run_to_fill, run_directory_of
from elastic.cli.show import describe, details, human_bytes, human_time, summary, table

if TYPE_CHECKING:
    from checkpointing import Reader

_KEYS = Keys()


def list_checkpoints(options: argparse.Namespace) -> int:
    """`list`"""
    store = open_run(options.run)
    pinned = pinned_steps(store, _KEYS)
    rows = (_row(store, step, step in pinned) for step in list_steps(store, _KEYS))
    found = [row for row in rows if row is not None]
    if options.json:
        print(json.dumps({"checkpoints": found}))
        return 0
    head = ("step", "committed", "generation", "size", "writers", "pinned", "verified")
    print(table([head, *(_cells(row) for row in found)]))
    return 0


def _row(store: Store, step: int, pinned: bool) -> dict[str, Any] | None:
    """None where the run has deleted it meanwhile."""
    try:
        manifest = load_manifest(store, _KEYS, step)
    except NotCommittedError:
        return None
    except CorruptError as error:
        return {"step": step, "pinned": pinned, "error": str(error)}
    noted = verified_at(store, _KEYS, manifest.step, manifest.sha256)
    return {**summary(manifest), "pinned": pinned, "verified_at": noted}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    pinned = "pinned" if row["pinned"] else "-"
    if "error" in row:
        return (str(row["step"]), "cannot be read", "-", "-", "-", pinned, "no")
    return (
        str(row["step"]),
        human_time(row["committed_at"]),
        str(row["generation"]),
        human_bytes(row["bytes"]),
        str(row["writers"]),
        pinned,
        "no" if row["verified_at"] is None else human_time(row["verified_at"]),
    )


def show(options: argparse.Namespace) -> int:
    """`show`"""
    store = open_run(options.run)
    manifest = load_manifest(store, _KEYS, find_step(store, options.step))
    if options.json:
        print(json.dumps(details(manifest)))
    else:
        print(describe(manifest, tensors=options.tensors))
    return 0


def verify(options: argparse.Namespace) -> int:
    """`verify`"""
    store = open_run(options.run)
    step = find_step(store, options.step)
    checked = verify_checkpoint(
        store, _KEYS, step, threads=options.threads, progress=_progress(sys.stderr)
    )
    _note(store, checked)
    if options.json:
        findings = [{"key": f.key, "check": f.check, "fact": f.fact} for f in checked.findings]
        print(json.dumps({"step": step, "bytes": checked.size_bytes, "findings": findings}))
        return 1 if findings else 0
    for finding in checked.findings:
        print(f"elastic: {finding}", file=sys.stderr)
    if checked.findings:
        print(f"step {step}: {len(checked.findings)} checks failed; restore another step")
        return 1
    print(f"step {step}: {human_bytes(checked.size_bytes)} read and checked, nothing wrong")
    return 0


def _note(store: Store, checked: Verification) -> None:
    """Keeps the outcome beside the checkpoint; whoever may only read can verify, too."""
    try:
        if any(finding.check != "unreachable" for finding in checked.findings):
            forget_verified(store, _KEYS, checked.step)
        elif not checked.findings and checked.manifest is not None:
            note_verified(store, _KEYS, checked.manifest)
    except StoreError as error:
        _tell([f"the outcome is not noted: {error}"])


def _progress(stream: Any) -> Callable[[int, int], None]:
    """Shows how far a verification is where somebody watches."""
    if not stream.isatty():
        return lambda done, total: None

    def tell(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        stream.write(f"\r{human_bytes(done)} of {human_bytes(total)} checked   {end}")
        stream.flush()

    return tell


def export(options: argparse.Namespace) -> int:
    """`export`"""
    from checkpointing import Reader

    store = open_run(options.run)
    reader = Reader(store, load_manifest(store, _KEYS, find_step(store, options.step)), threads=2)
    try:
        remarks = _export(reader, options)
    except CheckpointError:
        check_kept(store, _KEYS, reader.manifest)
        raise
    _tell(remarks)
    print(f"step {reader.manifest.step} is in {options.target}")
    return 0


def _export(reader: Reader, options: argparse.Namespace) -> list[str]:
    if options.to == "hf":
        from trainer.exchange.hf_export import export_hf

        shard_bytes = int(options.shard_gb * 1e9)
        return export_hf(
            reader, options.target, config_path=options.config, shard_bytes=shard_bytes
        )
    from trainer.exchange.dcp_export import export_dcp

    return export_dcp(reader, options.target, config_path=options.config)


def import_state(options: argparse.Namespace) -> int:
    """`import`"""
    from elastic.protocol.run_paths import RunPaths, hold_run
    from trainer.config import OptimizerConfig
    from trainer.errors import ExchangeError
    from trainer.optimizer import check_moments

    moments = OptimizerConfig().moments if options.moments is None else options.moments
    check_moments(moments, "--moments")
    store, root = open_run_to_fill(options.run), run_directory_of(options.run)
    with ExitStack() as held:
        if root is not None:
            root.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold_run(RunPaths(root=root)))
        if options.form == "dcp":
            from trainer.exchange.dcp_import import import_dcp

            manifest, remarks = import_dcp(
                store,
                _KEYS,
                options.source,
                step=options.step,
                moments=moments,
                config_path=options.config,
            )
        elif options.step is None:
            raise ExchangeError(
                str(options.source), "a model directory has no step", "Give one with --step"
            )
        else:
            from trainer.exchange.hf_import import import_hf

            manifest, remarks = import_hf(
                store, _KEYS, options.source, step=options.step, moments=moments
            )
    _tell(remarks)
    print(f"step {manifest.step} is committed in {options.run}")
    return 0


def _tell(remarks: list[str]) -> None:
    for remark in remarks:
        print(f"elastic: {remark}", file=sys.stderr)


def pin(options: argparse.Namespace) -> int:
    """`pin`"""
    store = open_run(options.run)
    step = find_step(store, options.step)
    pin_checkpoint(store, _KEYS, step)
    print(f"step {step} is pinned")
    return 0


def unpin(options: argparse.Namespace) -> int:
    """`unpin`"""
    store = open_run(options.run)
    step = find_step(store, None) if options.step is None else options.step
    if unpin_checkpoint(store, _KEYS, step):  # of a killed import there is the claim alone
        print(f"step {step} is no longer pinned")
    else:
        print(f"step {find_step(store, step)} is not pinned")
    return 0


def delete(options: argparse.Namespace) -> int:
    """`delete`"""
    store = open_run(options.run)
    step = find_step(store, options.step)
    delete_checkpoint(store, _KEYS, step, force=options.force)
    print(f"step {step} is deleted")
    return 0
