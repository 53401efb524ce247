"""Sharded checkpoints: written by every rank, committed by one record, read in any layout.

    receipt = write_slices(store, keys, rank=..., slices=...)         on every rank with a share
    commit(store, keys, receipts=..., training_state=..., ...)        on one, once all have returned
    Reader(store, newest(store, keys)).read_many(boxes)               on any rank of any layout

Snapshots (`snapshots.py`, `host_memory.py`) are checkpoints in the same format in a node's memory.

The package is a leaf: it imports no other package of this project, and no Ray. What needs torch is
imported at first use, so that configurations and manifests can be handled without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkpointing.boxes import Box, TensorInfo, TensorSlice
from checkpointing.claims import claim_for_import, pin, pinned_steps, unpin
from checkpointing.commit import (
    build_manifest,
    check_compatible,
    commit,
    list_steps,
    load_manifest,
    newest,
    set_aside,
    set_foreign_aside,
)
from checkpointing.config import CheckpointConfig
from checkpointing.errors import (
    AlreadyCommittedError,
    CheckpointConfigError,
    CheckpointError,
    CorruptError,
    IncompatibleError,
    MissingError,
    NotCommittedError,
    ProtectedError,
    SliceError,
    StaleGenerationError,
    StoreError,
    StoreUnavailableError,
)
from checkpointing.host_memory import (
    Stock,
    check_room,
    clear_memory,
    memory_folder,
    open_memory,
    settle_snapshot,
    sweep_snapshots,
    take_stock,
)
from checkpointing.interval import estimate_mtbf, plan_interval
from checkpointing.layout import Keys
from checkpointing.manifest import Manifest, Receipt, Segment, is_sound
from checkpointing.plan import check_coverage
from checkpointing.raw_writer import Attempt, write_shared
from checkpointing.retention import (
    delete_checkpoint,
    plan_retention,
    plan_segments,
    retire,
    sweep_orphans,
    sweep_uncommitted,
)
from checkpointing.shares import Rows, plan_shares
from checkpointing.snapshots import Snapshot, SnapshotIndex, find_newest, plan_other_node
from checkpointing.stores import RangeSource, Store, open_store
from checkpointing.stores.s3_config import S3Config
from checkpointing.survey import Survey, Surveyor
from checkpointing.unchanged import KnownPart, Written, write_changed
from checkpointing.verified import note_verified, verified_at
from checkpointing.verify import Finding, Verification, verify_checkpoint
from checkpointing.write_plan import plan_places
from checkpointing.writers import plan_writers

if TYPE_CHECKING:
    from checkpointing.digest import params_sha256, tensors_sha256
    from checkpointing.reader import Reader
    from checkpointing.writer import write_slices

_NEED_TORCH = {
    "Reader": "reader",
    "params_sha256": "digest",
    "tensors_sha256": "digest",
    "write_slices": "writer",
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
    "check_room",
    "claim_for_import",
    "clear_memory",
    "commit",
    "delete_checkpoint",
    "estimate_mtbf",
    "find_newest",
    "is_sound",
    "list_steps",
    "load_manifest",
    "memory_folder",
    "newest",
    "note_verified",
    "open_memory",
    "open_store",
    "params_sha256",
    "pin",
    "pinned_steps",
    "plan_interval",
    "plan_other_node",
    "plan_places",
    "plan_retention",
    "plan_segments",
    "plan_shares",
    "plan_writers",
    "retire",
    "set_aside",
    "set_foreign_aside",
    "settle_snapshot",
    "sweep_orphans",
    "sweep_snapshots",
    "sweep_uncommitted",
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
