"""Which environment NCCL needs over EFA on which AWS machine, and why. Pure.

The tables below are the whole of it: what is set, what is left to the libraries, and what a user
may have set that does harm. What the user has set stays. Nothing is set on a machine of an unknown
kind, or without EFA devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainer.backend.efa_facts import EfaFacts, Version

_CHEATSHEET = "aws/aws-ofi-nccl: doc/efa-env-var.md"
_AWSOME = "aws-samples/awsome-distributed-training: 1.architectures/efa-cheatsheet.md"


@dataclass(frozen=True, kw_only=True)
class InstanceKind:
    """A type of machine with GPUs that EFA's plugin reaches directly (GPUDirect RDMA)."""

    gpus: int
    """On each."""
    devices: int
    """EFA devices, where all network cards are attached."""


INSTANCES = {
    "p4d.24xlarge": InstanceKind(gpus=8, devices=4),
    "p4de.24xlarge": InstanceKind(gpus=8, devices=4),
    "p5.48xlarge": InstanceKind(gpus=8, devices=32),
    "p5e.48xlarge": InstanceKind(gpus=8, devices=32),
    "p5en.48xlarge": InstanceKind(gpus=8, devices=16),
    "p6-b200.48xlarge": InstanceKind(gpus=8, devices=8),
    "p6-b300.48xlarge": InstanceKind(gpus=8, devices=16),
}
"""By EC2's name. Source: awslabs/awsome-distributed-training, 2.gpu-cluster-healthcheck, and its
micro-benchmarks for p6-b300."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One variable that a machine needs."""

    name: str
    """The variable."""
    value: str
    """What it needs."""
    reason: str
    """Why."""
    source: str
    """Who says so."""
    yours: str | None
    """What the user has set instead, which stays; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class Harm:
    """A variable of the user's that does harm on this machine."""

    name: str
    """The variable."""
    value: str
    """What it is set to."""
    reason: str
    """What comes of it."""

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.reason}. Unset it"


@dataclass(frozen=True, kw_only=True)
class EfaPlan:
    """What to do with the environment of a process on one machine."""

    settings: tuple[Setting, ...] = ()
    """All that the machine needs, what the user has set otherwise included."""
    harms: tuple[Harm, ...] = ()
    """What to warn of."""

    @property
    def missing(self) -> dict[str, str]:
        """Name -> value of what is to be set."""
        return {one.name: one.value for one in self.settings if one.yours is None}


def plan_efa(facts: EfaFacts, environment: Mapping[str, str]) -> EfaPlan:
    """What NCCL needs on a machine, beside what the user has set.

    Args:
        facts: the machine's.
        environment: of the process, as the user and the cluster have left it.
    """
    if facts.instance not in INSTANCES or not facts.devices:
        return EfaPlan()
    settings = (
        Setting(
            name=rule.name,
            value=value,
            reason=rule.reason,
            source=rule.source,
            yours=environment.get(rule.name),
        )
        for rule in _RULES
        if (value := rule.value(facts)) is not None
    )
    harms = (
        Harm(name=name, value=value, reason=rule.reason)
        for name, value in sorted(environment.items())
        for rule in _HARMS
        if fnmatchcase(name, rule.name) and rule.harms(value, facts)
    )
    return EfaPlan(settings=tuple(settings), harms=tuple(harms))


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """When a variable is set."""

    name: str
    """The variable."""
    value: Callable[[EfaFacts], str | None]
    """What a machine needs; None: nothing."""
    reason: str
    """Why."""
    source: str
    """Who says so."""


@dataclass(frozen=True, kw_only=True)
class _HarmRule:
    """When a user's variable does harm."""

    name: str
    """A pattern of names."""
    harms: Callable[[str, EfaFacts], bool]
    """Whether this value does, on this machine."""
    reason: str
    """What comes of it."""


def _before(version: Version | None, first: Version) -> bool:
    """Whether it is older. An unknown one is taken for new."""
    return version is not None and version < first


def _where(value: str, needed: Callable[[EfaFacts], bool]) -> Callable[[EfaFacts], str | None]:
    return lambda facts: value if needed(facts) else None


def _own_tuner(facts: EfaFacts) -> str | None:
    """A plugin before 1.16 leaves its tuner out, and NCCL before 2.21.5 does not know its kind."""
    old = _before(facts.plugin, (1, 16)) and not _before(facts.nccl, (2, 21, 5))
    return facts.tuner_path if old else None


_RULES = (
    _Rule(
        name="FI_EFA_USE_HUGE_PAGE",
        value=lambda facts: "0",
        reason="a process that holds huge pages may not fork: 'Cannot allocate memory' in data "
        "loaders; without them a little speed is lost",
        source=_CHEATSHEET,
    ),
    _Rule(
        name="NCCL_SOCKET_IFNAME",
        value=lambda facts: "^lo,docker,veth,eni,pod-id-link",
        reason="the ranks meet over TCP first, and no other machine is reached through loopback, "
        "container bridges or EKS's link-local interface",
        source=f"{_AWSOME}; aws-samples/aws-do-eks: pull request 54",
    ),
    _Rule(
        name="FI_EFA_USE_DEVICE_RDMA",
        value=_where("1", lambda f: _before(f.plugin, (1, 7)) or _before(f.libfabric, (1, 18))),
        reason="libfabric before 1.18 and plugins before 1.7 use GPUDirect RDMA only when asked",
        source=_CHEATSHEET,
    ),
    _Rule(
        name="FI_PROVIDER",
        value=_where("efa", lambda f: _before(f.plugin, (1, 6))),
        reason="plugins before 1.6 take any provider of libfabric's, TCP included",
        source=_CHEATSHEET,
    ),
    _Rule(
        name="NCCL_PROTO",
        value=_where("simple", lambda f: _before(f.plugin, (1, 6))),
        reason="EFA delivers out of order, which the LL protocols do not bear; later plugins see "
        "to it themselves",
        source=_CHEATSHEET,
    ),
    _Rule(
        name="FI_EFA_SET_CUDA_SYNC_MEMOPS",
        value=_where(
            "0",
            lambda f: _before(f.installer, (1, 29, 1)) and not _before(f.nccl, (2, 19)),
        ),
        reason="NCCL from 2.19 hands EFA before 1.29.1 memory that it cannot register otherwise: "
        "'Unable to register memory … RC: -22'",
        source=_AWSOME,
    ),
    _Rule(
        name="NCCL_TUNER_PLUGIN",
        value=_own_tuner,
        reason="this plugin has AWS's choice of algorithms in a library of its own, which NCCL "
        "does not look for",
        source="aws/aws-ofi-nccl: doc/tuner.md",
    ),
)

LEFT_ALONE = {
    "FI_EFA_FORK_SAFE": "every plugin since 1.2 sets it",
    "NCCL_BUFFSIZE, NCCL_P2P_NET_CHUNKSIZE, NCCL_NVLS_CHUNKSIZE, NCCL_NVLSTREE_MAX_CHUNKSIZE": (
        "the plugin sets them for each type of machine; AWS says to leave them to it"
    ),
    "NCCL_TUNER_PLUGIN": "plugins from 1.16 set it",
    "NCCL_NET_PLUGIN": "NCCL finds libnccl-net.so where the loader does; a name could hide it",
    "NCCL_TOPO_FILE, NCCL_NET_FORCE_FLUSH, OFI_NCCL_PROTOCOL": (
        "the plugin knows them for each type of machine"
    ),
    "NCCL_ALGO, NCCL_PROTO, NCCL_MIN_NCHANNELS": (
        "the plugin's tuner and NCCL choose better; for determinism='strict' the first two are set "
        "all the same"
    ),
}
"""Variables -> why they are not set, although guides name them. Source: doc/efa-env-var.md and
src/platform-aws.cpp of aws/aws-ofi-nccl, as of 2026-08-12."""


def _is_lonely(value: str) -> bool:
    """Whether a choice of interfaces names one that ends on the machine."""
    names = [] if value.startswith("^") else value.split(",")
    return any(name.lstrip("=") in ("lo", "docker0") for name in names)


_HARMS = (
    _HarmRule(
        name="NCCL_NET",
        harms=lambda value, facts: value.lower() in ("socket", "ib"),
        reason="it keeps NCCL from EFA's plugin: 10 to 100 times slower",
    ),
    _HarmRule(
        name="NCCL_NET_PLUGIN",
        harms=lambda value, facts: value.lower() == "none",
        reason="it keeps NCCL from EFA's plugin: 10 to 100 times slower",
    ),
    _HarmRule(
        name="FI_PROVIDER",
        harms=lambda value, facts: value != "efa",
        reason="libfabric does not take EFA then",
    ),
    _HarmRule(
        name="FI_EFA_USE_DEVICE_RDMA",
        harms=lambda value, facts: value == "0",
        reason="it turns GPUDirect RDMA off: all bytes pass through the host's memory",
    ),
    _HarmRule(
        name="OFI_NCCL_DISABLE_GDR_REQUIRED_CHECK",
        harms=lambda value, facts: value == "1",
        reason="a machine that has lost GPUDirect RDMA is slow then instead of failing",
    ),
    _HarmRule(
        name="FI_EFA_FORK_SAFE",
        harms=lambda value, facts: value == "0" and _before(facts.kernel, (5, 15)),
        reason="on a kernel before 5.15 a fork ends the process, or corrupts what it sends",
    ),
    _HarmRule(
        name="RDMAV_*",
        harms=lambda value, facts: True,
        reason="rdma-core's variables break things on newer kernels; EFA has its own",
    ),
    _HarmRule(
        name="NCCL_PROTO",
        harms=lambda value, facts: value.lower() != "simple" or not _before(facts.plugin, (1, 6)),
        reason="the LL protocols corrupt data where a device delivers out of order, and Simple "
        "alone is slow for small messages; the plugin knows which are safe",
    ),
    _HarmRule(
        name="NCCL_SOCKET_IFNAME",
        harms=lambda value, facts: _is_lonely(value),
        reason="no other machine is reached through this interface",
    ),
    _HarmRule(
        name="NCCL_IB_DISABLE",
        harms=lambda value, facts: value == "1",
        reason="it is for clusters that shall use TCP; EFA's plugin does not read it, so it only "
        "misleads",
    ),
)
