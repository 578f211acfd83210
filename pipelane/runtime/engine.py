"""Execute one rank's instruction stream.

The stream is compiled once into a flat list of functions without arguments. A step runs through
the list and reads the clock once after each, so the index of the current instruction is always
known (for the timeline, and for the message when something fails) and costs next to nothing.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipelane.actions import Action, Kind
from pipelane.backward import edge_of, split_backward
from pipelane.errors import BoundaryError, LossError, PipelaneError, PipelineFailure, ScheduleError
from pipelane.program import Program
from pipelane.runtime.loss import microbatch_loss
from pipelane.runtime.stage import StageModule, backward_from
from pipelane.runtime.transport import Outbox, Spec, Transport

__all__ = ["Engine", "KnownSpecs", "StepInput"]

Op = Callable[[], None]
Slot = tuple[int, int]


class _Label(NamedTuple):
    """What an op is, for spans and messages. ``what``: "run", "send", "receive" or "wait"."""

    what: str
    action: Action
    peer: int = -1

    def __str__(self) -> str:
        peer = f" (rank {self.peer})" if self.peer >= 0 else ""
        prefix = "" if self.what == "run" else f"{self.what} "
        return f"{prefix}{self.action}{peer}"


@dataclass
class StepInput:
    """What one step works on.

    Attributes:
        number: counts steps from 0; random draws depend on it.
        keys: per micro-batch, the spec of the model's input; shapes of boundaries follow from it.
        inputs: micro-batches of the model's input, on the rank of the first stage.
        targets: micro-batches of the target, on the rank of the last stage.
        weights: what each micro-batch's loss is multiplied with, there too.
    """

    number: int
    keys: Sequence[Spec]
    inputs: Sequence[torch.Tensor] = ()
    targets: Sequence[Any] = ()
    weights: Sequence[float] = ()


class KnownSpecs:
    """Specs of the tensors at stage boundaries, learnt in the first step that meets an input spec.

    While an input spec is new, senders tell receivers each output's spec ahead of it. Whether it
    is new is decided by completed steps alone, so all ranks agree without talking.
    """

    def __init__(self) -> None:
        self._inputs: dict[Spec, dict[int, Spec]] = {}
        self._complete: set[Spec] = set()

    def is_new(self, key: Spec) -> bool:
        return key not in self._complete

    def get(self, key: Spec, stage: int) -> Spec | None:
        """The input spec of a stage, if seen here."""
        return self._inputs.get(key, {}).get(stage)

    def put(self, key: Spec, stage: int, spec: Spec) -> None:
        self._inputs.setdefault(key, {})[stage] = spec

    def complete(self, keys: Sequence[Spec]) -> None:
        self._complete.update(keys)


class Engine:
    """A program, compiled for this rank.

    Args:
        program: verified by pipelane.check.
        stages: this rank's stages by number.
        transport: channels to the other ranks.
        specs: shared by all engines of a pipeline with the same mode.
        loss_fn: ``(output, target) -> scalar``, on the rank of the last stage.

    Raises:
        ScheduleError: the program has an action that the runtime cannot execute.
    """

    def __init__(
        self,
        program: Program,
        stages: dict[int, StageModule],
        transport: Transport,
        specs: KnownSpecs,
        loss_fn: Callable[[Any, Any], Any] | None,
    ) -> None:
        self.program = program
        self._stages = stages
        self._transport = transport
        self._ranks = transport.ranks
        self._specs = specs
        self._loss_fn = loss_fn
        self._training = not program.forward_only
        self._last = program.stages - 1
        self._step: StepInput
        m = program.microbatches
        # Everything alive between two actions, by stage and micro-batch.
        self._x: dict[int, list[Any]] = {s: [None] * m for s in stages}
        self._y: dict[int, list[Any]] = {s: [None] * m for s in stages}
        self._edge: dict[int, list[Any]] = {s: [None] * m for s in stages}
        self._dy: dict[int, list[Any]] = {s: [None] * m for s in stages}
        self._dx: dict[int, list[Any]] = {s: [None] * m for s in stages}
        self._rest: dict[int, list[Any]] = {s: [None] * m for s in stages}  # between I and W
        self._out_spec: dict[int, list[Spec | None]] = {s: [None] * m for s in stages}
        self._warned: set[int] = set()
        self._outboxes: dict[tuple[int, bool], Outbox] = {}
        self._spec_sends: list[dist.Work] = []
        self._cold: list[bool] = [True] * m
        self._any_cold = True
        self._losses: list[torch.Tensor] = []
        self._inboxes = transport.inboxes(program, self._spec_of, self._learn)
        self._ops: list[Op] = []
        self._labels: list[_Label] = []
        self._events: dict[int, tuple[Any, Any]] = {}
        self._base_event: Any = None
        for instruction in program.streams[self._ranks.rank]:
            if instruction.kind.is_compute:
                for part in instruction.flat():
                    self._compile_compute(part)
            else:
                self._compile_message(
                    instruction.kind, instruction.stage, instruction.microbatch, instruction.peer
                )
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

    def _compile_compute(self, action: Action) -> None:
        kind, s, i = action.kind, action.stage, action.microbatch
        if kind is Kind.F:
            if s > 0 and self.program.placement[s - 1] != self._ranks.rank:
                self._compile_wait(action, Kind.F, s - 1, True, self._x)
            run = self._last_forward(s, i) if s == self._last else self._forward(s, i)
            self._add(_Label("run", action), run)
        elif kind in (Kind.B, Kind.I):
            if s < self._last and self.program.placement[s + 1] != self._ranks.rank:
                self._compile_wait(action, Kind.B, s + 1, False, self._dy)
            if kind is Kind.I:
                run = self._input_grad(s, i)
            else:
                run = self._last_backward(s, i) if s == self._last else self._backward(s, i)
            self._add(_Label("run", action), run)
        elif kind is Kind.W:
            self._add(_Label("run", action), self._weight_grad(s, i))
        else:
            raise ScheduleError(
                f"schedule {self.program.name!r}: {action} is nothing that the runtime can execute"
            )

    def _compile_wait(
        self, action: Action, kind: Kind, producer: int, forward: bool, into: dict[int, list[Any]]
    ) -> None:
        s, i = action.stage, action.microbatch
        peer = self.program.placement[producer]
        inbox, row, slot = self._inboxes[peer, forward], into[s], (s, i)

        def wait() -> None:
            row[i] = inbox.wait(slot)

        receive = Action(Kind.RECV_F if forward else Kind.RECV_B, s, i)
        self._add(_Label("wait", receive, peer), wait)

    def _compile_message(self, kind: Kind, s: int, i: int, peer: int) -> None:
        action = Action(kind, s, i)
        if kind.is_receive:
            inbox, slot = self._inboxes[peer, kind is Kind.RECV_F], (s, i)
            self._add(_Label("receive", action, peer), lambda: inbox.post(slot))
        elif kind is Kind.SEND_F:
            self._add(_Label("send", action, peer), self._send_forward(s, i, peer))
        elif kind is Kind.SEND_B:
            self._add(_Label("send", action, peer), self._send_backward(s, i, peer))
        else:
            raise ScheduleError(
                f"schedule {self.program.name!r}: {action} composes with sharded data parallelism, "
                "which this version does not run"
            )

    def _spec_of(self, forward: bool, slot: Slot) -> Spec | None:
        """What a message to this rank will be: the input, or the gradient of the output."""
        s, i = slot
        if not forward and (known := self._out_spec[s][i]) is not None:
            return known
        if self._cold[i]:
            return None
        return self._specs.get(self._step.keys[i], s if forward else s + 1)

    def _learn(self, slot: Slot, spec: Spec) -> None:
        self._specs.put(self._step.keys[slot[1]], slot[0], spec)

    def _runner(self, s: int, i: int) -> Callable[[], torch.Tensor]:
        """Run a stage on its input, a slice of the batch or what was received."""
        stage, xs, first, training = self._stages[s], self._x[s], s == 0, self._training

        def run() -> torch.Tensor:
            step = self._step
            if first:
                xs[i] = step.inputs[i]
            x = xs[i]
            if training and not first and (x.is_floating_point() or x.is_complex()):
                x.requires_grad_()
            return stage(x, step.number, i)

        return run

    def _forward(self, s: int, i: int) -> Op:
        stage, xs, ys, edges = self._stages[s], self._x[s], self._y[s], self._edge[s]
        run, out_spec, training = self._runner(s, i), self._out_spec[s], self._training
        own_next = self._x.get(s + 1) if self.program.placement[s + 1] == self._ranks.rank else None

        def forward() -> None:
            y = run()
            spec = stage.spec_of(y)
            key = self._step.keys[i]
            if self._cold[i]:
                self._specs.put(key, s + 1, spec)
            elif spec != self._specs.get(key, s + 1):
                raise BoundaryError(
                    f"{stage.where} returned {spec} for micro-batch {i}, but "
                    f"{self._specs.get(key, s + 1)} for an earlier input of the same shape "
                    f"({key}); the next stage expects the latter. The shape of a stage's output "
                    "must depend only on the shape of the model's input"
                )
            out_spec[i] = spec
            if training:
                edges[i] = edge_of(y) if y.requires_grad else None
            else:
                xs[i] = None
            y = y.detach()
            if own_next is not None:
                own_next[i] = y
            else:
                ys[i] = y if y.is_contiguous() else y.contiguous()

        return forward

    def _last_forward(self, s: int, i: int) -> Op:
        stage, xs, ys, edges = self._stages[s], self._x[s], self._y[s], self._edge[s]
        run, training, loss_fn = self._runner(s, i), self._training, self._loss_fn

        def forward() -> None:
            y, step = run(), self._step
            if not training:
                stage.spec_of(y)
                xs[i] = None
                ys[i] = y
                return
            assert loss_fn is not None
            loss = microbatch_loss(loss_fn, y, step.targets[i], step.weights[i], i)
            if not loss.requires_grad:
                raise LossError(
                    f"the loss of micro-batch {i} does not depend on any parameter or input that "
                    "requires a gradient: is it detached, or is every parameter frozen?"
                )
            edges[i] = loss
            self._losses.append(loss.detach())

        return forward

    def _last_backward(self, s: int, i: int) -> Op:
        edges, xs, first, give = self._edge[s], self._x[s], s == 0, self._giver(s, i)

        def backward() -> None:
            loss, edges[i] = edges[i], None
            torch.autograd.backward((loss,))
            x, xs[i] = xs[i], None
            if not first:
                give(x, x.grad)

        return backward

    def _backward(self, s: int, i: int) -> Op:
        edges, xs, dys, first = self._edge[s], self._x[s], self._dy[s], s == 0
        give = self._giver(s, i)

        def backward() -> None:
            dy, dys[i] = dys[i], None
            edge, edges[i] = edges[i], None
            if edge is not None and dy is not None:
                backward_from(edge, dy)
            x, xs[i] = xs[i], None
            if not first:
                give(x, x.grad)

        return backward

    def _input_grad(self, s: int, i: int) -> Op:
        """I: the gradient of the stage's input, so that the stage before can go on."""
        edges, xs, dys, first, last = (
            self._edge[s],
            self._x[s],
            self._dy[s],
            s == 0,
            s == self._last,
        )
        give, rests = self._giver(s, i), self._rest[s]

        def input_grad() -> None:
            dy, dys[i] = dys[i], None
            edge, edges[i] = edges[i], None
            x, xs[i] = xs[i], None
            gradient = None
            if edge is not None and (last or dy is not None):
                # Of the first stage only the weights need gradients: all is left to W.
                inputs = () if first else (x,)
                found, rests[i] = split_backward((edge,), (dy,), inputs)
                if rests[i].early:
                    self._warn_early(s, rests[i].early)
                gradient = None if first else found[0]
            if not first:
                give(x, gradient)

        return input_grad

    def _weight_grad(self, s: int, i: int) -> Op:
        """W: the gradients of the stage's parameters, what I left of them."""
        rests = self._rest[s]

        def weight_grad() -> None:
            rest, rests[i] = rests[i], None
            if rest is not None:
                rest.run()

        return weight_grad

    def _warn_early(self, s: int, names: tuple[str, ...]) -> None:
        if s not in self._warned:
            self._warned.add(s)
            stage = self._stages[s]
            warnings.warn(
                f"stage {s} (layers {stage.names[0]!r} to {stage.names[-1]!r}): {', '.join(names)} "
                "cannot be split into input and weight gradient, so I computes both for the "
                "parameters behind it and W is shorter than planned",
                RuntimeWarning,
                stacklevel=2,
            )

    def _giver(self, s: int, i: int) -> Callable[[torch.Tensor, torch.Tensor | None], None]:
        """Hand the gradient of a stage's input to the stage before, here or to its send."""
        if s == 0:
            return lambda x, grad: None
        here = self.program.placement[s - 1] == self._ranks.rank
        row = self._dy[s - 1] if here else self._dx[s]

        def give(x: torch.Tensor, grad: torch.Tensor | None) -> None:
            if x.requires_grad:
                row[i] = torch.zeros_like(x) if grad is None else grad.contiguous()

        return give

    def _send_forward(self, s: int, i: int, peer: int) -> Op:
        send = self._transport.sender(Kind.SEND_F, s, i, peer)
        tell = self._transport.spec_sender(s, i, peer)
        ys, out_spec = self._y[s], self._out_spec[s]
        outbox = self._outboxes.setdefault((peer, True), Outbox())

        def op() -> None:
            y, ys[i] = ys[i], None
            if self._cold[i]:
                spec = out_spec[i]
                assert spec is not None
                self._spec_sends.append(tell(spec))
            # While specs are new, receives are posted late: then waiting could deadlock.
            outbox.keep(send(y), y, may_wait=not self._any_cold)

        return op

    def _send_backward(self, s: int, i: int, peer: int) -> Op:
        send = self._transport.sender(Kind.SEND_B, s, i, peer)
        dxs = self._dx[s]
        outbox = self._outboxes.setdefault((peer, False), Outbox())

        def op() -> None:
            dx, dxs[i] = dxs[i], None
            if dx is None:  # an integer tensor crossed this boundary: it has no gradient
                return
            outbox.keep(send(dx), dx, may_wait=not self._any_cold)

        return op

    # -- running -----------------------------------------------------------------------------

    def run(self, step: StepInput) -> list[torch.Tensor]:
        """Execute the stream once.

        Returns:
            On the rank of the last stage the weighted micro-batch losses, or the outputs if the
            program is forward only; an empty list elsewhere.

        Raises:
            LossError, BoundaryError: raised here by this rank's own stages.
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
        self._specs.complete(step.keys)
        if self._training:
            return self._losses
        last = self._y.get(self._last)
        if last is None:
            return []
        outputs = list(last)
        last[:] = [None] * len(last)
        return outputs

    def _prepare(self, step: StepInput) -> None:
        self._step = step
        self._losses = []
        self.clock = []
        if self._base_event is None and self._events:
            self._base_event = _timing_event()
        if self._base_event is not None:
            self._base_event.record()
        for inbox in self._inboxes.values():
            inbox.restart()
        self._cold = [self._specs.is_new(key) for key in step.keys]
        self._any_cold = any(self._cold)
        for row in self._out_spec.values():
            row[:] = [None] * len(row)

    def _finish_sends(self) -> None:
        for work in self._spec_sends:
            work.wait()
        self._spec_sends.clear()
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
