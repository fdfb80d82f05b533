"""Workers that are forked: fresh, alone, and never from a process that has used CUDA."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pageahead.experiment import nursery, runner
from pageahead.experiment.evidence import Environment
from pageahead.experiment.messages import CellRequest, ProbeRequest, replies
from pageahead.experiment.nursery import Born, Nursery
from pageahead.experiment.protocol import Protocol

PROBE = ProbeRequest(run="now", argv=[], device="cpu")
LONG = CellRequest(
    run="now",
    cell="adamw32/32x8Mi",
    strategies=["streamed"],
    device="cpu",
    protocol=Protocol(warmups=10_000, rounds=1, repetitions=1),
)


@pytest.fixture(scope="module")
def nurse() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def born(nurse: Nursery, request: object = PROBE, **variables: str) -> tuple[Born | None, int]:
    """A worker, and the descriptor that its answers come from."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output:
        environment = {**runner.package_environment(), **variables}
        found = nurse.bear(request.model_dump_json(), writing, output, environment)
    os.close(writing)
    return found, reading


def answers(reading: int) -> list[object]:
    with os.fdopen(reading) as channel:
        return [replies.validate_json(line) for line in channel]


def test_each_request_has_a_process_of_its_own(nurse: Nursery) -> None:
    pids = set()
    for _ in range(2):
        worker, reading = born(nurse)
        assert worker is not None
        pids.add(worker._pid)
        assert psutil.Process(worker._pid).ppid() == nurse._process.pid
        (answer,) = answers(reading)
        assert isinstance(answer, Environment)
        assert worker.wait(60) == 0
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_another_environment_has_another_nursery(nurse: Nursery) -> None:
    """Some variables are read when PyTorch is imported, so that a fork would be too late."""
    for commit in ("abc", "def"):
        worker, reading = born(nurse, PAGEAHEAD_COMMIT=commit)
        (answer,) = answers(reading)
        assert answer.commit == commit
        worker.wait(60)


def test_two_at_once_are_not_born(nurse: Nursery) -> None:
    first, reading = born(nurse, LONG)
    assert first is not None
    assert first.poll() is None
    second, other = born(nurse)
    assert second is None
    os.close(other)
    first.kill()
    assert first.wait(60) == -signal.SIGKILL
    os.close(reading)
    third, last = born(nurse)
    assert third is not None
    assert len(answers(last)) == 1
    assert third.wait(60) == 0


def test_a_nursery_that_died_is_replaced(nurse: Nursery) -> None:
    """Its worker has died with it: how that ended, nobody could say."""
    worker, reading = born(nurse, LONG)
    process = psutil.Process(worker._pid)
    nurse._process.kill()
    assert worker.wait(60) == -signal.SIGKILL
    process.wait(60)
    os.close(reading)
    again, last = born(nurse)
    assert again is not None
    assert len(answers(last)) == 1
    again.wait(60)


def test_nothing_is_left_of_a_closed_nursery() -> None:
    closed = Nursery()
    worker, reading = born(closed, LONG)
    process = closed._process
    alive = psutil.Process(worker._pid)
    closed.close()
    assert process.returncode is not None
    alive.wait(60)
    os.close(reading)


def test_a_worker_ends_with_its_command(nurse: Nursery) -> None:
    """Even one that says nothing and would not notice."""
    reading, writing = os.pipe()
    code = (
        "import os, sys\n"
        f"sys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from tests.experiment.test_nursery import LONG, Nursery, runner\n"
        "with open(os.devnull, 'wb') as output:\n"
        f"    worker = Nursery().bear(LONG.model_dump_json(), {writing}, output, "
        "runner.package_environment())\n"
        "print(worker._pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = runner.subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=runner.subprocess.PIPE,
        stdout=runner.subprocess.PIPE,
        pass_fds=(writing,),
        env=runner.package_environment(),
    )
    os.close(writing)
    worker = psutil.Process(int(command.stdout.readline()))
    born_by = worker.parent()
    assert os.read(reading, 1)  # it has begun
    command.kill()
    command.communicate()
    worker.wait(60)
    born_by.wait(60)
    os.close(reading)


def test_its_exit_status_is_known(nurse: Nursery) -> None:
    unknown = LONG.model_copy(update={"cell": "none"})
    worker, reading = born(nurse, unknown)
    (answer,) = answers(reading)
    assert "none" in answer.reason
    assert worker.wait(60) == 1


@pytest.mark.parametrize(("answer", "untouched"), [(3, True), (0, False), (100, False)])
def test_a_driver_that_was_initialized_shows(
    answer: int, untouched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def cuDeviceGetCount(self, _: object) -> int:
            return answer

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert nursery.cuda_is_untouched() is untouched


def test_without_a_driver_nothing_can_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nursery.cuda_is_untouched()


def test_an_unfit_nursery_bears_nobody_and_workers_start_from_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unfit = Nursery()
    monkeypatch.setattr(nursery, "FIT", b"something else")
    assert born(unfit)[0] is None
    monkeypatch.setattr(runner, "_nursery", unfit)
    started: list[int] = []
    real = runner.subprocess.Popen
    monkeypatch.setattr(
        runner.subprocess, "Popen", lambda *a, **k: (started.append(1), real(*a, **k))[1]
    )
    assert isinstance(runner.ask(PROBE, lambda progress: None), Environment)
    assert started
    unfit.close()


def test_what_is_imported_before_a_fork_leaves_cuda_alone() -> None:
    """Were it not so, nothing would be wrong, but every worker slow to start."""
    assert "bitsandbytes" not in nursery.PRELOADED
    code = (
        f"import importlib, torch\nfor name in {nursery.PRELOADED!r}: importlib.import_module(name)"
        f"\nimport sys; assert 'bitsandbytes' not in sys.modules\n"
        f"assert not torch.cuda.is_initialized()"
    )
    done = runner.subprocess.run(
        [sys.executable, "-c", code], env=runner.package_environment(), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
