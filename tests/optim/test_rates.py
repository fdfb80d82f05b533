"""Chunk sizes follow what a machine can do; without a GPU nothing is measured."""

from __future__ import annotations

import pytest

from pageahead.device.cpu import CpuDevice
from pageahead.memory.layout import StateShape
from pageahead.optim.plan import chunk_bytes
from pageahead.optim.rates import TYPICAL, Rates, rates_of

STATES = [StateShape(8 << 20, ((1, 4), (1, 4)))] * 4


def test_a_cpu_is_not_measured() -> None:
    assert rates_of(CpuDevice(), "adam") is TYPICAL


@pytest.mark.parametrize(
    ("link", "update", "larger"),
    [(200e9, 1.0, True), (12e9, 1.0, False), (50e9, 0.1, True), (50e9, 20.0, False)],
)
def test_a_faster_stage_makes_larger_chunks(link: float, update: float, larger: bool) -> None:
    """The fixed cost of a chunk weighs more where its bytes take less time."""
    rates = Rates(link, {size: update * one for size, one in TYPICAL.update_seconds.items()})
    usual, here = chunk_bytes(STATES, None)[0], chunk_bytes(STATES, None, rates)[0]
    assert (here > usual) if larger else (here < usual)
