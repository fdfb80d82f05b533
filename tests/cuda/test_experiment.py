"""The harness on a real GPU: identity, link, managed memory that comes home and is given back."""

from __future__ import annotations

import gc

import pytest
import torch
from bitsandbytes.functional import GlobalPageManager

from pageahead.experiment.cells import CELLS
from pageahead.experiment.environment import describe
from pageahead.experiment.identity import identify
from pageahead.experiment.link import measure_link
from pageahead.experiment.measure import measure_cell
from pageahead.experiment.messages import CellRequest, PeakRequest, TrainingRequest
from pageahead.experiment.peak import measure_peak
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.training.cells import arms_of
from pageahead.experiment.training.cells import cell_named as training_cell
from pageahead.experiment.training.measure import measure_training


def test_the_machine_is_identified() -> None:
    identity = identify("auto")
    assert identity.type == "cuda"
    assert identity.library.startswith("libbitsandbytes_cuda")
    environment = describe(identity, run="now", argv=[], link=None)
    assert environment.gpu is not None
    assert environment.gpu.driver


def test_the_link_has_a_bandwidth_in_each_direction() -> None:
    link = measure_link(torch.device("cuda", torch.cuda.current_device()))
    for samples in (link.to_device, link.to_host, link.duplex):
        assert all(sample > 0 for sample in samples)
    # Both directions at once are no faster than one alone, give or take their spread.
    assert link.duplex_median < 1.2 * max(link.to_device + link.to_host)


def test_a_cell_is_measured_compared_and_cleaned_up() -> None:
    cell = CELLS["adamw8/mixed"]
    record = measure_cell(
        CellRequest(
            run="now",
            cell=cell.name,
            strategies=["streamed", "lookahead"],
            device="cuda",
            protocol=Protocol(warmups=2, rounds=2, repetitions=3),
        ),
        lambda phase, steps: None,
    )
    for candidate in record.candidates:
        assert candidate.comparison.equal, candidate.comparison.examples
        assert candidate.timings.event_ms is not None
    assert record.legacy.freed_bytes == cell.state_bytes("cuda")
    assert record.legacy.resident is not None
    assert GlobalPageManager.get_instance().paged_tensors == []
    assert record.link is not None


@pytest.mark.parametrize("strategy", ["streamed", "lookahead"])
def test_without_touching_state_stays_on_the_device(strategy) -> None:
    cell = CELLS["adamw8/8MiB@resident"]
    record = measure_cell(
        CellRequest(
            run="now",
            cell=cell.name,
            strategies=[strategy],
            device="cuda",
            protocol=Protocol(warmups=2, rounds=2, repetitions=3),
        ),
        lambda phase, steps: None,
    )
    (candidate,) = record.candidates
    assert candidate.comparison.equal, candidate.comparison.examples
    path = "resident" if strategy == "streamed" else strategy
    assert candidate.routes[path].state_bytes >= cell.state_bytes("cuda")


@pytest.mark.parametrize("arm", ["legacy", "streamed", "lookahead"])
def test_an_arms_peak_memory_is_watched(arm) -> None:
    cell = CELLS["adamw32/8MiB"]
    gc.collect()  # what other tests left would be there before, and be used again
    torch.cuda.empty_cache()
    record = measure_peak(
        PeakRequest(
            run="now",
            cell=cell.name,
            strategies=[arm],
            device="cuda",
            protocol=Protocol(warmups=3, rounds=1, repetitions=1),
        ),
        lambda phase, steps: None,
    )
    assert record.driver_peak > record.driver_before > 0
    assert record.torch_peak > 0
    assert (record.staging > 0) == (arm == "streamed")
    assert GlobalPageManager.get_instance().paged_tensors == []


@pytest.mark.parametrize("cell", ["adamw32/4096", "adamw8/4096"])
def test_training_iterations_are_measured_and_compared(cell) -> None:
    names = [arm.name for arm in arms_of(training_cell(cell))]
    record = measure_training(
        TrainingRequest(
            run="now",
            cell=cell,
            strategies=names,
            device="cuda",
            protocol=Protocol(warmups=2, rounds=2, repetitions=2),
            parameters=30_000_000,
        ),
        lambda phase, steps: None,
    )
    assert record.deterministic, record.nondeterminism
    assert record.left_out == {}
    (group,) = record.groups
    assert [arm.arm for arm in group.arms] == ["hbm", *names]
    for arm in group.arms:
        assert arm.occupancy is not None
        assert arm.timings.event_ms is not None
        if arm.way in ("after", "during"):
            assert arm.comparison is not None
            assert arm.comparison.equal, (arm.arm, arm.comparison.examples)
            assert arm.bound_ms > 0
