"""The ranks of one pipeline: who they are, how they agree, and how they learn of a failure."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipelane.errors import ConfigError, PipelineFailure

__all__ = ["Ranks"]

_POISON_TAG = 1 << 30
#: How many pipelines these ranks have built so far; all of them build in the same order.
_built: Counter[tuple[int, ...]] = Counter()


class Ranks:
    """The ranks of a pipeline and their control group.

    The control group is always gloo on the CPU: it carries small messages (agreement, step
    headers, losses), so that reading them never waits for a GPU.

    Attributes:
        rank: this process's rank within the pipeline.
        size: p.
        world: global rank of each pipeline rank.
        control: the gloo group.
        timeout: seconds after which a wait for a peer gives up.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "no process group: start the script with pipelane.launch(main, ranks=N), "
                "`pipelane run -n N script.py` or torchrun, or call "
                "torch.distributed.init_process_group() first"
            )
        base = group if group is not None else dist.group.WORLD
        assert base is not None
        self.rank = dist.get_rank(base)
        if self.rank < 0:
            raise ConfigError("this rank is not a member of the process group given as group=")
        self.size = dist.get_world_size(base)
        self.world = dist.get_process_group_ranks(base)
        self.timeout = timeout
        self._whole = self.size == dist.get_world_size()
        self.control = self._new_group(self.world, "gloo")
        self._data: list[dist.ProcessGroup] = []
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        members = tuple(self.world)
        _built[members] += 1
        prefix = f"pipelane/{'-'.join(map(str, members))}/{_built[members]}"
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def new_data_group(self, members: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        """A group for tensors among pipeline ranks; None on ranks that are not members.

        Every rank of the pipeline must call this in the same order.
        """
        member = self.rank in members
        if not (member or self._whole):
            return None
        made = self._new_group([self.world[r] for r in members], backend)
        if not member:
            return None
        self._data.append(made)
        return made

    def _new_group(self, world: Sequence[int], backend: str) -> dist.ProcessGroup:
        """A new group; torch names it by a count if all processes take part, which is best.

        Where a pipeline is on a part of the processes only its members can take part; torch then
        names the group by its members, and a name must not be used again (see :meth:`close`).
        """
        made: dist.ProcessGroup = dist.new_group(
            list(world),
            backend=backend,
            timeout=timedelta(seconds=self.timeout),
            use_local_synchronization=not self._whole,
        )
        return made

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, on every rank."""
        out: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(out, value, group=self.control)
        except RuntimeError as error:
            raise self.failure("an exchange among all ranks", error) from None
        return out

    def agree(self, value: Any) -> list[Any]:
        """Like :meth:`gather`, for values or exceptions: if any rank has one, all raise it.

        The exception of the lowest rank that has one is raised on every rank, with that rank
        named; so nobody goes on alone or waits for a rank that gave up.
        """
        values = self.gather(value)
        broken = [rank for rank, found in enumerate(values) if isinstance(found, Exception)]
        if not broken:
            return values
        error: Exception = values[broken[0]]
        if len(broken) == self.size:
            raise error
        raise type(error)(f"{error} (on {_ranks(broken)})")

    def send(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> None:
        """Send a small CPU tensor; returns without waiting for the peer."""
        try:
            self._sends.append((self.control.send([tensor], peer, tag), tensor))
            while len(self._sends) > 4 * self.size:  # steps old: over long ago, only let go of
                self._sends.popleft()[0].wait()
        except RuntimeError as error:
            raise self.failure(f"the send of {what} to rank {peer}", error) from None

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> None:
        """Receive a small CPU tensor and wait for it."""
        waiting = f"the receive of {what} from rank {peer}"
        try:
            work = self.control.recv([tensor], peer, tag)
        except RuntimeError as error:
            raise self.failure(waiting, error) from None
        self.finish(work, waiting)

    def finish(self, work: dist.Work, waiting: str) -> None:
        """Wait for a message of the control group."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failure(waiting, error) from None

    def leave_note(self, name: str, text: str) -> None:
        """Put a text where all ranks can read it."""
        self._store.set(name, text)

    def read_note(self, name: str) -> str:
        """Read a text that another rank left."""
        found: bytes = self._store.get(name)
        return found.decode()

    def announce(self, story: dict[str, Any]) -> None:
        """Tell all ranks that this one failed: leave the story, then break the connections.

        Peers that wait for this rank wake up with an error, read the story, and break their own
        connections in turn, so that the news reaches every rank, however far.
        """
        # If the store died with its host, peers still see their connections break.
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("failure", "", json.dumps(story))
        self.break_connections()

    def break_connections(self) -> None:
        """Close this rank's connections, so that no peer can wait for it any longer."""
        for group in [self.control, *self._data]:
            if dist.get_backend(group) == "nccl":
                group.abort()
                continue
            me = dist.get_rank(group)
            for peer in range(dist.get_world_size(group)):
                if peer != me:
                    # gloo has no abort; a receive that times out closes the connection.
                    try:
                        group.recv([torch.empty(1)], peer, _POISON_TAG).wait(
                            timedelta(milliseconds=1)
                        )
                    except RuntimeError:
                        continue

    def failure(self, waiting: str, error: BaseException) -> PipelineFailure:
        """The error to raise after a wait failed, with the first failing rank's story if told.

        Args:
            waiting: what this rank was doing.
            error: what the transport said.
        """
        story = self._story()
        here = f"rank {self.rank} was in {waiting}"
        if story is None:
            kind = "did not answer in time" if "imed out" in str(error) else "closed the connection"
            text = (
                f"a peer {kind} (timeout {self.timeout:g} s); {here}. No rank left a report, so it "
                "was killed, is stuck, or never made the matching call: look at the other ranks' "
                f"output. Transport: {_one_line(error)}"
            )
            story = {"message": text, "rank": self.rank, "instruction": waiting}
        else:
            text = f"{story['message']}\n({here} and stopped because of it)"
        self.announce(story)
        return PipelineFailure(text)

    def _story(self) -> dict[str, Any] | None:
        try:
            if not self._store.check(["failure"]):
                return None
            told: dict[str, Any] = json.loads(self._store.get("failure"))
        except RuntimeError:
            return None
        return told

    def close(self) -> None:
        """Leave the pipeline's groups; their threads and connections end.

        Groups of a part of the processes stay until the process ends: torch would give their name,
        and with it their stale addresses in the store, to the next such group.
        """
        if not self._whole:
            return
        for group in [*self._data, self.control]:
            dist.destroy_process_group(group)
        self._data.clear()

    @property
    def host(self) -> str:
        """Host name and process id, for messages."""
        return f"{socket.gethostname()}, pid {os.getpid()}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
