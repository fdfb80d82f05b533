from __future__ import annotations

import os
import re

import pytest

from pageahead.experiment import worker
from pageahead.experiment.evidence import Environment
from pageahead.experiment.messages import CellRequest, Failure, ProbeRequest, Progress, replies
from pageahead.experiment.protocol import Protocol


def answer(request) -> tuple[int, list]:
    """What a worker makes of `request`: its exit status and the lines it sends."""
    reading, writing = os.pipe()
    status = worker.main([str(writing), request.model_dump_json()])
    with os.fdopen(reading) as channel:
        return status, [replies.validate_json(line) for line in channel]


def test_a_probe_describes_the_machine() -> None:
    status, (described,) = answer(ProbeRequest(run="now", argv=["bench"], device="cpu"))
    assert status == 0
    assert isinstance(described, Environment)
    assert (described.run, described.device) == ("now", "cpu")


def test_a_cell_is_reported_on_and_measured() -> None:
    request = CellRequest(
        run="now",
        cell="lion8/8x1Mi",
        strategies=["streamed"],
        device="cpu",
        protocol=Protocol(1, 1, 1),
    )
    status, lines = answer(request)
    assert status == 0
    assert all(isinstance(line, Progress) for line in lines[:-1])
    assert lines[-1].kind == "cell"


@pytest.mark.parametrize(
    ("cell", "said"),
    [("lion8/none", r"UnknownCellError in cells\.py:\d+: no cell is called 'lion8/none'")],
)
def test_an_error_is_one_line_without_a_machines_folders(cell, said) -> None:
    request = CellRequest(
        run="now", cell=cell, strategies=["streamed"], device="cpu", protocol=Protocol(1, 1, 1)
    )
    status, lines = answer(request)
    assert status == 1
    assert isinstance(lines[-1], Failure)
    assert re.match(said, lines[-1].reason)


def test_an_error_of_ours_speaks_for_itself(monkeypatch) -> None:
    def refuse(wanted):
        raise worker.IdentityError("no GPU here")

    monkeypatch.setattr(worker, "identify", refuse)
    status, lines = answer(ProbeRequest(run="now", argv=[], device="cuda"))
    assert (status, lines[-1]) == (1, Failure(reason="no GPU here"))
