"""Meeting of the ranks: the store, the default process group, and leaving them again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["default_device", "host_store", "joined", "use_threads"]


def host_store(ranks: int) -> tuple[Any, int]:
    """Host the store of a local run in this process, on a port that the system chooses.

    Keep the returned store alive as long as the ranks run.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    return store, store.port


def use_threads(threads: int) -> None:
    """Set torch's intra-op threads of this process."""
    torch.set_num_threads(threads)


def default_device() -> torch.device:
    """This rank's device: its local GPU when there is one per local rank, else the CPU."""
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count():
            return torch.device("cuda", local)
    return torch.device("cpu")


@contextmanager
def joined() -> Iterator[None]:
    """Join the default process group from the environment, unless the script did; leave after."""
    if dist.is_initialized():
        yield
        return
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
