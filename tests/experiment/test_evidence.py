from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pageahead.experiment.evidence import (
    FailedRecord,
    LeftOutRecord,
    Timings,
    append,
)
from pageahead.experiment.gate.reading import read_one
from pageahead.experiment.oracle import records as oracle
from pageahead.experiment.protocol import Sample
from tests.experiment.support import RUN, cell, environment, peak, read
from tests.processes import finished, python


def test_records_come_back_as_they_were(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    records = [
        environment(),
        cell(),
        cell(device="cpu", strategy="lookahead", differences=1),
        FailedRecord(run=RUN, cell="a/b", strategies=["streamed"], reason='said "no"\nand died'),
        LeftOutRecord(run=RUN, cell="a/b", strategy="lookahead", reason="too large"),
    ]
    for record in records:
        append(path, record)
    assert read(path) == records
    assert len(path.read_text().splitlines()) == 5


def test_two_runs_share_a_file(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        append(path, environment())
    assert len(read(path)) == 2


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (lambda line: line[:-20], "Invalid JSON"),
        (lambda line: "", "Invalid JSON"),
        (lambda line: line.replace('"kind":"cell"', '"kind":"sell"'), "'sell'"),
        (lambda line: line.replace('"seed":1', '"seed":"one"'), "integer"),
        (lambda line: line.replace('"seed":1', '"seed":1,"host":"x"'), "Extra inputs"),
        (lambda line: json.dumps({"kind": "cell"}), "Field required"),
        (lambda line: line.replace("[55.0]", "[]"), "at least 1 item"),
        (lambda line: line.replace("[55.0]", "[0.0]"), "greater than 0"),
        (lambda line: line.replace("[55.0]", "[Infinity]"), "finite number"),
        (
            lambda line: (
                peak("adamw8/8x1Mi", "legacy", driver_peak=1)
                .model_dump_json()
                .replace('"driver_peak":1', '"driver_peak":0')
            ),
            "greater than 0",
        ),
    ],
)
def test_a_corrupt_line_is_named_by_its_number(tmp_path, corrupt, said) -> None:
    path = tmp_path / "run.jsonl"
    append(path, environment())
    append(path, cell())
    append(path, cell())
    lines = path.read_text().splitlines()
    lines[2] = corrupt(lines[2])
    path.write_text("\n".join([*lines, ""]))
    _, (problem,) = read_one(path)
    assert re.match(rf"run\.jsonl, line 3: .*{said}", problem)


def test_a_corrupt_line_costs_that_line_alone(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    append(path, environment())
    with path.open("ab") as file:
        file.write(b"\xff\xfe no text at all\n")
    append(path, cell())
    records, problems = read_one(path)
    assert records == [environment(), cell()]
    assert len(problems) == 1
    assert problems[0].startswith("run.jsonl, line 2: Invalid JSON")


def test_after_half_a_line_a_record_begins_on_its_own(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    append(path, environment())
    append(path, cell())
    path.write_bytes(path.read_bytes()[:-40])
    append(path, cell())
    records, problems = read_one(path)
    assert records == [environment(), cell()]
    assert len(problems) == 1
    assert "line 2" in problems[0]


@pytest.mark.parametrize("append", [append, oracle.append])
def test_where_it_cannot_be_written_the_file_is_named(append, tmp_path) -> None:
    """Python does not name it where it is the disk that is full."""
    full = tmp_path / "run.jsonl"
    code = (
        "import resource, sys; from pathlib import Path\n"
        f"from {append.__module__} import append\n"
        "from tests.experiment.support import environment\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "append(Path(sys.argv[1]), environment())"
    )
    done = finished(python("-c", code, str(full), folder=Path(__file__).parents[2]))
    assert f"OSError: [Errno 27] File too large: '{full}'" in done.stderr
    append(full, environment())
    assert read_one(full)[0] == [environment()]


def test_timings_keep_rounds_apart_and_know_whether_there_were_events() -> None:
    on_gpu = Timings.of([[Sample(1.00001, 2.0, 0.5)], [Sample(3.0, 4.0, 0.25)]])
    assert on_gpu.wall_ms == [[1.0], [3.0]]
    assert on_gpu.event_ms == [[2.0], [4.0]]
    assert on_gpu.settle_ms == [[0.5], [0.25]]
    assert Timings.of([[Sample(1.0, None, 0.0)]]).event_ms is None
