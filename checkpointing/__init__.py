"""Sharded checkpoints: written by every rank, committed by one record, read in any layout.

    receipt = write_slices(store, keys, rank=..., slices=...)         on every rank with a share
    commit(store, keys, receipts=..., training_state=..., ...)        on one, once all have returned
    Reader(store, newest(store, keys)).read_many(boxes)               on any rank of any layout

The package is a leaf: it imports no other package of this project, and no Ray. What needs torch is
imported at first use, so that configurations and manifests can be handled without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkpointing.boxes import Box, TensorInfo, TensorSlice
from checkpointing.commit import check_compatible, commit, list_steps, load_manifest, newest
from checkpointing.config import CheckpointConfig
from checkpointing.errors import (
    AlreadyCommittedError,
    CheckpointConfigError,
    CheckpointError,
    CorruptError,
    IncompatibleError,
    MissingError,
    NotCommittedError,
    SliceError,
    StaleGenerationError,
    StoreError,
    StoreUnavailableError,
)
from checkpointing.layout import Keys
from checkpointing.manifest import Manifest, Receipt
from checkpointing.plan import check_coverage
from checkpointing.retention import delete_checkpoint, plan_retention, sweep_uncommitted
from checkpointing.stores import Store, open_store

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
    "Box",
    "CheckpointConfig",
    "CheckpointConfigError",
    "CheckpointError",
    "CorruptError",
    "IncompatibleError",
    "Keys",
    "Manifest",
    "MissingError",
    "NotCommittedError",
    "Reader",
    "Receipt",
    "SliceError",
    "StaleGenerationError",
    "Store",
    "StoreError",
    "StoreUnavailableError",
    "TensorInfo",
    "TensorSlice",
    "check_compatible",
    "check_coverage",
    "commit",
    "delete_checkpoint",
    "list_steps",
    "load_manifest",
    "newest",
    "open_store",
    "params_sha256",
    "plan_retention",
    "sweep_uncommitted",
    "tensors_sha256",
    "write_slices",
]


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(import_module(f"checkpointing.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module 'checkpointing' has no attribute {name!r}")
