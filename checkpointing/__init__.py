"""Sharded checkpoints: written by every rank, committed by one record, read in any layout.

    receipt = write_slices(store, keys, rank=..., slices=...)         on every rank with a share
    commit(store, keys, receipts=..., training_state=..., ...)        on one, once all have returned
    Reader(store, newest(store, keys)).read_many(boxes)               on any rank of any layout

Snapshots (`snapshots/`) are checkpoints in the same format in a node's memory.

The package is a leaf: it imports no other package of this project, and no Ray. What needs torch is
imported at first use, so that configurations and manifests can be handled without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkpointing.config import CheckpointConfig
from checkpointing.errors import (
    AlreadyCommittedError,
    CheckpointConfigError,
    CheckpointError,
    CorruptError,
    IncompatibleError,
    MissingError,
    NotCommittedError,
    OtherRecordError,
    ProtectedError,
    SliceError,
    StaleGenerationError,
    StoreError,
    StoreUnavailableError,
)
from checkpointing.format.boxes import Box, TensorInfo, TensorSlice
from checkpointing.format.coverage import check_coverage
from checkpointing.format.layout import Keys
from checkpointing.format.manifest import Manifest, Receipt, Segment, is_sound, run_of
from checkpointing.read.assignment import Rows, plan_shares
from checkpointing.read.catalogue import (
    check_compatible,
    check_kept,
    list_steps,
    load_manifest,
    newest,
    set_aside,
    set_foreign_aside,
)
from checkpointing.read.second_look import decide_fault, is_damage, look_again
from checkpointing.read.verify import Finding, Verification, verify_checkpoint
from checkpointing.retention.claims import claim_for_import, give_up, pin, pinned_steps, unpin
from checkpointing.retention.retire import (
    delete_checkpoint,
    plan_retention,
    plan_segments,
    retire,
    sweep_attempts,
    sweep_orphans,
)
from checkpointing.retention.survey import Survey, Surveyor
from checkpointing.retention.verified_mark import note_verified, verified_at
from checkpointing.snapshots.host_memory import (
    Stock,
    clear_memory,
    hold_room,
    memory_folder,
    open_memory,
    settle_snapshot,
    sweep_given_up,
    sweep_snapshots,
    take_over,
    take_stock,
)
from checkpointing.snapshots.index import Snapshot, SnapshotIndex, find_newest, plan_other_node
from checkpointing.stores import (
    RangeSource,
    Store,
    StoreKind,
    StorePlace,
    is_local,
    open_store,
    place_of,
)
from checkpointing.stores.s3.config import S3Config
from checkpointing.write.assignment import plan_writers
from checkpointing.write.byte_writer import Attempt, write_shared
from checkpointing.write.incremental import KnownPart, Written, write_changed
from checkpointing.write.interval import estimate_mtbf, plan_interval
from checkpointing.write.publish import build_manifest, commit
from checkpointing.write.segment_plan import plan_places

if TYPE_CHECKING:
    from checkpointing.read.digest import params_sha256, tensors_sha256
    from checkpointing.read.reader import Reader
    from checkpointing.write.tensor_writer import write_slices

_NEED_TORCH = {
    "Reader": "read.reader",
    "params_sha256": "read.digest",
    "tensors_sha256": "read.digest",
    "write_slices": "write.tensor_writer",
}

__all__ = [
    "AlreadyCommittedError",
    "Attempt",
    "Box",
    "CheckpointConfig",
    "CheckpointConfigError",
    "CheckpointError",
    "CorruptError",
    "Finding",
    "IncompatibleError",
    "Keys",
    "KnownPart",
    "Manifest",
    "MissingError",
    "NotCommittedError",
    "OtherRecordError",
    "ProtectedError",
    "RangeSource",
    "Reader",
    "Receipt",
    "Rows",
    "S3Config",
    "Segment",
    "SliceError",
    "Snapshot",
    "SnapshotIndex",
    "StaleGenerationError",
    "Stock",
    "Store",
    "StoreError",
    "StoreKind",
    "StorePlace",
    "StoreUnavailableError",
    "Survey",
    "Surveyor",
    "TensorInfo",
    "TensorSlice",
    "Verification",
    "Written",
    "build_manifest",
    "check_compatible",
    "check_coverage",
    "check_kept",
    "claim_for_import",
    "clear_memory",
    "commit",
    "decide_fault",
    "delete_checkpoint",
    "estimate_mtbf",
    "find_newest",
    "give_up",
    "hold_room",
    "is_damage",
    "is_local",
    "is_sound",
    "list_steps",
    "load_manifest",
    "look_again",
    "memory_folder",
    "newest",
    "note_verified",
    "open_memory",
    "open_store",
    "params_sha256",
    "pin",
    "pinned_steps",
    "place_of",
    "plan_interval",
    "plan_other_node",
    "plan_places",
    "plan_retention",
    "plan_segments",
    "plan_shares",
    "plan_writers",
    "retire",
    "run_of",
    "set_aside",
    "set_foreign_aside",
    "settle_snapshot",
    "sweep_attempts",
    "sweep_given_up",
    "sweep_orphans",
    "sweep_snapshots",
    "take_over",
    "take_stock",
    "tensors_sha256",
    "unpin",
    "verified_at",
    "verify_checkpoint",
    "write_changed",
    "write_shared",
    "write_slices",
]


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(f"checkpointing.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module 'checkpointing' has no attribute {name!r}")
