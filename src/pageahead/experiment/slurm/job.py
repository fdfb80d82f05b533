"""What runs in a job: look at the device, run the command, keep a journal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from pageahead.experiment import runner
from pageahead.experiment.evidence import Environment
from pageahead.experiment.identity import scrub
from pageahead.experiment.messages import ProbeRequest
from pageahead.experiment.slurm.folder import Folder, Order
from pageahead.experiment.slurm.records import (
    CheckedRecord,
    FinishedRecord,
    SetupFailedRecord,
    StartedRecord,
    append,
    now,
)

__all__ = ["run"]

SUBMITIT_SIGNAL = signal.SIGUSR2
END_SECONDS = 10.0  # for a command that was told to stop


def run(order: Order) -> None:
    """Do what was ordered; ends the process with the command's exit status if it is not 0.

    The device is looked at before the command begins. One that was not expected ends the job with
    status 2, and so that nothing is added to the evidence.
    """
    job = os.environ["SLURM_JOB_ID"]
    journal = Folder(order.folder).journal(job)
    append(
        journal,
        StartedRecord(
            time=now(),
            job=job,
            device_kind=order.kind,
            expected=order.expected,
            command=list(order.command),
            evidence=order.evidence,
            node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        ),
    )
    try:
        environment = _look(order)
    except BaseException as error:
        append(journal, SetupFailedRecord(time=now(), reason=scrub(str(error))))
        if isinstance(error, runner.WorkerError):
            print(f"Error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        raise
    append(journal, CheckedRecord(time=now(), environment=environment))
    status = _command(order, journal)
    if status != 0:
        # Slurm's state and exit code of the job follow from it.
        raise SystemExit(status if status > 0 else 128 - status)


def _look(order: Order) -> Environment:
    """In a process of its own: on a GPU, whoever looks takes memory that is to be measured."""
    request = ProbeRequest(run=now(), argv=list(order.command), device=order.device)
    environment = runner.ask(request, lambda progress: None)
    assert isinstance(environment, Environment)
    name = environment.gpu.name if environment.gpu is not None else "CPU"
    if order.expected.lower() not in name.lower():
        raise runner.WorkerError(
            f"device kind {order.kind}: expected {order.expected}, but the device here is {name}"
        )
    return environment


def _command(order: Order, journal: Path) -> int:
    """Run it, and say in the journal how it ended. Returns its exit status, negative for a signal.

    Slurm stops a job by SIGTERM, or by submitit's signal before the time is up, which submitit
    makes an exception here.
    """
    words = [sys.executable, "-m", "pageahead", *order.command]
    evidence = order.folder / order.evidence
    if order.appends:
        words += ["--out", str(evidence)]
        return _watched(words, None, journal)
    with evidence.open("w") as output:
        status = _watched([*words, "--json"], output, journal)
    if evidence.stat().st_size == 0:
        evidence.unlink()
    return status


def _watched(words: list[str], output: TextIO | None, journal: Path) -> int:
    # submitit's signal goes to every process of the job. This one decides what follows from it.
    before = signal.signal(SUBMITIT_SIGNAL, signal.SIG_IGN)
    try:
        process = subprocess.Popen(words, stdout=output, env=runner.package_environment())
    finally:
        signal.signal(SUBMITIT_SIGNAL, before)
    stopped: list[str] = []
    try:
        with _passing_on(process, stopped):
            status = process.wait()
    except BaseException as error:
        _stop(process)
        # Not its status: where the exception came between the command's end and the return of
        # wait(), nobody can tell it any more, and subprocess says 0.
        _finish(journal, None, [*stopped, str(error) or type(error).__name__])
        raise
    _finish(journal, status, stopped)
    return status


@contextmanager
def _passing_on(process: subprocess.Popen[bytes], stopped: list[str]) -> Iterator[None]:
    """SIGTERM ends the command, not this process, which has its journal to write."""

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(signal.Signals(number).name)
        process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _finish(journal: Path, status: int | None, stopped: list[str]) -> None:
    append(
        journal,
        FinishedRecord(
            time=now(),
            exit_status=status if status is not None and status >= 0 else None,
            signal=signal.Signals(-status).name if status is not None and status < 0 else None,
            stopped="; ".join(stopped) or None,
        ),
    )
