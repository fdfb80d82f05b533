"""Profiles on a real GPU. Each arm is one process: CUPTI has to be there before managed memory."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pageahead import cli
from pageahead.experiment import evidence, runner
from pageahead.experiment.messages import ProfileRequest
from pageahead.experiment.profile.analysis import Figures, figures, problems, typical
from pageahead.experiment.profile.records import ProfileRecord
from pageahead.experiment.protocol import Protocol
from tests.experiment.support import read

pytest.importorskip("cupti.cupti", reason="needs cupti-python: the extra 'profile'")

MIB = 1 << 20
CELL = "adamw32/8x4Mi"  # 256 MiB of state in 16 tensors


def profiled(arm: str, cell: str = CELL) -> ProfileRecord:
    record = runner.ask(
        ProfileRequest(
            run="now",
            cell=cell,
            strategies=[arm],
            device="cuda",
            protocol=Protocol(5, 1, 5),
        ),
        lambda progress: None,
    )
    assert isinstance(record, ProfileRecord)
    return record


def relied_on(record: ProfileRecord) -> list[Figures]:
    """Figures of every step, which have to add up, and not for nothing."""
    assert problems(record) == []
    steps = [figures(step) for step in record.steps]
    for one in steps:
        assert one.accounted_ms == pytest.approx(one.wall_ms, rel=0.05)
        assert one.kernels >= one.launches > 0
        assert one.update_ms > 0
    return steps


def test_legacy_migrates_its_state_and_then_updates_in_turn() -> None:
    for one in relied_on(profiled("legacy")):
        assert 256 * MIB <= one.managed_to_device_bytes <= 258 * MIB
        assert one.to_device_bytes - one.managed_to_device_bytes < MIB
        assert one.to_host_bytes < MIB
        assert one.transfer_overlap < 0.01
        assert one.device_synchronizations >= 8
        assert one.prefetches >= 16


def test_streamed_state_goes_in_and_out_at_once_and_nobody_waits_for_the_device() -> None:
    for one in relied_on(profiled("streamed")):
        assert one.to_device_bytes == one.to_host_bytes == 256 * MIB
        assert one.managed_to_device_bytes == one.managed_to_host_bytes == 0
        assert one.both_ways_ms > 0.5 * one.transfer_ms
        assert one.update_overlap > 0.5
        assert (one.device_synchronizations, one.gpu_faults, one.prefetches) == (0, 0, 0)
        assert one.waits > 0


def test_lookahead_migrates_the_next_state_and_waits_for_events_only() -> None:
    steps = relied_on(profiled("lookahead"))
    for one in steps:
        assert 256 * MIB <= one.managed_to_device_bytes <= 258 * MIB
        assert one.prefetches == 16
        assert one.device_synchronizations == 0
        assert one.waits >= 8
    assert typical(profiled("sequential")).device_synchronizations >= 8


def test_resident_state_does_not_move() -> None:
    for one in relied_on(profiled("legacy", "adamw32/8MiB@resident")):
        assert one.to_device_bytes + one.to_host_bytes < MIB


def test_the_command_writes_everything(tmp_path) -> None:
    out, trace, picture = (tmp_path / name for name in ("p.jsonl", "t.json", "t.png"))
    words = ["profile", CELL, "--out", out, "--trace", trace, "--picture", picture]
    result = CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    print(result.output)
    machine, legacy, streamed = read(out)
    assert isinstance(machine, evidence.Environment)
    assert isinstance(legacy, ProfileRecord)
    assert isinstance(streamed, ProfileRecord)
    assert legacy.driver_peak
    assert streamed.torch_peak
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100
    assert picture.read_bytes().startswith(b"\x89PNG")
