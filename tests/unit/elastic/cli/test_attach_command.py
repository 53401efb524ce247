"""Which run `elastic attach` means, and with which status it ends, by the end of the run."""

from __future__ import annotations

from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import pytest
from ray.train import RunConfig

from elastic.cli.live import paths_of, tell
from elastic.cli.main import main
from elastic.cli.runs import run_directory_of
from elastic.driver.resume import run_root
from elastic.protocol.causes import OUT_OF_MEMORY, USER_ERROR, Cause
from elastic.protocol.run_paths import RunPaths
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


@pytest.mark.parametrize("named", ["runs/x", "../{here}/runs/x", "{root}/runs/y/../x"])
def test_a_run_is_found_however_its_directory_is_written(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = named.format(here=tmp_path.name, root=tmp_path)
    of_fit = RunPaths(root=run_root(RunConfig(name="x", storage_path="./y/../runs")))
    paths = paths_of(Namespace(run=run))
    assert (paths.key, paths.memory) == (of_fit.key, of_fit.memory)
    assert run_directory_of(run) == paths.root


def test_the_version_is_told_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"elastic {version('elastictrainer')}\n"
