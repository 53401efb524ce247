"""The facts are read from a tree of real files, as sysfs and EFA's installer lay them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.aws_machine import PLUGIN_FOLDER, make_machine, write
from trainer.backend.efa_facts import EfaFacts, read_efa


def test_a_p5(tmp_path: Path) -> None:
    facts = read_efa(make_machine(tmp_path), packages=())
    assert len(facts.devices) == 32 and "mlx5_0" not in facts.devices
    assert facts == EfaFacts(
        instance="p5.48xlarge",
        devices=facts.devices,
        kernel=(6, 8, 0),
        gpu_driver=(580, 95, 5),
        installer=(1, 45, 0),
        libfabric=(2, 3, 1),
        plugin=(1, 17, 1),
        plugin_path=str(tmp_path / PLUGIN_FOLDER / "libnccl-net.so"),
        nccl=(2, 29, 3),
    )


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert read_efa(tmp_path, packages=()) == EfaFacts()


def test_libfabrics_own_word_goes_before_the_installers(tmp_path: Path) -> None:
    make_machine(tmp_path, libfabric="1.22.0amzn4.0")
    assert read_efa(tmp_path, packages=()).libfabric == (1, 22, 0)
    write(tmp_path / "opt/amazon/efa/lib/pkgconfig/libfabric.pc", "Version: 2.1.0amzn3.0\n")
    assert read_efa(tmp_path, packages=()).libfabric == (2, 1, 0)


def test_the_nccl_of_torchs_wheel_goes_before_the_machines(tmp_path: Path) -> None:
    make_machine(tmp_path / "root", nccl="2.26.2")
    packages = tmp_path / "site-packages"
    (packages / "nvidia_nccl_cu13-2.28.9.dist-info").mkdir(parents=True)
    facts = read_efa(tmp_path / "root", [str(packages)])
    assert (facts.nccl, facts.cuda) == ((2, 28, 9), 13)


def test_a_plugin_built_from_a_commit_has_a_place_but_no_version(tmp_path: Path) -> None:
    make_machine(tmp_path, plugin=None)
    library = write(tmp_path / "opt/aws-ofi-nccl/lib/libnccl-net-ofi.so", "aws-ofi-nccl git-6e504")
    facts = read_efa(tmp_path, packages=())
    assert (facts.plugin, facts.plugin_path) == (None, str(library))


def test_a_tuner_of_its_own(tmp_path: Path) -> None:
    tuner = write(make_machine(tmp_path) / PLUGIN_FOLDER / "libnccl-ofi-tuner.so", "ELF")
    assert read_efa(tmp_path, packages=()).tuner_path == str(tuner)


_WRITE_ONLY = Path("/sys/bus/cpu/drivers_probe")
"""Nobody may read it, root neither."""


@pytest.mark.skipif(not _WRITE_ONLY.exists(), reason="no such file in this sysfs")
def test_a_plugin_that_may_not_be_read_has_no_version(tmp_path: Path) -> None:
    library = make_machine(tmp_path) / PLUGIN_FOLDER / "libnccl-net.so"
    library.unlink()
    library.symlink_to(_WRITE_ONLY)
    facts = read_efa(tmp_path, packages=())
    assert (facts.plugin, facts.plugin_path, len(facts.devices)) == (None, str(library), 32)


def test_folders_that_may_not_be_read_tell_nothing(tmp_path: Path) -> None:
    """A name that is too long fails for root, too."""
    beyond = tmp_path / ("x" * 300)
    assert read_efa(beyond, packages=(str(beyond),)) == EfaFacts()
