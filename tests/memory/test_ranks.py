"""Ranks of one launch know what the others hold."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pageahead.device.cpu import CpuDevice
from pageahead.memory import host, ranks
from pageahead.memory.arena import Arena
from pageahead.memory.host import available_bytes

GIB = 1 << 30

OTHER = """
import importlib.util
import sys
# Alone: all of the package takes long to import.
spec = importlib.util.spec_from_file_location("ranks", sys.argv[2])
ranks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ranks)
ranks.note(int(sys.argv[1]))
print("noted", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launch of 4 ranks on a host with 10 GiB free; its folder."""
    gc.collect()  # arenas of earlier tests would be given back in the middle of this one
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ranks, "_mine", {})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    monkeypatch.setattr(host, "_cgroup_bytes_left", list)
    return tmp_path / f"pageahead-{os.getuid()}-29500"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another rank, which holds 6 GiB."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(6 * GIB), ranks.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "noted\n"
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def test_a_rank_that_asks_later_has_the_same_share(other: subprocess.Popen[str]) -> None:
    """16 GiB there were, 4 for each."""
    assert ranks.held() == (0, 6 * GIB)
    assert available_bytes() == 4 * GIB
    ranks.note(1 * GIB)
    assert ranks.held() == (1 * GIB, 7 * GIB)


def test_one_that_was_killed_holds_nothing(other: subprocess.Popen[str], launch: Path) -> None:
    other.kill()
    other.wait()
    assert (launch / str(other.pid)).exists()
    assert ranks.held() == (0, 0)
    assert available_bytes() == 10 * GIB // 4


def test_one_that_ends_takes_its_file_along(other: subprocess.Popen[str], launch: Path) -> None:
    other.communicate("", timeout=60)
    assert other.returncode == 0
    assert not launch.exists()


def test_a_number_that_another_process_has_now_holds_nothing(launch: Path) -> None:
    launch.mkdir()
    old = launch / str(os.getppid())
    old.write_text(str(GIB))
    assert ranks.held() == (0, GIB)
    os.utime(old, (0, 0))
    assert ranks.held() == (0, 0)


@pytest.mark.parametrize("content", ["", "many"])
def test_files_that_say_nothing(launch: Path, content: str) -> None:
    launch.mkdir()
    (launch / str(os.getppid())).write_text(content)
    (launch / "notes").write_text("5")
    assert ranks.held() == (0, 0)


def test_an_arena_is_held_while_it_is_there(launch: Path) -> None:
    arena = Arena(CpuDevice())
    arena.grow(1 << 20)
    tensor = arena.bytes_at(0, 1 << 20)
    assert ranks.held() == (1 << 20, 1 << 20)
    assert (launch / str(os.getpid())).read_text() == str(1 << 20)
    del arena
    gc.collect()
    assert ranks.held()[0] == 1 << 20
    del tensor
    gc.collect()
    assert ranks.held() == (0, 0)


@pytest.mark.parametrize("missing", ["LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_without_a_launcher_nothing_is_written(
    missing: str, launch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(missing)
    ranks.note(GIB)
    assert ranks.held() == (GIB, GIB)
    assert not launch.exists()


def test_no_place_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    ranks.note(GIB)
    assert ranks.held() == (GIB, GIB)
