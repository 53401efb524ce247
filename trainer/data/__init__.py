"""Text → tokens on disk → batches, in an order that depends on nothing but (seed, position).

    DataConfig ── prepare() ──► train/ and val/ token sets + tokenizer.json   (once, on any machine)
    TokenDataset(train) ─┐
    sample_ids(seed, …) ─┴──► batch(ids): int64 (len(ids), seq_len + 1)       (in every worker)

The names below load on first use, so a configuration imports neither torch nor tokenizers. The
function `prepare` is not among them, because its module has its name: take it from there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.data.config import DataConfig
    from trainer.data.dataset import MapDataset, SampleSource, TextDataset, TokenDataset
    from trainer.data.index import TokensCorruptError
    from trainer.data.order import sample_ids
    from trainer.data.prepare import PreparedData
    from trainer.data.tokens import TokenSet
    from trainer.data.unigram import unigram_cross_entropy

__all__ = [
    "DataConfig",
    "MapDataset",
    "PreparedData",
    "SampleSource",
    "TextDataset",
    "TokenDataset",
    "TokenSet",
    "TokensCorruptError",
    "sample_ids",
    "unigram_cross_entropy",
]

_HOMES = {
    "DataConfig": "config",
    "MapDataset": "dataset",
    "PreparedData": "prepare",
    "SampleSource": "dataset",
    "TextDataset": "dataset",
    "TokenDataset": "dataset",
    "TokenSet": "tokens",
    "TokensCorruptError": "index",
    "sample_ids": "order",
    "unigram_cross_entropy": "unigram",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
