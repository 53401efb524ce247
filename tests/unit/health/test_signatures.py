"""Lines of logs, and what they say. Lines come from the sources that the table names."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any, get_args

import pytest

from elastic.protocol.causes import known_causes
from health.signatures import LINE_LENGTH, Log, Signature, find_sign, find_signs, known_signatures
from health.verdict import STEPS, Role, Subject

# The standard library's own, under the name that the interpreter has for it.
parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

MOST_TRIES = 200_000
"""Of one expression at one place of a line: the product of its repetitions."""

EFA_LINE = (
    "NET/OFI Request 0x7f456c224810 completed with error. RC: 103. Error: 4126 (Unresponsive "
    "receiver (reachable by EFA device but handshake failed) My EFA addr: "
    "fi_addr_efa://[fe80::c55:2eff:fe44:db5]:0:142160333 My host id: i-07792e0f955a9673b "
    "Peer EFA addr: fi_addr_efa://[fe80::8ff:f7ff:fefc:bc43]:0:1879318055 Peer host id: {peer})"
)

LINES: list[tuple[Log, str, str, dict[str, Any]]] = [
    (
        "kernel",
        "[111111111.111] NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', GPU has fallen off",
        "xid_79",
        {"of": "0000:05:00", "role": "root", "remedy": "reboot", "cause": "gpu_error"},
    ),
    ("kernel", "NVRM: Xid (0000:03:00): 13, Graphics", "xid_13", {"role": "confirmation"}),
    ("kernel", "NVRM: Xid (PCI:0000:83:00): 45, pid=7", "xid_45", {"role": "cascade"}),
    ("kernel", "NVRM: Xid (PCI:0000:83:00): 63, pid=7", "xid_63", {"role": "confirmation"}),
    (
        "kernel",
        "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to "
        "0x2 (Node Reboot Required)",
        "gpu_recovery_action",
        {"of": "0009:01:00", "remedy": "reboot"},
    ),
    (
        "kernel",
        "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from 0x0 (None) to "
        "0x2 (OS Reboot)",
        "gpu_recovery_action",
        {"of": "0000:02:00", "remedy": "reboot"},
    ),
    (
        "kernel",
        "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from 0x0 (None) to 0x7 (New)",
        "gpu_recovery_action",
        {"of": "0000:02:00", "remedy": "reboot"},
    ),
    (
        "kernel",
        "NVRM: Xid (PCI:0000:dc:00): 45, pid=7, name=python3, Ch 00000001 caused by previous "
        "Xid 149",
        "xid_149",
        {"of": "0000:dc:00", "role": "root", "remedy": "reset_gpu"},
    ),
    (
        "kernel",
        "NVRM: GPU 0000:81:00.0: RmInitAdapter failed! (0x25:0x40:1470)",
        "gpu_not_started",
        {"of": "0000:81:00", "remedy": "reboot"},
    ),
    (
        "kernel",
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] "
        "(0x00000062) returned from status @ kernel_channel.c:2874",
        "gpu_reset_required",
        {"role": "root", "remedy": "reset_gpu"},
    ),
    (
        "kernel",
        "NVRM: Xid (PCI:0000:04:00): 144, SAW_MVB Nonfatal XC0 i0 Link 00 (0x01 0x01)",
        "nvlink_nonfatal",
        {"role": "confirmation"},
    ),
    (
        "kernel",
        "NVRM: Xid (PCI:0000:04:00): 144, SAW_MVB Fatal XC0 i0 Link 00 (0x01 0x02)",
        "xid_144",
        {"role": "root", "remedy": "reset_gpu"},
    ),
    (
        "kernel",
        "NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.",
        "gpu_off_the_bus",
        {"of": "0000:29:00"},
    ),
    (
        "kernel",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up",
        "sxid_fatal",
        {"of": "0000:05:00.0", "subject": "link"},
    ),
    (
        "kernel",
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, x",
        "sxid_nonfatal",
        {},
    ),
    ("kernel", "python[7]: segfault at 0 ip 0 sp 0 error 4 in libnccl.so.2", "nccl_segfault", {}),
    (
        "kernel",
        "INFO: task python:7 blocked for more than 120 seconds.",
        "hung_task",
        {"worker": "w"},
    ),
    (
        "kernel",
        "nfs: server 10.0.3.7 not responding, still trying",
        "nfs_silent",
        {"of": "10.0.3.7"},
    ),
    (
        "kernel",
        "Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB",
        "oom_killed",
        {"worker": "w", "cause": "out_of_memory"},
    ),
    (
        "kernel",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,task=python,pid=7,uid=0",
        "oom_constraint",
        {"worker": "w"},
    ),
    (
        "raylet",
        "Selected to kill: (Actor(070fab12dff38b2fcdf1c34601000000): job ID=01000000, lease "
        "ID=00000000f8cd8fb4651c7b3c4888ed04d82d329abb6568f97e0513a9ba40eb34, task "
        "name=w1:A.__init__, required resources={}, pid=7, actual memory used=0.63GB, worker "
        "ID=ea078f8a8d65df2b76624492982251502beecbc39f944d21e271bf12)",
        "ray_oom_killed",
        {"worker": "w", "cause": "out_of_memory", "role": "root"},
    ),
    (
        "raylet",
        "OOM kill reason: Memory usage 2751959040B exceeded threshold of 2729862400B (10.8% of "
        "25276502016B limit)",
        "ray_memory_limit",
        {"worker": None, "node": "n1", "role": "confirmation"},
    ),
    ("kernel", "EXT4-fs (sda1): Remounting filesystem read-only", "remounted_read_only", {}),
    (
        "kernel",
        "blk_update_request: I/O error, dev nvme1n1, sector 8",
        "io_error",
        {"of": "nvme1n1"},
    ),
    (
        "kernel",
        "I/O error, dev nvme0n1, sector 131209936 op 0x0:(READ) flags 0x80700 phys_seg 25",
        "io_error",
        {"of": "nvme0n1", "remedy": None},
    ),
    (
        "kernel",
        "Buffer I/O error on dev nvme0n1p2, logical block 5, lost async page write",
        "io_error",
        {"of": "nvme0n1p2"},
    ),
    ("kernel", "Buffer I/O error on device dm-0, logical block 5", "io_error", {"of": "dm-0"}),
    (
        "kernel",
        "mlx5_core 0000:03:00.0: wait_func:1195:(pid 7): ENABLE_HCA(0x104) timeout. Will cause a "
        "leak of a command resource",
        "nic_silent",
        {"of": "0000:03:00.0", "cause": "node", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "mlx5_core 0000:d2:00.0: poll_health:825: device's health compromised - reached miss count",
        "nic_health",
        {"of": "0000:d2:00.0", "cause": "node", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "mlx5_core: INFO: synd 0x8: unrecoverable hardware error.",
        "nic_failed",
        {"of": "", "cause": "node", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "infiniband rdmap0s6: Admin queue is closed",
        "efa_closed",
        {"of": "rdmap0s6", "cause": "node", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "efa 0000:00:06.0: Wait for completion (polling) timeout",
        "efa_silent",
        {"of": "0000:00:06.0", "cause": "node", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "efa 0000:00:06.0: Reset indication didn't turn on",
        "efa_not_reset",
        {"of": "0000:00:06.0", "cause": "node", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "efa 0000:a0:1a.0 rdmap160s26: Admin queue is closed",  # as kernels of today
        "efa_closed",
        {"of": "rdmap160s26", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "efa 0000:a0:1a.0 rdmap160s26: The device didn't send any completion for admin cmd "
        "DEREG_MR(8) status 0 (ctx: 0x00000000, sq producer: 5, sq consumer: 5, cq consumer: 4)",
        "efa_silent",
        {"of": "rdmap160s26", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "efa 0000:00:1b.0 efa_0: Reset indication didn't turn on",
        "efa_not_reset",
        {"of": "efa_0", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "efa 0000:00:1b.0 efa_0: Device isn't ready, can't reset device",
        "efa_not_ready",
        {"of": "efa_0", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
        "memory_uncorrected",
        {"of": "MC0", "cause": "node", "remedy": "replace_node"},
    ),
    (
        "kernel",
        "nvme nvme1: I/O 5 QID 2 timeout, reset controller",
        "disk_timeout",
        {"of": "nvme1"},
    ),
    (
        "worker",
        EFA_LINE.format(peer="i-0f9e509bdf5c054bc"),
        "efa_peer_unresponsive",
        {"peer": "i-0f9e509bdf5c054bc", "node": "n1", "role": "root"},
    ),
    ("worker", EFA_LINE.format(peer="N/A"), "efa_peer_unnamed", {"peer": None, "role": "cascade"}),
    (
        "worker",
        "NCCL WARN socketProgress: Connection closed by remote peer ip-10-0-1-5.ec2.internal<3746>",
        "nccl_peer_closed",
        {"peer": None, "role": "cascade"},
    ),
    (
        "worker",
        "[gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:71",
        "gloo_peer_closed",
        {},
    ),
    ("worker", "torch.OutOfMemoryError: CUDA out of memory. Tried", "cuda_out_of_memory", {}),
    ("worker", "CUDA error: uncorrectable ECC error encountered", "cuda_ecc", {"subject": "gpu"}),
    (
        "worker",
        "cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error "
        "encountered",
        "cuda_ecc",
        {"subject": "gpu"},
    ),
    (
        "worker",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        "cuda_nvlink",
        {"subject": "link", "remedy": "reset_gpu"},
    ),
    ("worker", "KeyError: 'tokens'", "python_exception", {"cause": "user_error"}),
]


@pytest.mark.parametrize(("log", "line", "name", "shown"), LINES, ids=[row[2] for row in LINES])
def test_a_line_says(log: Log, line: str, name: str, shown: dict[str, Any]) -> None:
    sign = find_sign(line, log, "n1", 5.0, {7: "w"})
    assert sign is not None
    assert (sign.name, sign.source, sign.detail, sign.decisive) == (name, "log", line, False)
    assert {key: getattr(sign, key) for key in shown} == shown


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("kernel", "bridge: port 3(port2) entered disabled state"),
        ("kernel", "NVRM: Xid error: xyz, invalid data"),
        ("kernel", "NVRM: Xid (PCI:0000:05:00): 99999, unknown error"),
        ("kernel", "NVRM: Xid (PCI:0000:05:00): 43, pid=7, name=python"),  # IGNORE
        (
            "kernel",
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x1 to 0x0 (None)",
        ),
        ("kernel", "Out of memory: Killed process 8 (mysqld) total-vm:1kB"),  # not a worker
        ("worker", "NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."),  # not its to say
        (
            "kernel",
            "NVRM: Xid (PCI:0000:05:00): 45, pid=7, Ch 1 caused by previous Xid 43",
        ),  # IGNORE
        ("kernel", "efa 0000:a0:1a.0 rdmap160s26: Failed to process command DEREG_MR"),
        ("kernel", "ena 0000:00:05.0 eth0: Wait for completion (polling) timeout"),  # not EFA's
        *(
            ("kernel", line)
            for device in ("fd0", "sr0", "loop7", "nbd0")  # no disk of the machine
            for line in (
                f"I/O error, dev {device}, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1",
                f"Buffer I/O error on dev {device}, logical block 0, async page read",
            )
        ),
        ("kernel", "critical target error, dev sdc, sector 79816 op 0x3:(DISCARD) flags 0x800"),
        ("kernel", "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"),  # mended
        ("kernel", "mlx5_core 0000:41:00.1: Port module event: module 1, Cable unplugged"),
        ("kernel", "KeyError: 'tokens'"),
        ("raylet", "(Task: job ID=01000000, pid=7, actual memory used=21.95GB, worker ID=34)"),
        ("worker", "Selected to kill: (Task: , pid=7, actual memory used=1GB, worker ID=3)"),
        ("worker", "the error of the KeyError: kind"),
    ],
)
def test_a_line_says_nothing(log: Log, line: str) -> None:
    assert find_sign(line, log, "n1", 5.0, {7: "w"}) is None


@pytest.mark.parametrize(
    "line",
    [line for log, line, name, _ in LINES if name in ("oom_killed", "oom_constraint", "hung_task")],
)
def test_where_the_kernel_numbers_processes_otherwise_no_worker_is_meant(line: str) -> None:
    """A container's process 7 is not the kernel's."""
    sign = find_sign(line, "kernel", "n1", 5.0, None)
    assert sign is not None
    assert (sign.worker, sign.node, sign.role) == (None, "n1", "confirmation")


def test_only_the_beginning_of_a_line_is_looked_at() -> None:
    text = "CUDA out of memory"
    assert find_sign("x" * (LINE_LENGTH - len(text)) + text, "worker", "n", 0.0, {}) is not None
    assert find_sign("x" * (LINE_LENGTH - len(text) + 1) + text, "worker", "n", 0.0, {}) is None


def test_of_many_lines_each_name_counts_once() -> None:
    lines = ["KeyError: 1", "nothing", "KeyError: 2", "CUDA out of memory"]
    found = find_signs(lines, "worker", "n1", 0.0)
    assert [sign.name for sign in found] == ["python_exception", "cuda_out_of_memory"]


@pytest.mark.parametrize("signature", known_signatures(), ids=lambda signature: signature.name)
def test_an_entry_is_whole(signature: Signature) -> None:
    assert signature.role in get_args(Role)
    assert signature.subject in get_args(Subject)
    assert signature.log in get_args(Log)
    assert signature.cause in known_causes()
    assert signature.remedy is None or signature.remedy in STEPS
    assert signature.source
    assert not signature.invented
    assert (signature.blames == "nobody") <= (signature.role != "root")
    assert (signature.blames == "peer") <= ("peer" in signature.regex.groupindex)
    assert signature.regex.groupindex.keys() <= {"of", "pid", "peer", "xid", "action"}


@pytest.mark.parametrize("signature", known_signatures(), ids=lambda signature: signature.name)
def test_no_line_costs_an_expression_much(signature: Signature) -> None:
    assert tries(parser.parse(signature.regex.pattern)) <= MOST_TRIES


def test_a_costly_expression_would_be_found() -> None:
    assert tries(parser.parse(r"a{1,1000}b{1,1000}")) > MOST_TRIES
    for pattern in (r"a.*b", r"(a{1,3}){1,3}"):
        with pytest.raises(AssertionError):
            tries(parser.parse(pattern))


def tries(pattern: Any, inside: bool = False) -> int:
    """The product of all repetitions; each must be bounded, and none be in another."""
    product = 1
    for operation, argument in pattern:
        name = str(operation)
        if "REPEAT" in name:
            least, most, item = argument
            assert most is not parser.MAXREPEAT, "a repetition without a bound"
            assert not inside or most == 1, "a repetition in another"
            product *= (most - least + 1) * tries(item, inside or most > 1)
        elif name == "SUBPATTERN":
            product *= tries(argument[3], inside)
        elif name == "BRANCH":
            product *= max(tries(branch, inside) for branch in argument[1])
    return product


def test_needles_are_in_their_lines() -> None:
    """A needle that the expression does not need would hide lines."""
    for _, line, name, _ in LINES:
        for signature in known_signatures():
            if signature.name == name or (signature.name == "xid" and name.startswith("xid_")):
                assert signature.needle in line
                assert re.search(signature.regex, line)
