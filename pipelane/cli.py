"""The ``pipelane`` command. Nothing here imports torch unless the command needs it."""

from __future__ import annotations

import io
import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pipelane
from pipelane.actions import COMMUNICATION
from pipelane.bounds import makespan_bound
from pipelane.catalogue import build_schedule, default_chunks, load_generator, schedule_names
from pipelane.check import (
    Certificate,
    Verdict,
    check,
    deadlocks,
    peak_activations,
    verify_program,
)
from pipelane.commands import JsonFlag, compare_, memory_limit, partition_, profile_, read_costs
from pipelane.costs import Costs
from pipelane.errors import (
    CheckError,
    ConfigError,
    LaunchError,
    PartitionError,
    PipelaneError,
    ScheduleError,
)
from pipelane.files import write_text
from pipelane.program import Program, program_from_rows
from pipelane.schedule import Schedule, read_rows, schedule_from_csv, schedule_from_rows
from pipelane.simulate import simulate
from pipelane.timeline import Timeline
from pipelane.views.terminal import TimelineView, require_drawable

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Pipeline-parallel training for PyTorch: schedules, balance, and where the time goes.",
    epilog="Start with [bold]pipelane demo[/], or [bold]pipelane show 1f1b -p 4 -m 8[/].",
)

WidthOption = Annotated[
    int | None, typer.Option("--width", min=40, help="Columns; the terminal's if not given.")
]
AsciiFlag = Annotated[bool, typer.Option("--ascii", help="Plain ASCII characters only.")]
NoColorFlag = Annotated[bool, typer.Option("--no-color", help="No colour (also NO_COLOR=1).")]


class Output(str, Enum):
    """Whose standard output is shown."""

    first = "first"
    all = "all"


def main() -> NoReturn:
    """Run the command line; exit codes: 0 fine, 1 the answer is no, 2 wrong use."""
    debug = os.environ.get("PIPELANE_DEBUG", "0") not in ("", "0")
    if isinstance(sys.stdout, io.TextIOWrapper):  # names that the encoding lacks are spelled out
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    if arguments[:1] == ["--debug"]:
        debug, arguments = True, arguments[1:]
    try:
        app(args=arguments, prog_name="pipelane")
    except PipelaneError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, (CheckError, PartitionError, LaunchError)) else 2)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"pipelane {pipelane.__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options that come before the command."""


@app.command(epilog="Example: [bold]pipelane schedules[/]")
def schedules(json_: JsonFlag = False) -> None:
    """List the installed schedules."""
    entries = [(name, *_describe(name)) for name in schedule_names()]
    if json_:
        rows = [{"name": name, "chunks": v, "summary": s} for name, v, s in entries]
        print(json.dumps({"schedules": rows}))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("v", justify="right")
    table.add_column("what it does")
    for name, chunks, summary in entries:
        # Text: brackets are no markup here
        table.add_row(Text(name), str(chunks), Text(summary))
    console = _console()
    console.print(table)
    console.print("\nv: chunks per rank if -v is not given. Bubbles and memory: docs/schedules.md.")


def _describe(name: str) -> tuple[int, str]:
    """Its default chunks and the first paragraph of its docstring.

    A broken plug-in must not hide the others.
    """
    try:
        generator = load_generator(name)
    except ScheduleError as error:
        return 0, str(error)
    text = generator.__doc__ or ""
    summary = " ".join(text.strip().split("\n\n")[0].split())
    return default_chunks(generator), summary


@app.command(
    epilog="Examples: [bold]pipelane show 1f1b -p 4 -m 8[/], "
    "[bold]pipelane show gpipe -p 8 -m 32 --comm 0.1[/], [bold]pipelane show my.csv[/]"
)
def show(
    schedule: Annotated[str, typer.Argument(help="A name from `pipelane schedules`, or FILE.csv.")],
    ranks: Annotated[int | None, typer.Option("-p", "--ranks", help="Number of ranks.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("-m", "--microbatches", help="Number of micro-batches.")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "-v", "--chunks", help="Stages per rank, as the schedule has it if not given."
        ),
    ] = None,
    forward: Annotated[float, typer.Option("--f", help="Cost of a forward.")] = 1.0,
    input_grad: Annotated[float, typer.Option("--i", help="Cost of an input gradient.")] = 1.0,
    weight_grad: Annotated[float, typer.Option("--w", help="Cost of a weight gradient.")] = 1.0,
    comm: Annotated[float, typer.Option("--comm", help="Latency of a message.")] = 0.0,
    costs_file: Annotated[
        Path | None,
        typer.Option("--costs", help="Seconds and bytes per stage, in JSON, instead of these."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Bytes of activations per rank, such as 20GiB (for auto).")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Also write the schedule in torch's CSV form.")
    ] = None,
    json_: JsonFlag = False,
    width: WidthOption = None,
    ascii: AsciiFlag = False,
    no_color: NoColorFlag = False,
) -> None:
    """Draw a schedule, a backward costing --i plus --w, and say how large its bubbles are."""
    costs = read_costs(costs_file)
    limit = memory_limit(memory, costs_file)
    made = _load(schedule, ranks, microbatches, chunks, costs, limit)
    check(made)
    if costs is None:
        costs = Costs.unit(
            made.shape.stages,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            latency=comm,
        )
    elif costs.stages != made.shape.stages and costs.stages == made.shape.ranks:
        costs = costs.split(made.placement)
    timeline = simulate(made, costs, unit="" if costs_file is None else "s")
    require_drawable(timeline)
    bound = makespan_bound(made, costs, limit)
    if csv is not None:
        write_text(csv, made.to_csv())
    if json_:
        print(json.dumps(_facts(made, timeline, bound.seconds)))
        return
    _console(width, no_color).print(TimelineView(timeline, width, ascii or None, bound))


def _load(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    chunks: int | None,
    costs: Costs | None,
    memory: float | None,
) -> Schedule:
    if name.endswith(".csv"):
        made = schedule_from_csv(name)
        for option, wanted, found in (
            ("-p", ranks, made.shape.ranks),
            ("-m", microbatches, made.shape.microbatches),
            ("-v", chunks, made.shape.chunks),
        ):
            if wanted is not None and wanted != found:
                raise typer.BadParameter(f"{name} has {found}, not {wanted}", param_hint=option)
        return made
    if ranks is None or microbatches is None:
        raise typer.BadParameter("a named schedule needs -p RANKS and -m MICROBATCHES")
    if costs is not None and chunks is None and costs.stages == ranks:
        # Costs of one stage per rank are cut for schedules that take several.
        chunks = default_chunks(name)
    fitting = costs if costs is not None and costs.stages == ranks * (chunks or 1) else None
    return build_schedule(name, ranks, microbatches, chunks, fitting, memory)


def _facts(schedule: Schedule, timeline: Timeline, bound: float) -> dict[str, object]:
    shape = schedule.shape
    return {
        "schedule": schedule.name,
        "ranks": shape.ranks,
        "microbatches": shape.microbatches,
        "chunks": shape.chunks,
        "placement": list(schedule.placement),
        "orders": [[str(action) for action in order] for order in schedule.orders],
        "makespan": timeline.makespan,
        "span": timeline.span,
        "work": list(timeline.work),
        "idle": list(timeline.idle),
        "bubble_rate": timeline.bubble_rate,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_activations": list(peak_activations(schedule.orders)),
        "lower_bound": bound,
        "deadlock_free": True,
    }


@app.command("check", epilog="Example: [bold]pipelane check my-schedule.csv[/]")
def check_(
    file: Annotated[Path, typer.Argument(help="A schedule in torch's CSV form, a row per rank.")],
    json_: JsonFlag = False,
) -> None:
    """Check a schedule: exit 0 and the certificate, or 1 and the reason.

    A file with sends and receives is checked as it stands too: whether its own instruction streams
    can deadlock, for each way of carrying messages. The answer is no if they do with sends that
    never wait.
    """
    try:
        schedule, program = _read(file)
        certificate = check(schedule)
        own = () if program is None else deadlocks(program)
        if any(v.semantics == "buffered" and not v.safe for v in own) and program is not None:
            verify_program(program, "buffered")
    except CheckError as error:
        if not json_:
            raise
        print(json.dumps({"file": str(file), "valid": False, "reason": str(error)}))
        raise typer.Exit(1) from None
    if json_:
        facts = {"file": str(file), "valid": True, "deadlock_free": True}
        print(json.dumps({**facts, **_certificate(certificate), "own_messages": _verdicts(own)}))
        return
    print(
        f"{file}: valid. {certificate.ranks} ranks, {certificate.microbatches} micro-batches, "
        f"{certificate.chunks} chunks per rank; {certificate.computes} compute actions, "
        f"{certificate.messages} messages; peak activations per rank: "
        f"{', '.join(map(str, certificate.peak_activations))}.\n"
        f"Certificate: {certificate.statement}."
    )
    if own:
        print("The file's own sends and receives:")
    for found in own:
        answer = "cannot deadlock" if found.safe else "CAN deadlock"
        print(f"  {found.semantics:<10}  {answer} ({found.assumption})")
        if not found.safe:
            print("\n".join(f"            {line}" for line in found.reason.splitlines()))


def _verdicts(verdicts: tuple[Verdict, ...]) -> list[dict[str, object]]:
    return [verdict._asdict() for verdict in verdicts]


def _read(file: Path) -> tuple[Schedule, Program | None]:
    """The schedule, and the file's own instruction streams if it has sends or receives.

    A file that can be read and is no schedule is a no, not wrong use.
    """
    rows = read_rows(file)  # once: the file may be a pipe
    try:
        schedule = schedule_from_rows(rows, name=file.stem, where=str(file))
        program = program_from_rows(rows, name=file.stem, where=str(file))
    except ScheduleError as error:
        raise CheckError(str(error)) from None
    has = any(x.kind in COMMUNICATION for stream in program.streams for x in stream)
    return schedule, program if has else None


def _certificate(certificate: Certificate) -> dict[str, object]:
    return {
        "ranks": certificate.ranks,
        "microbatches": certificate.microbatches,
        "chunks": certificate.chunks,
        "computes": certificate.computes,
        "messages": certificate.messages,
        "peak_activations": list(certificate.peak_activations),
        "statement": certificate.statement,
    }


@app.command(epilog="Example: [bold]pipelane view timeline.json[/]")
def view(
    file: Annotated[Path, typer.Argument(help="A timeline saved with Timeline.to_json().")],
    width: WidthOption = None,
    ascii: AsciiFlag = False,
    no_color: NoColorFlag = False,
) -> None:
    """Draw a recorded or predicted timeline."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the timeline {file}: {error}") from error
    timeline = Timeline.from_json(text)
    _require_order(timeline, file)
    _console(width, no_color).print(TimelineView(timeline, width, ascii or None))


def _require_order(timeline: Timeline, file: Path) -> None:
    """Raise ConfigError unless each rank computes one thing after the other.

    The file may have been made by another program or by hand.
    """
    for rank, row in enumerate(timeline.spans):
        before = 0.0
        for action, start, end in row:
            if not (action.kind.is_compute and before <= start + 1e-9 and start <= end):
                raise ConfigError(
                    f"{file}: rank {rank} has {action} from {start} to {end} after {before}; "
                    "expected computing only, in order of time, each action before the next"
                )
            before = end


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    epilog="Example: [bold]pipelane run -n 4 train.py --epochs 3[/]",
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script; what follows are its arguments.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of local processes.")],
    output: Annotated[Output, typer.Option(help="Whose standard output is shown.")] = Output.first,
) -> None:
    """Run a script in local processes, one per rank, as torchrun would on one machine."""
    from pipelane.launch import run_script

    raise typer.Exit(run_script(script, context.args, ranks=ranks, output=output.value))


@app.command(epilog="Example: [bold]pipelane demo[/]")
def demo(
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Local processes.")] = 4,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="Fewer for a look.")] = None,
) -> None:
    """Train a classifier of scanned digits over local ranks; show planned and measured bubbles."""
    from pipelane.demo import run as run_demo

    raise typer.Exit(run_demo(ranks, epochs))


app.command(
    "profile",
    epilog="Example: [bold]pipelane profile examples/characters.py:build -o profile.json[/]",
)(profile_)
app.command(
    "compare",
    epilog="Example: [bold]pipelane compare -p 8 -m 32[/]",
)(compare_)
app.command(
    "partition",
    epilog="Example: [bold]pipelane partition vgg16.txt -k 4 --comm --memory 16GiB[/]",
)(partition_)


def _console(width: int | None = None, no_color: bool = False) -> Console:
    """Standard output: 80 columns where it is not a terminal, no colour where not wanted."""
    plain = no_color or "NO_COLOR" in os.environ
    columns = width if width is not None else (None if sys.stdout.isatty() else 80)
    return Console(width=columns, no_color=plain, highlight=False, soft_wrap=False)
