"""What the ranks of one launch hold of their host's memory, as each of them writes it down.

A rank may take an even share. One that asks after others have taken theirs finds less memory free
and would be refused its own, if it did not know what they hold. Each rank therefore keeps a file
with a number of bytes in a folder of the launch. A rank notes what it takes before it touches it:
the first to ask is told exactly what there is, and nobody who asks later is told less.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["held", "local_ranks", "note"]

_lock = threading.RLock()  # memory may go, and be noted, while something is written
_mine: dict[int, int] = {}
"""By process: a forked child holds nothing of what its parent does."""


def local_ranks() -> int:
    """How many ranks a launcher started on this host (``LOCAL_WORLD_SIZE``)."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def note(nbytes: int) -> None:
    """Note that this process holds `nbytes` more (or, if negative, fewer) bytes."""
    with _lock:
        process = os.getpid()
        known = process in _mine
        _mine[process] = _mine.get(process, 0) + nbytes
        folder = _folder()
        if folder is None:
            return
        file = folder / str(process)
        with suppress(OSError):  # no place to write: others cannot know
            written = None
            while written != _mine[process]:
                written = _mine[process]
                file.write_text(str(written))
            if not known:
                atexit.register(_remove, file, process)


def held() -> tuple[int, int]:
    """Bytes that this process holds, and that all ranks of the launch on this host do."""
    mine = _mine.get(os.getpid(), 0)
    folder = _folder()
    if folder is None:
        return mine, mine
    total = mine
    with suppress(OSError):
        for file in folder.iterdir():
            if file.name != str(os.getpid()):
                total += _bytes_of(file)
    return mine, total


def _bytes_of(file: Path) -> int:
    """What a rank wrote; 0 if it has ended, even if another process has its number now."""
    try:
        written, process = file.stat().st_mtime, psutil.Process(int(file.name))
        # File times are coarser than process times.
        return int(file.read_text()) if process.create_time() <= written + 1 else 0
    except (OSError, ValueError, psutil.Error):
        return 0


def _folder() -> Path | None:
    """The folder of this launch on this host, if there are other ranks and a place for it."""
    port = os.environ.get("MASTER_PORT")
    if local_ranks() == 1 or not port:
        return None
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"pageahead-{user}-{port}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if folder.stat().st_uid == user else None  # nobody else's
    except OSError:
        return None


def _remove(file: Path, process: int) -> None:
    if os.getpid() == process:
        with suppress(OSError):
            file.unlink()
            file.parent.rmdir()  # by the last of them
