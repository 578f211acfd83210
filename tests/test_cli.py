"""The command line: exit codes, JSON, what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipelane

KEYS = {
    "schedule", "ranks", "microbatches", "chunks", "placement", "orders", "makespan", "span",
    "work", "idle", "bubble_rate", "bubble_fraction", "peak_activations", "lower_bound",
    "deadlock_free",
}  # fmt: skip


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelane", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **env},
    )  # fmt: skip


def test_show_json_has_the_documented_keys() -> None:
    done = run("show", "1f1b", "-p", "4", "-m", "8", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    data = json.loads(done.stdout)
    assert set(data) == KEYS
    assert data["makespan"] == data["lower_bound"] == 33
    assert data["work"] == [24] * 4
    assert data["idle"] == [9, 6, 3, 0]
    assert data["peak_activations"] == [4, 3, 2, 1]
    assert data["orders"][3][:2] == ["3F0", "3B0"]
    assert data["deadlock_free"] is True


def test_show_draws_plainly_into_a_pipe() -> None:
    done = run("show", "gpipe", "-p", "2", "-m", "3", "--comm", "0.5")
    assert done.returncode == 0
    done.stdout.encode("ascii")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "makespan 13" in done.stdout


def test_csv_round_trip_through_show_and_check(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    assert run("show", "1f1b", "-p", "3", "-m", "4", "--csv", str(file)).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]
    done = run("check", str(file))
    assert done.returncode == 0
    assert "Certificate" in done.stdout
    assert "3, 2, 1" in done.stdout
    facts = json.loads(run("check", str(file), "--json").stdout)
    assert facts["valid"] is True
    again = json.loads(run("show", str(file), "--json").stdout)
    assert again["makespan"] == 18
    assert run("show", str(file), "-p", "4").returncode == 2


def test_a_broken_schedule_is_a_no(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0B0\n1F0\n")
    done = run("check", str(file))
    assert done.returncode == 1
    assert done.stderr.startswith("error: schedule 'bad', rank 1")
    assert len(done.stderr.splitlines()) == 1
    done = run("check", str(file), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["valid"] is False


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["show", "zigzag", "-p", "2", "-m", "2"], "unknown schedule 'zigzag'"),
        (["show", "1f1b", "-p", "0", "-m", "2"], "ranks must be at least 1"),
        (["show", "1f1b", "-p", "2"], "-m"),
        (["show", "1f1b", "-p", "2", "-m", "2", "-v", "2"], "one chunk per rank"),
        (["show", "1f1b", "-p", "2", "-m", "2", "--f", "-1"], "must be finite and >= 0"),
        (["check", "/nowhere.csv"], "cannot read"),
        (["view", "/nowhere.json"], "cannot read"),
        (["run", "-n", "2", "/nowhere.py"], "no such script"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_use(arguments: list[str], word: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert word in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    for done in (
        run("--debug", "check", "/nowhere.csv"),
        run("check", "/nowhere.csv", PIPELANE_DEBUG="1"),
    ):
        assert done.returncode != 0
        assert "Traceback" in done.stderr


def test_view_draws_a_saved_timeline(tmp_path: Path) -> None:
    timeline = pipelane.simulate(pipelane.build_schedule("1f1b", 2, 3))
    file = tmp_path / "timeline.json"
    file.write_text(timeline.to_json())
    done = run("view", str(file), "--width", "60")
    assert done.returncode == 0
    assert "1f1b, planned" in done.stdout


def test_schedules_version_and_help() -> None:
    names = [entry["name"] for entry in json.loads(run("schedules", "--json").stdout)["schedules"]]
    assert {"naive", "gpipe", "1f1b"} <= set(names)
    assert run("--version").stdout == f"pipelane {pipelane.__version__}\n"
    assert "pipelane show 1f1b" in run("show", "--help").stdout


def test_arguments_after_the_script_are_the_scripts_own(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import sys, os; print(os.environ['RANK'], sys.argv[1:])\n")
    done = run("run", "-n", "2", str(script), "--output", "x", "-n", "3", "--flag")
    assert done.returncode == 0
    assert done.stdout == "0 ['--output', 'x', '-n', '3', '--flag']\n"


def test_a_failing_script_gives_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import sys, os; sys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    assert run("run", "-n", "2", str(script)).returncode == 7


def test_showing_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['pipelane', 'show', '1f1b', '-p', '2', '-m', '2']\n"
        "import pipelane.cli\n"
        "try: pipelane.cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'sklearn', 'networkx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
