"""With which status `elastic attach` ends, by the end of the run."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from elastic.cli.live import tell
from elastic.cli.main import main
from elastic.protocol.causes import OUT_OF_MEMORY, USER_ERROR, Cause
from elastic.protocol.supervisor_api import Ending


@pytest.mark.parametrize(
    ("error", "cause", "status"),
    [
        (None, None, 0),
        ("machines are missing", None, 1),
        ("its memory ran out, twice", OUT_OF_MEMORY, 1),
        ("user code raised, twice", USER_ERROR, 93),
    ],
)
def test_where_a_retry_is_useless_the_status_says_so(
    error: str | None, cause: Cause | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tell(Ending(error=error, cause=cause)) == status
    assert capsys.readouterr().err == (
        "" if error is None else f"elastic: the run failed: {error}\n"
    )


def test_the_version_is_told_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"elastic {version('elastictrainer')}\n"
