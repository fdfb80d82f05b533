"""`pageahead profile`, from its options to its files."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from typer.testing import CliRunner

from pageahead import cli
from pageahead.experiment import evidence
from pageahead.experiment.profile import command, nsys
from pageahead.experiment.profile.analysis import typical
from tests.experiment.profile.exported import Export
from tests.experiment.profile.support import MS, profile
from tests.experiment.support import environment, read

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")


def run(*arguments: object) -> tuple[int, str]:
    words = ["profile", *map(str, arguments)]
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": "120"})
    return result.exit_code, result.output


def shows(said: str, name: str, *values: str) -> bool:
    """Whether a row of the table has that name and those values."""
    rows = [line.split() for line in said.splitlines() if line.strip().startswith(name)]
    return any(row[-len(values) :] == list(values) for row in rows)


def test_the_whole_of_it_on_the_cpu(tmp_path) -> None:
    out, trace, picture = (tmp_path / name for name in ("p.jsonl", "t.json", "t.png"))
    status, said = run(
        *("adamw32/8x1Mi", "--device", "cpu", "--steps", 2),
        *("--out", out, "--trace", trace, "--picture", picture),
    )
    assert status == 0, said
    assert shows(said, "to the device", "0", "B", "8", "MiB")
    assert shows(said, "to the host", "0", "B", "8", "MiB")
    assert "no evidence of speed" in " ".join(said.split())
    machine, legacy, streamed = read(out)
    assert isinstance(machine, evidence.Environment)
    assert machine.argv[:2] == ["profile", "adamw32/8x1Mi"]
    assert machine.argv[-2:] == ["--out", "p.jsonl"]
    assert isinstance(legacy, evidence.ProfileRecord)
    assert isinstance(streamed, evidence.ProfileRecord)
    assert (legacy.arm, streamed.arm, len(streamed.steps)) == ("legacy", "streamed", 2)
    assert typical(streamed).to_host_bytes == streamed.state_bytes
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_evidence_is_read_by_the_gate_too(tmp_path) -> None:
    out = tmp_path / "p.jsonl"
    evidence.append(out, profile())
    assert read(out) == [profile()]
    result = CliRunner().invoke(cli.app, ["gate", str(out)])
    assert result.exit_code == 2
    assert "no measured cell in this evidence" in result.output


@NO_GPU
def test_without_a_gpu_the_error_says_what_there_is(tmp_path) -> None:
    out = tmp_path / "p.jsonl"
    status, said = run("adamw32/8x4Mi", "--out", out)
    assert status == 2
    assert "Error: --device cuda: PyTorch" in said
    assert "sees no CUDA GPU here. Use --device cpu" in said
    (record,) = read(out)
    assert isinstance(record, evidence.SetupFailedRecord)


def test_without_cupti_the_error_says_what_to_install(tmp_path, monkeypatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    out = tmp_path / "p.jsonl"
    monkeypatch.setattr(command.bench, "_probe", lambda *args: environment())
    monkeypatch.setattr(importlib, "import_module", missing)
    status, said = run("adamw32/8x4Mi", "--out", out)
    assert status == 2
    assert "pip install 'pageahead[profile]'" in said
    (record,) = read(out)
    assert isinstance(record, evidence.SetupFailedRecord)


def test_an_arm_that_fails_is_told_and_the_other_one_shown(monkeypatch) -> None:
    records = [
        profile("legacy"),
        evidence.FailedRecord(
            run="now",
            cell="adamw32/8x4Mi",
            strategies=["streamed"],
            reason="CUPTI refused",
            what="profile",
        ),
    ]
    monkeypatch.setattr(command.bench, "collect", lambda *args, **kwargs: records)
    status, said = run("adamw32/8x4Mi")
    assert status == 1
    assert "failed: adamw32/8x4Mi, streamed: CUPTI refused" in said
    assert shows(said, "device-wide synchronizations", "8")


def test_what_does_not_add_up_is_told_and_ends_with_1(monkeypatch) -> None:
    steps = [step.model_copy(update={"wall_ms": 9.0}) for step in profile("legacy").steps]
    bad = profile("legacy").model_copy(update={"steps": steps})
    monkeypatch.setattr(command.bench, "collect", lambda *args, **kwargs: [bad, profile()])
    status, said = run("adamw32/8x4Mi")
    assert status == 1
    assert "not to be relied on: adamw32/8x4Mi, legacy: transfers, updates and idle time" in said
    assert "(-24.4%)" in said


def test_the_table_of_check_3(monkeypatch) -> None:
    both = [profile("legacy"), profile()]
    monkeypatch.setattr(command.bench, "collect", lambda *args, **kwargs: both)
    status, said = run("adamw32/8x4Mi")
    assert status == 0
    assert shows(said, "to the device", "256", "MiB", "256", "MiB")
    assert shows(said, "of it managed", "256", "MiB", "0", "B")
    assert shows(said, "to the host", "0", "B", "256", "MiB")
    assert shows(said, "an update runs meanwhile", "0.0%", "7.8%")
    assert shows(said, "device-wide synchronizations", "8", "0")
    assert shows(said, "peak HBM, driver", "1", "GiB", "1", "GiB")


def test_an_export_of_nsight_systems_is_read_in_the_place_of_running(tmp_path) -> None:
    made = Export(tmp_path / "report.sqlite")
    for process, (arm, begin) in enumerate((("legacy", 10), ("streamed", 20)), start=1):
        cell = "adamw32/8x4Mi"
        made.mark(nsys.stepping(cell, arm, 0), begin * MS, (begin + 5) * MS, process)
        made.mark(nsys.settling(cell, arm, 0), (begin + 5) * MS, (begin + 6) * MS, process)
        made.copy((begin + 1) * MS, (begin + 3) * MS, process, 11 if process == 1 else 1, 256 << 20)
        made.copy((begin + 3) * MS, (begin + 4) * MS, process, 2, 256 << 20)
    export, out = made.close(), tmp_path / "p.jsonl"
    status, said = run("adamw32/8x4Mi", "--nsys", export, "--out", out)
    assert status == 0, said
    assert shows(said, "of it managed", "256", "MiB", "0", "B")
    assert [record.arm for record in read(out)] == ["legacy", "streamed"]
    status, said = run("adamw32/8x4Mi", "--nsys", export, "--strategy", "lookahead")
    assert status == 1
    assert "failed: adamw32/8x4Mi, lookahead: not in the export" in said
    status, said = run("adamw8/8x4Mi", "--nsys", export)
    assert status == 2
    assert "it has: adamw32/8x4Mi legacy, adamw32/8x4Mi streamed" in " ".join(said.split())


def test_marked_steps_say_what_to_do_next() -> None:
    status, said = run("lion8/8x1Mi", "--device", "cpu", "--steps", 1, "--mark")
    assert status == 0
    assert "read it with --nsys" in said
    assert "wall time" not in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["adamw32/nothing"], "no cell is called 'adamw32/nothing'"),
        (["adamw32/8x4Mi", "--mark", "--out", "p.jsonl"], "nothing can be written"),
        (["adamw32/8x4Mi", "--mark", "--nsys", "r.sqlite"], "not both"),
        (["adamw32/8x4Mi", "--nsys", "r.sqlite"], "r.sqlite: no such file"),
        (["adamw32/8x4Mi", "--picture", "p.unknown"], "no such format of pictures"),
        (["adamw32/8x4Mi", "--trace", "not/there/t.json"], "cannot write not/there/t.json"),
        (["adamw32/32x8Mi@oversubscribed"], "measured only with --oversubscribe"),
        (["adamw8/llama-3.2-1b", "--strategy", "lookahead"], "GiB of managed memory"),
        (["adamw32/8x4Mi", "--strategy", "resident"], "resident"),
        (["adamw32/8x4Mi", "--steps", "0"], "greater than or equal to 1"),
    ],
)
def test_what_is_refused_before_anything_is_run(words, why, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.bench, "collect", lambda *args, **kwargs: pytest.fail("was run"))
    status, said = run(*words)
    assert status == 2
    assert why in " ".join(said.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []
