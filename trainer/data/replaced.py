"""Text in another encoding than UTF-8 loses characters: how many, and in which file most.

`text.py` reads on, as many a large text has a few such bytes; and what was collected from the web
has U+FFFD of its own, which is sound UTF-8. All of a file's accented letters are another matter,
and nothing else says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer.data.text import Document, SourceFile

_REPLACEMENT = "\ufffd"

_LEAST_SHARE = 0.001
"""Text in an 8-bit encoding has more wherever its language has letters beyond ASCII: 1 to 5 %."""


class Replaced:
    """Counts U+FFFD, which stands for what is no UTF-8, in documents that come file by file.

    Args:
        files: theirs. Those of Parquet are not counted: bytes that are no UTF-8 raise there.
    """

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self._decoded = {str(file.path) for file in files if file.format != "parquet"}
        self._path, self._bad, self._chars = "", 0, 0
        self._files = 0
        """That have so many, of those before the present one."""
        self._worst = (0.0, "", 0, 0)
        """Of those: share, path, how many of how many characters."""

    def count(self, documents: Iterable[Document]) -> None:
        """Those that follow the ones before."""
        for document in documents:
            path = document.source.rpartition(":")[0]
            if path != self._path:
                self._end_file()
                self._path = path
            if path in self._decoded:
                self._bad += document.text.count(_REPLACEMENT)
                self._chars += len(document.text)

    def told(self) -> str | None:
        """What to say when all is counted; None: nothing."""
        self._end_file()
        share, path, bad, chars = self._worst
        if not bad:
            return None
        others = (
            f", at least {_LEAST_SHARE:.1%} in {self._files - 1} more" if self._files > 1 else ""
        )
        return (
            f"{path}: {bad} of {chars} characters ({share:.2%}) are U+FFFD, as which bytes that "
            f"are no UTF-8 are read{others}. It may be text in another encoding. Convert it only "
            f"where its bytes, unpacked, are no UTF-8: iconv -f utf-8 ends with an error there"
        )

    def _end_file(self) -> None:
        if self._bad and (share := self._bad / self._chars) >= _LEAST_SHARE:
            self._files += 1
            self._worst = max(self._worst, (share, self._path, self._bad, self._chars))
        self._bad = self._chars = 0
