"""What is shown of training records: table, notes, picture; and the command that makes them."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from pageahead import cli
from pageahead.experiment import bench, evidence, runner
from pageahead.experiment.evidence import FailedRecord, TrainingRecord
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.training import command, plot
from pageahead.experiment.training.cells import CELLS, select
from pageahead.experiment.training.table import notes, results
from tests.experiment.support import RUN, cell, environment, read
from tests.experiment.training.support import record

ALL = [record(cell.name) for cell in CELLS]


def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def printed(records) -> list[str]:
    output = console()
    output.print(results(records))
    return output.file.getvalue().splitlines()


def test_the_table_fits_and_shows_each_way_once() -> None:
    lines = printed(ALL)
    assert "…" not in "".join(lines)
    assert lines[-1].rstrip().endswith("yes")
    assert all(len(line) <= 100 for line in lines)
    rows = [line for line in lines if line.startswith("adamw32/16384")]
    assert len(rows) == 11
    (row,) = [line.split() for line in rows if "during backward 35%" in line]
    assert row[4:6] == ["262.1", "259.4-267.3"]
    assert row[-1] == "yes"


def test_the_notes_have_both_bounds_and_the_link() -> None:
    said = " ".join(notes([environment(), *ALL]))
    assert "a GPT of 1.34 billion parameters (24 layers, width 2048" in said
    assert "50.0 GB/s each way" in said
    assert "adamw32/4096: forward and backward 70.0 ms, resident update" in said
    assert "10.75 GB each way at the link's duplex bandwidth 214.9 ms" in said
    assert "CPU" not in said


def test_differences_failures_and_what_is_missing_show() -> None:
    different = record("adamw32/4096", differences=1)
    missing = record("adamw8/4096").model_copy(
        update={
            "left_out": {"after-0": "too large"},
            "deterministic": False,
            "nondeterminism": "dice were thrown",
        }
    )
    failed = FailedRecord(run=RUN, cell="adamw8/16384", strategies=["model"], reason="it died")
    lines = printed([different, failed])
    assert any(line.rstrip().endswith("NO") for line in lines)
    assert lines[-1].split()[0] == "adamw8/16384"
    assert lines[-1].split()[-1] == "failed"
    said = " ".join(notes([different, missing, failed]))
    assert "NOT EQUAL adamw32/4096 (after-0): 1 of 500 tensors differ" in said
    assert "adamw8/4096: after-0 left out; too large." in said
    assert "NOT COMPARED: dice were thrown" in said
    assert "FAILED adamw8/16384: it died" in said
    assert not bench.good([different])
    assert bench.good([record()])


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_drawn_of_the_last_run(tmp_path, suffix) -> None:
    source, target = tmp_path / "run.jsonl", tmp_path / f"run.{suffix}"
    old = record().model_copy(update={"run": "before", "device_name": "An old GPU"})
    for one in (environment(), old, *ALL, cell()):
        evidence.append(source, one)
    plot.draw(source, target, console())
    written = target.read_bytes()
    if suffix == "png":
        assert written.startswith(b"\x89PNG")
        return
    text = written.decode()
    for words in ("after backward", "during backward", "all state in HBM", "model alone", "A GPU"):
        assert words in text
    assert "An old GPU" not in text
    assert text.count("HBM used for state, GB") == 4
    plot.draw(source, target, console())
    assert target.read_bytes() == written


def test_a_run_that_went_on_later_is_drawn_whole(tmp_path) -> None:
    """Each cell once, in the preset's order; nothing of other code or of another model."""
    again, other = environment(run="again"), environment(run="other", source_sha256="1" * 64)
    first, second = record("adamw8/4096"), record("adamw32/4096")
    later = first.model_copy(update={"run": "again", "seed": 2})
    elsewhere = record("adamw8/16384").model_copy(update={"run": "other"})
    smaller = record("adamw32/16384").model_copy(update={"parameters": 7})
    everything = [environment(), first, smaller, other, elsewhere, again, later]
    assert plot.latest([*everything, second]) == [second, later]


def test_lines_go_through_what_was_measured() -> None:
    one = record("adamw8/4096")
    (axes,) = (axes for axes in plot.figure([one]).axes)
    points = {tuple(round(value, 6) for value in xy) for line in axes.lines
              for xy in line.get_xydata()}  # fmt: skip
    for arm in one.groups[0].arms:
        if arm.budget is not None:
            assert (round(arm.hbm_state_bytes / 1e9, 6), round(arm.wall.median, 6)) in points


def test_there_may_be_nothing_to_draw_or_no_such_format(tmp_path) -> None:
    source = tmp_path / "run.jsonl"
    evidence.append(source, environment())
    with pytest.raises(plot.NothingToDrawError, match="1 records of 1 run"):
        plot.draw(source, tmp_path / "run.svg", console())
    evidence.append(source, record())
    with pytest.raises(plot.NothingToDrawError, match=r"run\.bmp: no such format .* svg"):
        plot.draw(source, tmp_path / "run.bmp", console())


def test_a_torn_line_costs_that_line_alone(tmp_path) -> None:
    source, target = tmp_path / "run.jsonl", tmp_path / "run.svg"
    for one in (environment(), *ALL):
        evidence.append(source, one)
    *whole, last = source.read_text().splitlines()
    source.write_text("\n".join([*whole, last[: len(last) // 2]]))
    result = CliRunner().invoke(cli.app, ["plot-training", str(source), "-o", str(target)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"wrote {target}\n"
    assert f"not a record, and left out: run.jsonl, line {len(ALL) + 1}: Invalid" in result.stderr
    assert target.read_text().count("HBM used for state, GB") == len(ALL) - 1


def test_a_full_disk_leaves_the_picture_before(tmp_path, monkeypatch) -> None:
    source, target = tmp_path / "run.jsonl", tmp_path / "run.svg"
    evidence.append(source, record())
    target.write_text("the one before")

    def half(figure: object, path: Path, **settings: object) -> None:
        path.write_text("<svg")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Figure, "savefig", half)
    result = CliRunner().invoke(cli.app, ["plot-training", str(source), "-o", str(target)])
    assert result.exit_code == 2
    assert f"Error: cannot write {target}: No space left on device" in result.output
    assert target.read_text() == "the one before"
    assert sorted(tmp_path.iterdir()) == [source, target]


def test_a_real_run_on_the_cpu(tmp_path) -> None:
    out, output = tmp_path / "run.jsonl", console()
    options = command.Options(
        select("adamw8/4096"), device="cpu", out=out, protocol=Protocol(1, 1, 1)
    )
    assert command.run(options, output, console()), output.file.getvalue()
    described, measured = read(out)
    assert isinstance(measured, TrainingRecord)
    assert described.run == measured.run
    assert "NO evidence of transfer speed" in " ".join(output.file.getvalue().split())
    plot.draw(out, tmp_path / "run.png", console())


def test_parameters_are_what_the_device_is_for(monkeypatch) -> None:
    asked: list = []

    def ask(request, on_progress):
        asked.append(request)
        return environment() if request.kind == "probe" else record(request.cell)

    monkeypatch.setattr(runner, "ask", ask)
    assert command.run(command.Options(select("adamw32/4096")), console(), console())
    assert asked[-1].parameters == 1_340_000_000
    assert asked[-1].strategies[:2] == ["model", "torch"]
    command.run(command.Options(select("adamw32/4096"), 5_000_000), console(), console())
    assert asked[-1].parameters == 5_000_000
