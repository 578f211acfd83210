"""Text forms of actions, also against torch's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_schedules import torch_schedules

from pipelane.actions import COMMUNICATION, COMPUTE, Action, Kind, parse_action
from pipelane.errors import PipelaneError, ScheduleError

PER_STAGE = (Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.RESHARD)
SINGLE = [kind for kind in Kind if kind not in (*PER_STAGE, Kind.OVERLAP)]
numbers = st.integers(0, 9999)
simple = st.one_of(
    st.builds(lambda *parts: Action(*parts), st.sampled_from(SINGLE), numbers, numbers),
    st.builds(lambda *parts: Action(*parts), st.sampled_from(PER_STAGE), numbers),
)
pairs = st.builds(
    lambda i, j, back, k, n: Action(
        Kind.OVERLAP, -1, -1, (Action(Kind.F, i, j), Action(back, k, n))
    ),
    numbers, numbers, st.sampled_from([Kind.B, Kind.I]), numbers, numbers,
)  # fmt: skip


@given(st.one_of(simple, pairs))
def test_text_round_trip(action: Action) -> None:
    assert parse_action(str(action)) == action
    assert parse_action(f" {action}\t") == action


@given(st.one_of(simple, pairs))
def test_text_is_what_torch_reads_and_prints(action: Action) -> None:
    schedules = torch_schedules()
    theirs = schedules._Action.from_str(str(action))
    assert str(theirs) == str(action)
    assert theirs.computation_type.value == action.kind.value
    if not action.parts:
        assert theirs.stage_index == action.stage
        assert theirs.microbatch_index == (None if action.microbatch < 0 else action.microbatch)


def test_every_kind_of_torch_is_known() -> None:
    schedules = torch_schedules()
    assert {kind.value for kind in schedules._ComputationType} == {kind.value for kind in Kind}


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F3", Action(Kind.F, 2, 3)),
        ("0B1", Action(Kind.B, 0, 1)),
        ("12I34", Action(Kind.I, 12, 34)),
        ("0W0", Action(Kind.W, 0, 0)),
        ("1SEND_F0", Action(Kind.SEND_F, 1, 0)),
        ("2RECV_B7", Action(Kind.RECV_B, 2, 7)),
        ("3UNSHARD", Action(Kind.UNSHARD, 3)),
        ("(4F0;3B1)OVERLAP_F_B",
         Action(Kind.OVERLAP, -1, -1, (Action(Kind.F, 4, 0), Action(Kind.B, 3, 1)))),
    ],
)  # fmt: skip
def test_text(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


def test_parts() -> None:
    pair = parse_action("(4F0;3I1)OVERLAP_F_B")
    assert list(pair.flat()) == [Action(Kind.F, 4, 0), Action(Kind.I, 3, 1)]
    assert list(Action(Kind.F, 4, 0).flat()) == [Action(Kind.F, 4, 0)]


@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_belongs_to_one_group(kind: Kind) -> None:
    assert (kind in COMPUTE) + (kind in COMMUNICATION) + (kind in PER_STAGE) == 1
    assert kind.is_compute == (kind in COMPUTE)
    assert (kind.is_send or kind.is_receive) == (kind in COMMUNICATION)
    assert kind.is_send == kind.value.startswith("SEND")
    assert f"{kind}" == kind.value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected STAGE KIND MICROBATCH"),
        ("F", "expected STAGE"),
        ("F0", "expected STAGE"),
        ("0X1", "expected STAGE"),
        ("0f1", "expected STAGE"),
        ("-1F0", "expected STAGE"),
        ("0F-1", "expected STAGE"),
        ("0F1x", "expected STAGE"),
        ("0 F 1", "expected STAGE"),
        ("٣F1", "expected STAGE"),
        ("0F1.5", "expected STAGE"),
        ("0F1\n0F2", "expected STAGE"),
        ("9" * 5000 + "F0", "expected STAGE"),
        ("0F", "F needs a micro-batch number"),
        ("1SEND_F", "SEND_F needs a micro-batch number"),
        ("1UNSHARD2", "UNSHARD takes no micro-batch number"),
        ("()OVERLAP_F_B", "expected STAGE"),
        ("(0F1)OVERLAP_F_B", "one forward and one backward"),
        ("(0F1;1F0)OVERLAP_F_B", "one forward and one backward"),
        ("(0F1;1W0)OVERLAP_F_B", "one forward and one backward"),
        ("(1B0;0F1)OVERLAP_F_B", "one forward and one backward"),
        ("(0F1;1B0;2B0)OVERLAP_F_B", "one forward and one backward"),
        ("(0F1;1B)OVERLAP_F_B", "B needs a micro-batch number"),
        ("((0F1;1B0)OVERLAP_F_B;2B0)OVERLAP_F_B", "expected STAGE"),
        ("(0F1;1B0)", "expected STAGE"),
        ("0F1;1B0", "expected STAGE"),
    ],
)
def test_bad_text_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_action(text)
    assert "bad action" in str(caught.value)
    assert reason in str(caught.value)


@given(st.text(alphabet="0123FBIWSENDRCV_();.- ", max_size=14))
def test_any_text_is_an_action_or_refused(text: str) -> None:
    """Whatever is accepted prints as what it was, but for spaces around and leading zeros."""
    try:
        action = parse_action(text)
    except PipelaneError:
        return
    assert parse_action(str(action)) == action
    assert str(action).replace("0", "") == text.strip().replace("0", "")
