from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest
import torch

from pageahead.experiment import identity
from pageahead.experiment.environment import describe, git_state, source_sha256
from pageahead.experiment.identity import Identity, IdentityError, identify, scrub


def git(folder, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "_version.py").write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "one")
    return folder


def test_git_state_tells_a_changed_tree_from_a_clean_one(repository) -> None:
    commit, dirty = git_state(repository)
    assert len(commit) == 40
    assert dirty is False
    (repository / "_version.py").write_text("2\n")
    assert git_state(repository) == (commit, True)


def test_evidence_beside_the_package_does_not_make_it_changed(repository) -> None:
    (repository.parent / "run.jsonl").write_text("{}\n")
    assert git_state(repository)[1] is False


def test_someone_elses_repository_around_the_package_is_not_ours(repository) -> None:
    installed = repository / "site-packages"
    installed.mkdir()
    (installed / "_version.py").write_text("1\n")
    assert git_state(installed) == (None, None)


def test_without_a_repository_the_commit_may_be_told(tmp_path, monkeypatch) -> None:
    assert git_state(tmp_path) == (None, None)
    monkeypatch.setenv("PAGEAHEAD_COMMIT", "abc")
    assert git_state(tmp_path) == ("abc", None)


def test_the_source_digest_sees_names_and_contents(tmp_path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = source_sha256(tmp_path)
    assert source_sha256(tmp_path) == first
    (tmp_path / "a.py").write_text("2")
    second = source_sha256(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, source_sha256(tmp_path)}) == 3


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("Error at line 80 in file /src/csrc/ops.cu", "Error at line 80 in file ops.cu"),
        ("FileNotFoundError: '/home/me/x.so'", "FileNotFoundError: 'x.so'"),
        ("3/4 of adamw32/8x1Mi at 50 GB/s", "3/4 of adamw32/8x1Mi at 50 GB/s"),
        ("at build-7.internal: no", "at <host>: no"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
    ],
)
def test_messages_lose_folders_and_host_name(monkeypatch, text, scrubbed) -> None:
    monkeypatch.setattr(identity.socket, "gethostname", lambda: "build-7.internal")
    assert scrub(text) == scrubbed


def test_a_gpu_that_is_not_there_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(IdentityError, match=r"--device cuda.*no CUDA GPU.*--device cpu"):
        identify("cuda")
    assert identify("auto").type == "cpu"


def test_a_gpu_without_the_cuda_library_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(identity, "_library", lambda: "libbitsandbytes_cpu.so")
    for wanted in ("auto", "cuda"):
        with pytest.raises(IdentityError, match="libbitsandbytes_cpu"):
            identify(wanted)
    assert identify("cpu").device == torch.device("cpu")


def test_the_environment_says_what_and_where(monkeypatch) -> None:
    found = Identity(torch.device("cpu"), "cpu", "CPU", "libbitsandbytes_cpu.so")
    words = ["bench", "--select", "adamw8*", "--out", "/somewhere/of/mine/run.jsonl"]
    record = describe(found, run="now", argv=words, link=None)
    assert record.argv == [*words[:-1], "run.jsonl"]
    assert record.torch == torch.__version__
    assert record.library == "libbitsandbytes_cpu.so"
    assert record.gpu is None
    assert record.cpu_count >= 1
    assert len(record.source_sha256) == 64
    assert "/" not in record.model_dump_json()


@pytest.mark.parametrize("job", ["12", None])
def test_the_environment_has_the_slurm_job(monkeypatch, job) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    assert describe(identify("cpu"), run="now", argv=[], link=None).slurm_job == job


def test_a_gpu_is_described(monkeypatch, tmp_path) -> None:
    properties = SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && printf "580.1\\n580.1\\n"\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = Identity(torch.device("cuda", 0), "cuda", "A GPU", "libbitsandbytes_cuda130.so")
    gpu = describe(found, run="now", argv=[], link=None).gpu
    assert (gpu.name, gpu.compute_capability, gpu.driver) == ("A GPU", "9.0", "580.1")
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert describe(found, run="now", argv=[], link=None).gpu.driver is None


def test_the_gpu_is_taken_if_there_is_one(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(identity, "_library", lambda: "libbitsandbytes_cuda130.so")
    found = identify("auto")
    assert (found.device, found.type) == (torch.device("cuda", 1), "cuda")
    assert (found.name, found.library) == ("GPU 1", "libbitsandbytes_cuda130.so")


def test_the_library_that_bitsandbytes_loaded_is_named() -> None:
    assert identify("cpu").library.startswith("libbitsandbytes_")
