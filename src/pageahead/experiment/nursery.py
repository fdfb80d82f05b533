"""Where workers are born: a process that has imported what takes seconds, and forks.

Every cell is measured in a process of its own, and most of a small cell's time went into importing
PyTorch and what bitsandbytes imports of it. Here that is done once. CUDA does not survive a fork,
so nothing may have initialized it before: that is checked, and where it was, workers are started
from nothing, as they are where there is no fork. A worker is fresh all the same, in everything that
is measured: bitsandbytes, CUDA and all memory of a device begin in it.

``python -m pageahead.experiment.nursery FD`` takes requests from the socket FD, one at a time.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["Born", "Nursery", "main"]

PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch.distributed.tensor",
    "pageahead.experiment.messages",
)
START_SECONDS = 120.0
LONGEST_MESSAGE = 1 << 20
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
PR_SET_PDEATHSIG = 1
FIT, UNFIT = b"fit", b"unfit"


class Born:
    """A forked worker, as far as `subprocess.Popen` is asked about one.

    Attributes:
        returncode: as there; None while it runs.
    """

    def __init__(self, pid: int, link: socket.socket) -> None:
        self._pid = pid
        self._link = link
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            readable, _, _ = select.select([self._link], [], [], timeout)
            if not readable:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            said = self._link.recv(LONGEST_MESSAGE)
            # Nothing: whoever it was born to has died, and takes its exit status along.
            self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class Nursery:
    """Starts the process when it is first needed, and again for another environment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._conditions: object = None
        self._last: Born | None = None
        self._fit = False
        atexit.register(self.close)

    def bear(
        self, request: str, channel: int, output: BinaryIO, environment: dict[str, str]
    ) -> Born | None:
        """Fork a worker for one request.

        Args:
            request: as JSON.
            channel: descriptor for its answers.
            output: where what it prints goes.
            environment: its environment variables.

        Returns:
            The worker, or None where it has to be started in another way.
        """
        if not hasattr(os, "fork"):
            return None
        with self._lock:
            # One at a time: two that are measured at once would be in each other's way.
            if self._last is not None and self._last.poll() is None:
                return None
            try:
                return self._bear(request, channel, output, environment)
            except OSError:
                self._end()
                return None
            except BaseException:
                self._end()  # a worker that nobody knows would answer the next request's questions
                raise

    def close(self) -> None:
        """End the process, and its worker, if there is one."""
        with self._lock:
            self._end()

    def _bear(
        self, request: str, channel: int, output: BinaryIO, environment: dict[str, str]
    ) -> Born | None:
        conditions = (os.getpid(), Path.cwd(), environment)
        if conditions != self._conditions or (self._process and self._process.poll() is not None):
            self._end()
            self._conditions = conditions
            self._begin(environment)
        if not self._fit or self._link is None:
            return None
        socket.send_fds(self._link, [request.encode()], [channel, output.fileno()])
        said = self._link.recv(LONGEST_MESSAGE)
        if not said:
            raise ConnectionError("the nursery has died")
        self._last = Born(int(said), self._link)
        return self._last

    def _begin(self, environment: dict[str, str]) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pageahead.experiment.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        readable, _, _ = select.select([self._link], [], [], START_SECONDS)
        self._fit = bool(readable) and self._link.recv(LONGEST_MESSAGE) == FIT

    def _end(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.kill()  # it has nothing to put in order, and would take seconds for it
            self._process.wait()
        self._process = self._link = self._last = self._conditions = None
        self._fit = False


def main(arguments: list[str]) -> int:
    """Take requests until the other end closes; in a worker, answer one. The exit status."""
    link = socket.socket(fileno=int(arguments[0]))
    asked = os.environ.get(ASK_NVML)
    os.environ[ASK_NVML] = "1"  # a module that asks whether there is a GPU initializes nothing
    for name in PRELOADED:
        importlib.import_module(name)
    if asked is None:
        del os.environ[ASK_NVML]
    link.send(FIT if cuda_is_untouched() else UNFIT)
    while True:
        text, descriptors, _, _ = socket.recv_fds(link, LONGEST_MESSAGE, 2)
        if not text:
            return 0
        channel, output = descriptors
        nursery = os.getpid()
        worker = os.fork()
        if worker == 0:
            _end_with(nursery)
            link.close()
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
            from pageahead.experiment import worker as work

            return work.main([str(channel), text.decode()])
        os.close(channel)
        os.close(output)
        link.send(str(worker).encode())
        with suppress(OSError):  # nobody wants to know any more
            link.send(str(_status(worker, link)).encode())


def _status(worker: int, link: socket.socket) -> int:
    """How a worker ended, negative for a signal. It is ended if the other end of `link` is."""
    with suppress(AttributeError, OSError):  # before Linux 5.3 it ends when it next says something
        ending = os.pidfd_open(worker)
        try:
            ready, _, _ = select.select([ending, link.fileno()], [], [])
        finally:
            os.close(ending)
        if ending not in ready:  # nothing is asked before the answer is there
            os.kill(worker, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _end_with(parent: int) -> None:
    """Let the end of `parent`, which forked this process, end this one too, where there is Linux.

    Nobody would be left to say how this one ends.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def cuda_is_untouched() -> bool:
    """Whether no CUDA driver was initialized in this process; asked of the driver itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True  # there is none
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == NOT_INITIALIZED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
