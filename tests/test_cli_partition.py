"""``pipelane partition``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GRAPHS = Path(__file__).parent / "data" / "graphs"
VGG = str(GRAPHS / "pipedream" / "vgg16.txt")
PIPER = str(GRAPHS / "piper" / "bert32a100.json")


def run(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelane", "partition", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"COLUMNS": str(columns), "PATH": "", "PYTHONIOENCODING": "ascii"},
    )


def test_json_says_everything() -> None:
    done = run(VGG, "-k", "6", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["bottleneck"] == pytest.approx(159.531)
    assert found["lower_bound"] == found["bottleneck"] == max(found["stage_costs"])
    assert found["exact"] is True
    assert found["unit"] == "ms"
    names = [name for stage in found["stages"] for name in stage]
    assert len(names) == len(set(names)) == 40
    assert {"method", "seconds"} <= set(found)
    fewer = json.loads(run(VGG, "-k", "8", "--comm", "--json").stdout)
    assert fewer["bottleneck"] == pytest.approx(304.097, abs=1e-3)
    assert len(fewer["stages"]) < 8
    exactly = json.loads(run(VGG, "-k", "8", "--comm", "--exactly", "--json").stdout)
    assert len(exactly["stages"]) == 8
    assert exactly["bottleneck"] >= fewer["bottleneck"]


def test_names_that_are_not_unique_become_ids() -> None:
    found = json.loads(run(PIPER, "-k", "4", "--json").stdout)
    listed = [name for stage in found["stages"] for name in stage]
    assert len(listed) == len(set(listed)) == 37


def test_memory_that_no_plan_meets_is_a_no() -> None:
    done = run(PIPER, "-k", "4", "--memory", "12GiB")
    assert done.returncode == 1
    assert "needs" in done.stderr
    assert "bytes" in done.stderr
    done = run(PIPER, "-k", "4", "--memory", "12GiB", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["stages"] is None
    done = run(PIPER, "-k", "4", "--memory", "20GiB")
    assert done.returncode == 0
    assert "272.86 ms, proven optimal" in done.stdout


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_table_fits(columns: int) -> None:
    for options in (["--comm"], ["--memory", "20GiB"]):
        done = run(VGG if len(options) == 1 else PIPER, "-k", "4", *options, columns=columns)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        assert max(map(len, done.stdout.splitlines())) <= columns
        assert "Slowest" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([VGG, "-k", "0"], 2, "at least 1"),
        ([VGG, "-k", "41", "--exactly"], 1, "41 stages for 40 layers"),
        ([VGG, "-k", "2", "--bandwidth", "1e9"], 2, "add --comm"),
        ([VGG, "-k", "2", "--comm", "--bandwidth", "1e9"], 2, "times are in ms"),
        ([VGG, "-k", "2", "--memory", "much"], 2, "not a size"),
        ([VGG, "-k", "2", "--speeds", "1"], 2, "1 numbers for 2 ranks"),
        ([VGG, "-k", "2", "--memory", "9GiB", "--schedule", "nope"], 2, "unknown schedule"),
        (["nothing.json", "-k", "2"], 2, "cannot read"),
    ],
)
def test_wrong_use(arguments: list[str], code: int, word: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert word in done.stderr
    assert "Traceback" not in done.stderr
