"""What the import linter cannot say: which parts of Ray, and what is imported with a module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import ROOT

PACKAGES = ("elastic", "trainer", "checkpointing", "health")
RAY_INTERNALS = ("ray._private", "ray.train.v2._internal")
ALLOWED = ROOT / "elastic" / "ray_compat"
REPORTING = (
    "callback", "event_log", "follower", "incidents", "picture", "progress", "report",
    "tensorboard",
)  # fmt: skip
LIGHT_MODULES = ["protocol/events.py"] + [f"reporting/{name}.py" for name in REPORTING]


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Names that import statements among `nodes` bring in, as `module` or `module.name`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def uses_ray_internals(source: str) -> bool:
    return any(is_in(n, *RAY_INTERNALS) for n in imported(ast.walk(ast.parse(source))))


@pytest.mark.parametrize(
    ("source", "internal"),
    [
        ("import ray._private.worker", True),
        ("from ray import _private", True),
        ("def f():\n    from ray.train.v2._internal.execution import context", True),
        ("import ray.train.v2", False),
        ("from ray.train import ScalingConfig", False),
    ],
)
def test_the_check_sees_every_kind_of_import(source: str, internal: bool) -> None:
    assert uses_ray_internals(source) is internal


def test_only_ray_compat_imports_rays_internals() -> None:
    files = [f for p in PACKAGES for f in (ROOT / p).rglob("*.py") if ALLOWED not in f.parents]
    assert files
    offenders = [f for f in files if uses_ray_internals(f.read_text(encoding="utf-8"))]
    assert offenders == []


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_reading_a_report_needs_neither_ray_nor_torch(module: str) -> None:
    tree = ast.parse((ROOT / "elastic" / module).read_text(encoding="utf-8"))
    assert not [n for n in imported(iter(tree.body)) if is_in(n, "ray", "torch")]


def test_a_node_agent_carries_neither_torch_nor_ray_train() -> None:
    """Ray imports an actor's module wherever a handle of it arrives."""
    modules = "elastic.node.agent, elastic.coordinator.actor, elastic.node.snapshot_holder"
    heavy = "{'torch', 'ray.train', 'pandas', 'transformers'}"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
