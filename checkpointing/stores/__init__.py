"""Where checkpoints lie: the few operations on objects that everything else is built from.

Keys are strings with `/` between the parts. The operations are those of an object store, so that a
local directory and S3 serve alike; nothing here knows what a checkpoint is.
"""

from checkpointing.stores.kinds import StoreKind, is_local, open_store, place_of
from checkpointing.stores.protocols import RangeSource, Store, StorePlace

__all__ = [
    "RangeSource",
    "Store",
    "StoreKind",
    "StorePlace",
    "is_local",
    "open_store",
    "place_of",
]
