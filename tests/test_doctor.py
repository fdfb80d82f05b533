"""`pageahead doctor` says what is there, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from pageahead.cli import app
from pageahead.device.cpu import CpuDevice
from pageahead.doctor import advice, command, findings
from pageahead.doctor.advice import Choice, choices
from pageahead.doctor.command import Diagnosis
from pageahead.doctor.findings import Finding
from pageahead.doctor.speeds import Speeds
from pageahead.experiment.evidence import LinkRecord
from pageahead.experiment.identity import Identity, identify
from pageahead.memory import host

GB = 10**9
CPU = torch.device("cpu")
SPEEDS = Speeds(
    link=LinkRecord(to_device=[55.0], to_host=[54.0], duplex=[50.0]),
    pageable=9.0,
    device_memory=4300.0,
    update_elements={8: 27e9, 32: 65e9},
)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def test_on_the_cpu_it_says_what_there_is() -> None:
    code, text = run("--device", "cpu")
    assert code == 0
    assert "bitsandbytes" in text
    assert "speed cannot" in " ".join(text.split())


def test_without_a_gpu_it_says_that_no_settings_follow() -> None:
    _, text = run("--device", "cpu", "--params", "1234567")
    said = " ".join(text.split())
    assert "the settings for 1,234,567 parameters, are said on a machine that has one" in said


def test_json_is_what_the_table_was_made_from() -> None:
    code, text = run("--device", "cpu", "--json", "--params", "5")
    assert code == 0
    found = Diagnosis.model_validate(json.loads(text))
    assert found.parameters == 5
    assert found.speeds is None
    assert {"GPU", "bitsandbytes", "host memory"} <= {one.name for one in found.findings}


def test_what_does_not_work_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Finding(name="page-locking", value="not tried", state="bad", advice="more memory")
    monkeypatch.setattr(command, "findings", lambda identity: [bad])
    code, text = run("--device", "cpu")
    assert code == 1
    assert "more memory" in text


def test_no_gpu_where_one_was_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(app, ["doctor", "--device", "cuda"])
    assert result.exit_code == 2
    assert "sees no CUDA GPU" in result.output


@pytest.fixture(params=[True, False], ids=["granted", "refused"])
def page_locking(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[bool, list[Finding]]:
    class Device(CpuDevice):
        def pin(self, address: int, nbytes: int) -> bool:
            return bool(request.param)

    monkeypatch.setattr(findings, "device_for", lambda device: Device())
    return request.param, list(findings._page_locking(CPU))


def test_page_locking_is_tried(page_locking: tuple[bool, list[Finding]]) -> None:
    granted, (found,) = page_locking
    assert found.state == ("good" if granted else "slow")
    assert ("works" if granted else "refused") in found.value
    assert ("memlock" in found.advice) is not granted


def test_page_locking_is_not_tried_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 1)
    (found,) = findings._page_locking(CPU)
    assert found.state == "bad"
    assert "only 1 bytes" in found.advice


def test_wsl_and_integrated_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings.platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=True)
    )
    gpu = Identity(torch.device("cuda", 0), "cuda", "Orin", "libbitsandbytes_cuda130.so")
    wsl, integrated = findings._kinds(gpu)
    assert wsl.value == "WSL2"
    assert ".wslconfig" in wsl.advice
    assert "without paging" in integrated.advice


def test_a_library_that_is_missing_is_bad() -> None:
    (found,) = [findings._library(Identity(CPU, "cpu", "CPU", "none"))]
    assert found.state == "bad"


def test_ranks_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "this one of 4 ranks" in findings._host_memory().value


def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "enabled"
    monkeypatch.setattr(findings, "HUGE_PAGES", file)
    assert list(findings._huge_pages()) == []
    file.write_text("always madvise [never]\n")
    assert [one.state for one in findings._huge_pages()] == ["slow"]
    file.write_text("always [madvise] never\n")
    assert [one.value for one in findings._huge_pages()] == ["madvise"]


def advised(
    monkeypatch: pytest.MonkeyPatch, free: int, parameters: int
) -> dict[tuple[int, str], Choice]:
    class Device(CpuDevice):
        def free_bytes(self) -> int:
            return free

    monkeypatch.setattr(advice, "device_for", lambda device: Device())
    monkeypatch.setattr(host, "available_bytes", lambda: 64 * GB)
    return {(one.bits, one.setting): one for one in choices(CPU, parameters, SPEEDS)}


def test_state_that_fits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = advised(monkeypatch, free=100 * GB, parameters=GB)
    assert set(found) == {(8, "hbm_budget"), (32, "hbm_budget")}
    assert "all 7.45 GiB of state fit" in found[32, "hbm_budget"].why


def test_state_that_does_not_fit_moves_at_the_links_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = advised(monkeypatch, free=0, parameters=GB)
    assert "0% of 7.45 GiB" in found[32, "hbm_budget"].why
    # 8 GB each way at 50 GB/s against 1e9 updates at 65e9 a second.
    assert found[32, "a step's time"].value == "160 ms"
    assert "the link decides" in found[32, "a step's time"].why
    # 2 GB at 50 GB/s against 1e9 updates at 27e9 a second.
    assert found[8, "a step's time"].value == "40 ms"
    assert (32, "host memory") not in found
    assert "160 ms" in found[32, "in_backward"].why


def test_too_little_host_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = advised(monkeypatch, free=0, parameters=10 * GB)
    assert found[32, "host memory"].value == "too little"
    assert (8, "host memory") not in found


def test_everything_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    diagnosis = Diagnosis(
        environment=command.describe(identify("cpu"), run="now", argv=[], link=None),
        parameters=7,
        findings=[Finding(name="GPU", value="one")],
        speeds=SPEEDS,
        choices=[Choice(bits=8, setting="staging", value="16 MiB", why="because")],
    )
    command.show(diagnosis, command.Console(width=120))
    text = capsys.readouterr().out
    for expected in ("50.0 GB/s", "9.0 GB/s", "4,300 GB/s", "27.0 billion/s", "16 MiB", "because"):
        assert expected in text
