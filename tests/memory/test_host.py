"""How much host memory is left: machine, cgroup v1 and v2, and other ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pageahead.memory import host, ranks
from pageahead.memory.host import HostMemoryError, available_bytes, require

GIB = 1 << 30


class Cgroups:
    """A fake ``/proc/self/cgroup`` and ``/sys/fs/cgroup``."""

    def __init__(self, folder: Path) -> None:
        self.membership = folder / "self_cgroup"
        self.root = folder / "cgroup"
        self.root.mkdir()

    def belongs_to(self, *lines: str) -> None:
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: object) -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / f"memory.{name}").write_text(f"{content}\n")

    def bytes_left(self) -> list[int]:
        return sorted(host._cgroup_bytes_left(self.membership, self.root))


@pytest.fixture
def cgroups(tmp_path: Path) -> Cgroups:
    return Cgroups(tmp_path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 10 GiB available, without cgroups and other ranks."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    monkeypatch.setattr(host, "_cgroup_bytes_left", list)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(ranks, "_mine", {})


NO_FILES = "inactive_file 0\nanon 5"


def test_version_2_counts_what_each_enclosing_group_has_left(cgroups: Cgroups) -> None:
    cgroups.belongs_to("0::/pods/mine")
    cgroups.group("pods/mine", max=1000, current=400, stat="anon 300\ninactive_file 50")
    cgroups.group("pods", max=5000, current=4800, stat=NO_FILES)
    assert cgroups.bytes_left() == [200, 650]


def test_version_2_without_a_limit(cgroups: Cgroups) -> None:
    cgroups.belongs_to("0::/mine")
    cgroups.group("mine", max="max", current=400, stat=NO_FILES)
    assert cgroups.bytes_left() == []


def test_a_container_sees_its_own_group_at_the_mount_point(cgroups: Cgroups) -> None:
    cgroups.belongs_to("0::/host/path/of/the/container")  # which does not exist in here
    cgroups.group(".", max=1000, current=100, stat=NO_FILES)
    assert cgroups.bytes_left() == [900]


def test_version_1_reads_the_memory_controller(cgroups: Cgroups) -> None:
    cgroups.belongs_to("5:cpu,cpuacct:/mine", "4:memory:/mine", "1:name=systemd:/mine")
    statistics = "inactive_file 7\ntotal_inactive_file 30"  # the latter includes the children's
    cgroups.group("memory/mine", limit_in_bytes=1000, usage_in_bytes=600, stat=statistics)
    cgroups.group("memory", limit_in_bytes=2**63 - 4096, usage_in_bytes=900, stat=NO_FILES)
    cgroups.group("cpu/mine", limit_in_bytes=1, usage_in_bytes=0, stat=NO_FILES)
    assert cgroups.bytes_left() == [430]


def test_version_1_and_2_together(cgroups: Cgroups) -> None:
    cgroups.belongs_to("4:memory,hugetlb:/one", "0::/two")
    cgroups.group("memory/one", limit_in_bytes=100, usage_in_bytes=10, stat=NO_FILES)
    cgroups.group("two", max=50, current=20, stat=NO_FILES)
    assert cgroups.bytes_left() == [30, 90]


def test_a_path_does_not_lead_out_of_the_hierarchy(cgroups: Cgroups) -> None:
    cgroups.belongs_to("0::/mine")
    cgroups.group("..", max=1000, current=999, stat=NO_FILES)  # beside it, not in it
    cgroups.group("mine", max=1000, current=0, stat=NO_FILES)
    assert cgroups.bytes_left() == [1000]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"max": 1000},
        {"max": 1000, "current": 10},
        {"max": 1000, "current": 10, "stat": "not two words"},
    ],
)
def test_incomplete_files_set_no_limit(cgroups: Cgroups, files: dict[str, object]) -> None:
    cgroups.belongs_to("0::/mine")
    cgroups.group("mine", **files)
    assert cgroups.bytes_left() == []


def test_no_cgroups_at_all(cgroups: Cgroups) -> None:
    assert cgroups.bytes_left() == []


@pytest.mark.usefixtures("machine")
def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes() == 10 * GIB
    monkeypatch.setattr(host, "_cgroup_bytes_left", lambda: [20 * GIB, 3 * GIB])
    assert available_bytes() == 3 * GIB
    monkeypatch.setattr(host, "_cgroup_bytes_left", lambda: [-5])
    assert available_bytes() == 0


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("count", "share"),
    [("4", 10 * GIB // 4), ("1", 10 * GIB), ("0", 10 * GIB), ("", 10 * GIB), ("x", 10 * GIB)],
)
def test_ranks_on_one_host_share(monkeypatch: pytest.MonkeyPatch, count: str, share: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", count)
    assert available_bytes() == share


@pytest.mark.usefixtures("machine")
def test_the_error_names_the_sizes_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    require(10 * GIB)
    with pytest.raises(HostMemoryError) as caught:
        require(10 * GIB + 1)
    assert isinstance(caught.value, MemoryError)
    assert "needs 10,737,418,241 bytes of host memory" in str(caught.value)
    assert "only 10,737,418,240 bytes are available. Use 8-bit state" in str(caught.value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(HostMemoryError, match=r"5,368,709,120 .* \(this process's share among 2"):
        require(6 * GIB)


@pytest.mark.usefixtures("machine")
def test_what_a_rank_holds_counts_against_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ranks, 10 GiB free, this one holds 4: 7 each, of which it may take 3 more."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ranks.note(4 * GIB)
    assert available_bytes() == 3 * GIB
    ranks.note(-4 * GIB)
    assert available_bytes() == 5 * GIB


def test_this_machine_has_some_memory_left() -> None:
    assert available_bytes() > 0
    require(1)
