"""What a checkpoint on S3 costs, beside peers: `python -m benchmarks.checkpoint`.

Four workers hold one state: the tensors of a small Llama and both moments, in float32. In each
round every system saves it once to the same HTTP server on this machine, each after another one:

    ours                        buffer, uploader process, commit record
    dcp_save_*, dcp_async_*     torch's DCP, through s3torchconnector and through fsspec (s3fs)
    boto3, s5cmd                the same bytes as files in memory, by these clients alone;
                                s5cmd_unsigned does not hash them, as it does not over https

Then what concerns ours alone. The numbers are medians; ratios are ours / theirs, of times or bytes,
but for uploads, where they are of throughput.

stall_vs_dcp_save: by how much a save makes the next step longer, beside which its copy is made, to
    how long DCP's holds the training: the faster of both, synchronous.
stall_vs_memcpy: the same, to one copy of as many bytes to memory in use, in the same worker.
upload_vs_s5cmd: from the beginning of the save to its commit; of s5cmd the faster of both.
upload_vs_dcp_s3torchconnector: the same, against DCP's synchronous save.
checksum_share: 1 - time of a save whose CRC32s cost nothing / time of a save. On a machine whose
    cores are all taken this is their share of the CPU time; a slower network (--link) hides them.
bytes_written_ratio: received by the server / bytes of the state, the worst of 1, 2, 4 replicas.
reshard_read_ratio: bytes read by N workers of a checkpoint of M / bytes they need.
replan_ratio: what the second save sets up before its first byte (plan, buffers, store) / the first.
throttled_ratio: a save at 20 % of 503s / one without, both through the proxy that answers them.
peak_extra_bytes_ratio: most memory of workers and uploader beyond the state / bytes of the state;
    a worker has its share once more (the buffer), and the uploader sends from there.
peer_heal_store_requests: asked of the server while a replica heals from another.

Of the times, uploads are this machine's CPU time (client, server and kernel share its cores) and
say what a client costs, not what S3 does; stalls are memory bandwidth. Bytes and requests do not
depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks._checkpoint_measure import (
    RESHARDS,
    SYSTEMS,
    Bench,
    Saved,
    bytes_written,
    first_and_second,
    form,
    hold,
    measure,
    peer_heal,
    reshard_read,
    twenty_percent,
    url_of,
    without_checksums,
)
from benchmarks._checkpoint_peers import CREDENTIALS, find_peers, versions
from benchmarks._checkpoint_workers import TIMEOUT_S, Setup, Workers
from benchmarks._common import (
    end_properly,
    limit_link,
    median_of,
    print_result,
    say,
    scratch,
    show_table,
)
from benchmarks._processes import Processes
from checkpointing import S3Config
from checkpointing.stores.s3.config import MIN_PART_BYTES
from checkpointing.stores.s3.pace import shared_file
from trainer.backend.rendezvous import Rendezvous

COPIES = 9
"""How often the stall is measured in a round."""


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mib", type=int, default=1024, help="the state (1024)")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each system (5)")
    parser.add_argument(
        "--link", help="rate of the way to the server, such as 4gbit; needs root, tc, unshare"
    )
    options = parser.parse_args()
    if options.link:
        limit_link("benchmarks.checkpoint", options.link)
    end_properly()
    os.environ.update(CREDENTIALS)
    peers = find_peers()
    with scratch("checkpoint") as directory, started(directory, peers, options.size_mib) as bench:
        result = run(bench, options.rounds)
    print_result(result)


def run(bench: Bench, rounds: int) -> dict[str, Any]:
    """All measurements. Returns what is printed."""
    form(bench, 1)
    say(f"{bench.state_bytes / 2**20:.0f} MiB in {len(bench.tensors)} tensors")
    setting = first_and_second(bench)
    bench.workers.tell("dump", bench.files[0].parent)
    saves, stalls = run_rounds(bench, rounds)
    checksums = median_of([without_checksums(bench) for _ in range(max(3, rounds))])
    say("reshards, replicas, heal")
    reads = {f"{saved}->{wanted}": reshard_read(bench, saved, wanted) for saved, wanted in RESHARDS}
    written = {replicas: bytes_written(bench, replicas) for replicas in (1, 2, 4)}
    heal = peer_heal(bench)
    rows = {
        name: {
            "held_s": statistics.median(one.held_s for one in found),
            "total_s": statistics.median(one.total_s for one in found),
        }
        for name, found in saves.items()
    }
    for row in rows.values():
        row["MiB_per_s"] = bench.state_bytes / 2**20 / row["total_s"]
    show_table("saves", rows)
    ours_s, plain_s = (statistics.median(column) for column in zip(*stalls, strict=True))
    return {
        **ratios(rows, ours_s, plain_s),
        "checksum_share": round(checksums["share"], 4),
        "bytes_written_ratio": round(max(written.values()), 6),
        "reshard_read_ratio": {name: round(ratio, 4) for name, ratio in reads.items()},
        "replan_ratio": round(setting["second_s"] / setting["first_s"], 5),
        "peak_extra_bytes_ratio": round(setting["peak_extra_bytes"] / setting["share_bytes"], 3),
        "peer_heal_store_requests": heal["heal_requests"],
        "detail": {
            "saves": {name: _rounded(row) for name, row in rows.items()},
            "stall_s": round(ours_s, 5),
            "memcpy_s": round(plain_s, 5),
            "checksums": checksums,
            "checksum_share_of_cpu": round(checksums["share_of_cpu"], 4),
            "bytes_written_ratio_by_replicas": written,
            "setting_up": _rounded(setting),
            "heal": heal,
            "injected_503": bench.rule.fired if bench.rule else 0,
            "state_bytes": bench.state_bytes,
            "tensors": len(bench.tensors),
            "rounds": rounds,
            "cores": os.cpu_count(),
            "versions": versions(),
        },
    }


def ratios(rows: dict[str, dict[str, float]], ours_s: float, plain_s: float) -> dict[str, float]:
    """Ours against each peer."""
    dcp_s = min(rows["dcp_save_s3torchconnector"]["held_s"], rows["dcp_save_fsspec"]["held_s"])
    s5cmd_s = min(rows["s5cmd"]["total_s"], rows["s5cmd_unsigned"]["total_s"])
    total_s = rows["ours"]["total_s"]
    found = {
        "stall_vs_dcp_save": ours_s / dcp_s,
        "stall_vs_memcpy": ours_s / plain_s,
        "upload_vs_s5cmd": s5cmd_s / total_s,
        "upload_vs_dcp_s3torchconnector": rows["dcp_save_s3torchconnector"]["total_s"] / total_s,
        "throttled_ratio": rows["ours_at_20_percent_503"]["total_s"]
        / rows["ours_by_proxy"]["total_s"],
    }
    return _rounded(found)


def run_rounds(
    bench: Bench, rounds: int
) -> tuple[dict[str, list[Saved]], list[tuple[float, float]]]:
    """Every system once in each round, after a round that does not count."""
    saves: dict[str, list[Saved]] = {name: [] for name in SYSTEMS}
    stalls: list[tuple[float, float]] = []
    with twenty_percent(bench):
        for number in range(rounds + 1):
            found = {}
            for name in SYSTEMS:
                found[name] = measure(bench, name)
                say(f"round {number}: {name} {found[name].total_s:.2f} s")
            copies = [hold(bench) for _ in range(COPIES)]
            if number:
                stalls += copies
                for name, saved in found.items():
                    saves[name].append(saved)
    return saves, stalls


@contextlib.contextmanager
def started(directory: Path, peers: Path, size_mib: int) -> Iterator[Bench]:
    """The server, the proxies before it, the processes of the run, and room for files."""
    from tests.support.fakes.s3_faults import FaultServer

    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        endpoint = _start_server(stack, directory)
        proxies = {name: FaultServer(endpoint) for name in ("proxy", "throttled")}
        urls = {"plain": endpoint, **{name: proxy.url for name, proxy in proxies.items()}}
        # With a small state smaller parts, so that there are requests enough to spoil some.
        part_bytes = min(S3Config.part_bytes, max(MIN_PART_BYTES, (size_mib << 20) // 32))
        stores = {
            name: S3Config(url=url_of(name), endpoint_url=url, part_bytes=part_bytes)
            for name, url in urls.items()
        }
        for config in stores.values():
            stack.callback(_forget_pace, config)
        setup = Setup(
            size_bytes=size_mib << 20,
            rendezvous=Rendezvous(host="127.0.0.1", port=meeting.port, timeout_s=TIMEOUT_S),
            peers=peers,
        )
        workers = stack.enter_context(Workers(setup, stores))
        for proxy in proxies.values():  # threads, so after the forks
            stack.enter_context(proxy)
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_", dir="/dev/shm"))
        files = [Path(memory) / f"rank{number}" for number in range(len(workers.worker_pids))]
        yield Bench(workers=workers, endpoint=endpoint, stores=stores, files=files, proxies=proxies)


def _start_server(stack: contextlib.ExitStack, directory: Path) -> str:
    processes = stack.enter_context(Processes(directory / "server.log"))
    port = directory / "port"
    server = processes.start("-m", "benchmarks._checkpoint_server", str(port))
    until_s = time.monotonic() + TIMEOUT_S
    while not port.exists():
        if server.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"the server did not start: {processes.log.read_text()[-500:]}")
        time.sleep(0.05)
    return f"http://127.0.0.1:{port.read_text()}"


def _forget_pace(config: S3Config) -> None:
    """What the stores of this run have left in this machine's memory."""
    file = shared_file(f"{config.endpoint_url} {config.bucket}")
    file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others have theirs there
        file.parent.rmdir()


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in numbers.items()}


if __name__ == "__main__":
    main()
