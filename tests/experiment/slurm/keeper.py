"""Runs programs, and ends them and everything they have started when its standard input closes.

``python keeper.py COMMANDS``: a JSON list of commands, each a list of words. That input is a pipe
from the test, so that it closes however the test ends. Daemons do not escape: what loses its parent
becomes a child of this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_SECONDS = 3.0  # a job's own parent waits for the controller, which has gone


def main(commands: list[list[str]]) -> None:
    """Start the commands; return when standard input has closed and nothing of them is left."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit("cannot become the parent of orphans")
    try:
        for command in commands:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        while not select.select([sys.stdin], [], [], 0.5)[0]:
            _bury()
    finally:
        _end_all()


def _end_all() -> None:
    """In rounds, because those that end may start others meanwhile."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while left := psutil.Process().children(recursive=True):
        hard = time.monotonic() > give_up
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
        time.sleep(0.1)
        _bury()


def _bury() -> None:
    """Children that have ended, adopted ones included, are zombies until somebody asks."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    # The one who started this closes the pipe; a terminal's Ctrl-C is for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(json.loads(sys.argv[1]))
