"""Which module may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_import_pipelane_is_light() -> None:
    modules = loaded_by("import pipelane")
    for heavy in ("torch", "typer", "rich", "networkx", "sklearn", "numpy", "asyncio"):
        assert heavy not in modules


def test_planning_needs_no_torch() -> None:
    code = "import pipelane; pipelane.check(pipelane.build_schedule('1f1b', 4, 8))"
    assert "torch" not in loaded_by(code)


def test_the_pipeline_needs_no_command_line() -> None:
    modules = loaded_by("import pipelane; pipelane.Pipeline; pipelane.launch")
    for name in ("typer", "sklearn", "torch.distributed.run", "torch.distributed.launcher"):
        assert name not in modules


def test_functions_are_not_hidden_by_modules_of_the_same_name() -> None:
    import pipelane
    import pipelane.check
    import pipelane.plan
    import pipelane.simulate

    for name in ("check", "plan", "simulate", "profile", "partition", "launch", "reference"):
        assert callable(getattr(pipelane, name)), name
    assert set(dir(pipelane)) >= {"Pipeline", "launch", "check"}
    with pytest.raises(AttributeError, match="nothing_like_it"):
        pipelane.nothing_like_it  # noqa: B018


def names_in(code: str) -> set[str]:
    """What is imported, or reached through a name (``torch.distributed`` after ``import torch``),
    or spelled as text for a dynamic import.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch."):
            found.add(str(node.value))
    return found


def uses_torch_distributed(code: str) -> bool:
    return any(f"{name}.".startswith("torch.distributed.") for name in names_in(code))


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch import nn, distributed as d",
        "from torch.distributed import rpc",
        "from torch.distributed.pipelining import schedules",
        "import torch\ntorch.distributed.init_process_group()",
        "def f():\n    import torch.distributed.elastic",
        "import_module('torch.distributed')",
    ],
)
def test_the_scan_sees_every_way_to_reach_torch_distributed(code: str) -> None:
    assert uses_torch_distributed(code)


@pytest.mark.parametrize(
    "code", ["import torch", "from torch import nn", "from torch.distributions import Normal"]
)
def test_the_scan_sees_nothing_else(code: str) -> None:
    assert not uses_torch_distributed(code)


def test_only_the_runtime_touches_torch_distributed() -> None:
    users = {
        path.relative_to(ROOT / "pipelane").parts[0]
        for path in (ROOT / "pipelane").rglob("*.py")
        if uses_torch_distributed(path.read_text())
    }
    assert users == {"runtime"}


def test_schedules_know_only_actions_and_schedules() -> None:
    """A list of what is allowed: the import-linter contract can only list what is not."""
    allowed = {"pipelane.actions", "pipelane.schedule", "pipelane.errors", "__future__", "."}
    standard = sys.stdlib_module_names - {"__future__"}
    files = sorted((ROOT / "schedules").rglob("*.py"))
    assert len(files) > 3
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {"." if node.level == 1 else str(node.module)}
            else:
                continue
            ours = {name for name in names if name.split(".")[0] not in standard}
            assert ours - {""} <= allowed, (path.name, ours)


def test_import_rules_hold() -> None:
    """The contracts of pyproject.toml, where import-linter is installed."""
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
