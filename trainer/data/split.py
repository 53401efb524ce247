"""Which documents are held out: decided by a hash of their text, not by their place in a list.

So a document stays on its side however files are named, ordered or added to, and two copies of one
document never end up on different sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from trainer.data.text import Document
from trainer.errors import ConfigError


def hash_of(document: Document) -> int:
    """Hash a document's text to 64 bits."""
    digest = hashlib.blake2b(document.text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def find_threshold(documents: Iterable[Document], holdout: float) -> int:
    """Find the hash below which a document is held out. It reads until the share alone decides:
    of many documents a few.

    Args:
        documents: one or more.
        holdout: the share to hold out. If above 0, the threshold moves as far as it must for at
            least one document to fall on each side.

    Raises:
        ConfigError: all documents are the same, and one is to be held out.
    """
    if holdout == 0:
        return 0
    share = int(holdout * 2**64)
    lowest, highest = 2**64, -1
    count = 0
    for document in documents:
        count += 1
        value = hash_of(document)
        lowest, highest = min(lowest, value), max(highest, value)
        if lowest < share <= highest:
            return share  # as `plan_threshold` gives, whatever follows
    if lowest == highest:
        raise ConfigError(
            "train.task.data.holdout",
            holdout,
            f"all documents ({count}) have the same text, and it cannot be on both sides",
            "Give other documents as well, or use 0 for no validation set",
        )
    return plan_threshold(lowest, highest, holdout)


def plan_threshold(lowest: int, highest: int, holdout: float) -> int:
    """Place the threshold at the share, but above the lowest hash and not above the highest."""
    return min(max(int(holdout * 2**64), lowest + 1), highest)
