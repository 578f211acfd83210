"""Every way of carrying messages against an executor that explores all interleavings."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake import needs, random_schedule, result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import pipelane
from pipelane.actions import Kind, parse_action
from pipelane.check import deadlocks, verify_program
from pipelane.cli import app
from pipelane.errors import CheckError, ConfigError, ScheduleError
from pipelane.program import Instruction, Program, program_from_csv
from pipelane.semantics import LOOKAHEAD, SEMANTICS, SENDS_AHEAD, play, trace_messages

Channel = tuple[int, int, bool]
Name = tuple[bool, int, int]  # is forward, producer, micro-batch
Op = tuple[str, Channel, Name, int]  # what, its place in its rank's own order of the channel

SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def name_of(x: Instruction) -> Name:
    forward = x.kind in (Kind.SEND_F, Kind.RECV_F)
    step = {Kind.RECV_F: -1, Kind.RECV_B: 1}.get(x.kind, 0)
    return forward, x.stage + step, x.microbatch


def inputs_of(x: Instruction, program: Program, rank: int) -> list[Name]:
    """The messages that a compute waits for, in order."""
    found = []
    for part in x.parts or (x,):
        for kind, stage, number in needs(part, program.stages):
            if program.placement[stage] != rank:
                found.append((kind == "F", stage, number))
    return found


def operations(program: Program, semantics: str) -> list[list[Op]]:
    """Each rank's stream as the smallest steps between which others may go on."""
    rows = []
    for rank, stream in enumerate(program.streams):
        row: list[Op] = []
        count: Counter[tuple[str, Channel]] = Counter()
        place: dict[Name, tuple[Channel, int]] = {}
        for x in stream:
            if x.kind in SENDS:
                channel = (rank, x.peer, x.kind is Kind.SEND_F)
                row.append(("send", channel, name_of(x), count["send", channel]))
                if semantics == "pipelane":
                    row.append(("drain", channel, name_of(x), count["send", channel]))
                count["send", channel] += 1
            elif x.kind in RECEIVES:
                channel = (x.peer, rank, x.kind is Kind.RECV_F)
                number = count["receive", channel]
                count["receive", channel] += 1
                place[name_of(x)] = (channel, number)
                what = "post" if semantics == "pipelane" else "receive"
                row.append((what, channel, name_of(x), number))
            elif semantics == "pipelane" and x.kind.is_compute:
                for name in inputs_of(x, program, rank):
                    row.append(("post-own", place[name][0], name, place[name][1]))
                    row.append(("wait", place[name][0], name, place[name][1]))
        rows.append(row)
    return rows


def can_fail(program: Program, semantics: str, buffers: int) -> bool:
    """Whether some order of events ends before every rank has, or delivers a wrong message."""
    rows = operations(program, semantics)
    room = {"rendezvous": 0, "k-buffered": buffers}.get(semantics, 10**9)

    def passed(at: tuple[int, ...], what: str, channel: Channel) -> list[Op]:
        rank = channel[0] if what in ("send", "drain") else channel[1]
        return [op for op in rows[rank][: at[rank]] if op[:2] == (what, channel)]

    def moves(at: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
        """Every state that can follow; None for a wrong message."""

        def go(*ranks: int) -> tuple[int, ...]:
            return tuple(a + (r in ranks) for r, a in enumerate(at))

        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            what, channel, name, number = row[at[rank]]
            sent = [op[2] for op in passed(at, "send", channel)]
            if what == "send":
                got = {op[2] for op in passed(at, "receive", channel)}
                peer = channel[1]
                if len([n for n in sent if n not in got]) < room:
                    yield go(rank)
                if semantics != "fifo" and rows[peer][at[peer] :][:1] == [
                    op for op in rows[peer] if op[:3] == ("receive", channel, name)
                ]:
                    yield go(rank, peer)
            elif what == "receive":
                if semantics == "fifo":
                    taken = len(passed(at, "receive", channel))
                    if len(sent) > taken:
                        yield go(rank) if sent[taken] == name else None
                elif name in sent:
                    yield go(rank)
            elif what == "wait":
                if len(sent) > number:
                    yield go(rank) if sent[number] == name else None
            elif what == "drain":
                posted = max(
                    [op[3] + 1 + LOOKAHEAD for op in passed(at, "post", channel)]
                    + [op[3] + 1 for op in passed(at, "post-own", channel)],
                    default=0,
                )
                if number + 1 - posted <= SENDS_AHEAD:
                    yield go(rank)
            else:
                yield go(rank)

    end = tuple(map(len, rows))
    todo = [tuple(0 for _ in rows)]
    seen = set(todo)
    while todo:
        at = todo.pop()
        following = list(moves(at))
        if None in following or (not following and at != end):
            return True
        for state in following:
            if state is not None and state not in seen:
                seen.add(state)
                todo.append(state)
    return False


def shuffled(program: Program, rng: random.Random, tries: int) -> Program:
    """Neighbours swapped at random wherever each rank's own inputs stay before their use."""
    streams = []
    for rank, stream in enumerate(program.streams):
        row = list(stream)
        for _ in range(tries if len(row) > 1 else 0):
            i = rng.randrange(len(row) - 1)
            a, b = row[i], row[i + 1]
            if a.kind.is_compute and b.kind.is_compute:
                continue
            made: set[tuple[bool, int, int]] = set()
            if a.kind in RECEIVES:
                made = {name_of(a)}
                used = inputs_of(b, program, rank) if b.kind.is_compute else []
            elif a.kind.is_compute:
                made = {(k == "F", s, n) for k, s, n in map(result, a.parts or (a,)) if k != "W"}
                used = [name_of(b)] if b.kind in SENDS else []
            else:
                used = []
            if made.isdisjoint(used):
                row[i], row[i + 1] = b, a
        streams.append(tuple(row))
    return replace(program, streams=tuple(streams))


def small_program(rng: random.Random) -> Program:
    while True:
        schedule = random_schedule(rng)
        shape = schedule.shape
        if shape.ranks in (2, 3) and shape.stages * shape.microbatches <= 12:
            program = pipelane.lower(schedule)
            return shuffled(program, rng, rng.choice([0, 5, 40, 200]))


@settings(max_examples=250)
@given(seed=st.integers(0, 2**32 - 1), buffers=st.integers(0, 3))
def test_verdicts_against_all_interleavings(seed: int, buffers: int) -> None:
    program = small_program(random.Random(seed))
    messages = trace_messages(program)
    for semantics, verdict in zip(SEMANTICS, deadlocks(program, buffers=buffers), strict=True):
        fails = can_fail(program, semantics, buffers)
        assert verdict.semantics == semantics
        assert verdict.safe != fails, (semantics, verdict.reason)
        # What follows from rendezvous is also what playing it says.
        assert play(messages, semantics, buffers=buffers).safe == verdict.safe
        assert verdict.safe == (verdict.reason == "")
        if fails:
            with pytest.raises(CheckError, match=r"rank \d.*#\d"):
                verify_program(program, semantics, buffers=buffers)
        else:
            assert verify_program(program, semantics, buffers=buffers)[1] >= 0


def test_both_answers_were_met_for_each_semantics() -> None:
    rng = random.Random(11)
    count: Counter[tuple[str, bool]] = Counter()
    for _ in range(400):
        program = small_program(rng)
        count.update((v.semantics, v.safe) for v in deadlocks(program))
    for semantics in SEMANTICS:
        assert count[semantics, True] > 20, semantics
        assert count[semantics, False] > 5, semantics


def test_the_look_ahead_is_the_transports() -> None:
    transport = pytest.importorskip("pipelane.runtime.transport")
    assert (LOOKAHEAD, SENDS_AHEAD) == (transport.LOOKAHEAD, transport.SENDS_AHEAD)


def rows(*texts: str) -> tuple[tuple[Instruction, ...], ...]:
    """Two ranks; every message is for the other one."""
    return tuple(
        tuple(
            Instruction(*a[:3], -1 if a.kind.is_compute else 1 - rank, a.parts)
            for a in map(parse_action, text.split())
        )
        for rank, text in enumerate(texts)
    )


def test_orders_of_a_channel_that_differ() -> None:
    program = Program(
        "swapped", 2, 2, (0, 1),
        rows("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1"), forward_only=True,
    )  # fmt: skip
    found = {v.semantics: v for v in deadlocks(program)}
    assert {name for name, v in found.items() if v.safe} == {"k-buffered", "buffered"}
    assert found["fifo"].reason == (
        "  the forward channel from rank 0 to rank 1 has two orders; message 0 of it: rank 0 has "
        "0SEND_F0 (#1), rank 1 has 1RECV_F1 (#0)"
    )
    assert found["pipelane"].reason == found["fifo"].reason
    assert found["rendezvous"].reason.splitlines() == [
        "  rank 0 waits in 0SEND_F0 (#1) for rank 1: 1RECV_F0 (#1)",
        "  rank 1 waits in 1RECV_F1 (#0) for rank 0: 0SEND_F1 (#3)",
    ]


@pytest.mark.parametrize("ahead", [7, 8, 9, 10])
def test_pipelanes_transport_is_filled_by_nine_messages(ahead: int) -> None:
    """Rank 0 sends ahead; rank 1 takes four of them and then sends three gradients.

    Its fourth receive has posted 4 + 2 messages, and two more may be under way: the ninth send of
    rank 0 waits. The third gradient waits too, because rank 0 has not posted any of them yet.
    """
    n = range(ahead)
    program = Program(
        "filled", 2, ahead, (0, 1),
        rows(
            " ".join([f"0F{i} 0SEND_F{i}" for i in n] + [f"0RECV_B{i} 0B{i}" for i in n]),
            " ".join(
                [f"1RECV_F{i} 1F{i}" for i in range(4)] + [f"1B{i} 1SEND_B{i}" for i in range(3)]
                + [f"1RECV_F{i} 1F{i}" for i in n[4:]] + [f"1B{i} 1SEND_B{i}" for i in n[3:]]
            ),
        ),
    )  # fmt: skip
    found = {v.semantics: v for v in deadlocks(program, buffers=2)}
    assert found["pipelane"].safe == (ahead < 9)
    assert found["buffered"].safe
    assert found["fifo"].safe
    assert not found["k-buffered"].safe
    if ahead >= 9:
        assert found["pipelane"].reason.splitlines() == [
            "  rank 0 waits in 0SEND_F8 (#17) for rank 1: 1RECV_F4 (#14)",
            f"  rank 1 waits in 1SEND_B2 (#13) for rank 0: 0RECV_B0 (#{2 * ahead})",
        ]


def test_unmatched_messages_are_named() -> None:
    good = rows("0F0 0SEND_F0", "1RECV_F0 1F0")
    program = Program("mine", 2, 1, (0, 1), (good[0], ()), forward_only=True)
    with pytest.raises(CheckError, match="rank 0: 0SEND_F0 has no other end; rank 1 needs a 1RECV"):
        deadlocks(program)
    program = replace(program, streams=((), good[1]))
    with pytest.raises(CheckError, match="rank 1: 1RECV_F0 has no other end; rank 0 needs a 0SEND"):
        deadlocks(program)


def test_wrong_arguments() -> None:
    program = Program("mine", 2, 1, (0, 1), rows("0F0 0SEND_F0", "1RECV_F0 1F0"), forward_only=True)
    with pytest.raises(ConfigError, match="unknown semantics 'tags'; choose from rendezvous"):
        verify_program(program, "tags")
    with pytest.raises(ConfigError, match="buffers must be at least 0"):
        deadlocks(program, buffers=-1)


def test_the_certificate_has_the_verdicts() -> None:
    verdicts = pipelane.check(pipelane.build_schedule("1f1b", 4, 8)).verdicts
    assert [v.semantics for v in verdicts] == list(SEMANTICS)
    assert all(v.safe and v.assumption for v in verdicts)


# Streams from files


def test_a_program_from_its_own_csv(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = tmp_path / "own.csv"
    for _ in range(60):
        program = small_program(rng)
        cells = [[str(x) for x in stream] for stream in program.streams]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(cells)
        read = program_from_csv(path, name="random")
        assert read == program
        assert deadlocks(read) == deadlocks(program)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "0F0,0SEND_F0,0SEND_F1\n1RECV_F0,1F0\n",
            "row 1, cell 3: rank 0: 0SEND_F1 is out of range",
        ),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n", "row 2, cell 3: rank 1: 1SEND_F0 has no stage"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,0RECV_B0\n", "row 2, cell 3: rank 1: 0RECV_B0 belongs to"),
        ("0F0,0SEND_F0,1F0\n", "row 1, cell 2: rank 0: 0SEND_F0 is not needed"),
    ],
)
def test_messages_in_a_file_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        program_from_csv(path)
    assert str(caught.value).startswith(f"{path}, ")
    assert words in str(caught.value)


BUFFERED = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


def test_the_command_checks_a_files_own_messages(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(BUFFERED)
    shown = CliRunner().invoke(app, ["check", str(path)])
    assert shown.exit_code == 0
    assert "rendezvous  CAN deadlock" in shown.output
    assert "rank 0 waits in 0SEND_F1 (#3) for rank 1: 1RECV_F1 (#4)" in shown.output
    assert "pipelane    cannot deadlock" in shown.output
    data = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).output)
    assert [v["safe"] for v in data["own_messages"]] == [False, True, True, True, True]

    path.write_text("0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    data = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).output)
    assert not data["valid"]
    assert "rank 0 waits in 0RECV_B0 (#1) for rank 1: 1SEND_B0 (#3)" in data["reason"]

    path.write_text(BUFFERED.replace(",1SEND_B1", ""))
    data = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).output)
    assert "rank 0: 0RECV_B1 has no other end; rank 1 needs a 1SEND_B1" in data["reason"]

    path.write_text("0F0,0B0\n1F0,1B0\n")
    data = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).output)
    assert data["own_messages"] == []
