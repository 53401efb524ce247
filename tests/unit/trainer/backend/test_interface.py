"""Gloo listens where the control plane is reached from."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from trainer.backend.interface import GLOO_VARIABLE, interface_of, listen_towards, own_address


def test_loopback() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    name = interface_of("127.0.0.1")
    assert name in [name for _, name in socket.if_nameindex()]


def test_every_interface_is_found_by_its_address() -> None:
    try:
        shown = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("the command `ip` (iproute2) tells what is expected")
    rows = [line.split() for line in shown.stdout.splitlines() if "secondary" not in line]
    expected = {row[3].split("/")[0]: row[1] for row in rows}
    assert expected
    assert {address: interface_of(address) for address in expected} == expected


def test_an_address_of_another_machine_is_nobodys() -> None:
    assert interface_of("203.0.113.7") is None


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_VARIABLE, "chosen")
    listen_towards("127.0.0.1", 1)
    assert os.environ[GLOO_VARIABLE] == "chosen"


def test_left_open_it_is_the_interface_towards_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_VARIABLE, "to be undone")
    monkeypatch.delenv(GLOO_VARIABLE)
    listen_towards("127.0.0.1", 1)
    assert os.environ[GLOO_VARIABLE] == interface_of("127.0.0.1")
