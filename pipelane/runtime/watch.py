"""The control plane: a watchdog thread in every rank, connected with those of all other ranks.

It notices at once when a process is gone (its connection ends), within the timeout when one hangs,
and tells everybody who was first, so that all ranks raise the same story. It wakes the main thread
wherever that waits: by breaking the pipeline's connections, by a signal, and at last by ending the
process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from pipelane.errors import ConfigError, PipelineFailure
from pipelane.runtime.activity import Activity, Label, Peek, label_of
from pipelane.runtime.story import EVERY, State, Story, first, older, report, tell, verdict

__all__ = ["STRIDE", "Watch", "farewell", "job_folder"]

#: Tables of activities are numbered: pipeline x STRIDE + table.
STRIDE = 4096

#: Seconds between two signs of life; less for a short timeout.
BEAT = 0.5
#: Seconds to wait for the news after a connection broke, and then for all ranks' words.
NEWS, SETTLE = 3.0, 1.0
#: Seconds that the main thread has to come back by itself, and then after a signal.
WAKE, LEAVE = 1.5, 2.5
#: A first instruction of its kind may compile: it may take so many times the timeout.
COLD = 10.0
#: Seconds to tell the others goodbye.
FAREWELL = 2.0
_PORTION = 1 << 16

_watches: dict[tuple[int, ...], Watch] = {}


class _Peer:
    """The connection to another rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.inbound, self.outbound = b"", bytearray()
        self.lost = False


class Watch:
    """Watches the ranks of one set of processes, for all pipelines that they build together.

    Args:
        rank: this process's rank among ``size``.
        size: how many they are, at least 2.
        store: where they find each other.
        timeout: seconds, see :func:`pipelane.runtime.story.verdict`.
    """

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.host = f"{socket.gethostname()}, pid {os.getpid()}"
        self.activity = Activity()
        self._tables: dict[int, Sequence[Label]] = {}
        self._told: dict[int, dict[int, Sequence[Label]]] = {r: {} for r in range(size)}
        self._states: dict[int, State] = {}
        self._heard: dict[int, float] = {}
        self._ended: dict[int, int] = {}  # rank -> calls that it had begun
        self._peeks: dict[int, Peek] = {}
        self._hosts = [""] * size
        self._stories: list[Story] = []
        self._doing: dict[int, str] = {}
        self._news = threading.Condition()
        self._since_news: float | None = None
        self._groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._broken: set[int] = set()
        self._surfaced = False
        self._signalled = False
        self._left = False
        self._slowest: dict[tuple[int, int], float] = {}
        self._cold: set[int] = set()
        self._mark = (0, 0, 0, 0)
        self._since = time.monotonic()
        self._outbox: list[dict[str, Any]] = []
        self._parent = os.getppid()
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._here, self._wake = socket.socketpair()
        self._here.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._here, selectors.EVENT_READ)
        self._peers: dict[int, _Peer] = {}
        self._meet(store)
        self._handlers()
        self._job = self._leave_card()
        self._thread = threading.Thread(target=self._watch, name="pipelane watchdog", daemon=True)
        self._thread.start()

    @staticmethod
    def of(rank: int, world: Sequence[int], store: Any, timeout: float) -> Watch:
        """The watch of these processes; made by the first pipeline, shared by those that follow."""
        members = tuple(world)
        watch = _watches.get(members)
        if watch is None or watch._left:
            watch = _watches[members] = Watch(rank, len(world), store, timeout)
        watch.timeout = timeout
        return watch

    # -- meeting -----------------------------------------------------------------------------

    def _meet(self, store: Any) -> None:
        """Connect to every other rank; each connects to those below it."""
        self._listener = socket.create_server(("", 0), backlog=self.size + 8)
        port = self._listener.getsockname()[1]
        card = {
            "addresses": _addresses(), "port": port, "token": self._token, "host": self.host,
            "machine": _machine(), "path": self.activity.path,
        }  # fmt: skip
        store.set(f"watch/{self.rank}", json.dumps(card))
        cards: list[dict[str, Any]] = []
        for rank in range(self.size):
            key = f"watch/{rank}"
            try:
                store.wait([key], timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise PipelineFailure(
                    f"rank {rank} did not build this pipeline within {self.timeout:g} s (timeout "
                    f"{self.timeout:g} s), while rank {self.rank} did: look at rank {rank}'s "
                    "output; every rank must build the same pipelines in the same order"
                ) from error
            cards.append(json.loads(store.get(key)))
        self._hosts = [card["host"] for card in cards]
        for rank, other in enumerate(cards):
            if rank < self.rank:
                self._add(rank, _connect(other, self.rank, self.timeout, rank))
        self._listener.settimeout(self.timeout)
        while len(self._peers) < self.size - 1:
            try:
                connection, _ = self._listener.accept()
                hello = _line(connection, self.timeout)
            except OSError as error:
                missing = sorted(set(range(self.size)) - set(self._peers) - {self.rank})
                raise PipelineFailure(
                    f"rank {self.rank} got no connection from ranks {missing} within "
                    f"{self.timeout:g} s: {error}; can these hosts reach each other?"
                ) from error
            if hello.get("token") == self._token and "rank" in hello:
                self._add(int(hello["rank"]), connection)
            else:
                connection.close()
        for rank, other in enumerate(cards):
            if rank != self.rank and other["machine"] == card["machine"]:
                # Another container may say the same name and not see the file.
                with contextlib.suppress(OSError):
                    self._peeks[rank] = Peek(other["path"])
        store.set(f"watch/met/{self.rank}", "1")
        store.wait([f"watch/met/{rank}" for rank in range(self.size)], timedelta(seconds=60))
        self.activity.unlink()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _add(self, rank: int, connection: socket.socket) -> None:
        self._peers[rank] = _Peer(connection)
        self._heard[rank] = time.monotonic()
        self._states[rank] = State(rank, "idle", "outside of the pipeline")
        self._selector.register(connection, selectors.EVENT_READ, rank)

    # -- for the main thread -----------------------------------------------------------------

    def watch(self, number: int, ranks: Any) -> None:
        """A pipeline, whose connections are broken when it fails."""
        self._groups[number] = ranks

    def table(self, key: int, labels: Sequence[Label]) -> None:
        """Tell what the entries of a table of activities are."""
        self._tables[key] = labels
        self._send({"kind": "table", "key": key, "labels": [list(label) for label in labels]})

    @contextmanager
    def during(self, table: int, entry: int, pipeline: int) -> Iterator[None]:
        """A small call that is one entry of a table."""
        self.check(pipeline)
        self.activity.begin(table)
        self.activity.marks[1] = entry
        try:
            yield
        finally:
            self.activity.end()

    def cold(self, table: int, cold: bool) -> None:
        """Whether instructions of a table may compile, and so take much longer."""
        (self._cold.add if cold else self._cold.discard)(table)

    def check(self, pipeline: int) -> None:
        """Raise the story if this pipeline has failed."""
        if self._stories and any(story.about(pipeline) for story in self._stories):
            raise PipelineFailure(self.settle(pipeline, None))

    def publish(self, story: Story) -> None:
        """This rank failed: tell everybody."""
        with self._news:
            if self._left:
                return
            self._spread(story)
        self._wake_up()

    def settle(self, pipeline: int, own: Story | None) -> str:
        """Wait until it is clear who was first, and return the story.

        Args:
            pipeline: of this pipeline.
            own: what to say if nobody else says anything.
        """
        with self._news:
            self._surfaced = True
            if not self._about(pipeline):
                self._news.wait_for(lambda: self._about(pipeline), NEWS if own else 0)
            if not self._about(pipeline):
                assert own is not None
                self._spread(own)
                self._wake_up()
            self._news.wait_for(lambda: set(self._doing) >= self._able(), SETTLE)
            chosen = first(self._about(pipeline))
            doing = dict(self._doing)
        if chosen.rank not in doing:
            doing[chosen.rank] = chosen.instruction
        return tell(chosen, doing)

    def leave(self, error: BaseException | None) -> None:
        """This process ends, well or with an error; others are told which."""
        with self._news:
            if self._left:
                return
            if error is not None and not self._stories and not _is_exit(error):
                story = Story(
                    time.time(),
                    self.rank,
                    f"rank {self.rank} ({self.host}) failed outside of the pipeline: "
                    f"{type(error).__name__}: {error}",
                    "its own script",
                    "".join(traceback.format_exception(error)),
                )
                self._spread(story)
            self._outbox.append({"kind": "bye", "call": self.activity.now()[2]})
            self._left = True
        self._wake_up()
        self._thread.join(FAREWELL)
        self._restore()
        if self._job is not None:
            self._job.unlink(missing_ok=True)
        for peer in self._peers.values():
            peer.connection.close()
        self._listener.close()

    # -- news --------------------------------------------------------------------------------

    def _about(self, pipeline: int) -> list[Story]:
        return [story for story in self._stories if story.about(pipeline)]

    def _able(self) -> set[int]:
        """Ranks that can still say what they were doing."""
        gone = {rank for rank, peer in self._peers.items() if peer.lost}
        return set(range(self.size)) - gone - set(self._ended)

    def _spread(self, story: Story) -> None:
        """Learn a story that this rank tells first (with the lock), and tell it to all others."""
        self._take(story)
        self._outbox.append({"kind": "story", "story": story.to_dict()})

    def _take(self, story: Story) -> None:
        """Learn a story (with the lock): note what this rank does, and tell it."""
        if self._since_news is None or not self._about(story.pipeline):
            self._since_news = time.monotonic()
            self._surfaced = self._signalled = False
            self._doing = {}
            own = self._own_state()
            text = f"{own.text}{_since(own.age)}"
            self._doing[self.rank] = text
            self._outbox.append({"kind": "doing", "text": text})
            for rank in self._peeks:
                if self._peers[rank].lost:
                    self._doing[rank] = f"{self._last_seen(rank)} (its end)"
        self._stories.append(story)
        self._news.notify_all()

    def _last_seen(self, rank: int) -> str:
        """What another rank is or was doing, as well as can be known."""
        peek = self._peeks.get(rank)
        if peek is None:
            return f"{self._states[rank].text} (when last heard of)"
        return label_of(self._told[rank], peek.now())[1]

    # -- the thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        due = time.monotonic()
        while True:
            beat = min(BEAT, self.timeout / 8)
            pause = 0.1 if self._since_news is not None else beat
            for key, _ in self._selector.select(max(0.0, min(due - time.monotonic(), pause))):
                if key.fileobj is self._here:
                    self._woken()
                elif key.fileobj is self._listener:
                    self._answer()
                else:
                    self._hear(key.data)
            now = time.monotonic()
            if now >= due:
                due = now + beat
                self._tick()
            self._flush()
            self._enforce()
            if self._left and not self._outbox:
                self._flush()
                return

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for byte in self._here.recv(_PORTION):
                if byte == signal.SIGUSR1:
                    print(self.status(), file=sys.stderr, flush=True)
                elif byte in (signal.SIGINT, signal.SIGTERM):
                    self._interrupted(signal.Signals(byte))

    def _interrupted(self, number: signal.Signals) -> None:
        handler = signal.getsignal(number)
        if handler is not signal.default_int_handler and handler != self._on_term:
            return  # the user's own way
        with self._news:
            if self._stories:
                return
        story = Story(
            time.time() + 0.3,  # what made somebody interrupt us comes first
            self.rank,
            f"rank {self.rank} ({self.host}) was interrupted ({number.name}) in "
            f"{self._own_state().text}",
            self._own_state().text,
        )
        self.publish(story)

    def _tick(self) -> None:
        own = self._own_state()
        self._put(
            {"kind": "beat", "mark": list(self._mark), "age": own.age,
             "allowed": min(own.allowed, 1e9), "debugging": own.debugging}
        )  # fmt: skip
        if self._since_news is None and not self._left:
            found = verdict(self.states(), self.rank, self.timeout)
            if found is not None:
                self._condemn(*found)
            if os.getppid() != self._parent and "PIPELANE_LAUNCHER" in os.environ:
                self._condemn(self.rank, "lost its launcher, which was killed")

    def states(self) -> dict[int, State]:
        """Of all ranks, now."""
        now = time.monotonic()
        found = {}
        for rank in range(self.size):
            if rank == self.rank:
                found[rank] = self._own_state()
            elif rank in self._ended:
                found[rank] = State(rank, "ended", "ended", call=self._ended[rank])
            else:
                found[rank] = older(self._states[rank], now - self._heard[rank])
        return found

    def _own_state(self) -> State:
        mark, now = self.activity.now(), time.monotonic()
        if mark != self._mark:
            key = self._mark[:2]
            self._slowest[key] = max(self._slowest.get(key, 0.0), now - self._since)
            self._mark, self._since = mark, now
        label, text = label_of(self._tables, mark)
        allowed = self.timeout + self._slowest.get(mark[:2], 0.0)
        if mark[0] in self._cold and label.what == "run":
            allowed *= COLD
        return State(
            self.rank, label.what, text, label.peer, mark[2], now - self._since, allowed,
            debugging=_debugged(),
        )  # fmt: skip

    def _condemn(self, rank: int, reason: str) -> None:
        state = self.states()[rank]
        trace = ""
        if rank == self.rank:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            if frame is not None:
                trace = "".join(["It is here:\n", *traceback.format_stack(frame)])
        text = self._last_seen(rank) if rank in self._peeks else state.text
        self.publish(
            Story(
                time.time(), rank, f"rank {rank} ({self._hosts[rank]}) {reason}; its last "
                f"instruction: {text}", text, trace,
            )
        )  # fmt: skip

    def _hear(self, rank: int) -> None:
        peer = self._peers[rank]
        try:
            portion = peer.connection.recv(_PORTION)
        except BlockingIOError:
            return
        except OSError:
            portion = b""
        if not portion:
            self._lose(rank)
            return
        *lines, peer.inbound = (peer.inbound + portion).split(b"\n")
        for line in lines:
            self._learn(rank, json.loads(line))

    def _learn(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        self._heard[rank] = time.monotonic()
        if kind == "beat":
            label, text = label_of(self._told[rank], tuple(message["mark"]))
            self._states[rank] = State(
                rank, label.what, text, label.peer, message["mark"][2], message["age"],
                message["allowed"], debugging=message["debugging"],
            )  # fmt: skip
        elif kind == "table":
            self._told[rank][message["key"]] = [Label(*label) for label in message["labels"]]
        elif kind == "story":
            with self._news:
                self._take(Story(**message["story"]))
        elif kind == "doing":
            with self._news:
                self._doing[rank] = message["text"]
                self._news.notify_all()
        elif kind == "bye":
            self._ended[rank] = message["call"]

    def _lose(self, rank: int) -> None:
        """A connection ended: the process is gone, unless it said goodbye."""
        peer = self._peers[rank]
        self._selector.unregister(peer.connection)
        with self._news:
            peer.lost = True
            if rank in self._ended or self._left:
                self._news.notify_all()
                return
            where = self._last_seen(rank)
            story = Story(
                time.time(),
                rank,
                f"rank {rank} ({self._hosts[rank]}) is gone: it was killed, perhaps by the system "
                f"for lack of memory, or its host was lost; it was in {where}",
                where,
            )
            self._spread(story)
            self._doing[rank] = f"{where} (its end)" if rank in self._peeks else where

    # -- sending -----------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        self._put(message)
        self._wake_up()

    def _wake_up(self) -> None:
        # A full pipe has woken it already.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"\0")

    def _put(self, message: dict[str, Any]) -> None:
        """Send it when the thread comes to it."""
        with self._news:
            self._outbox.append(message)

    def _flush(self) -> None:
        with self._news:
            messages, self._outbox = self._outbox, []
        data = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
        for peer in self._peers.values():
            if peer.lost:
                continue
            peer.outbound += data
            while peer.outbound:
                try:
                    count = peer.connection.send(peer.outbound[:_PORTION])
                except BlockingIOError:
                    break  # a stopped process; what it missed it need not know
                except OSError:
                    break  # its end is read next
                del peer.outbound[:count]

    # -- consequences ------------------------------------------------------------------------

    def _enforce(self) -> None:
        """After news: break what the main thread may wait for, then wake it harder."""
        since = self._since_news
        if since is None or self._left:
            return
        with self._news:
            stories = list(self._stories)
        for number, ranks in list(self._groups.items()):
            if number not in self._broken and any(story.about(number) for story in stories):
                self._broken.add(number)
                ranks.break_connections()
        table = self.activity.now()[0]
        inside = table >= 0 and any(story.about(table // STRIDE) for story in stories)
        everywhere = any(story.pipeline == EVERY for story in stories)
        late = time.monotonic() - since
        if self._surfaced or not (inside or everywhere) or late < WAKE:
            return
        if not self._signalled:
            self._signalled = True
            if signal.getsignal(signal.SIGUSR2) == self._on_wake:
                os.kill(os.getpid(), signal.SIGUSR2)
        elif late > WAKE + LEAVE and inside:
            print(self.settle(max(table, 0) // STRIDE, None), file=sys.stderr)
            print(f"rank {self.rank} does not come back from its work; ending it", file=sys.stderr)
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
            if self._job is not None:
                self._job.unlink(missing_ok=True)
            os._exit(1)

    def _handlers(self) -> None:
        self._previous: dict[int, Any] = {}
        self._old_wakeup: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in (
            (signal.SIGUSR1, self._on_status),
            (signal.SIGUSR2, self._on_wake),
            (signal.SIGTERM, self._on_term),
        ):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._previous[number] = signal.signal(number, handler)
        old = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        if old != -1:
            signal.set_wakeup_fd(old)
        else:
            self._old_wakeup = old

    def _restore(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._old_wakeup is not None:
            signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_status(self, number: int, frame: FrameType | None) -> None:
        """The watchdog does it, which the signal has woken."""

    def _on_wake(self, number: int, frame: FrameType | None) -> None:
        if self._stories and not self._surfaced:
            table = max(self.activity.now()[0], 0)
            raise PipelineFailure(self.settle(table // STRIDE, None))

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        # A launcher ends all when one is gone, perhaps before we know: then that is the story.
        with self._news:
            self._news.wait_for(lambda: bool(self._stories), 0.5)
            told = [story for story in self._stories if story.rank != self.rank]
        if told and not self._surfaced:
            raise PipelineFailure(self.settle(told[0].pipeline, None))
        if not told:
            raise SystemExit(128 + number)

    # -- asking ------------------------------------------------------------------------------

    def status(self) -> str:
        """What every rank is doing, since when, and who holds up whom."""
        states = self.states()
        for rank, peek in self._peeks.items():
            if states[rank].what in ("idle", "ended"):
                continue
            mark = peek.now()
            label, text = label_of(self._told[rank], mark)
            if text != states[rank].text:
                states[rank] = State(rank, label.what, text, label.peer, mark[2])
        return report(states)

    def _answer(self) -> None:
        """Somebody asks for the status."""
        with contextlib.suppress(OSError, ValueError):
            connection, _ = self._listener.accept()
            with connection:
                asked = _line(connection, 1.0)
                if asked.get("token") == self._token and asked.get("ask") == "status":
                    connection.settimeout(1.0)
                    connection.sendall(self.status().encode())

    def _leave_card(self) -> Path | None:
        """How ``pipelane status`` finds this process."""
        try:
            folder = job_folder()
            folder.mkdir(mode=0o700, exist_ok=True)
            card = folder / f"{os.getpid()}.json"
            text = json.dumps(
                {"pid": os.getpid(), "rank": self.rank, "size": self.size, "token": self._token,
                 "port": self._listener.getsockname()[1], "script": " ".join(sys.argv)[:200]}
            )  # fmt: skip
            descriptor = os.open(card, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            return None  # no place to write to: then only the signal asks
        return card


def job_folder() -> Path:
    """Where running ranks of this user leave word of how to ask them."""
    return Path(tempfile.gettempdir()) / f"pipelane-{os.getuid()}"


def farewell(error: BaseException | None) -> None:
    """This process ends; tell all others, once."""
    for watch in list(_watches.values()):
        watch.leave(error)


@atexit.register
def _at_exit() -> None:
    farewell(getattr(sys, "last_value", None))


def _is_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _since(age: float) -> str:
    return f", since {age:.1f} s" if age >= 0.05 else ""


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _addresses() -> list[str]:
    """Where others may reach this host, best first."""
    found = []
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((master, 9))  # sends nothing; chooses the interface that leads there
        found.append(probe.getsockname()[0])
    found.append(socket.gethostname())
    found.append("127.0.0.1")
    return found


def _connect(card: dict[str, Any], me: int, timeout: float, rank: int) -> socket.socket:
    problem: Exception | None = None
    for address in card["addresses"]:
        try:
            connection = socket.create_connection((address, card["port"]), min(timeout, 10.0))
            hello = json.dumps({"rank": me, "token": card["token"]}) + "\n"
            connection.sendall(hello.encode())
            return connection
        except OSError as error:  # noqa: PERF203 - the next address may do
            problem = error
    raise ConfigError(
        f"rank {me} cannot reach rank {rank} ({card['host']}) at {', '.join(card['addresses'])}, "
        f"port {card['port']}: {problem}; ranks need a free path to each other's ports"
    )


def _line(connection: socket.socket, timeout: float) -> dict[str, Any]:
    """The first line that comes, as JSON; {} if it is none."""
    connection.settimeout(timeout)
    data = b""
    while not data.endswith(b"\n") and len(data) < 4096:
        portion = connection.recv(1)
        if not portion:
            break
        data += portion
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _debugged() -> bool:
    """Whether somebody looks at this process with a debugger."""
    if sys.gettrace() is not None and "pytest_cov" not in sys.modules:
        return True
    if "pydevd" in sys.modules or "debugpy" in sys.modules:
        return True
    bdb = sys.modules.get("bdb")
    if bdb is not None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame.f_code.co_filename == bdb.__file__:
                return True
            frame = frame.f_back
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return False
