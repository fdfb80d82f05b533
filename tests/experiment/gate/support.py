"""Evidence that gives GO, of real records, and ways to change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from pageahead.experiment.cells import CELLS, MATRIX, PEAK_ROLES, Cell
from pageahead.experiment.evidence import (
    CandidateRecord,
    CellRecord,
    Comparison,
    LegacyRecord,
    LinkRecord,
    PathSummary,
    Timings,
)
from pageahead.experiment.gate.decision import Decision, decide
from pageahead.experiment.gate.finding import Finding
from pageahead.experiment.gate.reading import Record, gather
from pageahead.experiment.oracle.records import SummaryRecord as Verified
from pageahead.experiment.protocol import Protocol, Sample
from pageahead.experiment.summary import ratio, spread
from tests.experiment.support import MIB, RUN, environment, peak

PROTOCOL = Protocol(warmups=10, rounds=7, repetitions=8)
STAGING = 64 * MIB
LINK = LinkRecord(to_device=[55.0], to_host=[54.0], duplex=[50.0])
NEEDED = [cell for cell in MATRIX.cells if cell.residency != "oversubscribed"]
#: Legacy over candidate: little more than what is asked for, so that one cell decides.
RATIOS = {"primary": 1.155, "tiny": 1.3, "public": 1.155, "resident": 1.0}


def timings(
    milliseconds: float, rounds: int = 7, repetitions: int = 8, settle: float = 0.05
) -> Timings:
    """Rounds that vary by 0.4 % about a median of exactly that."""
    noise = [1 + 0.001 * (number % 8 - 3.5) for number in range(repetitions)]
    scale = milliseconds / median(noise)
    samples = [Sample(scale * one, scale * one, settle) for one in noise]
    return Timings.of([samples] * rounds)


def record(cell: Cell, value: float, **changes: object) -> CellRecord:
    """A cell of that ratio. The candidate copies at 45 GB/s each way, at once."""
    state = cell.state_bytes("cuda")
    ours_ms = state / 45e6 + 0.2
    resident = cell.residency == "resident"
    legacy = timings(round(value * ours_ms, 4))
    ours = timings(round(ours_ms, 4))
    path = "resident" if resident else "streamed"
    return CellRecord(
        run=RUN,
        cell=cell.name,
        optimizer=cell.optimizer.name,
        layout=cell.layout.name,
        residency=cell.residency,
        device="cuda",
        device_name="A GPU",
        library="libbitsandbytes_cuda130.so",
        parameters=len(cell.layout.shapes),
        elements=1,
        state_bytes=state,
        cpu_divisor=1,
        protocol=PROTOCOL,
        seed=1,
        gradient_sets=3,
        legacy=LegacyRecord(
            optimizer_class=f"bitsandbytes.{cell.optimizer.legacy}",
            wall=spread(legacy.wall_ms),
            timings=legacy,
            managed_bytes=state,
            freed_bytes=state,
            resident=None if resident else timings(0.5, rounds=1),
        ),
        candidates=[
            CandidateRecord(
                strategy="streamed",
                optimizer_class=f"pageahead.{cell.optimizer.candidate}",
                paging="Paging()",
                wall=spread(ours.wall_ms),
                ratio=ratio(legacy.wall_ms, ours.wall_ms),
                timings=ours,
                managed_bytes=0,
                routes={path: PathSummary(parameters=1, state_bytes=state, reasons=["large"])},
                comparison=Comparison(tensors=24, nbytes=80, differences=0, examples=[]),
            )
        ],
        link=LINK,
    ).model_copy(update=changes)


def verified(family: str, bits: int, **changes: object) -> Verified:
    return Verified(
        run=RUN,
        family=family,
        bits=bits,
        movement="streamed+staging=1MiB",
        device="cuda",
        cells=20,
        results={"equal": 20},
        bit_for_bit=18,
        steps=50,
        compared_steps=50,
        tensors=100,
        copies=1,
        copied_bytes=1,
        prefetched_bytes=0,
        references=[],
    ).model_copy(update=changes)


def good() -> list[Record]:
    """Everything the gate asks for, and all of it well."""
    records: list[Record] = [environment()]
    records += [record(cell, RATIOS.get(cell.role, 1.2)) for cell in NEEDED]
    for cell in NEEDED:
        if cell.role in PEAK_ROLES:
            records.append(peak(cell.name, "legacy"))
            records.append(peak(cell.name, "streamed", staging=STAGING))
    for family in ("adam", "adamw", "lion", "ademamix"):
        records += [verified(family, bits) for bits in (8, 32)]
    return records


GOOD = good()


def judged(records: list[Record]) -> Decision:
    return decide(gather(records))


def finding(decision: Decision, key: str) -> Finding:
    (found,) = [one for one in decision.findings if one.key == key]
    return found


def failed(decision: Decision) -> list[str]:
    return [one.key for one in decision.findings if one.status == "failed"]


def missing(decision: Decision) -> list[str]:
    return [one.key for one in decision.findings if one.status == "missing"]


def changed(change: Callable[[Record], Iterator[Record]]) -> list[Record]:
    """`GOOD` with each record replaced by what `change` makes of it."""
    return [after for before in GOOD for after in change(before)]


def without(unwanted: Callable[[Record], bool]) -> list[Record]:
    left = [one for one in GOOD if not unwanted(one)]
    assert len(left) < len(GOOD)
    return left


def with_cell(name: str, new: CellRecord) -> list[Record]:
    """`GOOD` with another record of one cell."""
    return [new if isinstance(one, CellRecord) and one.cell == name else one for one in GOOD]


def moved(name: str, value: float) -> list[Record]:
    """`GOOD` with one cell's raw rounds at another ratio; what was summed up of them stays."""
    old = next(one for one in GOOD if isinstance(one, CellRecord) and one.cell == name)
    new = record(CELLS[name], value)
    ours, theirs = old.candidates[0], old.legacy
    return with_cell(
        name,
        old.model_copy(
            update={
                "legacy": theirs.model_copy(update={"timings": new.legacy.timings}),
                "candidates": [ours.model_copy(update={"timings": new.candidates[0].timings})],
            }
        ),
    )
