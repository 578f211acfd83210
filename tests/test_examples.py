"""The examples and the demo run as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 110
    return done.stdout


def test_demo() -> None:
    output = run("-m", "pipelane", "demo", "--epochs", "4")
    assert "equal bit for bit on every rank" in " ".join(output.split())
    assert "1f1b, planned  p=4 m=8" in output
    assert "1f1b, measured  p=4 m=8" in output
    assert "proven optimal" in output
    accuracy = re.search(r"([0-9.]+)% of 359 held-out digits", output)
    assert accuracy
    assert float(accuracy.group(1)) > 60


def test_digits() -> None:
    output = run(str(EXAMPLES / "digits.py"))
    accuracy = re.search(r"([0-9.]+)% of 360 held-out digits", output)
    assert accuracy
    assert float(accuracy.group(1)) >= 95
    assert "1f1b, measured  p=4 m=8" in output


def test_characters() -> None:
    output = run(str(EXAMPLES / "characters.py"), "--steps", "51", "--ranks", "3")
    first, *_, later = (float(value) for value in re.findall(r"loss ([0-9.]+)", output))
    assert later < first - 1
    assert "1f1b, measured  p=3 m=4" in output
    assert "A sample: 'The " in output


def test_language() -> None:
    output = run(str(EXAMPLES / "language.py"))
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]
    assert len(losses) == 5
    assert losses[-1] < 0.75 * losses[0]
