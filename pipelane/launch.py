"""Start one process per rank on this machine, watch them, and report the first failure.

Under ``torchrun`` (or any launcher that sets ``RANK`` and ``WORLD_SIZE``) the processes exist
already, and :func:`launch` only runs the function, so the same script works both ways.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from pipelane.errors import ConfigError, LaunchError, PipelineFailure

__all__ = ["launch", "run_script", "under_launcher"]

#: Seconds that the other ranks have to end by themselves after the first one failed.
GRACE = 10.0
_POLL = 0.02


def under_launcher() -> bool:
    """Whether this process was started as one rank of several, by torchrun or by pipelane."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    fn: Callable[..., Any], ranks: int, *args: Any, output: str = "first", grace: float = GRACE
) -> list[Any]:
    """Run ``fn(*args)`` in ``ranks`` local processes with a process group ready in each.

    Under torchrun it runs ``fn(*args)`` in this process, whose rank torchrun decides; ``ranks``
    is not used then.

    Args:
        fn: a function at the top level of a module (it is pickled by name).
        ranks: number of processes, at least 1.
        args: arguments for ``fn``; must be picklable.
        output: "first" shows the standard output of rank 0 only, "all" of every rank. Standard
            error is always shown.
        grace: seconds that the other ranks get to end after one has failed.

    Returns:
        What ``fn`` returned, one entry per rank that ran here (one entry under torchrun).

    Raises:
        ConfigError: bad arguments; nothing was started.
        LaunchError: a rank failed. The message has the traceback of the rank that failed first;
            ``rank`` and ``failures`` (rank -> traceback) hold the details.
    """
    if under_launcher():
        from pipelane.runtime.rendezvous import joined

        with joined():
            return [fn(*args)]
    _check(ranks, output)
    try:
        pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigError(
            f"cannot send {getattr(fn, '__name__', fn)!r} and its arguments to new processes: "
            f"{error}; define the function at the top level of a module and pass picklable "
            "arguments"
        ) from error
    from pipelane.runtime.rendezvous import host_store

    store, port = host_store(ranks)
    context = multiprocessing.get_context("spawn")
    workers: list[Any] = []
    pipes: list[Connection] = []
    failed: list[int] = []
    try:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(
                target=_worker,
                args=(fn, args, _environment(rank, ranks, port), output, sender),
                name=f"pipelane rank {rank}",
                daemon=True,
            )
            worker.start()
            sender.close()
            workers.append(worker)
            pipes.append(receiver)
        reports, failed = _watch(
            [_Spawned(w, p) for w, p in zip(workers, pipes, strict=True)], grace
        )
    finally:
        _end([_Spawned(w, p) for w, p in zip(workers, pipes, strict=False)])
        del store
    if failed:
        raise _failure(reports, failed, [w.exitcode for w in workers])
    return [report[1] for report in reports]


def run_script(
    script: str, args: Sequence[str], *, ranks: int, output: str = "first", grace: float = GRACE
) -> int:
    """Run ``python script args`` in ``ranks`` local processes, as ``torchrun`` would.

    Returns:
        0, or the exit code of the rank that failed first (128 + number for a signal).

    Raises:
        ConfigError: the script does not exist, or bad arguments.
    """
    _check(ranks, output)
    if not Path(script).is_file():
        raise ConfigError(f"no such script: {script}")
    from pipelane.runtime.rendezvous import host_store

    store, port = host_store(ranks)
    workers: list[_Popened] = []
    try:
        for rank in range(ranks):
            hidden = output == "first" and rank > 0
            process = subprocess.Popen(
                [sys.executable, script, *args],
                env={**os.environ, **_environment(rank, ranks, port)},
                stdout=subprocess.DEVNULL if hidden else None,
            )
            workers.append(_Popened(process))
        _, failed = _watch(workers, grace)
    finally:
        _end(workers)
        del store
    if not failed:
        return 0
    code = workers[failed[0]].exit_code() or 1
    if len(failed) > 1 or code < 0:
        print(f"pipelane: rank {failed[0]} failed first ({_ending(code)})", file=sys.stderr)
    return 128 - code if code < 0 else code


def _check(ranks: int, output: str) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ConfigError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    if output not in ("first", "all"):
        raise ConfigError(f"output must be 'first' or 'all', got {output!r}")


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set; one thread per core in all, unless the user chose."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The launcher hosts the store, so no worker may try to.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def _worker(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    output: str,
    report: Connection,
) -> None:
    """Body of a spawned process: report ("ok", value) or ("error", text, is consequence)."""
    os.environ.update(environment)
    if output == "first" and environment["RANK"] != "0":
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from pipelane.runtime.rendezvous import joined, use_threads

    use_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        with joined():
            value = fn(*args)
        sys.stdout.flush()
        report.send(("ok", value))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:
        sys.stdout.flush()
        consequence = isinstance(error, PipelineFailure) and not error.__cause__
        report.send(("error", traceback.format_exc(), consequence))
        sys.exit(1)


class _Process(Protocol):
    def exit_code(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def report(self) -> Any: ...


class _Spawned:
    """A multiprocessing process and the pipe with its report."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self._report: Any = None

    def report(self) -> Any:
        # Read while the process runs, so that a large result cannot fill the pipe and block it.
        if self._report is None and not self._pipe.closed and self._pipe.poll():
            try:
                self._report = self._pipe.recv()
            except EOFError:
                self._pipe.close()
            except Exception as error:
                self._report = ("error", f"its result could not be read: {error!r}", False)
        return self._report

    def exit_code(self) -> int | None:
        self.report()
        code: int | None = self._process.exitcode
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class _Popened:
    """A subprocess; it has no report but its exit code."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def report(self) -> Any:
        return None

    def exit_code(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _watch(workers: Sequence[_Process], grace: float) -> tuple[list[Any], list[int]]:
    """Wait for all; after the first failure the others have ``grace`` seconds.

    Returns:
        The reports by rank, and the ranks that failed by themselves, first to last.
    """
    running = dict(enumerate(workers))
    failed: list[int] = []
    deadline: float | None = None
    while running:
        for rank, worker in list(running.items()):
            code = worker.exit_code()
            if code is None:
                continue
            del running[rank]
            if code != 0 and _finished(worker):
                # Its work is done and its result is here: only the interpreter's own end failed,
                # as threads of the communication library now and then make it.
                warnings.warn(
                    f"rank {rank} had returned its result and then ended badly: {_ending(code)}",
                    RuntimeWarning,
                    stacklevel=3,
                )
            elif code != 0:
                failed.append(rank)
                deadline = deadline or time.monotonic() + grace
        if running and deadline is not None and time.monotonic() > deadline:
            break
        if running:
            time.sleep(_POLL)
    return [worker.report() for worker in workers], failed


def _finished(worker: _Process) -> bool:
    """Whether a rank has reported that its function returned."""
    report = worker.report()
    return bool(report) and report[0] == "ok"


def _end(workers: Sequence[_Process]) -> None:
    """Leave no process behind: ask politely, then kill."""
    alive = [w for w in workers if w.exit_code() is None]
    for worker in alive:
        worker.terminate()
    deadline = time.monotonic() + 5.0
    while alive and time.monotonic() < deadline:
        time.sleep(_POLL)
        alive = [w for w in alive if w.exit_code() is None]
    for worker in alive:
        worker.kill()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _failure(
    reports: Sequence[Any], failed: Sequence[int], codes: Sequence[int | None]
) -> LaunchError:
    """The error of the rank that failed first; one that only heard of a failure comes last."""
    texts = {
        rank: reports[rank][1]
        if reports[rank]
        else f"the process ended without a report ({_ending(codes[rank] or 0)})"
        for rank in failed
    }
    own = [rank for rank in failed if not (reports[rank] and reports[rank][2])]
    rank = own[0] if own else failed[0]
    others = ", ".join(str(r) for r in failed if r != rank)
    also = f"\n(ranks that stopped because of it: {others})" if others else ""
    return LaunchError(f"rank {rank} failed:\n{texts[rank].rstrip()}{also}", rank, texts)
