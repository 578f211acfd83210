"""The commands that look at models and graphs: ``pipelane profile`` and ``pipelane partition``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pipelane.costs import Costs, Link
from pipelane.errors import ConfigError, PartitionError
from pipelane.files import read_text
from pipelane.schedule import Shape, looped_placement, snake_placement

if TYPE_CHECKING:
    from pipelane.partition import Partition

__all__ = [
    "JsonFlag",
    "compare_",
    "memory_limit",
    "parse_bytes",
    "partition_",
    "profile_",
    "read_costs",
]


JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


class TiedWeights(str, Enum):
    """What to do with layers that share parameters."""

    auto = "auto"
    colocate = "colocate"
    replicate = "replicate"


class Placement(str, Enum):
    """Which rank has which stage."""

    looped = "looped"
    v = "v"


_FOR_CHUNKS = {Placement.looped: "interleaved", Placement.v: "wave"}
_PLACED = {Placement.looped: looped_placement, Placement.v: snake_placement}

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SIZE = re.compile(r"^\s*([0-9.]+(?:e[+-]?\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(text: str) -> float:
    """ "20GiB", "16GB", "12e9" in bytes.

    Raises:
        ConfigError: not such a size, or not above 0.
    """
    match = _SIZE.match(text)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not number > 0:
        raise ConfigError(f"{text!r} is not a size in bytes; write 20GiB, 16GB or 12e9")
    letter = match[2].lower()
    if match[3]:
        if not letter:
            raise ConfigError(f"{text!r} is not a size in bytes; write 20GiB, 16GB or 12e9")
        return number * 1024.0 ** " kmgt".index(letter)
    return float(number * _UNITS[letter])


def partition_(
    file: Annotated[
        Path,
        typer.Argument(
            help="A graph or a saved profile: pipelane's JSON, dnn-partitioning JSON, PipeDream "
            "text, or Piper JSON."
        ),
    ],
    k: Annotated[int, typer.Option("-k", "--stages", help="Number of stages (ranks).")],
    exactly: Annotated[
        bool, typer.Option("--exactly", help="Exactly k stages; at most k if not given.")
    ] = False,
    comm: Annotated[bool, typer.Option("--comm", help="Price what passes between stages.")] = False,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Bytes per second between ranks; as the file says if not given."),
    ] = None,
    latency: Annotated[float, typer.Option(help="Seconds per message between ranks.")] = 0.0,
    memory: Annotated[str | None, typer.Option(help="Bytes per rank, such as 20GiB.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Says how many micro-batches a stage holds, and where stages are; 1f1b if not "
            "given, with several chunks interleaved or wave."
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option("-m", "--microbatches", help="Per step; 4 per rank if not given.")
    ] = None,
    chunks: Annotated[
        int, typer.Option("-v", "--chunks", help="Stages per rank; -k then counts ranks.")
    ] = 1,
    placement: Annotated[
        Placement | None, typer.Option(help="Of several stages per rank; looped if not given.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Stages that do not fit may run forward twice.")
    ] = False,
    speeds: Annotated[
        str | None, typer.Option(help="Of the ranks, as 1,1,0.5; 1 is as profiled.")
    ] = None,
    tied: Annotated[
        TiedWeights, typer.Option(help="Layers that share weights.")
    ] = TiedWeights.auto,
    time_limit: Annotated[float, typer.Option(help="Seconds to search at most.")] = 60.0,
    json_: JsonFlag = False,
) -> None:
    """Balance layers over stages, and prove how good the balance is."""
    from pipelane.catalogue import build_schedule
    from pipelane.formats import read_graph
    from pipelane.memory import in_flight
    from pipelane.partition import partition
    from pipelane.views.tables import PartitionTable

    source = read_graph(file)
    if chunks < 1 or k < 1:
        raise ConfigError(f"-k and -v must be at least 1, got {k} and {chunks}")
    link = _link(source, comm, bandwidth, latency)
    m = 4 * k if microbatches is None else microbatches
    limit = None if memory is None else parse_bytes(memory)
    name = schedule or ("1f1b" if chunks == 1 else _FOR_CHUNKS[placement or Placement.looped])
    ranks: Sequence[int] | None = None
    if chunks > 1 and placement is not None:
        ranks = _PLACED[placement](Shape(k, 1, chunks))
    elif chunks > 1:
        ranks = build_schedule(name, k, m, chunks).placement
    try:
        made = partition(
            source,
            k * chunks,
            link=link,
            at_most=not exactly and chunks == 1,
            communication="both" if comm else "none",
            memory=limit,
            in_flight=in_flight(name, m, chunks) if limit is not None else None,
            speeds=_numbers(speeds, k),
            recompute=recompute,
            placement=ranks,
            tied=tied.value,
            microbatches=m,
            time_limit=time_limit,
        )
    except PartitionError as error:
        if not json_:
            raise
        print(json.dumps({"stages": None, "bottleneck": None, "reason": str(error)}))
        raise typer.Exit(1) from None
    if json_:
        print(json.dumps(_as_json(made)))
        return
    Console(highlight=False).print(PartitionTable(made))


class ProfileMethod(str, Enum):
    """How seconds are found."""

    measure = "measure"
    estimate = "estimate"


def profile_(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:build, a function without arguments that returns the model and an "
            "example micro-batch; or path/to/file.py:build."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the profile to this file.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to measure; where the example is if not given.")
    ] = None,
    method: Annotated[
        ProfileMethod, typer.Option(help="Run the layers, or estimate from their operations.")
    ] = ProfileMethod.measure,
    repeats: Annotated[int, typer.Option(help="Measurements per layer at least.")] = 5,
    optimizer: Annotated[
        str, typer.Option(help="Whose state is counted: adam, adamw, momentum or sgd.")
    ] = "adam",
    json_: Annotated[
        bool, typer.Option("--json", help="The profile as JSON on standard output.")
    ] = False,
) -> None:
    """Profile the layers of a model: seconds of F, I and W, and bytes."""
    from pipelane.profile import profile
    from pipelane.views.tables import ProfileTable

    model, example = _built(target)
    found = profile(
        model,
        example,
        device=device,
        method=method.value,
        repeats=repeats,
        optimizer=optimizer,
        progress=sys.stderr.isatty(),
    )
    if output is not None:
        found.save(output)
    if json_:
        print(found.to_json())
        return
    console = Console(highlight=False)
    console.print(ProfileTable(found))
    if output is not None:
        console.print(f"Written to {output}.", markup=False, soft_wrap=True)


def _built(target: str) -> tuple[Any, Any]:
    """What the named function returns: a model and an example."""
    where, _, name = target.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"{target!r}: expected package.module:function or file.py:function")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            if spec is None or spec.loader is None:
                raise ImportError(f"no module at {where}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(where)
        build = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(f"cannot load {target}: {error}") from error
    made = build()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ConfigError(
            f"{target} returned {type(made).__name__}; expected (model, example micro-batch)"
        )
    return made


def compare_(
    ranks: Annotated[int, typer.Option("-p", "--ranks", help="Number of ranks.")],
    microbatches: Annotated[int, typer.Option("-m", "--microbatches", help="Per step.")],
    costs: Annotated[
        Path | None, typer.Option(help="Seconds and bytes per stage, in JSON; unit costs without.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Bytes of activations per rank, such as 20GiB.")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """Compare all schedules under the same costs and memory."""
    from pipelane.compare import compare
    from pipelane.views.comparison import ComparisonTable

    found = compare(ranks, microbatches, read_costs(costs), memory_limit(memory, costs))
    if json_:
        print(
            json.dumps(
                {
                    "schedules": [
                        {
                            name: getattr(entry, name)
                            for name in (*entry.__dataclass_fields__, "gap")
                            if name != "schedule"
                        }
                        for entry in found.entries
                    ],
                    "left_out": [
                        {"name": name, "chunks": chunks, "reason": reason}
                        for name, chunks, reason in found.left_out
                    ],
                }
            )
        )
        return
    unit = "" if costs is None else "s"
    Console(highlight=False).print(ComparisonTable(found, unit))


def read_costs(path: Path | None) -> Costs | None:
    """Costs from a file, None without one.

    Raises:
        ConfigError: the file cannot be read or holds no costs.
    """
    if path is None:
        return None
    return Costs.from_json(read_text(path), str(path))


def memory_limit(memory: str | None, costs: Path | None) -> float | None:
    """Bytes of --memory, None without.

    Raises:
        ConfigError: not a size, or nothing says what a micro-batch holds.
    """
    if memory is None:
        return None
    if costs is None:
        raise ConfigError("--memory needs to know what a micro-batch holds; give it by --costs")
    return parse_bytes(memory)


def _link(source: Any, comm: bool, bandwidth: str | None, latency: float) -> Link | None:
    if not comm:
        if bandwidth is not None or latency:
            raise ConfigError("--bandwidth and --latency say what --comm costs; add --comm")
        return None
    if bandwidth is not None:
        if not hasattr(source, "layers") and source.graph.get("unit", "s") != "s":
            raise ConfigError(
                f"the file's times are in {source.graph['unit']}, and --bandwidth gives seconds; "
                "leave --bandwidth out to price communication as the file does"
            )
        return Link(latency, parse_bytes(bandwidth))
    if hasattr(source, "layers"):
        raise ConfigError("a profile does not know the network; add --bandwidth, such as 25e9")
    return Link(latency) if latency else None


def _numbers(text: str | None, count: int) -> list[float] | None:
    if text is None:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--speeds must be numbers such as 1,1,0.5, got {text!r}") from None
    if len(found) != count:
        raise ConfigError(f"--speeds has {len(found)} numbers for {count} ranks")
    return found


def _as_json(made: Partition) -> dict[str, object]:
    names = Counter(name for stage in made.stages for name in stage)
    unique = all(count == 1 for count in names.values())
    listed = made.stages if unique or not made.nodes else made.nodes
    return {
        "stages": [list(stage) for stage in listed],
        "stage_costs": list(made.stage_seconds),
        "bottleneck": made.bottleneck,
        "lower_bound": made.lower_bound,
        "bound": made.bound_reason,
        "exact": made.exact,
        "method": made.method,
        "seconds": made.seconds,
        "unit": made.unit,
        "placement": list(made.placement) or list(range(len(made.stages))),
        "recompute": [load.recompute for load in made.loads],
        "memory_bytes": [load.memory_bytes for load in made.loads],
        "notes": list(made.notes),
    }
