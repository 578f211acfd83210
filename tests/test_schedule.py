"""Schedules: their files, torch's files, the catalogue and the built-in ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_schedules import torch_schedules

import pipelane
from pipelane import catalogue
from pipelane.actions import Action, Kind, parse_action
from pipelane.errors import PipelaneError, ScheduleError
from pipelane.schedule import (
    Schedule,
    Shape,
    looped_placement,
    schedule_from_csv,
    schedule_from_json,
)

BUILT_IN = ["naive", "gpipe", "1f1b"]


# Sizes and placements


@pytest.mark.parametrize("bad", [0, -1, True, False, 1.0, 1.5, "3", None])
@pytest.mark.parametrize("name", ["ranks", "microbatches", "chunks"])
def test_bad_sizes(name: str, bad: object) -> None:
    sizes = {"ranks": 2, "microbatches": 2, "chunks": 1, name: bad}
    with pytest.raises(ScheduleError, match=name):
        Shape(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -3, True, 2.0])
@pytest.mark.parametrize("name", BUILT_IN)
def test_bad_sizes_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ScheduleError, match="ranks must be"):
        pipelane.build_schedule(name, bad, 2)
    with pytest.raises(ScheduleError, match="microbatches must be"):
        pipelane.build_schedule(name, 2, bad)
    with pytest.raises(ScheduleError, match="chunks must be"):
        pipelane.build_schedule(name, 2, 2, chunks=bad)


def test_stages_of_a_shape_and_where_they_live() -> None:
    shape = Shape(3, 5, 2)
    assert shape.stages == 6
    assert looped_placement(shape) == (0, 1, 2, 0, 1, 2)
    snake = Schedule("v", shape, (0, 1, 2, 2, 1, 0), ((), (), ()))
    assert [snake.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_lists_are_as_good_as_tuples() -> None:
    rows = [[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]]
    from_lists = Schedule("mine", Shape(1, 1), [0], rows)  # type: ignore[arg-type]
    assert from_lists == Schedule("mine", Shape(1, 1), (0,), (tuple(rows[0]),))
    assert hash(from_lists) is not None
    pipelane.check(from_lists)


# Built-in schedules


def plainly(schedule: Schedule) -> set[str]:
    """The actions that F and B for every stage and micro-batch are."""
    shape = schedule.shape
    return {
        f"{s}{kind}{i}" for s in range(shape.stages) for i in range(shape.microbatches)
        for kind in "FB"
    }  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("p", range(1, 9))
def test_built_in_schedules_are_complete_for_every_size(name: str, p: int) -> None:
    for m in range(1, 13):
        schedule = pipelane.build_schedule(name, p, m)
        actions = [str(a) for order in schedule.orders for a in order]
        assert set(actions) == plainly(schedule)
        assert len(actions) == 2 * p * m
        certificate = pipelane.check(schedule)
        assert (certificate.ranks, certificate.microbatches, certificate.chunks) == (p, m, 1)
        assert certificate.computes == 2 * p * m
        assert certificate.messages == 2 * (p - 1) * m
        peaks = {"naive": [1] * p, "gpipe": [m] * p, "1f1b": [min(p - r, m) for r in range(p)]}
        assert list(certificate.peak_activations) == peaks[name]
        timeline = pipelane.simulate(schedule)
        if name == "naive":
            assert timeline.makespan == 3 * m * p
            assert timeline.bubble_fraction == pytest.approx(p - 1)
        else:
            assert timeline.makespan == 3 * (m + p - 1)
            assert timeline.bubble_fraction == pytest.approx((p - 1) / m)


@pytest.mark.parametrize("name", BUILT_IN)
def test_gradients_accumulate_in_the_order_of_one_process(name: str) -> None:
    """Backwards of a stage come in the order of the micro-batches: sums are bit for bit equal."""
    for order in pipelane.build_schedule(name, 4, 7).orders:
        assert [a.microbatch for a in order if a.kind is Kind.B] == list(range(7))


def test_built_in_schedules_say_that_they_have_one_chunk() -> None:
    for name in BUILT_IN:
        with pytest.raises(ScheduleError, match=f"{name} has one chunk per rank, got chunks=2"):
            pipelane.build_schedule(name, 2, 2, chunks=2)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 1), (3, 5, 1), (4, 8, 2), (4, 2, 3), (2, 6, 2)])
def test_forward_only_keeps_all_ranks_busy(p: int, m: int, v: int) -> None:
    rows = [
        [Action(kind, r + c * p, i) for kind, chunks in ((Kind.F, range(v)),
         (Kind.B, range(v - 1, -1, -1))) for c in chunks for i in range(2)]
        for r in range(p)
    ]  # fmt: skip
    trained = Schedule.looped("breadth first", Shape(p, 2, v), rows)
    pipelane.check(trained)
    schedule = trained.forward_only(m)
    assert pipelane.check(schedule, forward_only=True).computes == p * v * m
    if m % p == 0:
        assert pipelane.simulate(schedule).makespan == v * m + p - 1
    assert trained.forward_only().shape == trained.shape


def test_forward_only_of_a_snake() -> None:
    snake = Schedule("v", Shape(3, 1, 2), (0, 1, 2, 2, 1, 0), ((), (), ()))
    assert pipelane.check(snake.forward_only(7), forward_only=True).computes == 42
    with pytest.raises(ScheduleError, match="microbatches"):
        snake.forward_only(0)


# CSV and JSON


@pytest.mark.parametrize("name", BUILT_IN)
@given(p=st.integers(1, 6), m=st.integers(1, 9))
def test_csv_and_json_round_trip(
    tmp_path_factory: pytest.TempPathFactory, name: str, p: int, m: int
) -> None:
    schedule = pipelane.build_schedule(name, p, m)
    path = tmp_path_factory.mktemp("csv") / "s.csv"
    path.write_text(schedule.to_csv())
    assert schedule_from_csv(path, name=name) == schedule
    assert schedule_from_csv(str(path)).name == "s"
    assert schedule_from_json(schedule.to_json()) == schedule


def mixed() -> Schedule:
    """A snake with split backwards and an overlapped pair."""
    rows = [
        "0F0 0F1 3F0 3I0 (3F1;0B0)OVERLAP_F_B 3W0 3B1 0B1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    ]
    orders = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule("mixed", Shape(2, 2, 2), (0, 1, 1, 0), orders)


def test_files_of_snakes_split_backwards_and_pairs(tmp_path: Path) -> None:
    schedule = mixed()
    pipelane.check(schedule)
    path = tmp_path / "mixed.csv"
    path.write_text(schedule.to_csv())
    assert schedule_from_csv(path) == schedule
    assert schedule_from_json(schedule.to_json()) == schedule
    assert schedule.splits_backward
    assert not pipelane.build_schedule("1f1b", 2, 2).splits_backward


def test_files_from_spreadsheets(tmp_path: Path) -> None:
    """A byte order mark, CRLF, quotes, empty cells and empty lines at the end do no harm."""
    path = tmp_path / "s.csv"
    path.write_bytes(b'\xef\xbb\xbf0F0,,"0B0"\r\n,1F0 ,1B0\r\n\r\n\r\n')
    assert schedule_from_csv(path) == replace_name(pipelane.build_schedule("gpipe", 2, 1), "s")


def replace_name(schedule: Schedule, name: str) -> Schedule:
    return Schedule(name, schedule.shape, schedule.placement, schedule.orders)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0Q0\n", ["row 1", "cell 2", "0Q0"]),
        ("0F0,0B0\n0F0,0B0\n", ["row 2", "cell 1", "stage 0", "rank 0"]),
        ("0F0,0B0\n2F0,2B0\n", ["stage 1", "no rank"]),
        ("\n", ["no compute action"]),
        ("", ["no compute action"]),
        ("0SEND_F0\n", ["no compute action"]),
        ("0F0,1F0,2F0\n3F0,4F0\n", ["5 stages on 2 ranks"]),
        ("0F0,0B0\n,,\n", ["1 stages on 2 ranks"]),
        ("0F0,999999999F0\n", ["stage 1 appears on no rank"]),
        ("0F0,0B0,0F" + "9" * 5000 + "\n", ["row 1", "cell 3", "bad action"]),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        schedule_from_csv(path)
    for word in [*words, "bad.csv"]:
        assert word in str(caught.value)


def test_a_huge_microbatch_number_is_refused_at_once(tmp_path: Path) -> None:
    """Nothing is allocated by what the file claims; a billion micro-batches would not fit."""
    path = tmp_path / "huge.csv"
    path.write_text("0F999999999,0B999999999\n")
    with pytest.raises(ScheduleError, match="0F0 is missing"):
        pipelane.check(schedule_from_csv(path))


def test_several_chunks_on_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "three.csv"
    path.write_text("0F0,1F0,2F0\n")
    assert schedule_from_csv(path).shape == Shape(1, 1, 3)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="cannot read"):
        schedule_from_csv(tmp_path / "none.csv")
    with pytest.raises(ScheduleError, match="cannot read"):
        schedule_from_csv(tmp_path)
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="cannot read"):
        schedule_from_csv(tmp_path / "b.csv")
    (tmp_path / "wide.csv").write_text("0" * (csv.field_size_limit() + 1))
    with pytest.raises(ScheduleError, match="cannot read"):
        schedule_from_csv(tmp_path / "wide.csv")


def test_bad_json() -> None:
    good = json.loads(pipelane.build_schedule("1f1b", 2, 2).to_json())
    changes: list[dict[str, object]] = [
        {"orders": [["0F0", 5]]},
        {"orders": 7},
        {"orders": [["0Q0"]]},
        {"placement": ["x", 1]},
        {"placement": [0.5, 1]},
        {"placement": [True, 1]},
        {"placement": None},
        {"ranks": 2.0},
        {"ranks": 0},
    ]
    texts = ["{}", "[]", "nonsense", "", '{"name": 1}', "9" * 5000, "[" * 100_000]
    for text in texts + [json.dumps({**good, **change}) for change in changes]:
        with pytest.raises(ScheduleError):
            schedule_from_json(text)


# torch's files


def torch_schedule(kind: str, p: int, m: int, v: int, snake: bool = False) -> Any:
    """One of torch's own multi-stage schedules (rank 0's), made without any process group."""
    schedules = torch_schedules()
    own = [0, 2 * p - 1] if snake else [chunk * p for chunk in range(v)]
    stages = [
        SimpleNamespace(
            stage_index=s, num_stages=p * v, group_size=p, group_rank=0, has_backward=True,
            is_first=s == 0, is_last=s == p * v - 1, submod=SimpleNamespace(), device="cpu",
        )
        for s in own
    ]  # fmt: skip
    return getattr(schedules, kind)(stages, m, loss_fn=lambda a, b: None)


def torch_single(kind: str, p: int, m: int) -> dict[int, list[Any]]:
    """The table that torch makes for GPipe or 1F1B, which it makes a rank at a time."""
    schedules = torch_schedules()
    made = getattr(schedules, kind).__new__(getattr(schedules, kind))
    made._stage = SimpleNamespace(stage_index=0, group_rank=0)
    made._num_stages, made._n_microbatches, made.pp_group_size, made.rank = p, m, p, 0
    order = made._get_pipeline_order()
    return {rank: list(order[rank]) for rank in range(p)}


@pytest.mark.parametrize(("kind", "name"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 7)])
def test_tables_that_torch_wrote(tmp_path: Path, kind: str, name: str, p: int, m: int) -> None:
    """Torch's tables have empty cells where a rank idles (2.6) or reductions (2.13)."""
    order = torch_single(kind, p, m)
    ours = pipelane.build_schedule(name, p, m)
    last = [str(a) for a in order[p - 1] if a is not None]
    if kind == "Schedule1F1B" and last[0] == f"{p - 1}F1":
        # torch 2.13 counts the last rank's forwards from 1 (3F1 ... 3F8): its runtime does not
        # use this table. Only the other rows can be compared.
        order[p - 1] = list(ours.orders[p - 1])
    path = tmp_path / "torch.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(order.values())
    read = schedule_from_csv(path, name=name)
    pipelane.check(read)
    assert read == ours


MULTI = [
    ("ScheduleInterleaved1F1B", 4, 8, 2, False),
    ("ScheduleInterleaved1F1B", 2, 6, 3, False),
    ("ScheduleLoopedBFS", 3, 5, 2, False),
    ("ScheduleInterleavedZeroBubble", 4, 8, 2, False),
    ("ScheduleZBVZeroBubble", 4, 8, 2, True),
    ("ScheduleDualPipeV", 4, 10, 2, True),
]
multi = pytest.mark.parametrize(("kind", "p", "m", "v", "snake"), MULTI)


@multi
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_files_that_torch_dumped(
    tmp_path: Path, kind: str, p: int, m: int, v: int, snake: bool, form: str
) -> None:
    """In both of torch's forms; the second has communication and per-stage actions."""
    theirs = torch_schedule(kind, p, m, v, snake)
    path = tmp_path / "torch.csv"
    theirs._dump_csv(str(path), format=form)
    text = path.read_text()
    assert ("SEND_F" in text) == (form == "compute_comms")
    if form == "compute_only" and kind == "ScheduleInterleaved1F1B":
        assert ",," in text  # an empty cell where a rank idles
    read = schedule_from_csv(path)
    assert read.shape == Shape(p, m, v)
    assert read.placement == tuple(theirs.stage_index_to_group_rank[s] for s in range(p * v))
    expected = [[str(a) for a in row if a is not None] for row in theirs.pipeline_order.values()]
    assert [[str(a) for a in order] for order in read.orders] == expected
    certificate = pipelane.check(read)
    text = json.dumps(expected)
    assert read.splits_backward == ("I" in text)
    assert ("OVERLAP" in text) == (kind == "ScheduleDualPipeV")
    assert pipelane.simulate(read).peak_activations == certificate.peak_activations


def exchange(path: Path, schedule: Schedule, snake: bool = False) -> Any:
    """Torch's runtime with a schedule that it loaded from our file."""
    path.write_text(schedule.to_csv())
    shape = schedule.shape
    runtime = torch_schedule(
        "_PipelineScheduleRuntime", shape.ranks, shape.microbatches, shape.chunks, snake
    )
    runtime._load_csv(str(path), format="compute_only")
    return runtime


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 6), (3, 2)])
def test_torch_loads_our_files(tmp_path: Path, name: str, p: int, m: int) -> None:
    ours = pipelane.build_schedule(name, p, m)
    runtime = exchange(tmp_path / "ours.csv", ours)
    rows = [[str(a) for a in row] for row in runtime.pipeline_order.values()]
    assert rows == [[str(a) for a in order] for order in ours.orders]
    lowered = [str(a) for row in runtime.pipeline_order_with_comms.values() for a in row]
    assert sum("SEND" in text for text in lowered) == pipelane.check(ours).messages
    runtime._dump_csv(str(tmp_path / "back.csv"), format="compute_comms")
    assert schedule_from_csv(tmp_path / "back.csv", name=name) == ours


def test_torch_loads_our_snake_with_split_backwards_and_a_pair(tmp_path: Path) -> None:
    runtime = exchange(tmp_path / "ours.csv", mixed(), snake=True)
    assert runtime.stage_index_to_group_rank == {0: 0, 1: 1, 2: 1, 3: 0}
    runtime._dump_csv(str(tmp_path / "back.csv"), format="compute_only")
    assert schedule_from_csv(tmp_path / "back.csv", name="mixed") == mixed()


# The catalogue


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Registers an entry point as an installed distribution would."""
    catalogue._registered.cache_clear()
    points = dict(catalogue._registered())

    def add(name: str, value: str) -> None:
        points[name] = EntryPoint(name, value, catalogue.GROUP)

    monkeypatch.setattr(catalogue, "_registered", lambda: points)
    return add


def made_elsewhere(shape: Shape) -> Schedule:
    return pipelane.build_schedule("gpipe", shape.ranks, shape.microbatches)


def test_names() -> None:
    names = pipelane.schedule_names()
    assert set(names) >= set(BUILT_IN)
    assert names == sorted(names)
    assert pipelane.build_schedule("GPipe", 2, 2).name == "gpipe"


def test_an_unknown_name_shows_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule '2f2b'; installed schedules: 1f1b,"):
        pipelane.build_schedule("2f2b", 2, 2)


def test_plug_ins(plugin: Callable[[str, str], None]) -> None:
    plugin("elsewhere", f"{__name__}:made_elsewhere")
    assert "elsewhere" in pipelane.schedule_names()
    assert pipelane.build_schedule("elsewhere", 3, 2) == pipelane.build_schedule("gpipe", 3, 2)


@pytest.mark.parametrize("value", ["no_such_module_anywhere:f", f"{__name__}:no_such_function"])
def test_a_plug_in_that_cannot_be_loaded(plugin: Callable[[str, str], None], value: str) -> None:
    plugin("broken", value)
    with pytest.raises(ScheduleError, match=r"'broken'.*cannot be loaded: .*no_such") as caught:
        pipelane.build_schedule("broken", 2, 2)
    assert isinstance(caught.value.__cause__, (ImportError, AttributeError))


def test_a_function_that_fails() -> None:
    def broken(shape: Shape) -> Schedule:
        raise ZeroDivisionError("oh no")

    with pytest.raises(ScheduleError, match=r"'broken' failed.*ZeroDivisionError: oh no") as caught:
        pipelane.build_schedule(broken, 2, 2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def picky(shape: Shape) -> Schedule:
        raise ScheduleError("only odd sizes")

    with pytest.raises(PipelaneError, match=r"^only odd sizes$"):
        pipelane.build_schedule(picky, 2, 2)


def test_a_function_that_returns_something_else() -> None:
    with pytest.raises(ScheduleError, match="returned int"):
        pipelane.build_schedule(lambda shape: 3, 2, 2)  # type: ignore[arg-type,return-value]
    other = pipelane.build_schedule("gpipe", 3, 2)
    with pytest.raises(ScheduleError, match="was asked for"):
        pipelane.build_schedule(lambda shape: other, 2, 2)
    with pytest.raises(ScheduleError, match="a name or a function"):
        pipelane.build_schedule(3, 2, 2)  # type: ignore[arg-type]


def test_a_function_gets_costs_and_memory_if_it_wants_them() -> None:
    seen: list[object] = []

    def both(shape: Shape, costs: object, memory: object) -> Schedule:
        seen.append((costs, memory))
        return made_elsewhere(shape)

    def one(shape: Shape, memory: object = None) -> Schedule:
        seen.append(memory)
        return made_elsewhere(shape)

    def any_keyword(shape: Shape, **options: object) -> Schedule:
        seen.append(options)
        return made_elsewhere(shape)

    costs = pipelane.Costs.unit(2)
    for function in (both, one, any_keyword, made_elsewhere):
        pipelane.build_schedule(function, 2, 3, costs=costs, memory=7)
    assert seen == [(costs, 7), 7, {"costs": costs, "memory": 7}]
