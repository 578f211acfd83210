"""The local launcher, `pipelane run`, and torchrun, with the same script."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import pipelane
from pipelane import errors
from pipelane.launch import run_script

SCRIPT = """
import os, sys
import torch
import pipelane

def main(word):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    pipe = pipelane.Pipeline(
        model, example=x[:2], microbatches=3, loss_fn=torch.nn.functional.mse_loss)
    loss = pipe.step(x, y)
    # One write, so that lines of several ranks do not mix.
    sys.stdout.write(f"{word} rank {pipe.rank} of {pipe.ranks} loss {loss.item():.6f}\\n")
    sys.stdout.flush()
    if "--fail" in sys.argv and pipe.rank == 1:
        raise RuntimeError("told to fail")
    return pipe.rank

if __name__ == "__main__":
    sys.stdout.write(f"returned {pipelane.launch(main, 2, 'hello')}\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=clean, check=False
    )


def losses(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("hello"))


def test_the_same_script_runs_three_ways(script: Path) -> None:
    local = run([sys.executable, str(script)])
    assert local.returncode == 0, local.stderr
    assert "returned [0, 1]" in local.stdout
    first = losses(local.stdout)
    assert len(first) == 1  # only rank 0 is shown
    assert first[0].startswith("hello rank 0 of 2 loss ")

    ours = run([sys.executable, "-m", "pipelane", "run", "-n", "2", "--output", "all", str(script)])
    assert ours.returncode == 0, ours.stderr
    theirs = run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    )
    assert theirs.returncode == 0, theirs.stderr
    for output in (ours.stdout, theirs.stdout):
        assert losses(output) == [first[0], first[0].replace("rank 0", "rank 1")]
        assert "returned [0]" in output
        assert "returned [1]" in output


def test_run_script_reports_the_failing_rank(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run_script(str(script), ["--fail"], ranks=2, output="all")
    out, err = capfd.readouterr()
    assert code == 1
    assert "told to fail" in err
    assert "rank 0 of 2" in out


def test_run_script_needs_a_script() -> None:
    with pytest.raises(errors.ConfigError, match="no such script"):
        run_script("/nowhere/script.py", [], ranks=2)


def pid_and_threads() -> tuple[int, str, int]:
    return os.getpid(), os.environ["OMP_NUM_THREADS"], dist.get_world_size()


def test_launch_returns_results_by_rank_and_leaves_no_process() -> None:
    results = pipelane.launch(pid_and_threads, 3)
    assert len({pid for pid, _, _ in results}) == 3
    assert all(size == 3 for _, _, size in results)
    for pid, _, _ in results:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def large_result() -> bytes:
    return b"x" * (4 << 20)


def test_a_large_result_does_not_block() -> None:
    assert [len(found) for found in pipelane.launch(large_result, 2)] == [4 << 20] * 2


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom")
    time.sleep(600)  # does not end by itself


def test_the_first_failure_is_reported_and_the_others_are_ended() -> None:
    began = time.monotonic()
    with pytest.raises(errors.LaunchError, match="boom") as caught:
        pipelane.launch(fail_on_rank_1, 3, grace=1.0)
    assert time.monotonic() - began < 30
    assert caught.value.rank == 1
    assert "ValueError" in caught.value.failures[1]


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "2"])
def test_bad_number_of_ranks(ranks: object) -> None:
    with pytest.raises(errors.ConfigError, match="ranks must be"):
        pipelane.launch(pid_and_threads, ranks)  # type: ignore[arg-type]


def test_a_function_that_cannot_be_sent() -> None:
    with pytest.raises(errors.ConfigError, match="top level"):
        pipelane.launch(lambda: None, 2)


def unpicklable() -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(errors.LaunchError, match=r"rank [01] failed"):
        pipelane.launch(unpicklable, 2)


def returns_and_then_dies() -> int:
    rank = dist.get_rank()
    if rank == 1:
        atexit.register(os.abort)
    return rank


def test_a_result_is_not_lost_when_the_interpreter_ends_badly() -> None:
    with pytest.warns(RuntimeWarning, match="rank 1 had returned its result .*: killed by SIGABRT"):
        assert pipelane.launch(returns_and_then_dies, 2) == [0, 1]
