"""Starting a worker, listening to it, and saying what happened when it dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pageahead
from pageahead.experiment.identity import scrub
from pageahead.experiment.messages import (
    Answer,
    Failure,
    MeasureRequest,
    ProbeRequest,
    Progress,
    replies,
)
from pageahead.experiment.nursery import Born, Nursery

__all__ = ["WorkerError", "ask", "package_environment"]

WORKER = (sys.executable, "-m", "pageahead.experiment.worker")
SILENCE_SECONDS = 300.0  # far more than the longest phase between two lines of a live worker
END_SECONDS = 60.0  # for a worker that has answered to end
OUTPUT_TAIL_BYTES = 2000
OUTPUT_TAIL_LINES = 3

_nursery = Nursery()


class WorkerError(RuntimeError):
    """A worker that failed, died or fell silent; the message is the reason.

    Attributes:
        answer: what it had answered before it went wrong, if it had.
    """

    def __init__(self, reason: str, answer: Answer | None = None) -> None:
        super().__init__(reason)
        self.answer = answer


def ask(
    request: ProbeRequest | MeasureRequest,
    on_progress: Callable[[Progress], None],
    *,
    command: Sequence[str] = WORKER,
    silence_seconds: float = SILENCE_SECONDS,
) -> Answer:
    """Start a worker, hand it `request` and return its answer.

    Raises:
        WorkerError: there was none, or the worker did not end well after it. It is gone in any
            case.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output:
        try:
            process = _start(command, request.model_dump_json(), writing, output)
        finally:
            os.close(writing)
        try:
            answer = _listen(reading, on_progress, silence_seconds)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        finally:
            os.close(reading)
            if process.poll() is None:
                process.kill()
                process.wait()
        if isinstance(answer, Failure):
            raise WorkerError(answer.reason)
        if answer is None:
            how = _post_mortem(process.wait(), output)
            raise WorkerError(f"worker ended without an answer, {how}")
        if process.returncode != 0:
            how = _post_mortem(process.wait(), output)
            raise WorkerError(f"worker answered, but then ended badly, {how}", answer)
        return answer


def _start(
    command: Sequence[str], request: str, writing: int, output: BinaryIO
) -> subprocess.Popen[bytes] | Born:
    environment = package_environment()
    if command == WORKER:
        born = _nursery.bear(request, writing, output, environment)
        if born is not None:
            return born
    return subprocess.Popen(
        [*command, str(writing), request],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=(writing,),
        env=environment,
    )


def _listen(
    descriptor: int, on_progress: Callable[[Progress], None], silence_seconds: float
) -> Failure | Answer | None:
    """Read until the worker closes its end; None if it had nothing to say."""
    answer = None
    doing = "starting"
    try:
        for line in _lines(descriptor, silence_seconds):
            reply = replies.validate_json(line)
            if isinstance(reply, Progress):
                doing = reply.phase
                on_progress(reply)
            else:
                answer = reply
    except TimeoutError:
        raise WorkerError(
            f"stopped after {silence_seconds:g} s without a sign of life while {doing}"
        ) from None
    return answer


def _lines(descriptor: int, silence_seconds: float) -> Iterator[bytes]:
    pending = b""
    while True:
        readable, _, _ = select.select([descriptor], [], [], silence_seconds)
        if not readable:
            raise TimeoutError
        received = os.read(descriptor, 1 << 16)
        if not received:
            return
        *whole, pending = (pending + received).split(b"\n")
        yield from whole


def _post_mortem(status: int, output: BinaryIO) -> str:
    """How a worker ended, with the last lines it printed."""
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - OUTPUT_TAIL_BYTES))
    text = output.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = scrub(" | ".join(lines[-OUTPUT_TAIL_LINES:]))
    return f"{ended}; last output: {said}" if said else ended


def package_environment() -> dict[str, str]:
    """This process's, such that another one imports the very same package.

    Nor, from Python 3.11 on, anything that happens to lie in the working directory.
    """
    root = str(Path(pageahead.__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
