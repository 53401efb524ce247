"""Text in another encoding than UTF-8 loses characters: how many, and in which file most.

`text.py` reads on, as many a large text has a few such bytes. All of a file's accented letters are
another matter, and nothing else says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer.data.text import Document

_REPLACEMENT = "\ufffd"


class Replaced:
    """Counts U+FFFD, which stands for what is no UTF-8, in documents that come file by file."""

    def __init__(self) -> None:
        self._path, self._bad, self._chars = "", 0, 0
        self._files = 0
        """That have some, of those before the present one."""
        self._worst = (0.0, "", 0, 0)
        """Of those: share, path, how many of how many characters."""

    def count(self, documents: Iterable[Document]) -> None:
        """Those that follow the ones before."""
        for document in documents:
            path = document.source.rpartition(":")[0]
            if path != self._path:
                self._end_file()
                self._path = path
            self._bad += document.text.count(_REPLACEMENT)
            self._chars += len(document.text)

    def told(self) -> str | None:
        """What to say when all is counted; None: nothing."""
        self._end_file()
        share, path, bad, chars = self._worst
        if not bad:
            return None
        others = f", and some in {self._files - 1} other files" if self._files > 1 else ""
        return (
            f"{path}: {bad} of {chars} characters ({share:.2%}) are no UTF-8 and are read as "
            f"U+FFFD{others}. Is it text in another encoding? Convert it, as by "
            f"iconv -f latin1 -t utf-8"
        )

    def _end_file(self) -> None:
        if self._bad:
            self._files += 1
            share = self._bad / self._chars
            self._worst = max(self._worst, (share, self._path, self._bad, self._chars))
        self._bad = self._chars = 0
