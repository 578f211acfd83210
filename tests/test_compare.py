"""``compare``, costs in files, and costs of several chunks per rank."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipelane.catalogue import schedule_names
from pipelane.cli import app
from pipelane.compare import compare
from pipelane.costs import Costs, Link
from pipelane.errors import ConfigError

COSTS = Costs(
    (0.01, 0.012, 0.011, 0.02), (0.01, 0.012, 0.011, 0.02), (0.008, 0.01, 0.011, 0.015),
    boundary_bytes=(1e6, 2e6, 1e6), activation_bytes=(2e9,) * 4, weight_grad_bytes=(1e9,) * 4,
    link=Link(1e-4, 1e10),
)  # fmt: skip


def test_every_schedule_is_there_once_and_sorted() -> None:
    found = compare(4, 8)
    assert sorted(entry.name for entry in found.entries) == schedule_names()
    assert not found.left_out
    makespans = [entry.makespan for entry in found.entries]
    assert makespans == sorted(makespans)
    named = {entry.name: entry for entry in found.entries}
    assert named["1f1b"].makespan == 33
    assert named["1f1b"].bubble_fraction == pytest.approx(3 / 8)
    assert named["gpipe"].peak_activations == 8
    assert named["zbv"].peak_activations == 4
    assert named["interleaved"].makespan == 28.5
    assert all(entry.makespan >= entry.makespan_bound * (1 - 1e-9) for entry in found.entries)
    assert all(entry.span >= entry.span_bound * (1 - 1e-9) for entry in found.entries)
    assert named["naive"].messages == 2 * 3 * 8


def test_what_does_not_fit_says_why() -> None:
    found = compare(4, 8, COSTS, 10e9)
    reasons = {name: reason for name, _, reason in found.left_out}
    assert "gpipe" in reasons
    assert reasons["gpipe"].endswith("would hold 16000000000 bytes, 6000000000 too many")
    assert {entry.name for entry in found.entries} | set(reasons) == set(schedule_names())
    assert all(entry.peak_bytes <= 10e9 for entry in found.entries)
    assert {entry.name for entry in found.entries} >= {"1f1b", "auto", "zb-h1"}
    auto = next(entry for entry in found.entries if entry.name == "auto")
    same = [entry for entry in found.entries if entry.chunks == 1]
    assert auto.makespan == min(entry.makespan for entry in same)
    assert auto.sent_bytes == 2 * 8 * 4e6


def test_costs_of_chunks_follow_the_placement() -> None:
    snake = COSTS.split((0, 1, 2, 3, 3, 2, 1, 0))
    assert snake.forward == tuple(COSTS.forward[rank] / 2 for rank in (0, 1, 2, 3, 3, 2, 1, 0))
    assert snake.boundary_bytes == (1e6, 2e6, 1e6, 2e6, 1e6, 2e6, 1e6)
    assert sum(snake.activation_bytes) == sum(COSTS.activation_bytes)
    assert COSTS.split((0, 1, 2, 3)) == COSTS
    with pytest.raises(ConfigError, match="other ranks"):
        COSTS.split((0, 1))


number = st.floats(0, 1e6)


@given(data=st.data(), stages=st.integers(1, 4))
def test_costs_in_json(data: st.DataObject, stages: int) -> None:
    def some(count: int) -> tuple[float, ...]:
        return tuple(data.draw(st.lists(number, min_size=count, max_size=count)))

    links = {(0, 1): Link(data.draw(number), data.draw(st.floats(1, 1e9)))}
    costs = Costs(
        some(stages), some(stages), some(stages), some(stages - 1), some(stages), some(stages),
        link=data.draw(st.sampled_from([Link(), Link(1.0, 5.0)])), links=links,
    )  # fmt: skip
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[]", "expected an object"),
        ("{", "not JSON"),
        ("{}", "'forward'"),
        ('{"forward": [1], "input_grad": [1], "weight_grad": [1, 2]}', "weight_grad has 2 entries"),
        ('{"forward": [-1], "input_grad": [1], "weight_grad": [1]}', r"forward\[0\]"),
        ('{"forward": 1, "input_grad": [1], "weight_grad": [1]}', "not costs"),
        ('{"forward": [1], "input_grad": [1], "weight_grad": [1], "x": 1}', "unknown 'x'"),
        ('{"schema": 2, "forward": [1], "input_grad": [1], "weight_grad": [1]}', "not costs"),
        ('{"forward": [1], "input_grad": [1], "weight_grad": [1], "link": 3}', "not costs"),
    ],
)
def test_bad_costs_files(text: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        Costs.from_json(text, str(file))
    assert str(file) in str(caught.value)


def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(COSTS.to_json())
    runner = CliRunner()
    done = runner.invoke(app, ["compare", "-p", "4", "-m", "8", "--json"])
    assert done.exit_code == 0
    rows = json.loads(done.stdout)["schedules"]
    assert {row["name"] for row in rows} == set(schedule_names())
    assert all(math.isfinite(row["gap"]) for row in rows)
    arguments = ["-p", "4", "-m", "8", "--costs", str(file), "--memory", "10GB"]
    for columns in ("60", "80", "120"):
        done = runner.invoke(app, ["compare", *arguments], env={"COLUMNS": columns})
        assert done.exit_code == 0
        assert max(map(len, done.stdout.splitlines())) <= int(columns)
        assert "Left out: gpipe (v=1)" in done.stdout
    done = runner.invoke(app, ["show", "auto", *arguments, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["makespan"] >= json.loads(done.stdout)["lower_bound"]
    done = runner.invoke(app, ["show", "zbv", "-p", "4", "-m", "8", "--costs", str(file)])
    assert done.exit_code == 0
    assert "time in ms" in done.stdout


def test_wrong_use() -> None:
    with pytest.raises(ConfigError, match="no multiple of 3 ranks"):
        compare(3, 8, COSTS)
    with pytest.raises(ConfigError, match="memory has 1 entries"):
        compare(4, 8, COSTS, [1.0])
