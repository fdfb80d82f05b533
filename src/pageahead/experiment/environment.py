"""The environment block of a run: everything a reader needs to judge or repeat it."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import bitsandbytes
import torch

from pageahead._version import __version__
from pageahead.experiment.evidence import Environment, Gpu, LinkRecord
from pageahead.experiment.identity import Identity, scrub

__all__ = ["describe", "git_state", "source_sha256"]

PACKAGE = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "PAGEAHEAD_COMMIT"


def describe(
    identity: Identity, *, run: str, argv: list[str], link: LinkRecord | None
) -> Environment:
    """Return the record. No folder of this machine and no host name goes into it."""
    commit, dirty = git_state(PACKAGE)
    return Environment(
        run=run,
        argv=[scrub(word) for word in argv],
        device=identity.type,
        gpu=_gpu(identity.device) if identity.type == "cuda" else None,
        library=identity.library,
        torch=torch.__version__,
        bitsandbytes=bitsandbytes.__version__,
        pageahead=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=len(os.sched_getaffinity(0)),
        commit=commit,
        dirty=dirty,
        source_sha256=source_sha256(PACKAGE),
        link=link,
        slurm_job=os.environ.get("SLURM_JOB_ID"),
    )


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """The commit that `folder` is part of, and whether the files in it differ from that.

    Only those: evidence that is being written into the same repository changes nothing measured.

    Where the code was copied without its repository, or into another state of it, the variable
    ``PAGEAHEAD_COMMIT`` says the commit, and whether it was changed since is unknown;
    `source_sha256` tells.
    """
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE], None
    # A virtual environment may lie inside somebody else's repository: the file must be tracked.
    if _run("git", "-C", str(folder), "ls-files", "--error-unmatch", "_version.py") is None:
        return None, None
    commit = _run("git", "-C", str(folder), "rev-parse", "HEAD")
    changes = _run("git", "-C", str(folder), "status", "--porcelain", ".")
    return commit, None if changes is None else bool(changes)


def source_sha256(folder: Path) -> str:
    """Digest of the names and contents of all Python files under `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        driver=_driver(),
        cuda_runtime=str(torch.version.cuda),
    )


def _driver() -> str | None:
    listed = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return listed.splitlines()[0].strip() if listed else None


def _run(*command: str) -> str | None:
    """What a command printed; None if there is no such command or it failed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
