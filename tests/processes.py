"""Running Python programs as users do, in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pageahead

SOURCE = Path(pageahead.__file__).parents[1]


def environment(**changed: str) -> dict[str, str]:
    """This process's, in which the package is found from any folder; nothing is downloaded."""
    found = [str(SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
        "HF_HUB_OFFLINE": "1",
        **changed,
    }


def python(*words: str, folder: Path, **changed: str) -> subprocess.Popen[str]:
    """Start ``python words...`` in a folder."""
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(**changed),
    )


def finished(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a process that `python` started."""
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def torchrun(processes: int) -> list[str]:
    """The words for ``python`` that are ``torchrun``, on a port that was free just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        f"--master-port={port}",
    ]
