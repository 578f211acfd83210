"""Text forms of actions and schedules, also against torch's own."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelane
from pipelane.actions import Action, Kind, parse_action
from pipelane.errors import ScheduleError
from pipelane.schedule import Schedule, Shape, schedule_from_csv, schedule_from_json

try:
    from torch.distributed.pipelining.schedules import Schedule1F1B

    TORCH_HAS_TABLES = hasattr(Schedule1F1B, "_get_pipeline_order")
except ImportError:
    TORCH_HAS_TABLES = False
torch_tables = pytest.mark.skipif(
    not TORCH_HAS_TABLES, reason="this torch does not print its schedules as newer ones do"
)

PER_STAGE = (Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.RESHARD)
SINGLE = [kind for kind in Kind if kind not in (*PER_STAGE, Kind.OVERLAP)]
numbers = st.integers(0, 9999)
simple = st.one_of(
    st.builds(lambda *parts: Action(*parts), st.sampled_from(SINGLE), numbers, numbers),
    st.builds(lambda *parts: Action(*parts), st.sampled_from(PER_STAGE), numbers),
)  # fmt: skip
pairs = st.builds(
    lambda i, j, k, n: Action(
        Kind.OVERLAP, -1, -1, (Action(Kind.F, i, j), Action(Kind.B, k, n))
    ),
    numbers, numbers, numbers, numbers,
)  # fmt: skip


@given(st.one_of(simple, pairs))
def test_text_round_trip(action: Action) -> None:
    assert parse_action(str(action)) == action


@torch_tables
@given(st.one_of(simple, pairs))
def test_text_is_what_torch_reads(action: Action) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = schedules._Action.from_str(str(action))
    assert str(theirs) == str(action)
    assert theirs.computation_type.value == action.kind.value


@pytest.mark.parametrize(
    "text",
    ["", "F", "0F", "F0", "0X1", "-1F0", "0F-1", "0F1x", "1UNSHARD2", "0 F 1", "٣F1",
     "()OVERLAP_F_B", "(0F1)OVERLAP_F_B", "(0F1;1F0)OVERLAP_F_B", "(0F1;1B0)", "0F1;1B0"],
)  # fmt: skip
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="bad action"):
        parse_action(text)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@given(p=st.integers(1, 6), m=st.integers(1, 9))
def test_csv_and_json_round_trip(
    tmp_path_factory: pytest.TempPathFactory, name: str, p: int, m: int
) -> None:
    schedule = pipelane.build_schedule(name, p, m)
    path = tmp_path_factory.mktemp("csv") / "s.csv"
    path.write_text(schedule.to_csv())
    assert schedule_from_csv(path, name=name) == schedule
    assert schedule_from_json(schedule.to_json()) == schedule


def torch_orders(kind: str, p: int, m: int, v: int) -> dict[int, list[object]]:
    """The order that torch itself computes for one of its schedules."""
    from torch.distributed.pipelining import schedules

    if kind in ("gpipe", "1f1b"):
        order: dict[int, list[object]] = {}
        for rank in range(p):
            made = (schedules.ScheduleGPipe if kind == "gpipe" else schedules.Schedule1F1B).__new__(
                schedules.ScheduleGPipe if kind == "gpipe" else schedules.Schedule1F1B
            )
            made._stage = type("Stage", (), {"stage_index": rank, "group_rank": rank})()
            made._stage_index, made._num_stages, made._n_microbatches = rank, p, m
            made.pp_group_size, made.rank = p, rank
            order.update({k: v for k, v in made._get_pipeline_order().items() if v})
        return order
    made = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = p, v, m
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    made.rank = 0
    return {rank: made._calculate_single_rank_operations(rank) for rank in range(p)}


@torch_tables
@pytest.mark.parametrize(("kind", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_csv_that_torch_wrote(tmp_path: Path, kind: str, v: int) -> None:
    """Torch's files have empty cells where a rank idles."""
    p, m = 4, 8
    order = torch_orders(kind, p, m, v)
    if kind == "1f1b":
        # torch 2.13's table for 1F1B counts the last rank's forwards from 1 (3F1 ... 3F8): its
        # runtime does not use the table. Take that row from ours and compare the others.
        ours_last = pipelane.build_schedule("1f1b", p, m).orders[-1]
        order[p - 1] = [str(action) for action in ours_last]
    path = tmp_path / "torch.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for rank in sorted(order):
            writer.writerow(["" if a is None else a for a in order[rank]])
    ours = schedule_from_csv(path)
    pipelane.check(ours)
    assert ours.shape == Shape(p, m, v)
    if v == 1:
        assert ours.orders == pipelane.build_schedule(kind, p, m).orders


@torch_tables
def test_csv_with_communication_that_torch_wrote(tmp_path: Path) -> None:
    from torch.distributed.pipelining import schedules

    p, m, v = 2, 4, 2
    compute = torch_orders("interleaved", p, m, v)
    filled = {rank: [a for a in row if a is not None] for rank, row in compute.items()}
    lowered = schedules._add_send_recv(
        {rank: list(row) for rank, row in filled.items()},
        stage_to_rank=lambda stage: stage % p,
        num_stages=p * v,
    )
    path = tmp_path / "lowered.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([lowered[rank] for rank in range(p)])
    ours = schedule_from_csv(path)
    assert "SEND_F" in path.read_text()
    assert [list(map(str, o)) for o in ours.orders] == [
        [str(a) for a in filled[rank]] for rank in range(p)
    ]


@torch_tables
def test_our_csv_is_read_by_torch(tmp_path: Path) -> None:
    from torch.distributed.pipelining import schedules

    path = tmp_path / "ours.csv"
    made = pipelane.build_schedule("1f1b", 4, 6)
    path.write_text(made.to_csv())
    with path.open(newline="") as file:
        rows = [[schedules._Action.from_str(cell) for cell in row] for row in csv.reader(file)]
    order = {rank: list(row) for rank, row in enumerate(rows)}  # torch empties what it is given
    lowered = schedules._add_send_recv(order, stage_to_rank=lambda s: s, num_stages=4)
    assert [str(a) for a in rows[0]] == [str(a) for a in made.orders[0]]
    assert sum(a.computation_type.value == "SEND_F" for row in lowered.values() for a in row) == 18


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0Q0\n", ["row 1", "cell 2", "0Q0"]),
        ("0F0,0B0\n0F0,0B0\n", ["row 2", "stage 0", "rank 0"]),
        ("0F0,0B0\n2F0,2B0\n", ["stage 1", "no rank"]),
        ("0F0,1F0,2F0\n", []),
        ("\n", ["no compute action"]),
        ("0F0,1F0,2F0\n3F0,4F0\n", ["5 stages on 2 ranks"]),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    if not words:  # three chunks on one rank: fine
        assert schedule_from_csv(path).shape == Shape(1, 1, 3)
        return
    with pytest.raises(ScheduleError) as caught:
        schedule_from_csv(path)
    for word in [*words, "bad.csv"]:
        assert word in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="cannot read"):
        schedule_from_csv(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="cannot read"):
        schedule_from_csv(tmp_path / "b.csv")
    for text in ("{}", "[]", "nonsense", '{"name": 1}'):
        with pytest.raises(ScheduleError, match="JSON"):
            schedule_from_json(text)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "3", None])
@pytest.mark.parametrize("name", ["ranks", "microbatches", "chunks"])
def test_bad_sizes(name: str, bad: object) -> None:
    sizes = {"ranks": 2, "microbatches": 2, "chunks": 1, name: bad}
    with pytest.raises(ScheduleError, match=name):
        Shape(**sizes)  # type: ignore[arg-type]


@given(p=st.integers(1, 8), m=st.integers(1, 33))
def test_1f1b_holds_no_more_than_it_must(p: int, m: int) -> None:
    certificate = pipelane.check(pipelane.build_schedule("1f1b", p, m))
    assert certificate.peak_activations == tuple(min(p - r, m) for r in range(p))
    assert certificate.computes == 2 * p * m
    assert certificate.messages == 2 * (p - 1) * m


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@given(p=st.integers(1, 8), m=st.integers(1, 33))
def test_formulas_of_the_docstrings(name: str, p: int, m: int) -> None:
    schedule = pipelane.build_schedule(name, p, m)
    pipelane.check(schedule)
    timeline = pipelane.simulate(schedule)
    if name == "naive":
        assert timeline.makespan == 3 * m * p
        assert timeline.peak_activations == (1,) * p
    else:
        assert timeline.makespan == 3 * (m + p - 1)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / m)


def test_catalogue() -> None:
    assert set(pipelane.schedule_names()) >= {"naive", "gpipe", "1f1b"}
    with pytest.raises(ScheduleError, match="installed schedules: 1f1b"):
        pipelane.build_schedule("2f2b", 2, 2)
    with pytest.raises(ScheduleError, match="one chunk per rank"):
        pipelane.build_schedule("gpipe", 2, 2, chunks=2)
    with pytest.raises(ScheduleError, match="returned int"):
        pipelane.build_schedule(lambda shape: 3, 2, 2)  # type: ignore[arg-type,return-value]
    other = pipelane.build_schedule("gpipe", 3, 2)
    with pytest.raises(ScheduleError, match="was asked for"):
        pipelane.build_schedule(lambda shape: other, 2, 2)


def test_a_function_gets_costs_and_memory_if_it_wants_them() -> None:
    seen = []

    def wanting(shape: Shape, costs: object, memory: object) -> Schedule:
        seen.append((costs, memory))
        return pipelane.build_schedule("gpipe", shape.ranks, shape.microbatches)

    costs = pipelane.Costs.unit(2)
    pipelane.build_schedule(wanting, 2, 3, costs=costs, memory=7)
    assert seen == [(costs, 7)]
