"""The command line: exit codes, JSON, what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pipelane
from pipelane import catalogue
from pipelane.cli import app
from pipelane.errors import ConfigError

KEYS = {
    "schedule", "ranks", "microbatches", "chunks", "placement", "orders", "makespan", "span",
    "work", "idle", "bubble_rate", "bubble_fraction", "peak_activations", "lower_bound",
    "deadlock_free",
}  # fmt: skip


#: What a developer's or a CI's shell may set, and what would change the output.
SHELL = ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR", "COLUMNS", "PIPELANE_DEBUG")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in SHELL}
    return subprocess.run(
        [sys.executable, "-m", "pipelane", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**clean, **env},
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


@pytest.mark.parametrize("text", ["0F0,0B0\n0B0,1F0\n", "0F0,zero\n", ""])
def test_a_file_that_is_no_schedule_is_a_no(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    done = run("check", str(file))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {file}")
    assert done.stdout == ""
    done = run("check", str(file), "--json")
    assert done.returncode == 1
    assert str(file) in json.loads(done.stdout)["reason"]


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    small = ("show", "gpipe", "-p", "1", "-m", "1", "--csv")
    for target in (tmp_path, tmp_path / "missing" / "x.csv"):
        done = run(*small, str(target))
        assert done.returncode == 2
        assert done.stderr.startswith("error: cannot write")
        assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.parent.glob(f".{tmp_path.name}*")) == []
    link, real = tmp_path / "link.csv", tmp_path / "real.csv"
    real.write_text("old")
    link.symlink_to(real)
    assert run(*small, str(link)).returncode == 0
    assert link.is_symlink()
    assert real.read_text() == "0F0,0B0\n"


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipelane.cli.os.replace", full)
    arguments = ["show", "gpipe", "-p", "1", "-m", "1", "--csv", str(file)]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ConfigError)
    assert "No space left" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]
    assert file.read_text() == "old"


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout")
def test_standard_output_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Sent to a file, /dev/stdout leads to that file; others write to it as well."""
    target = tmp_path / "out.txt"
    with target.open("a") as out:
        out.write("before\n")
        out.flush()
        subprocess.run(
            [sys.executable, "-m", "pipelane", "show", "gpipe", "-p", "1", "-m", "1",
             "--csv", "/dev/stdout", "--json"],
            stdout=out, check=True,
        )  # fmt: skip
    before, csv, facts = target.read_text().splitlines()
    assert (before, csv) == ("before", "0F0,0B0")
    assert json.loads(facts)["orders"] == [["0F0", "0B0"]]


def test_names_that_the_encoding_lacks(tmp_path: Path) -> None:
    file = tmp_path / "模型.csv"
    file.write_text("0F0,0B0\n")
    for command in ("show", "check"):
        done = run(command, str(file), PYTHONIOENCODING="ascii")
        assert done.returncode == 0
        assert done.stderr == ""
        done.stdout.encode("ascii")


@pytest.mark.parametrize(
    "spans",
    [
        '[["0F0", 0, Infinity]]',
        '[["0F0", 0, NaN]]',
        '[["0SEND_F0", 0, 1]]',
        '[["0F0", 1, 0]]',
        '[["0F0", 0, 2], ["0B0", 1, 3]]',
        '[["0F0", -1, 1]]',
    ],
)
def test_view_refuses_what_cannot_have_run(spans: str, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    file.write_text(
        '{"schema": 1, "kind": "pipelane.timeline", "name": "x", "placement": [0], "unit": "s", '
        f'"microbatches": 1, "measured": true, "messages": [], "spans": [{spans}]}}'
    )
    done = run("view", str(file))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["show", "zigzag", "-p", "2", "-m", "2"], "unknown schedule 'zigzag'"),
        (["show", "1f1b", "-p", "0", "-m", "2"], "ranks must be at least 1"),
        (["show", "1f1b", "-p", "2"], "-m"),
        (["show", "1f1b", "-p", "2", "-m", "2", "-v", "2"], "one chunk per rank"),
        (["show", "1f1b", "-p", "2", "-m", "2", "--f", "-1"], "must be finite and >= 0"),
        (["show", "1f1b", "-p", "2", "-m", "2", "--f", "1e308"], "only finite times"),
        (["show", "1f1b", "-p", "2", "-m", "2", "--f", "1e308", "--json"], "only finite times"),
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
    assert "Traceback" not in run("check", "/nowhere.csv", PIPELANE_DEBUG="0").stderr


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


def test_a_broken_plug_in_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good = catalogue.load_generator("gpipe")
    points = {
        "bad": EntryPoint("bad", "no_such_module:f", catalogue.GROUP),
        "good": EntryPoint("good", f"{good.__module__}:{good.__name__}", catalogue.GROUP),
    }
    monkeypatch.setattr(catalogue, "_registered", lambda: points)
    done = CliRunner().invoke(app, ["schedules"])
    assert done.exit_code == 0
    assert "cannot be loaded" in " ".join(done.stdout.split())
    assert "Fill the pipeline" in done.stdout


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
