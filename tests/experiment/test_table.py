from __future__ import annotations

import io

import pytest
from rich.console import Console

from pageahead.experiment.evidence import FailedRecord, LeftOutRecord
from pageahead.experiment.table import amount, notes, results
from tests.experiment.support import RUN, cell, environment


def printed(records, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(results(records))
    return console.file.getvalue().splitlines()


def row(record) -> list[str]:
    return printed([record])[-1].split()


def test_a_row_has_every_figure() -> None:
    # 64 MiB in 1.25 ms: 53.7 GB/s, of a link whose duplex median is 51.
    expected = "adamw32 8x1Mi 64 MiB streamed 3.100 1.250 2.55 2.00-3.10 53.7 105% yes"
    assert row(cell()) == expected.split()


def test_a_difference_shows() -> None:
    record = cell(differences=1)
    assert row(record)[-1] == "NO"
    said = "\n".join(notes([record]))
    assert "NOT EQUAL adamw32/8x1Mi (streamed): 1 of 24 tensors" in said
    assert "parameter 3, state1" in said


@pytest.mark.parametrize(
    "record", [cell(strategy="lookahead"), cell(device="cpu", divisor=8)], ids=["managed", "cpu"]
)
def test_bandwidth_is_given_for_streamed_state_on_a_gpu_only(record) -> None:
    assert row(record)[-3:] == ["-", "-", "yes"]


def test_a_failed_cell_has_a_row_and_its_reason() -> None:
    record = FailedRecord(
        run=RUN, cell="lion8/8x4Mi", strategies=["streamed", "lookahead"], reason="it died"
    )
    first, second = (line.split() for line in printed([record])[-2:])
    assert first == ["lion8", "8x4Mi", "-", "streamed", "-", "-", "-", "-", "-", "-", "failed"]
    assert second[3] == "lookahead"
    assert notes([record]) == ["FAILED lion8/8x4Mi (streamed, lookahead): it died"]


def test_what_was_left_out_is_said() -> None:
    record = LeftOutRecord(run=RUN, cell="a/b", strategy="lookahead", reason="too large")
    assert notes([record]) == ["a/b: lookahead left out; too large."]


def test_on_the_cpu_the_caption_says_what_the_timings_are_not() -> None:
    said = " ".join(notes([environment("cpu"), cell(device="cpu", divisor=8)]))
    assert "NO evidence of transfer speed" in said
    assert "1/8 (8x1Mi)" in said
    assert "Link" not in said


def test_on_a_gpu_the_caption_has_the_link_and_the_protocol() -> None:
    said = " ".join(notes([environment(), cell()]))
    assert "55.0 to the GPU, 54.0 to the host, 51.0 each way" in said
    assert "1 warm-ups, then 2 rounds of 2 steps" in said
    assert "CPU" not in said


def test_the_widest_row_fits_in_a_hundred_columns() -> None:
    wide = cell().model_copy(
        update={"optimizer": "ademamix32", "layout": "llama-3.2-1b", "state_bytes": 2_471_493_632}
    )
    narrow = printed([cell()], width=80)
    assert narrow[-1].split()[-1] == "yes"
    assert "…" not in "".join(narrow + printed([wide, cell(strategy="sequential")]))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (512, "512 B"),
        (8 << 20, "8 MiB"),
        (1000 << 20, "1000 MiB"),
        (2 << 30, "2 GiB"),
        (2_471_493_632, "2.3 GiB"),
    ],
)
def test_amounts(nbytes, text) -> None:
    assert amount(nbytes) == text
