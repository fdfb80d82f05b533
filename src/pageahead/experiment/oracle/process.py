"""One worker process: asked one request at a time, and what is said when it dies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, cast

import torch

import pageahead
from pageahead.experiment.identity import scrub
from pageahead.experiment.oracle.messages import Done, Request, replies
from pageahead.experiment.oracle.records import CellRecord, FailureRecord

__all__ = ["WORKER", "StoppedError", "WorkerDiedError", "WorkerProcess"]

WORKER = (sys.executable, "-m", "pageahead.experiment.oracle.worker")
SILENCE_SECONDS = 300.0  # far more than a case, or making one small, takes
END_SECONDS = 30.0
TAIL_BYTES = 2000
TAIL_LINES = 3


class WorkerDiedError(Exception):
    """A worker ended or fell silent before it had answered; the message says how."""


class StoppedError(Exception):
    """Nobody wants the answers any more."""


class WorkerProcess:
    """Started when made. Close it, whatever happened."""

    def __init__(
        self,
        stop: threading.Event,
        *,
        command: Sequence[str] = WORKER,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """Args:
        stop: when it is set, whoever waits for an answer gets `StoppedError`.
        command: is given the number of a file descriptor for its answers.
        silence_seconds: after which a worker that says nothing is ended.
        """
        self._stop = stop
        self._silence_seconds = silence_seconds
        self._pending = b""
        self._reading, writing = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        try:
            self._process = subprocess.Popen(
                [*command, str(writing)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                env={**_environment(), **_gpu()},
            )
        finally:
            os.close(writing)

    @property
    def _input(self) -> IO[bytes]:
        return cast(IO[bytes], self._process.stdin)

    def ask(self, request: Request) -> Iterator[CellRecord | FailureRecord]:
        """Yield the answers as they come.

        Raises:
            WorkerDiedError: the worker did not come to the end of them.
            StoppedError: see there.
        """
        try:
            self._input.write(request.model_dump_json().encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            raise WorkerDiedError(self._post_mortem()) from None
        while True:
            reply = replies.validate_json(self._line())
            if isinstance(reply, Done):
                return
            yield reply

    def close(self) -> None:
        """End the process: without more requests it does so itself, unless nobody can wait."""
        with suppress(BrokenPipeError):
            self._input.close()
        if self._stop.is_set():
            self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._reading)
        self._output.close()

    def _line(self) -> bytes:
        silent = 0.0
        while b"\n" not in self._pending:
            readable, _, _ = select.select([self._reading], [], [], 1.0)
            if self._stop.is_set():
                raise StoppedError
            if readable:
                received = os.read(self._reading, 1 << 16)
                if not received:
                    raise WorkerDiedError(self._post_mortem())
                self._pending += received
                silent = 0.0
            else:
                silent += 1.0
                if silent >= self._silence_seconds:
                    self._process.kill()
                    raise WorkerDiedError(f"no sign of life for {self._silence_seconds:g} s")
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def _post_mortem(self) -> str:
        """How the process ended, with the last lines it printed."""
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the process closed its end, but went on"
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - TAIL_BYTES))
        text = self._output.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = scrub(" | ".join(lines[-TAIL_LINES:]))
        return f"the process ended, {ended}{f': {said}' if said else ''}"


_workers = count()


def _gpu() -> dict[str, str]:
    """Workers take turns with the GPUs there are: contexts that share one slow each other down."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if len(visible) == gpus else [str(number) for number in range(gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[next(_workers) % gpus]}


def _environment() -> dict[str, str]:
    """This process's, such that the worker imports the very same package, on one CPU thread."""
    root = str(Path(pageahead.__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
