"""What a user touches: a model, trained in a pipeline over the ranks of a process group."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from pipelane.catalogue import build_schedule, schedule_names
from pipelane.check import check, verify_program
from pipelane.errors import (
    ConfigError,
    InputError,
    ModelError,
    PartitionError,
    PipelaneError,
    PipelineFailure,
)
from pipelane.layers import layers_of
from pipelane.partition import Partition, validate_sizes
from pipelane.plan import Plan, plan
from pipelane.program import lower
from pipelane.runtime.batch import batch_of, give_back, moved, plain, put_together, scale_of
from pipelane.runtime.batchnorm import WholeBatchNorm, whole_batch_norms
from pipelane.runtime.boundary import Message
from pipelane.runtime.clip import ClipGroup
from pipelane.runtime.engine import Engine, KnownBoundaries, StepInput, StepOutput
from pipelane.runtime.forward import Layer, Policy
from pipelane.runtime.group import Ranks
from pipelane.runtime.header import BatchKinds, Header, LossMessage, exchange_header, kind_of
from pipelane.runtime.loss import (
    LossFn,
    LossPolicy,
    microbatch_weights,
    split_sizes,
    total,
    total_metrics,
)
from pipelane.runtime.measure import gather_timeline
from pipelane.runtime.rendezvous import default_device
from pipelane.runtime.stage import StageModule, stage_ends
from pipelane.runtime.tied import Tie, TiedWeights, find_ties
from pipelane.runtime.transport import Transport
from pipelane.schedule import Schedule, schedule_from_csv
from pipelane.skips import Route, routes
from pipelane.timeline import Timeline
from pipelane.trees import Inputs, Rows, rebuild, split_rows

__all__ = ["Pipeline"]

ScheduleLike = str | Path | Schedule | Callable[..., Schedule]
Recompute = str | Iterable[str] | Callable[[str, nn.Module], bool]

_NOTHING: Any = object()


class Pipeline:
    """Train an ``nn.Sequential`` in stages, one or more per rank.

    Every rank builds it with the same arguments. Afterwards a rank holds the parameters of its
    own stages only: **the other layers of ``model`` are moved to the meta device**, so that their
    memory is free even while the caller still holds the model.

    Args:
        model: an ``nn.Sequential``; each direct child is a layer. Layers take and return one value:
            a tensor, or any nesting of tuples, lists, dicts and dataclasses with tensors and other
            values in it. Values may skip layers, see :func:`pipelane.skippable`; parameters may be
            shared by layers of several stages.
        schedule: a name from ``pipelane schedules``, a function ``(shape) -> Schedule``, a
            :class:`~pipelane.schedule.Schedule`, or the path of a CSV file.
        microbatches: m; each batch is split into as many parts along dimension 0, whose sizes
            differ by at most one row.
        loss_fn: ``(output, target) -> scalar tensor`` for one micro-batch, or a dict with one as
            "loss" and other numbers to be reported; needed by ``step``.
        example: a typical micro-batch of inputs, on rank 0; needed to balance by profile. Several
            arguments as :class:`pipelane.Inputs`.
        partition: number of layers of each stage, or a
            :class:`~pipelane.partition.Partition`; profiled and balanced if not given.
        chunks: stages per rank (v), 1 if not given.
        group: the pipeline's process group; the default group if not given.
        mesh: a one-dimensional ``DeviceMesh`` instead of a group.
        device: where this rank computes; its local GPU if there are enough, else the CPU.
        recompute: what runs its forward again in the backward instead of keeping activations:
            "none"; "full": each stage, from its input; "layer": each layer, from its input; or
            only some layers: their names, or a function ``(name, layer) -> bool``.
        loss_reduction: "mean" or "sum": what ``loss_fn`` does over the rows of a micro-batch. The
            step's loss and gradients are then those of the whole batch.
        loss_weight: for "mean" over something else than rows: ``target -> number`` of entries
            that count, say tokens that are not padding.
        autocast: dtype of ``torch.autocast`` around layers and loss: torch.bfloat16 or float16.
        batch_norm: "micro-batch": running statistics are updated by each micro-batch, in order;
            "whole batch": once per step, by the whole batch. Both normalise with the statistics of
            the micro-batch.
        compile: compile each stage with ``torch.compile``; a dict has its arguments. For schedules
            with a whole backward only.
        dynamic: what passes a boundary may have another form each time, even for inputs of the same
            form; each message is then announced, which costs time.
        detect_anomaly: look at every output and gradient, and raise AnomalyError at the first that
            is not finite, with stage, micro-batch and layer; slow.
        timeout: seconds after which a wait for another rank gives up.
        seed: random draws in layers depend on (seed, step, micro-batch, layer) only; rank 0's
            ``torch.initial_seed()`` if not given.

    Attributes:
        rank, ranks: this process's place in the pipeline, and p.
        schedule: what runs, already checked.
        partition: which layers make which stage.
        plan: profile, costs and predicted timeline, if it was profiled.
        device: where this rank computes.
        metrics: what the loss function returned next to the loss in the last step, for the whole
            batch (weighted as the loss); the same on every rank.

    Raises:
        ConfigError, ModelError, PartitionError, ScheduleError, ProfileError: on **every** rank,
            whichever rank found the fault, before anything runs.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        schedule: ScheduleLike = "1f1b",
        microbatches: int,
        loss_fn: LossFn | None = None,
        example: Any = None,
        partition: Sequence[int] | Partition | None = None,
        chunks: int | None = None,
        group: Any = None,
        mesh: Any = None,
        device: torch.device | str | None = None,
        recompute: Recompute = "none",
        loss_reduction: str = "mean",
        loss_weight: Callable[[Any], Any] | None = None,
        autocast: torch.dtype | None = None,
        batch_norm: str = "micro-batch",
        compile: bool | Mapping[str, Any] = False,
        dynamic: bool = False,
        detect_anomaly: bool = False,
        timeout: float = 300.0,
        seed: int | None = None,
    ) -> None:
        if group is not None and mesh is not None:
            raise ConfigError("give group= or mesh=, not both")
        if not timeout > 0:
            raise ConfigError(f"timeout must be > 0 seconds, got {timeout}")
        self._ranks = Ranks(mesh.get_group() if mesh is not None else group, timeout)
        self.rank, self.ranks = self._ranks.rank, self._ranks.size
        self._broken: str | None = None
        self.device = _with_index(torch.device(device)) if device else default_device()

        def arguments() -> tuple[_Model, Schedule, dict[str, str]]:
            _check_choices(loss_reduction, loss_fn, loss_weight, autocast, batch_norm)
            layers = layers_of(model)
            again = _recomputed(recompute, layers)
            found = _resolve_schedule(schedule, self.ranks, microbatches, chunks)
            check(found)
            if compile and found.splits_backward:
                raise ConfigError(
                    f"schedule {found.name!r} runs input and weight gradients apart, which a "
                    "compiled stage cannot; use a schedule with whole backwards, such as 1f1b or "
                    "interleaved, or compile=False"
                )
            if found.shape.stages > len(layers):
                raise PartitionError(
                    f"{found.shape.stages} stages for {len(layers)} layers: every stage needs at "
                    f"least one; use at most {len(layers)} ranks x chunks, or split the layers"
                )
            if isinstance(partition, Partition):
                validate_sizes(partition.sizes, len(layers), found.shape.stages)
            elif partition is not None:
                validate_sizes(partition, len(layers), found.shape.stages)
            facts = _facts(layers, found, partition, loss_reduction, seed)
            facts["device type"] = self.device.type
            facts["loss_fn"] = "missing" if loss_fn is None else "given"
            facts["recompute"] = again if isinstance(again, str) else ", ".join(sorted(again))
            facts["autocast"], facts["batch_norm"] = str(autocast), batch_norm
            facts["dynamic"] = str(bool(dynamic))
            return _Model(layers, routes(layers), again), found, facts

        self._model: _Model
        self._model, self.schedule, _ = self._together(arguments, lambda value: value[2])
        layers = self._model.layers

        def decision() -> tuple[Partition, Plan | None, int] | None:
            if self.rank != 0:
                return None
            shape = self.schedule.shape
            made: Plan | None = None
            if partition is None and 1 < shape.stages < len(layers):
                if example is None:
                    raise ConfigError(
                        "balancing needs an example: pass example=x[:rows of a micro-batch], or "
                        "partition=[layers per stage]"
                    )
                made = plan(
                    model,
                    example,
                    self.ranks,
                    microbatches=microbatches,
                    schedule=_source(schedule, self.schedule),
                    chunks=shape.chunks,
                    device=self.device,
                    recompute=self._model.recompute,
                )
                chosen = made.partition
            elif isinstance(partition, Partition):
                chosen = partition
            else:
                sizes = partition or ([len(layers)] if shape.stages == 1 else [1] * shape.stages)
                chosen = Partition.from_sizes([name for name, _ in layers], sizes)
            return chosen, made, torch.initial_seed() if seed is None else seed

        decided = self._ranks.agree(self._caught(decision))[0]
        self.partition: Partition
        self.plan: Plan | None
        self.partition, self.plan, self._seed = decided
        if self.plan is not None:
            self.schedule = self.plan.schedule
        self._policy = LossPolicy(loss_reduction, loss_weight)
        running = Policy(self._seed, self.device, autocast, detect_anomaly)

        def building() -> list[Tie]:
            # Before layers move to other devices, which ends the identity of what they share.
            return find_ties(layers, self.partition.sizes)

        self._ties: list[Tie] = self._together(building, lambda value: None)
        names = _names_in_order(layers)
        self._stages = self._take_over(running, compile)
        sizes = self.partition.sizes
        ends = stage_ends(sizes, self._model.routes)
        edges = [(s, other) for s, (_, going) in enumerate(ends) for other in going.stages]
        self._skips = tuple(edge for edge in edges if edge[1] > edge[0] + 1)
        placement = self.schedule.placement
        self._transport = Transport(self._ranks, placement, edges, self.device)
        own = dict(self.named_parameters(remove_duplicate=False))
        copies = {
            tie.name: own[name] for tie in self._ties for name in tie.names[::-1] if name in own
        }
        self._tied = TiedWeights(self._ranks, self._ties, placement, copies, self.device)
        self._clip = ClipGroup(self._ranks, names, self.named_parameters)
        self._norms: list[WholeBatchNorm] = []
        if batch_norm == "whole batch":
            self._norms = whole_batch_norms(module for _, module in self._named_modules())
        self._loss_fn = loss_fn
        self._first_rank, self._last_rank = placement[0], placement[-1]
        self._loss_message = LossMessage(self._ranks, self._last_rank, self.device)
        self._known = {True: KnownBoundaries(dynamic), False: KnownBoundaries(dynamic)}
        self._kinds = BatchKinds()
        program = lower(self.schedule, self._skips)
        if self._skips:
            verify_program(program)
        self._train_engine = Engine(
            program, self._stages, self._transport, self._known[True], loss_fn, self._tied
        )
        self._forward_engines: dict[int, Engine] = {}
        self._latest: Engine | None = None
        self._calls = 0
        self._steps = 0
        self._sync = True
        self._warned = False
        self.metrics: dict[str, torch.Tensor] = {}
        self.training = True
        self.train(model.training)

    # -- construction ------------------------------------------------------------------------

    def _caught(self, work: Callable[[], Any]) -> Any:
        """The result, or the exception as a value, for ``Ranks.agree``."""
        try:
            return work()
        except PipelaneError as error:
            return error

    def _together(self, work: Callable[[], Any], facts_of: Callable[[Any], Any]) -> Any:
        """Do local work on every rank; if any rank fails or has other facts, all raise."""
        value = self._caught(work)
        failed = isinstance(value, Exception)
        facts = self._ranks.agree(value if failed else facts_of(value))
        _compare_facts(facts)
        return value

    def _take_over(
        self, policy: Policy, compile: bool | Mapping[str, Any]
    ) -> dict[int, StageModule]:
        """Keep the own stages on the device, and let go of all other layers."""
        compiler: Callable[[nn.Module], Callable[..., Any]] | None = None
        if compile:
            options = dict(compile) if isinstance(compile, Mapping) else {}
            compiler = lambda module: torch.compile(module, **options)  # noqa: E731
        layers, sizes = self._model.layers, self.partition.sizes
        ends = stage_ends(sizes, self._model.routes)
        stages: dict[int, StageModule] = {}
        own: set[nn.Module] = set()
        for index, (size, begin) in enumerate(zip(sizes, (0, *accumulate(sizes)), strict=False)):
            if self.schedule.placement[index] != self.rank:
                continue
            part = [Layer(begin + i, *layers[begin + i]) for i in range(size)]
            for layer in part:
                layer.module.to(self.device)
                own.add(layer.module)
            stages[index] = StageModule(
                index, part, policy, ends[index], self._model.recompute, compiler,
                self.schedule.shape.microbatches,
            )  # fmt: skip
        kept = {id(x) for module in own for x in (*module.parameters(), *module.buffers())}
        for _, module in layers:
            if module not in own:
                _to_meta(module, kept)
        return stages

    # -- training ----------------------------------------------------------------------------

    def step(
        self, *inputs: Any, target: Any = _NOTHING, scale: Any = 1.0, **keywords: Any
    ) -> torch.Tensor:
        """Forward and backward of one batch; gradients are added to the parameters' ``.grad``.

        ``step(x, y)``: the last positional argument is the target, unless ``target=`` is given.
        All others, and other keywords, are arguments of the first layer: ``step(ids, y,
        mask=mask)``. Batch and target may be nested tuples, lists, dicts and dataclasses; each
        tensor in them has one entry per row along dimension 0, or is in a
        :class:`pipelane.Shared`.

        Args:
            inputs: the batch, read on the rank of the first stage, may be None elsewhere; and the
                target.
            target: of the batch, with the same number of rows; read on the rank of the last stage,
                may be None elsewhere.
            scale: what all gradients are multiplied with, a number or a gradient scaler; read on
                the rank of the last stage. The loss that is returned is not scaled.
            keywords: more arguments of the first layer.

        Returns:
            The loss of the whole batch, a detached scalar on ``device``, the same on every rank.
            Other entries of what the loss function returned are in :attr:`metrics`.

        Raises:
            InputError: the batch cannot be used; the pipeline stays usable.
            LossError, BoundaryError, ModelError, AnomalyError: found by this rank while the step
                ran.
            PipelineFailure: a layer raised, or another rank failed. After this and those above the
                pipeline is broken and gradients are incomplete.
        """
        self._usable()
        if self._loss_fn is None:
            raise ConfigError("step needs a loss: pass loss_fn= to Pipeline")
        if torch.is_inference_mode_enabled():
            raise ConfigError("step needs gradients; call it outside of torch.inference_mode()")
        if target is _NOTHING:
            inputs, target = (inputs[:-1], inputs[-1]) if len(inputs) > 1 else (inputs, None)
        m = self.schedule.shape.microbatches
        own, header = self._begin(inputs, keywords, True, m)
        self._loss_message.expect()
        with self._guard():
            sizes = split_sizes(header.rows, m)
            step = self._input(own, header, sizes)
            step.scale = scale_of(scale)
            step.reduce = self._sync
            if self.rank == self._last_rank:
                step.targets = self._targets(target, header.rows, sizes)
                step.weights = microbatch_weights(self._policy, step.targets, sizes)
        self._tied.begin()
        self._latest = self._train_engine
        out = self._run(self._train_engine, step)
        self._steps += 1
        if own is not None and any(leaf.requires_grad for leaf in own.leaves):
            give_back(own, out.input_grads)
        for norm in self._norms:
            norm.finish()
        return self._share_loss(out)

    def _targets(self, target: Any, rows: int, sizes: list[int]) -> list[Any]:
        if target is None:
            raise InputError(
                "the target is None on the rank of the last stage; expected a tensor (or a nesting "
                "of some) with one row per row of the batch"
            )
        whole = split_rows(target, "the target", rows).moved(self.device)
        return [rebuild(whole.structure, part) for part in whole.parts(sizes)]

    def _share_loss(self, out: StepOutput) -> torch.Tensor:
        try:
            if self.rank != self._last_rank:
                loss, self.metrics = self._loss_message.hear()
                return loss
            loss, self.metrics = total(out.losses), total_metrics(out.metrics)
            self._loss_message.tell(loss, self.metrics)
        except PipelineFailure as error:
            self._broken = str(error)
            raise
        if not self._warned and not torch.isfinite(loss):
            self._warned = True
            bad = [i for i, one in enumerate(out.losses) if not torch.isfinite(one)]
            warnings.warn(
                f"the loss of step {self._steps - 1} is {loss.item()} (micro-batch "
                f"{', '.join(map(str, bad[:8])) or 'none by itself'}); detect_anomaly=True finds "
                "the layer that made the first value that is not finite",
                RuntimeWarning,
                stacklevel=3,
            )
        return loss

    def forward(self, *inputs: Any, gather: bool = False, **keywords: Any) -> Any:
        """The outputs of a batch, without gradients. Call ``eval()`` first.

        Args:
            inputs, keywords: the batch, as for :meth:`step`; read on the rank of the first stage.
                Any number of rows: a batch smaller than ``microbatches`` is split into fewer parts.
            gather: give the outputs to every rank, on its own device.

        Returns:
            The outputs of the whole batch, on the rank of the last stage; None elsewhere unless
            gathered. Tensors are put together along dimension 0, those without dimensions
            stacked; what is no tensor is that of the first micro-batch.

        Raises:
            ConfigError: in training mode.
            InputError, BoundaryError, PipelineFailure: as for :meth:`step`.
        """
        self._usable()
        if self.training:
            raise ConfigError("forward is for evaluation: call eval() first, or step() to train")
        own, header = self._begin(inputs, keywords, False, 1)
        m = min(self.schedule.shape.microbatches, header.rows)
        with self._guard():
            sizes = split_sizes(header.rows, m)
            step = self._input(own, header, sizes)
        engine = self._forward_engine(m)
        self._latest = engine
        out = self._run(engine, step)
        whole = None
        if self.rank == self._last_rank:
            with self._guard():
                whole = put_together(out.outputs, sizes)
        if gather:
            shared = None if whole is None else moved(whole, torch.device("cpu"))
            whole = moved(self.gather(shared)[self._last_rank], self.device)
        return whole

    __call__ = forward

    def _begin(
        self, inputs: tuple[Any, ...], keywords: dict[str, Any], training: bool, least: int
    ) -> tuple[Rows | None, Header]:
        """Agree on the batch of this call; raises on every rank if it cannot be used."""
        number, self._calls = self._calls, self._calls + 1
        own, refused = None, None
        value = inputs[0] if len(inputs) == 1 and not keywords else Inputs(*inputs, **keywords)
        given = any(one is not None for one in (*inputs, *keywords.values()))
        if self.rank == self._first_rank or given:
            try:
                own = batch_of(value if given else None, least)
            except InputError as error:
                refused = str(error)
        try:
            header = exchange_header(
                self._ranks, self._first_rank, number, training, self._kinds,
                own if self.rank == self._first_rank else None,
                refused if self.rank == self._first_rank else None,
            )  # fmt: skip
        except (ConfigError, PipelineFailure) as error:
            self._broken = str(error)
            raise
        if own is not None and self.rank != self._first_rank:
            kind, expected = kind_of(own), self._kinds[header.kind]
            if kind != expected or own.count != header.rows:
                self._fail(
                    InputError(
                        f"rank {self.rank} was given a batch of {own.count} rows, {kind}, but rank "
                        f"{self._first_rank} one of {header.rows} rows, {expected}; pass the same "
                        "batch, or None on ranks that do not read it"
                    )
                )
        return own if self.rank == self._first_rank else None, header

    def _input(self, own: Rows | None, header: Header, sizes: list[int]) -> StepInput:
        step = StepInput(self._steps, [(header.kind, size) for size in sizes])
        if own is not None:
            batch = own.moved(self.device)
            grads = [leaf.requires_grad for leaf in own.leaves]
            step.inputs = [
                Message(batch.structure, [plain(leaf) for leaf in part], grads)
                for part in batch.parts(sizes)
            ]
        return step

    def _run(self, engine: Engine, step: StepInput) -> StepOutput:
        try:
            return engine.run(step)
        except BaseException as error:
            self._broken = str(error)
            raise

    def _forward_engine(self, microbatches: int) -> Engine:
        engine = self._forward_engines.get(microbatches)
        if engine is None:
            schedule = self.schedule.forward_only(microbatches)
            check(schedule, forward_only=True)
            engine = Engine(
                lower(schedule, self._skips), self._stages, self._transport, self._known[False]
            )
            self._forward_engines[microbatches] = engine
        return engine

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, ``step`` leaves gradients of tied weights unsummed; the next one sums all.

        Only a saving of messages while gradients accumulate over several steps: results are the
        same up to rounding. The last step before the optimizer's must be outside.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def relearn(self) -> None:
        """Learn anew what crosses the boundaries; **every rank must call it**, between two steps.

        Needed after parameters were made trainable that were frozen, so that gradients go back to
        stages that wanted none before; also worth it after freezing some, to send no more
        gradients than are needed.
        """
        for known in self._known.values():
            known.forget()

    def _usable(self) -> None:
        if self._broken is not None:
            raise PipelineFailure(
                "this pipeline is broken since an earlier failure; build a new one. It was: "
                f"{self._broken}"
            )

    def _guard(self) -> _Guard:
        return _Guard(self)

    def _fail(self, error: Exception) -> NoReturn:
        """An error that only this rank sees: tell the others, then raise it."""
        message = f"rank {self.rank} failed in step {self._steps}: {type(error).__name__}: {error}"
        self._ranks.announce({"message": message, "rank": self.rank, "instruction": "step"})
        self._broken = message
        raise error

    # -- state -------------------------------------------------------------------------------

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for stage in self._stages.values():
            yield from zip(stage.names, stage.modules, strict=True)

    def named_parameters(
        self, *, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the model, each once."""
        seen: set[int] = set()
        for name, module in self._named_modules():
            for key, one in module.named_parameters(prefix=name, remove_duplicate=False):
                if not remove_duplicate or id(one) not in seen:
                    seen.add(id(one))
                    yield key, one

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer.

        A rank whose stages have no parameter yields one empty placeholder, because torch's
        optimizers refuse an empty list. A parameter that several stages share (tied weights) is
        on each of their ranks, and stays equal there if every rank has the same optimizer.
        """
        found = [parameter for _, parameter in self.named_parameters()]
        if not found:
            found = [nn.Parameter(torch.empty(0, device=self.device))]
        return iter(found)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this rank's parameters."""
        self._tied.forget()
        for _, parameter in self.named_parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients, of all stages, so that their norm is at most ``max_norm``.

        As ``torch.nn.utils.clip_grad_norm_`` on the whole model in one process, to the last bit;
        tied weights count once. **Every rank must call it.**

        Args:
            max_norm: at most that much.
            norm_type: p of the p-norm; may be ``inf``.
            error_if_nonfinite: raise if the norm is NaN or infinite.

        Returns:
            The norm before, the same on every rank, on ``device``.

        Raises:
            AnomalyError: the norm is not finite, on every rank; gradients are left as they were.
            PipelineFailure: another rank did not call it within the timeout.
        """
        self._usable()
        return self._clip(float(max_norm), float(norm_type), error_if_nonfinite, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of this rank's layers, under their names in the model."""
        state: dict[str, Any] = {}
        for name, module in self._named_modules():
            state.update(module.state_dict(prefix=f"{name}."))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's layers from a state dict of the whole model, or of these layers.

        Raises:
            ModelError: an entry is missing or has another shape; nothing was loaded then.
        """
        own = self.state_dict()
        state = dict(state)
        for tie in self._ties:  # saved once, perhaps without its other names
            there = next((name for name in tie.names if name in state), None)
            if there is not None:
                for name in tie.names:
                    state.setdefault(name, state[there])
        missing = [key for key in own if key not in state]
        prefixes = tuple(f"{name}." for name, _ in self._named_modules())
        unknown = [key for key in state if key.startswith(prefixes) and key not in own]
        wrong = [
            f"{key} has shape {list(state[key].shape)}, expected {list(value.shape)}"
            for key, value in own.items()
            if key in state and isinstance(value, torch.Tensor) and state[key].shape != value.shape
        ]
        if missing or unknown or wrong:
            parts = [
                f"missing: {', '.join(missing[:5])}" if missing else "",
                f"unknown: {', '.join(unknown[:5])}" if unknown else "",
                "; ".join(wrong[:5]),
            ]
            raise ModelError(
                f"rank {self.rank}: the state dict does not fit this rank's layers; "
                + "; ".join(part for part in parts if part)
            )
        for name, module in self._named_modules():
            prefix = f"{name}."
            module.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )

    def train(self, mode: bool = True) -> Pipeline:
        """Set this rank's layers to training mode."""
        self.training = mode
        for _, module in self._named_modules():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set this rank's layers to evaluation mode."""
        return self.train(False)

    # -- seeing ------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """What every rank did in the last step, and when; **every rank must call it**.

        Raises:
            ConfigError: no step has run yet.
            PipelineFailure: another rank did not call it within the timeout.
        """
        self._usable()
        if self._latest is None:
            raise ConfigError("no step has run yet: call step() before timeline()")
        program = self._latest.program
        return gather_timeline(
            self._ranks,
            self._latest.spans(),
            program.name,
            program.placement,
            program.microbatches,
        )

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (any picklable object), by rank; **every rank must call it**."""
        self._usable()
        return self._ranks.gather(value)

    def close(self) -> None:
        """Give back connections and threads; **every rank must call it**.

        Only programs that build many pipelines need it; the end of the process does the same.
        """
        self._broken = self._broken or "the pipeline was closed"
        self._ranks.close()

    def __repr__(self) -> str:
        shape = self.schedule.shape
        return (
            f"Pipeline({self.schedule.name}, rank {self.rank} of {self.ranks}, "
            f"{shape.microbatches} micro-batches, layers per stage {list(self.partition.sizes)}, "
            f"{self.device})"
        )


class _Guard:
    """Errors of one rank's own preparation reach the other ranks, which wait for it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            self._pipeline._fail(error)


def _with_index(device: torch.device) -> torch.device:
    """ "cuda" as the device that it means now, as tensors on it say."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class _Model(NamedTuple):
    """The model as it was given."""

    layers: list[tuple[str, nn.Module]]
    routes: tuple[Route, ...]
    recompute: frozenset[str] | str


def _names_in_order(layers: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Names of all parameters of the model, each parameter once, under its first name."""
    seen: set[int] = set()
    names = []
    for name, module in layers:
        for key, parameter in module.named_parameters(prefix=name):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                names.append(key)
    return names


def _to_meta(module: nn.Module, kept: set[int]) -> None:
    """Let go of a layer's memory, but not of tensors (identities) that own layers have too."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) not in kept:
                    empty: Any = torch.empty_like(tensor, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, tensor.requires_grad)
                    table[key] = empty


def _recomputed(
    recompute: Recompute, layers: Sequence[tuple[str, nn.Module]]
) -> frozenset[str] | str:
    """Names of layers to recompute one by one, or "full" for whole stages."""
    names = [name for name, _ in layers]
    if isinstance(recompute, str):
        if recompute == "full":
            return "full"
        if recompute not in ("none", "layer"):
            raise ConfigError(
                f"recompute must be 'none', 'full', 'layer', names of layers or a function (name, "
                f"layer) -> bool, got {recompute!r}"
            )
        return frozenset(names if recompute == "layer" else ())
    if callable(recompute):
        return frozenset(name for name, layer in layers if recompute(name, layer))
    chosen = frozenset(recompute)
    if unknown := sorted(chosen - set(names), key=str):
        raise ConfigError(
            f"recompute names {unknown[0]!r}, which is no layer of the model; its layers are "
            f"{', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
        )
    return chosen


def _check_choices(
    loss_reduction: str,
    loss_fn: object,
    loss_weight: object,
    autocast: object,
    batch_norm: str,
) -> None:
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(f"autocast must be torch.bfloat16 or torch.float16, got {autocast!r}")
    if batch_norm not in ("micro-batch", "whole batch"):
        raise ConfigError(f"batch_norm must be 'micro-batch' or 'whole batch', got {batch_norm!r}")
    if loss_reduction not in ("mean", "sum"):
        raise ConfigError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
    for name, function in (("loss_fn", loss_fn), ("loss_weight", loss_weight)):
        if function is not None and not callable(function):
            raise ConfigError(f"{name} must be callable, got {type(function).__name__}")
    if loss_weight is not None and loss_reduction == "sum":
        raise ConfigError("loss_weight belongs to loss_reduction='mean'; a sum needs no weights")


def _source(given: ScheduleLike, made: Schedule) -> str | Schedule | Callable[..., Schedule]:
    """What can be made anew for the profiled stages: a name or a function; else the schedule."""
    if callable(given) or (isinstance(given, str) and given.lower() in schedule_names()):
        return given
    return made


def _resolve_schedule(
    schedule: ScheduleLike, ranks: int, microbatches: int, chunks: int | None
) -> Schedule:
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        schedule = schedule_from_csv(schedule)
    if not isinstance(schedule, Schedule):
        return build_schedule(schedule, ranks, microbatches, chunks)
    shape = schedule.shape
    wanted = (ranks, microbatches, shape.chunks if chunks is None else chunks)
    if (shape.ranks, shape.microbatches, shape.chunks) != wanted:
        raise ConfigError(
            f"schedule {schedule.name!r} is for {shape.ranks} ranks, {shape.microbatches} "
            f"micro-batches and {shape.chunks} chunks; the pipeline has {wanted[0]}, {wanted[1]} "
            f"and {wanted[2]}"
        )
    return schedule


def _facts(
    layers: Sequence[tuple[str, nn.Module]],
    schedule: Schedule,
    partition: Sequence[int] | Partition | None,
    loss_reduction: str,
    seed: int | None,
) -> dict[str, str]:
    """What must be the same on every rank, by name."""
    structure = [
        (name, type(layer).__name__, [(k, tuple(p.shape), str(p.dtype)) for k, p in state])
        for name, layer in layers
        for state in [list(layer.named_parameters())]
    ]
    digest = hashlib.sha256(repr(structure).encode()).hexdigest()[:12]
    orders = hashlib.sha256(schedule.to_json().encode()).hexdigest()[:12]
    sizes = partition.sizes if isinstance(partition, Partition) else partition
    return {
        "model": f"{len(layers)} layers, structure {digest}",
        "schedule": f"{schedule.name} ({orders})",
        "microbatches": str(schedule.shape.microbatches),
        "partition": "by profile" if sizes is None else str(list(sizes)),
        "loss_reduction": loss_reduction,
        "seed": str(seed),
        "torch version": torch.__version__,
    }


def _compare_facts(facts: Sequence[Any]) -> None:
    if facts[0] is None:
        return
    for name in facts[0]:
        by_value: dict[str, list[int]] = {}
        for rank, found in enumerate(facts):
            by_value.setdefault(found[name], []).append(rank)
        if len(by_value) > 1:
            detail = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            raise ConfigError(
                f"the ranks were given different arguments: {name} is {detail}. Every rank must "
                "build the same pipeline"
            )
