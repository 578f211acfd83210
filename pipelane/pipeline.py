"""What a user touches: a model, trained in a pipeline over the ranks of a process group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from pipelane.catalogue import build_schedule, schedule_names
from pipelane.check import check
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
from pipelane.runtime.engine import Engine, KnownSpecs, StepInput
from pipelane.runtime.group import Ranks
from pipelane.runtime.header import LossMessage, exchange_header
from pipelane.runtime.loss import LossPolicy, microbatch_weights, split_sizes
from pipelane.runtime.measure import gather_timeline
from pipelane.runtime.rendezvous import default_device
from pipelane.runtime.stage import StageModule
from pipelane.runtime.transport import DTYPES, MAX_DIMS, Spec, Transport
from pipelane.schedule import Schedule, schedule_from_csv
from pipelane.timeline import Timeline

__all__ = ["Pipeline"]

ScheduleLike = str | Path | Schedule | Callable[..., Schedule]


class Pipeline:
    """Train an ``nn.Sequential`` in stages, one or more per rank.

    Every rank builds it with the same arguments. Afterwards a rank holds the parameters of its
    own stages only: **the other layers of ``model`` are moved to the meta device**, so that their
    memory is free even while the caller still holds the model.

    Args:
        model: an ``nn.Sequential``; each direct child is a layer. Its layers take and return one
            tensor.
        schedule: a name from ``pipelane schedules``, a function ``(shape) -> Schedule``, a
            :class:`~pipelane.schedule.Schedule`, or the path of a CSV file.
        microbatches: m; each batch is split into as many parts along dimension 0, whose sizes
            differ by at most one row.
        loss_fn: ``(output, target) -> scalar tensor`` for one micro-batch; needed by ``step``.
        example: a typical micro-batch of inputs, on rank 0; needed to balance by profile.
        partition: number of layers of each stage, or a
            :class:`~pipelane.partition.Partition`; profiled and balanced if not given.
        chunks: stages per rank (v), 1 if not given.
        group: the pipeline's process group; the default group if not given.
        mesh: a one-dimensional ``DeviceMesh`` instead of a group.
        device: where this rank computes; its local GPU if there are enough, else the CPU.
        recompute: "none"; other policies come in a later version.
        loss_reduction: "mean" or "sum": what ``loss_fn`` does over the rows of a micro-batch. The
            step's loss and gradients are then those of the whole batch.
        loss_weight: for "mean" over something else than rows: ``target -> number`` of entries
            that count, say tokens that are not padding.
        timeout: seconds after which a wait for another rank gives up.
        seed: random draws in layers depend on (seed, step, micro-batch, layer) only; rank 0's
            ``torch.initial_seed()`` if not given.

    Attributes:
        rank, ranks: this process's place in the pipeline, and p.
        schedule: what runs, already checked.
        partition: which layers make which stage.
        plan: profile, costs and predicted timeline, if it was profiled.
        device: where this rank computes.

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
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        example: torch.Tensor | None = None,
        partition: Sequence[int] | Partition | None = None,
        chunks: int | None = None,
        group: Any = None,
        mesh: Any = None,
        device: torch.device | str | None = None,
        recompute: str = "none",
        loss_reduction: str = "mean",
        loss_weight: Callable[[Any], Any] | None = None,
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

        def arguments() -> tuple[list[tuple[str, nn.Module]], Schedule, dict[str, str]]:
            _check_choices(recompute, loss_reduction, loss_fn, loss_weight)
            layers = layers_of(model)
            found = _resolve_schedule(schedule, self.ranks, microbatches, chunks)
            check(found)
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
            return layers, found, facts

        layers, self.schedule, _ = self._together(arguments, lambda value: value[2])

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

        def building() -> dict[int, StageModule]:
            _refuse_tied(layers, self.partition.sizes)
            return self._take_over(layers)

        self._stages = self._together(building, lambda value: None)
        self._transport = Transport(self._ranks, self.schedule.placement, self.device)
        self._loss_fn = loss_fn
        self._policy = LossPolicy(loss_reduction, loss_weight)
        self._first_rank = self.schedule.placement[0]
        self._last_rank = self.schedule.placement[-1]
        self._loss_message = LossMessage(self._ranks, self._last_rank, self.device)
        self._specs = {True: KnownSpecs(), False: KnownSpecs()}
        self._train_engine = Engine(
            lower(self.schedule), self._stages, self._transport, self._specs[True], loss_fn
        )
        self._forward_engines: dict[int, Engine] = {}
        self._latest: Engine | None = None
        self._calls = 0
        self._steps = 0
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

    def _take_over(self, layers: Sequence[tuple[str, nn.Module]]) -> dict[int, StageModule]:
        stages: dict[int, StageModule] = {}
        own: set[nn.Module] = set()
        begin = 0
        for index, size in enumerate(self.partition.sizes):
            if self.schedule.placement[index] == self.rank:
                part = layers[begin : begin + size]
                for _, layer in part:
                    layer.to(self.device)
                    own.add(layer)
                stages[index] = StageModule(index, part, begin, self.device, self._seed)
            begin += size
        for _, layer in layers:
            if layer not in own:
                layer.to("meta")
        return stages

    # -- training ----------------------------------------------------------------------------

    def step(self, x: torch.Tensor | None = None, target: Any = None) -> torch.Tensor:
        """Forward and backward of one batch; gradients are added to the parameters' ``.grad``.

        Args:
            x: the batch, rows first; read on the rank of the first stage, may be None elsewhere.
            target: its target, a tensor with the same number of rows; read on the rank of the
                last stage, may be None elsewhere.

        Returns:
            The loss of the whole batch, a detached scalar on ``device``, the same on every rank.

        Raises:
            InputError: the batch cannot be used; the pipeline stays usable.
            LossError, BoundaryError: found by this rank while the step ran.
            PipelineFailure: a layer raised, or another rank failed. After this and the two
                above the pipeline is broken and gradients are incomplete.
        """
        self._usable()
        if self._loss_fn is None:
            raise ConfigError("step needs a loss: pass loss_fn= to Pipeline")
        m = self.schedule.shape.microbatches
        batch = self._begin(x, True, m)
        self._loss_message.expect()
        with self._guard():
            sizes = split_sizes(batch.shape[0], m)
            step = self._input(x, batch, sizes)
            if self.rank == self._last_rank:
                _check_target(target, batch.shape[0])
                step.targets = torch.split(target.to(self.device), sizes)
                step.weights = microbatch_weights(self._policy, step.targets)
        self._latest = self._train_engine
        losses = self._run(self._train_engine, step)
        self._steps += 1
        try:
            return self._loss_message.share(losses)
        except PipelineFailure as error:
            self._broken = str(error)
            raise

    def forward(self, x: torch.Tensor | None = None, *, gather: bool = False) -> Any:
        """The outputs of a batch, without gradients. Call ``eval()`` first.

        Args:
            x: the batch, rows first; read on the rank of the first stage. Any number of rows: a
                batch smaller than ``microbatches`` is split into fewer parts.
            gather: give the outputs to every rank, on its own device.

        Returns:
            The outputs of the whole batch, a tensor, on the rank of the last stage; None
            elsewhere unless gathered.

        Raises:
            ConfigError: in training mode.
            InputError, BoundaryError, PipelineFailure: as for :meth:`step`.
        """
        self._usable()
        if self.training:
            raise ConfigError("forward is for evaluation: call eval() first, or step() to train")
        batch = self._begin(x, False, 1)
        m = min(self.schedule.shape.microbatches, batch.shape[0])
        with self._guard():
            step = self._input(x, batch, split_sizes(batch.shape[0], m))
        engine = self._forward_engine(m)
        self._latest = engine
        outputs = self._run(engine, step)
        whole = torch.cat(outputs) if self.rank == self._last_rank else None
        if gather:
            shared = None if whole is None else whole.cpu()
            whole = self.gather(shared)[self._last_rank].to(self.device)
        return whole

    __call__ = forward

    def _begin(self, x: torch.Tensor | None, training: bool, least: int) -> Spec:
        """Agree on the batch of this call; raises on every rank if it cannot be used."""
        number, self._calls = self._calls, self._calls + 1
        refused = None
        if self.rank == self._first_rank or x is not None:
            refused = _refuse_batch(x, least)
        own = None
        if refused is None and x is not None:
            own = Spec(tuple(x.shape), x.dtype)
        try:
            header = exchange_header(self._ranks, self._first_rank, number, training, own, refused)
        except (ConfigError, PipelineFailure) as error:
            self._broken = str(error)
            raise
        assert header.batch is not None
        if own is not None and own != header.batch:
            self._fail(
                InputError(
                    f"rank {self.rank} was given a batch {own}, but rank {self._first_rank} one of "
                    f"{header.batch}; pass the same batch, or None on ranks that do not read it"
                )
            )
        return header.batch

    def _input(self, x: torch.Tensor | None, batch: Spec, sizes: list[int]) -> StepInput:
        step = StepInput(self._steps, _keys(batch, sizes))
        if self.rank == self._first_rank:
            assert x is not None  # the header would have said so
            step.inputs = torch.split(x.to(self.device), sizes)
        return step

    def _run(self, engine: Engine, step: StepInput) -> list[torch.Tensor]:
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
                lower(schedule), self._stages, self._transport, self._specs[False], None
            )
            self._forward_engines[microbatches] = engine
        return engine

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

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the model."""
        for name, module in self._named_modules():
            yield from module.named_parameters(prefix=name)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer.

        A rank whose stages have no parameter yields one empty placeholder, because torch's
        optimizers refuse an empty list.
        """
        found = [parameter for _, parameter in self.named_parameters()]
        if not found:
            found = [nn.Parameter(torch.empty(0, device=self.device))]
        return iter(found)

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


def _check_choices(
    recompute: str, loss_reduction: str, loss_fn: object, loss_weight: object
) -> None:
    if recompute != "none":
        raise ConfigError(
            f"recompute={recompute!r} is not there yet; this version knows 'none' only"
        )
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


def _refuse_tied(layers: Sequence[tuple[str, nn.Module]], sizes: Sequence[int]) -> None:
    """A parameter in two stages would get two copies that drift apart."""
    home: dict[int, tuple[int, str]] = {}
    begin = 0
    for stage, size in enumerate(sizes):
        for name, layer in layers[begin : begin + size]:
            for key, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                where = f"{name}.{key}"
                other, first = home.setdefault(id(tensor), (stage, where))
                if other != stage:
                    raise ModelError(
                        f"{first} in stage {other} and {where} in stage {stage} are the same "
                        "tensor; tied weights across stages are not supported yet: put both "
                        "layers into one stage with partition=[layers per stage], or untie them"
                    )
        begin += size


def _keys(batch: Spec, sizes: Sequence[int]) -> list[Spec]:
    made = {size: Spec((size, *batch.shape[1:]), batch.dtype) for size in set(sizes)}
    return [made[size] for size in sizes]


def _refuse_batch(x: object, least: int) -> str | None:
    """Why a batch cannot be used, or None."""
    if x is None:
        return "the rank of the first stage was given no batch: pass x to step or forward there"
    if not isinstance(x, torch.Tensor):
        return f"the batch is {type(x).__name__}; this version takes one tensor, rows first"
    if x.dim() == 0 or x.dim() > MAX_DIMS or x.dtype not in DTYPES:
        return (
            f"the batch is {x.dtype} with {x.dim()} dimensions; expected 1 to {MAX_DIMS}, rows "
            "first"
        )
    if len(x) < least:
        if least == 1:
            return "the batch is empty; pass at least one row"
        return (
            f"the batch has {len(x)} rows, fewer than microbatches={least}; use larger batches "
            "(DataLoader(..., drop_last=True) drops a short last one) or fewer micro-batches"
        )
    return None


def _check_target(target: object, rows: int) -> None:
    if not isinstance(target, torch.Tensor):
        raise InputError(
            f"the target is {type(target).__name__} on the rank of the last stage; expected a "
            "tensor with one row per row of the batch"
        )
    if target.dim() == 0 or len(target) != rows:
        raise InputError(
            f"the target has shape {list(target.shape)}, but the batch has {rows} rows; they must "
            "have the same number of rows"
        )
