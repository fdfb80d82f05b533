"""`pageahead gate` on files: those of this repository, and written ones."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pageahead import cli
from pageahead.experiment.evidence import Environment, SetupFailedRecord, SummaryRecord, append
from pageahead.experiment.gate.reading import read
from pageahead.experiment.oracle import records as oracle
from tests.experiment.gate.support import GOOD
from tests.experiment.support import RUN
from tests.processes import environment

EVIDENCE = Path(__file__).parents[3] / "evidence"
B300 = EVIDENCE / "source-b300.jsonl"
H200 = EVIDENCE / "nvidia-h200"
TIMES, DASH = " \N{MULTIPLICATION SIGN} ", "\N{EN DASH}"


def gate(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["gate", *map(str, arguments)], env={"COLUMNS": "120"})
    return result.exit_code, result.output


@pytest.fixture
def written(tmp_path):
    """`GOOD` in two files, one of them packed."""
    bench, verify = tmp_path / "bench.jsonl", tmp_path / "verify.jsonl"
    for record in GOOD:
        append(verify if isinstance(record, oracle.SummaryRecord) else bench, record)
    packed = tmp_path / "verify.jsonl.gz"
    packed.write_bytes(gzip.compress(verify.read_bytes()))
    return bench, packed


def test_go_ends_with_0_and_shows_every_finding_and_cell(written) -> None:
    status, said = gate(*written)
    assert status == 0
    assert said.startswith("GO: all criteria hold and no clause applies")
    assert said.count(" passed: ") == 6
    assert said.count(" does not apply: ") == 3
    assert "adamw32/256MiB@resident" in said
    assert "160 of 160 cells equal" in said


def test_incomplete_ends_with_2_and_names_what_is_missing(written) -> None:
    status, said = gate(written[0])
    assert status == 2
    assert said.startswith("INCOMPLETE: nothing failed, but something is missing for criterion 1")
    assert "ademamix 32-bit: no cell of `pageahead verify`" in said


def test_a_corrupt_line_is_named_and_the_rest_still_counts(written) -> None:
    bench, packed = written
    lines = bench.read_text().splitlines()
    assert '"adamw8/8x1Mi"' in lines[1]
    lines.insert(1, lines[1][:1000])
    bench.write_text("\n".join([*lines, ""]))
    status, said = gate(bench, packed)
    assert status == 0
    assert "not a record, and not counted: bench.jsonl, line 2: Invalid JSON" in said
    del lines[2]
    bench.write_text("\n".join([*lines, ""]))
    status, said = gate(bench, packed)
    assert status == 2
    assert "adamw8/8x1Mi: not measured" in said


def test_a_packed_file_that_breaks_off_counts_as_far_as_it_goes(written) -> None:
    bench, packed = written
    packed.write_bytes(packed.read_bytes()[:-12])
    status, said = gate(bench, packed)
    assert status == 2
    assert "verify.jsonl.gz, after line 7: cannot be unpacked" in said
    assert "ademamix 32-bit: no cell" in said
    assert "ademamix 8-bit" not in said


def test_a_failed_set_up_is_said_and_is_no_evidence(written) -> None:
    append(written[0], SetupFailedRecord(run=RUN, argv=["bench"], reason="no GPU here"))
    status, said = gate(*written)
    assert status == 0
    assert "a run failed before it measured anything, and is no evidence: no GPU here" in said


def test_the_sources_figures_give_its_verdict_for_its_reason() -> None:
    status, said = gate(B300)
    assert status == 1
    assert said.startswith("NO-GO: failed: criterion 2\n")
    assert "8-bit: geometric mean 1.13 of 2 cells" in said
    assert "32-bit: geometric mean 0.9735 of 2 cells" in said
    assert said.count("less than 1.15") == 2
    assert "overlap alone could reach at most: 8x4Mi 1.062" in said


def test_the_sources_figures_are_those_of_the_experiments_page() -> None:
    page = (EVIDENCE.parent / "docs" / "experiment.md").read_text()
    optimizers = {"AdamW8": "adamw8", "AdamW32": "adamw32", "Lion8": "lion8"}
    rows = {}
    for line in page.splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if len(parts) == 7 and TIMES in parts[1] and parts[2].endswith("MiB"):
            name = parts[0].partition(" ")[0]
            count, numel = parts[1].replace(",", "").split(TIMES)
            layout = f"{count}x{int(numel) >> 20}Mi"
            rows[f"{optimizers.get(name, name.lower())}/{layout}"] = parts[2:]
    found = {record.cell: record for record in read([B300]).summaries}
    assert set(found) == set(rows)
    for cell, (state, legacy, ours, ratio, bounds) in rows.items():
        record = found[cell]
        assert record.state_bytes == int(state.split()[0]) << 20
        assert (record.legacy_ms, record.candidate_ms) == (float(legacy), float(ours))
        assert record.legacy_ms / record.candidate_ms == pytest.approx(float(ratio), abs=1e-3)
        assert (record.lowest, record.highest) == tuple(map(float, bounds.split(DASH)))
    assert "about 0.397 ms of a 6.9 ms step" in page
    assert found["adamw32/8x4Mi"].update_ms == 0.397


def test_published_figures_can_fail_but_not_pass(tmp_path) -> None:
    path = tmp_path / "better.jsonl"
    for line in B300.read_text().splitlines():
        better = json.loads(line)
        better["legacy_ms"] *= 2
        better["lowest"], better["highest"] = 2 * better["lowest"], 2 * better["highest"]
        append(path, SummaryRecord(**better))
    status, said = gate(path)
    assert status == 2
    assert "raw rounds; there are published figures only" in said


def test_the_h200s_first_evidence() -> None:
    status, said = gate(H200 / "bench-source.jsonl", "--strategy", "lookahead")
    assert status == 1
    assert "NO-GO: failed: criterion 2" in said
    status, said = gate(
        H200 / "bench-source.jsonl", H200 / "verify.jsonl", "--strategy", "streamed"
    )
    assert status == 2
    assert "22,200 of 22,200 cells equal" in said


def test_the_oracles_file_is_read_whole() -> None:
    found = read([H200 / "verify.jsonl"])
    assert found.problems == []
    assert len(found.verified_summaries) == 56
    assert all(isinstance(one, Environment) for one in found.environments.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([EVIDENCE / "none.jsonl"], "does not exist"),
        ([H200 / "bench-source.jsonl"], "choose one with --strategy: streamed, lookahead"),
        ([B300, "--strategy", "streamed"], "no evidence of streamed; there is: lookahead"),
        ([H200 / "verify.jsonl"], "no measured cell in this evidence"),
    ],
)
def test_what_cannot_be_judged_ends_with_2_and_says_why(arguments, said) -> None:
    status, printed = gate(*arguments)
    assert status == 2
    assert said in " ".join(printed.replace("│", "").split())


def test_whoever_stops_reading_does_not_change_the_exit_status(written) -> None:
    command = [sys.executable, "-m", "pageahead", "gate", *map(str, written)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 0
