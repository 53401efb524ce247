"""Who replaces machines: one interface, and a module for each kind of provider.

A machine is replaced once the run has left it, so what a provider does takes no worker away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    """A node of Ray's, as Ray knows it."""

    node: str
    """Ray's id."""
    address: str
    """IP address by which the cluster knows it."""
    instance: str
    """What those who started it call it, where Ray was told: its pod, its instance; or ""."""
    head: bool = False
    """Whether Ray's head is there: the cluster would end with it."""

    @property
    def name(self) -> str:
        """That, or else its address."""
        return self.instance or self.address


class NodeProvider(Protocol):
    """Replaces machines. Calls may take a minute; each is made on a thread.

    A call that is repeated, as by a coordinator that was started anew, goes on where the first one
    came to; but for `LocalProvider`, which starts one more node.
    """

    def machine_of(self, node: NodeIdentity) -> str:
        """The name of the machine below a node. It outlives Ray and the run. Asked when the node's
        first worker starts, for a lost node may not be known any more.

        Raises:
            Exception: it is not known. Whoever asks does without it.
        """

    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        """Takes the machine out for good and sees to it that another one comes.

        Args:
            nodes: all of Ray's nodes there.
            machine: its name.
            reason: in words.

        Returns:
            What was done, in words.

        Raises:
            NoCapacityError, ProviderAwayError: ask again later.
            Exception: it was not done.
        """

    def reboot(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str | None:
        """Starts the machine anew, where it comes back by itself. Arguments: see `replace`.

        Returns:
            What was done, in words, also where it is only known to have been asked for; None: this
            machine cannot be rebooted so, replace it.

        Raises:
            ProviderAwayError: it may have been asked for, or not; ask again later.
            Exception: it was not done.
        """

    def complaints(self) -> dict[str, str]:
        """What the platform itself has against its machines now: machine -> in words."""
