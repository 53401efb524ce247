"""What NCCL's log tells. The lines are from the threads and files that each case names; names of
hosts are shortened."""

from __future__ import annotations

import pytest

from trainer.backend.nccl_log import Network, parse_nccl_log

P4D = """\
a-1:18564:18638 [2] NCCL INFO NET/OFI Using transport protocol SENDRECV
a-1:18564:18638 [2] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
libfabric:18563:1733296782::efa:ep_ctrl:efa_rdm_ep_set_shared_memory_permitted():1410<warn> FI_OPT
a-1:18563:18636 [1] NCCL INFO NET/OFI Setting NCCL_PROTO to "simple"
a-1:18059:18146 [2] NCCL INFO Using network AWS Libfabric
a:18:20 [2] NCCL INFO Channel 04/1 : 15[7] -> 2[2] [send] via NET/AWS Libfabric/1/GDRDMA/Shared
a-1:18059:20782 [2] NCCL INFO Channel 00/1 : 2[2] -> 5[5] via P2P/CUMEM/read
"""  # aws/aws-ofi-nccl#715

P5EN = """\
h-3:6310:6318 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
h-3:6310:6318 [0] NCCL INFO NET/OFI NIC group 0 device #0 0000:56:00.0
h-2:6831:6840 [0] NCCL INFO NET/OFI Support for DMA-BUF registrations: false
h-2:6831:6840 [0] NCCL INFO PROFILER/Plugin: Could not find: libnccl-profiler.so.
h-2:6831:6840 [0] NCCL INFO Using network Libfabric
"""  # NVIDIA/nccl#1597

EFA_DIRECT = """\
n:172:172 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
n:172:172 [0] NCCL INFO Using network Libfabric
n:172:172 [0] NCCL INFO GPU Direct RDMA Enabled for GPU 0 / HCA 0 (distance 4 <= 5),
n:172:172 [0] NCCL INFO GPU Direct RDMA Disabled for GPU 0 / HCA 9 (distance 7 > 5)
"""  # aws/aws-ofi-nccl: src/nccl_ofi_net.cpp; NVIDIA/nccl: src/graph/paths.cc

UNSUPPORTED = """\
a:17774:17853 [1] nccl_net_ofi_create:259 NCCL WARN NET/OFI aws-ofi-nccl initialization failed
a-1:17780:17851 [7] NCCL INFO NET/Socket : Using [0]eth0:10.0.227.37<0>
a-1:17774:17853 [1] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
a-1:17780:17851 [7] NCCL INFO Using non-device net plugin version 0
a-1:17780:17851 [7] NCCL INFO Using network Socket
"""  # aws/aws-ofi-nccl#715

NO_PROVIDER = """\
d:79:79 [0] NCCL INFO NET/OFI Using transport protocol RDMA (platform set)
d:79:79 [0] NCCL INFO NET/OFI No eligible providers were found
d:79:79 [0] NCCL INFO NET/OFI aws-ofi-nccl initialization failed
d:79:79 [0] NCCL INFO NET/IB : No device found.
d:79:79 [0] NCCL INFO Initialized NET plugin Socket
d:79:79 [0] NCCL INFO NET/Socket : Using [0]enp73s0:10.1.216.156<0>
d:79:79 [0] NCCL INFO Using network Socket
"""  # aws-samples/aws-do-eks#54

NO_PLUGIN = """\
b:1:1 [1] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
b:1:1 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
b:1:1 [0] NCCL INFO Using network Socket
"""  # NVIDIA/nccl#959

PLUGIN_OVER_TCP = """\
i:25604:25604 [0] NCCL INFO NET/Socket : Using [0]eth0:192.168.16.255<0>
i:25604:25604 [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm
i:35480:35545 [0] NCCL INFO Ring 00 : 7 -> 8 [receive] via NET/AWS Libfabric/0
"""  # NVIDIA/nccl#229


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (P4D, Network(name="AWS Libfabric", provider="efa", devices=4, gpu_direct=True)),
        (P5EN, Network(name="Libfabric", provider="efa", devices=16)),
        (EFA_DIRECT, Network(name="Libfabric", provider="efa", devices=32, gpu_direct=True)),
    ],
)
def test_efa(log: str, expected: Network) -> None:
    assert parse_nccl_log(log) == expected and not expected.is_tcp


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            UNSUPPORTED,
            Network(name="Socket", troubles=("NET/OFI aws-ofi-nccl initialization failed",)),
        ),
        (
            NO_PROVIDER,
            Network(
                name="Socket",
                troubles=(
                    "NET/OFI No eligible providers were found",
                    "NET/OFI aws-ofi-nccl initialization failed",
                ),
            ),
        ),
        (
            NO_PLUGIN,
            Network(
                name="Socket",
                troubles=(
                    "NET/Plugin : No plugin found (libnccl-net.so).",
                    "Failed to open libibverbs.so[.1]",
                ),
            ),
        ),
        (PLUGIN_OVER_TCP, Network(provider="tcp;ofi_rxm", gpu_direct=False)),
    ],
)
def test_tcp(log: str, expected: Network) -> None:
    assert parse_nccl_log(log) == expected and expected.is_tcp


def test_the_interface_of_the_bootstrap_is_no_fallback() -> None:
    """NCCL's ranks always meet over TCP first."""
    log = P5EN + "n:1:1 [0] NCCL INFO Bootstrap: Using eth0:10.0.5.112<0>\n"
    assert not parse_nccl_log(log).is_tcp


def test_a_later_group_counts() -> None:
    assert parse_nccl_log(P5EN + UNSUPPORTED).name == "Socket"
    assert parse_nccl_log(UNSUPPORTED + P5EN).name == "Libfabric"


def test_one_channel_through_the_host_is_told() -> None:
    assert parse_nccl_log(P4D.replace("/1/GDRDMA/Shared", "/1/Shared")).gpu_direct is False


def test_an_empty_log_tells_nothing() -> None:
    assert parse_nccl_log("") == Network() and not Network().is_tcp
