"""Execute one rank's instruction stream.

The stream is compiled once into a flat list of functions without arguments. A step runs through
the list and reads the clock once after each, so the index of the current instruction is always
known (for the timeline, and for the message when something fails) and costs next to nothing.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipelane.actions import Action, Kind
from pipelane.errors import (
    AnomalyError,
    BoundaryError,
    LossError,
    PipelaneError,
    PipelineFailure,
    ScheduleError,
)
from pipelane.program import Program
from pipelane.runtime.boundary import Boundary, Message, describe, differs, returning
from pipelane.runtime.loss import LossFn, microbatch_loss
from pipelane.runtime.stage import StageModule
from pipelane.runtime.tied import TiedWeights
from pipelane.runtime.transport import Edge, Outbox, Slot, Transport
from pipelane.trees import LEAF

__all__ = ["Engine", "KnownBoundaries", "StepInput", "StepOutput"]

Op = Callable[[], None]
Table: TypeAlias = dict[tuple[Edge, bool], Boundary]
"""What goes along an edge, forward or back."""


class _Label(NamedTuple):
    """What an op is, for spans and messages.

    ``what``: "run", "send", "receive", "wait" or "reduce".
    """

    what: str
    action: Action
    peer: int = -1

    def __str__(self) -> str:
        peer = f" (rank {self.peer})" if self.peer >= 0 else ""
        prefix = "" if self.what in ("run", "reduce") else f"{self.what} "
        return f"{prefix}{self.action}{peer}"


@dataclass
class StepInput:
    """What one step works on.

    Attributes:
        number: counts steps from 0; random draws depend on it.
        keys: per micro-batch, what the shapes of all boundaries follow from.
        inputs: micro-batches of the model's input, on the rank of the first stage.
        targets: micro-batches of the target, on the rank of the last stage.
        weights: what each micro-batch's loss is multiplied with, there too.
        scale: what all gradients are multiplied with, there too.
        reduce: whether gradients of tied weights are summed at the end.
    """

    number: int
    keys: Sequence[Hashable]
    inputs: Sequence[Message] = ()
    targets: Sequence[Any] = ()
    weights: Sequence[float] = ()
    scale: float = 1.0
    reduce: bool = True


@dataclass
class StepOutput:
    """What one step gave.

    Attributes:
        losses: on the rank of the last stage, the weighted losses in the order of micro-batches.
        metrics: the other entries of what the loss function returned, weighted as well.
        outputs: of a program that is forward only, there too.
        input_grads: per micro-batch and tensor of the model's input, its gradient if wanted.
    """

    losses: list[Tensor] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Message] = field(default_factory=list)
    input_grads: list[list[Any]] = field(default_factory=list)


class KnownBoundaries:
    """What crosses each boundary, learnt in the first step that meets a kind of input.

    While a kind of input is new, senders tell receivers each message's boundary ahead of it.
    Whether it is new is decided by completed steps alone, so all ranks agree without talking.

    Args:
        dynamic: never take anything as known.
    """

    #: More kinds of input than that, and all is learnt anew: nobody has that many on purpose.
    MOST = 4096

    def __init__(self, dynamic: bool = False) -> None:
        self._dynamic = dynamic
        self._tables: dict[Hashable, Table] = {}
        self._complete: set[Hashable] = set()

    def is_new(self, key: Hashable) -> bool:
        return key not in self._complete

    def tables(self, keys: Sequence[Hashable]) -> list[Table]:
        """Per micro-batch of a step, what is known here for its kind of input."""
        if self._dynamic:
            return [{} for _ in keys]
        return [self._tables.setdefault(key, {}) for key in keys]

    def complete(self, keys: Sequence[Hashable]) -> None:
        if self._dynamic:
            return
        self._complete.update(keys)
        if len(self._complete) > self.MOST:
            self.forget()

    def forget(self) -> None:
        """Learn all anew; every rank must do it at the same time."""
        self._tables.clear()
        self._complete.clear()


class Engine:
    """A program, compiled for this rank.

    Args:
        program: verified by pipelane.check.
        stages: this rank's stages by number.
        transport: channels to the other ranks.
        known: shared by all engines of a pipeline with the same mode.
        loss_fn: on the rank of the last stage.
        tied: parameters that stages share.

    Raises:
        ScheduleError: the program has an action that the runtime cannot execute.
    """

    def __init__(
        self,
        program: Program,
        stages: dict[int, StageModule],
        transport: Transport,
        known: KnownBoundaries,
        loss_fn: LossFn | None = None,
        tied: TiedWeights | None = None,
    ) -> None:
        self.program = program
        self._stages = stages
        self._transport = transport
        self._ranks = transport.ranks
        self._known = known
        self._loss_fn = loss_fn
        self._training = not program.forward_only
        self._last = program.stages - 1
        self._step: StepInput
        self._out = StepOutput()
        m = program.microbatches
        # Messages to stages here, by edge and micro-batch, until they are used; the same for
        # gradients of messages that went out from here, and for what is to be sent.
        self._arrived: dict[Edge, list[Any]] = {}
        self._gradients: dict[Edge, list[Any]] = {}
        self._leaving: dict[tuple[Edge, bool], list[Any]] = {}
        for s, stage in stages.items():
            for other in stage.coming.stages:
                self._arrived[other, s] = [None] * m
            for other in stage.going.stages:
                self._gradients[s, other] = [None] * m
        self._warned: set[int] = set()
        self._outboxes: dict[tuple[int, bool], Outbox] = {}
        self._boundary_sends = Outbox()
        self._tables: list[Table] = [{} for _ in range(m)]
        self._cold: list[bool] = [True] * m
        self._any_cold = True
        self._inboxes = transport.inboxes(program, self._boundary_of, self._learn)
        self._ops: list[Op] = []
        self._labels: list[_Label] = []
        self._events: dict[int, tuple[Any, Any]] = {}
        self._base_event: Any = None
        for instruction in program.streams[self._ranks.rank]:
            if instruction.kind.is_compute:
                for part in instruction.flat():
                    self._compile_compute(part)
            else:
                self._compile_message(instruction)
        if tied is not None and self._training:
            for stage_number, op in tied.reductions(lambda: self._step.reduce):
                self._add(_Label("reduce", Action(Kind.REDUCE_GRAD, stage_number)), op)
        self.clock: list[float] = []

    # -- compiling ---------------------------------------------------------------------------

    def _add(self, label: _Label, op: Op) -> None:
        if label.what == "run" and self._transport.device.type == "cuda":
            op = self._timed(len(self._ops), op)
        self._ops.append(op)
        self._labels.append(label)

    def _timed(self, index: int, op: Op) -> Op:
        """On a GPU the host clock says nothing: record events around the action."""
        begin, end = _timing_event(), _timing_event()
        self._events[index] = (begin, end)

        def timed() -> None:
            begin.record()
            op()
            end.record()

        return timed

    def _here(self, stage: int) -> bool:
        return self.program.placement[stage] == self._ranks.rank

    def _compile_compute(self, action: Action) -> None:
        kind, s, i = action.kind, action.stage, action.microbatch
        stage = self._stages[s]
        if kind is Kind.F:
            for other in stage.coming.stages:
                if other >= 0 and not self._here(other):
                    self._compile_wait(action, (other, s), True)
            run = self._forward(s, i)
        elif kind in (Kind.B, Kind.I):
            for other in stage.going.stages:
                if not self._here(other):
                    self._compile_wait(action, (s, other), False)
            run = self._backward(s, i, split=kind is Kind.I)
        elif kind is Kind.W:
            run = self._weight_grad(s, i)
        else:
            raise ScheduleError(
                f"schedule {self.program.name!r}: {action} is nothing that the runtime can execute"
            )
        self._add(_Label("run", action), run)

    def _compile_wait(self, action: Action, edge: Edge, forward: bool) -> None:
        i, slot = action.microbatch, (edge, action.microbatch)
        peer = self.program.placement[edge[0] if forward else edge[1]]
        wait = self._inboxes[peer, forward].wait
        if forward:
            row = self._arrived[edge]

            def op() -> None:
                row[i] = wait(slot)
        else:
            row = self._gradients[edge]

            def op() -> None:
                message = wait(slot)
                there = iter(message.leaves)
                row[i] = [next(there) if sent else None for sent in message.grads]

        receive = Action(Kind.RECV_F if forward else Kind.RECV_B, action.stage, i)
        self._add(_Label("wait", receive, peer), op)

    def _compile_message(self, instruction: Any) -> None:
        kind, i, peer = instruction.kind, instruction.microbatch, instruction.peer
        action = Action(kind, instruction.stage, i)
        if not (kind.is_send or kind.is_receive):
            raise ScheduleError(
                f"schedule {self.program.name!r}: {action} composes with sharded data parallelism, "
                "which this version does not run"
            )
        edge, forward = instruction.edge
        if kind.is_receive:
            inbox, slot = self._inboxes[peer, forward], (edge, i)
            self._add(_Label("receive", action, peer), lambda: inbox.post(slot))
        else:
            self._add(_Label("send", action, peer), self._send(edge, i, peer, forward))

    def _boundary_of(self, forward: bool, slot: Slot) -> Boundary | None:
        """What a message to this rank will be."""
        edge, i = slot
        return None if self._cold[i] else self._tables[i].get((edge, forward))

    def _learn(self, forward: bool, slot: Slot, boundary: Boundary) -> None:
        """What was told ahead of a message, or was found out here, for the steps to come.

        A gradient that any micro-batch has is expected of all: the others then send zeros.
        """
        i, key = slot[1], (slot[0], forward)
        before = self._tables[i].get(key)
        if before is not None and not forward:
            specs = [
                old if old.grad else new
                for old, new in zip(before.specs, boundary.specs, strict=True)
            ]
            boundary = Boundary(boundary.structure, tuple(specs))
        self._tables[i][key] = boundary

    def _forward(self, s: int, i: int) -> Op:
        stage, training, is_last = self._stages[s], self._training, s == self._last
        rows = [self._arrived[other, s] for other in stage.coming.stages]
        first = s == 0
        finish = self._finisher(i) if is_last and training else None
        deliver = [self._deliverer(s, other, i) for other in stage.going.stages]

        def forward() -> None:
            step = self._step
            if first:
                messages = [step.inputs[i]]
            else:
                messages = [row[i] for row in rows]
                for row in rows:
                    row[i] = None
            if training:
                out = stage.forward(i, step.number, messages, finish)
            else:
                out = stage.infer(i, step.number, messages)
            del messages
            if not is_last:
                for hand, message in zip(deliver, out, strict=True):
                    hand(message)
            elif training:
                self._out.losses[i] = out[0].leaves[0]
            else:
                self._out.outputs[i] = out[0]

        return forward

    def _deliverer(self, s: int, to: int, i: int) -> Callable[[Message], None]:
        """Check an outgoing message, and hand it to the stage here, or to its send."""
        stage, edge, device = self._stages[s], (s, to), self._transport.device
        key = edge, True
        if self._here(to):
            row = self._arrived[edge]
        else:
            row = self._leaving.setdefault((edge, True), [None] * self.program.microbatches)

        def hand(message: Message) -> None:
            known = self._tables[i].get(key)
            if known is None:
                self._tables[i][key] = describe(message, device, stage.where)
            else:
                wrong = differs(message, known, device)
                if wrong is not None:
                    self._refuse(stage, to, i, wrong)
            row[i] = message

        return hand

    def _refuse(self, stage: StageModule, to: int, i: int, wrong: str) -> None:
        if "needs a gradient" in wrong:
            hint = (
                "if parameters were made trainable since, call pipe.relearn() on every rank before "
                "the next step"
            )
        else:
            hint = (
                f"stage {to} expects the latter. What a stage returns must have the same form for "
                "all inputs of the same form; if it depends on their values, build the pipeline "
                "with dynamic=True"
            )
        raise BoundaryError(
            f"{stage.where} returned {wrong} for an earlier input of the same form (micro-batch "
            f"{i}); {hint}"
        )

    def _finisher(self, i: int) -> Callable[[Any], Tensor]:
        """From the model's output to the weighted loss of a micro-batch."""
        loss_fn, policy = self._loss_fn, self._stages[self._last].policy
        assert loss_fn is not None

        def finish(output: Any) -> Tensor:
            step = self._step
            with policy.precision():
                loss, metrics = microbatch_loss(
                    loss_fn, output, step.targets[i], step.weights[i], i
                )
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise LossError(
                    f"the loss of micro-batch {i} does not depend on any parameter or input that "
                    "requires a gradient: is it detached, or is every parameter frozen?"
                )
            if policy.detect_anomaly and not torch.isfinite(loss.detach()).all():
                raise AnomalyError(f"the loss of micro-batch {i} is {loss.item()}")
            self._out.metrics[i] = metrics
            return loss

        return finish

    def _backward(self, s: int, i: int, *, split: bool) -> Op:
        stage, first, is_last = self._stages[s], s == 0, s == self._last
        rows = [self._gradients[s, other] for other in stage.going.stages]
        give = [self._giver(other, s, i) for other in stage.coming.stages]
        work = stage.input_grad if split else stage.backward

        def backward() -> None:
            if is_last:
                scale = self._step.scale
                gradients: list[Any] = []
                if scale != 1.0:
                    loss = self._out.losses[i]
                    gradients = [[torch.full_like(loss, scale)]]
            else:
                gradients = [row[i] for row in rows]
                for row in rows:
                    row[i] = None
            found = work(i, gradients)
            del gradients
            if split and stage.early:
                self._warn_early(s)
            if first:
                self._out.input_grads[i] = found[0]
                return
            for hand, row in zip(give, found, strict=True):
                hand(row)

        return backward

    def _giver(self, source: int, s: int, i: int) -> Callable[[list[Any]], None]:
        """Hand the gradients of a stage's input to the stage before, here or to its send."""
        if source < 0:
            return lambda row: None
        edge = source, s
        if self._here(source):
            row = self._gradients[edge]
        else:
            row = self._leaving.setdefault((edge, False), [None] * self.program.microbatches)

        slot, key = (edge, i), (edge, False)

        def give(gradients: list[Any]) -> None:
            row[i] = gradients
            if self._cold[i]:
                self._learn(False, slot, Boundary(LEAF, returning(gradients)))
                return
            for place, spec in enumerate(self._tables[i][key].specs):
                if (gradients[place] is None) is spec.grad:
                    if not spec.grad:
                        self._refuse_gradient(s, source, i)
                    gradients[place] = torch.zeros(
                        spec.shape, dtype=spec.dtype, device=self._transport.device
                    )

        return give

    def _refuse_gradient(self, s: int, source: int, i: int) -> None:
        names = self._stages[s].names
        raise BoundaryError(
            f"stage {s} (layers {names[0]!r} to {names[-1]!r}) has a gradient for stage "
            f"{source} in micro-batch {i} that no micro-batch had for an earlier input of the same "
            "form; if which outputs are used depends on values, build it with dynamic=True; if "
            "parameters were made trainable since, call pipe.relearn() on every rank"
        )

    def _weight_grad(self, s: int, i: int) -> Op:
        stage = self._stages[s]
        return lambda: stage.weight_grad(i)

    def _warn_early(self, s: int) -> None:
        if s not in self._warned:
            self._warned.add(s)
            stage = self._stages[s]
            warnings.warn(
                f"stage {s} (layers {stage.names[0]!r} to {stage.names[-1]!r}): "
                f"{', '.join(stage.early)} cannot be split into input and weight gradient, so I "
                "computes both for the parameters behind it and W is shorter than planned",
                RuntimeWarning,
                stacklevel=2,
            )

    def _send(self, edge: Edge, i: int, peer: int, forward: bool) -> Op:
        m = self.program.microbatches
        send = self._transport.sender(forward, edge, i, m)
        tell = self._transport.boundary_sender(forward, edge, i, m)
        row = self._leaving.setdefault((edge, forward), [None] * m)
        outbox = self._outboxes.setdefault((peer, forward), Outbox())

        def op() -> None:
            tensors, row[i] = row[i], None
            if forward:
                tensors = [leaf.contiguous() for leaf in tensors.leaves]
            if self._cold[i]:
                boundary = self._tables[i][edge, forward]
                if not forward:  # of this very message, not of others of its kind
                    boundary = Boundary(LEAF, returning(tensors))
                self._boundary_sends.keep(tell(boundary), may_wait=False)
            # While boundaries are new, receives are posted late: then waiting could deadlock.
            outbox.keep(send(tensors), may_wait=not self._any_cold)

        return op

    # -- running -----------------------------------------------------------------------------

    def run(self, step: StepInput) -> StepOutput:
        """Execute the stream once.

        Raises:
            LossError, BoundaryError, ModelError, AnomalyError: raised here by this rank's own
                stages.
            PipelineFailure: this rank's layers raised (the original is its cause), or a peer
                failed or did not answer; the message names who, where and why.
        """
        self._prepare(step)
        clock = self.clock
        record, now = clock.append, perf_counter
        record(now())
        try:
            with torch.set_grad_enabled(self._training):
                for op in self._ops:
                    op()
                    record(now())
                self._finish_sends()
        except BaseException as error:
            raise self._explain(error, len(clock) - 1) from _cause(error)
        self._known.complete(step.keys)
        return self._out

    def _prepare(self, step: StepInput) -> None:
        self._step = step
        m = self.program.microbatches
        self._out = StepOutput()
        if self._last in self._stages:
            blank: list[Any] = [None] * m
            if self._training:
                self._out.losses, self._out.metrics = blank, [{} for _ in range(m)]
            else:
                self._out.outputs = blank
        if 0 in self._stages and self._training:
            self._out.input_grads = [[] for _ in range(m)]
        self.clock = []
        if self._base_event is None and self._events:
            self._base_event = _timing_event()
        if self._base_event is not None:
            self._base_event.record()
        for inbox in self._inboxes.values():
            inbox.restart()
        self._cold = [self._known.is_new(key) for key in step.keys]
        self._any_cold = any(self._cold)
        self._tables = self._known.tables(step.keys)

    def _finish_sends(self) -> None:
        self._boundary_sends.finish()
        for outbox in self._outboxes.values():
            outbox.finish()

    def _explain(self, error: BaseException, index: int) -> BaseException:
        """Tell the other ranks, and make the exception that this rank raises."""
        ranks = self._ranks
        if index < len(self._labels):
            label = self._labels[index]
        else:
            label = _Label("wait", Action(Kind.SEND_F, -1), -1)
        inside = label.what == "run"
        where = f"instruction {label}" if index < len(self._labels) else "the end of its step"
        if isinstance(error, RuntimeError) and not inside and not isinstance(error, PipelaneError):
            return ranks.failure(where, error)
        action = label.action
        layers = ""
        if inside and action.stage in self._stages:
            names = self._stages[action.stage].names
            layers = f" (layers {names[0]!r} to {names[-1]!r})"
        message = (
            f"rank {ranks.rank} ({ranks.host}) failed in step {self._step.number}, stage "
            f"{action.stage}{layers}, micro-batch {action.microbatch}, {where}: "
            f"{type(error).__name__}: {error}"
        )
        ranks.announce(
            {
                "message": message,
                "rank": ranks.rank,
                "instruction": str(label),
                "traceback": "".join(traceback.format_exception(error)),
            }
        )
        if isinstance(error, PipelaneError) or not isinstance(error, Exception):
            return error
        return PipelineFailure(message)

    def held(self) -> int:
        """How many tensors' places are taken between two actions; 0 after a step."""
        tables = (self._arrived, self._gradients, self._leaving)
        rows = [row for table in tables for row in table.values()]
        waiting = sum(one is not None for row in rows for one in row)
        return waiting + sum(stage.held() for stage in self._stages.values())

    # -- measuring ---------------------------------------------------------------------------

    def spans(self) -> list[tuple[Action, float, float]]:
        """The compute actions of the last step with start and end on this rank's clock, seconds."""
        clock = self.clock
        if self._events:
            torch.cuda.synchronize(self._transport.device)
            return [
                (
                    self._labels[index].action,
                    clock[0] + self._base_event.elapsed_time(begin) / 1e3,
                    clock[0] + self._base_event.elapsed_time(end) / 1e3,
                )
                for index, (begin, end) in self._events.items()
            ]
        return [
            (label.action, clock[index], clock[index + 1])
            for index, label in enumerate(self._labels)
            if label.what == "run"
        ]


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cause(error: BaseException) -> BaseException | None:
    """What to chain: the original, unless it is raised itself."""
    return None if isinstance(error, PipelaneError) or not isinstance(error, Exception) else error
