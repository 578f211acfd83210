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


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_only_the_runtime_touches_torch_distributed() -> None:
    users = {
        path.relative_to(ROOT / "pipelane").parts[0]
        for path in (ROOT / "pipelane").rglob("*.py")
        if any(name.startswith("torch.distributed") for name in imports_of(path))
    }
    assert users == {"runtime"}


def test_schedules_know_only_actions_and_schedules() -> None:
    allowed = ("pipelane.actions", "pipelane.schedule", "pipelane.errors", "_single", "__future__")
    for path in (ROOT / "schedules").glob("*.py"):
        for name in imports_of(path):
            assert name.startswith(allowed), (path.name, name)
