"""What the README and the docs say is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelane.catalogue import schedule_names

README = (Path(__file__).parent.parent / "README.md").read_text()
CATALOGUE = (Path(__file__).parent.parent / "docs" / "schedules.md").read_text()
_PICTURE = re.compile(r"```console\n\$ pipelane (show [^\n]*)\n(.*?)```", re.DOTALL)
PICTURES = _PICTURE.findall(README) + _PICTURE.findall(CATALOGUE)


def run(*arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 20
    (tmp_path / "train.py").write_text(example)
    output = run("train.py", cwd=tmp_path)
    assert "1f1b, measured  p=4 m=8" in output
    assert "makespan" in output


@pytest.mark.parametrize(("command", "picture"), PICTURES, ids=[c for c, _ in PICTURES])
def test_pictures_are_what_the_command_prints(command: str, picture: str) -> None:
    assert picture.strip() in run("-m", "pipelane", *command.split())


def test_there_are_pictures_and_every_schedule_is_told_of() -> None:
    assert len(PICTURES) == 2 + 11
    for name in schedule_names():
        assert f"| `{name}` |" in CATALOGUE
        assert f"`{name}`" in README
