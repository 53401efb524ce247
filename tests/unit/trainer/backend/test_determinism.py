"""What `strict` and `fast` set; the page of the manual says it all, and torch obeys."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch

from tests.support import ROOT
from trainer.backend.determinism import SETTINGS, Setting, plan_settings, settle

MEMORY: Any = torch.utils.deterministic
INDUCTOR: Any = torch._inductor.config


@pytest.fixture
def flags() -> Iterator[None]:
    """torch's own, put back afterwards."""
    mode = torch.get_deterministic_debug_mode()
    fills = MEMORY.fill_uninitialized_memory
    products, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    compiles = INDUCTOR._config["deterministic"].default
    tf32 = torch.backends.cudnn.allow_tf32
    yield
    torch.use_deterministic_algorithms(mode == 2)
    MEMORY.fill_uninitialized_memory = fills
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.benchmark = benchmark
    INDUCTOR._config["deterministic"].default = compiles
    torch.backends.cudnn.allow_tf32 = tf32


def test_a_cpu_needs_torchs_flags_alone() -> None:
    assert plan_settings("strict", "cpu") == {
        "deterministic_algorithms": True,
        "fill_uninitialized_memory": False,
    }


def test_a_gpu_needs_the_libraries_settings_too() -> None:
    assert plan_settings("strict", "cuda") == {
        **plan_settings("strict", "cpu"),
        "cudnn_benchmark": False,
        "matmul_precision": "highest",
        "cudnn_allow_tf32": False,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "simple",
        "NCCL_NVLS_ENABLE": "0",
    }


def test_fast_leaves_the_environment_to_the_cluster() -> None:
    assert not any(name.isupper() for name in plan_settings("fast", "cuda"))


@pytest.mark.usefixtures("flags")
def test_torch_is_set_and_set_back() -> None:
    settle("strict", "cuda", {})
    assert torch.are_deterministic_algorithms_enabled()
    assert torch._inductor.config.deterministic
    assert not MEMORY.fill_uninitialized_memory
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(RuntimeError, match="put_"):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    settle("fast", "cuda", {})
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch._inductor.config.deterministic
    assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"
    torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))


@pytest.mark.usefixtures("flags")
def test_no_thread_chooses_kernels_by_their_time() -> None:
    """On CUDA the backward is compiled on one of autograd's."""
    with ThreadPoolExecutor(1) as autograd:
        modes: tuple[tuple[Literal["strict", "fast"], bool], ...]
        modes = (("strict", True), ("fast", False))
        for mode, expected in modes:
            settle(mode, "cuda", {})
            seen = autograd.submit(lambda: INDUCTOR.deterministic).result()
            assert (INDUCTOR.deterministic, seen) == (expected, expected)


@pytest.mark.usefixtures("flags")
def test_what_the_cluster_exports_is_replaced_and_said(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"NCCL_ALGO": "Tree", "NCCL_PROTO": "simple", "NCCL_DEBUG": "INFO"}
    with caplog.at_level(logging.WARNING):
        settle("strict", "cuda", environment)
    (record,) = caplog.records
    assert "NCCL_ALGO=Tree is replaced by Ring" in record.message
    assert environment == {
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "simple",
        "NCCL_DEBUG": "INFO",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_NVLS_ENABLE": "0",
    }


def row(setting: Setting) -> str:
    fast = "as it is" if setting.fast is None else f"`{setting.fast}`"
    return (
        f"| `{setting.name}` | `{setting.strict}` | {fast} | {setting.reason} | {setting.cost} | "
        f"[source]({setting.source}) |"
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_manual_has_each_setting(setting: Setting) -> None:
    assert row(setting) in (ROOT / "docs" / "bits.md").read_text(encoding="utf-8")
