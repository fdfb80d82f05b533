"""Records to test with, made as a run would make them."""

from __future__ import annotations

from pathlib import Path

from pageahead.experiment.evidence import (
    CandidateRecord,
    CellRecord,
    Comparison,
    Environment,
    Gpu,
    LegacyRecord,
    LinkRecord,
    PathSummary,
    PeakRecord,
    Timings,
)
from pageahead.experiment.gate.reading import Record, read_one
from pageahead.experiment.protocol import Protocol, Sample
from pageahead.experiment.summary import ratio, spread

RUN = "2025-01-01T00:00:00+00:00"
MIB = 1 << 20


def read(path: Path) -> list[Record]:
    """The records of a file without a line that is none."""
    records, problems = read_one(path)
    assert problems == []
    return records


def timings(*rounds: list[float]) -> Timings:
    return Timings.of([[Sample(value, value, 0.0) for value in one] for one in rounds])


def environment(device: str = "cuda", gpu_bytes: int = 1 << 37, **fields: object) -> Environment:
    return Environment(
        run=RUN,
        argv=["bench"],
        device=device,
        gpu=Gpu(
            name="A GPU",
            compute_capability="9.0",
            memory_bytes=gpu_bytes,
            driver="580.1",
            cuda_runtime="13.0",
        ),
        library="libbitsandbytes_cuda130.so",
        torch="2.11",
        bitsandbytes="0.50.2",
        pageahead="0.1.0",
        python="3.12.0",
        platform="Linux",
        cpu_count=16,
        commit="0" * 40,
        dirty=False,
        source_sha256="0" * 64,
        link=LinkRecord(to_device=[55.0], to_host=[54.0], duplex=[50.0]),
    ).model_copy(update=fields)


def peak(name: str, arm: str, driver_peak: int = 4096 * MIB, staging: int = 0) -> PeakRecord:
    return PeakRecord(
        run=RUN,
        cell=name,
        arm=arm,
        device="cuda",
        device_name="A GPU",
        library="libbitsandbytes_cuda130.so",
        steps=10,
        samples=100,
        driver_before=512 * MIB,
        driver_peak=driver_peak,
        driver_ready=0,
        torch_peak=1024 * MIB,
        staging=staging,
    )


def cell(
    *, device: str = "cuda", strategy: str = "streamed", differences: int = 0, divisor: int = 1
) -> CellRecord:
    legacy = timings([3.0, 3.2], [3.1, 3.1])
    ours = timings([1.5, 1.6], [1.0, 1.0])
    state_bytes = 64 * MIB
    return CellRecord(
        run=RUN,
        cell="adamw32/8x1Mi",
        optimizer="adamw32",
        layout="8x1Mi",
        device=device,
        device_name="A GPU",
        library="libbitsandbytes_cuda130.so",
        parameters=8,
        elements=8 * MIB,
        state_bytes=state_bytes,
        cpu_divisor=divisor,
        protocol=Protocol(warmups=1, rounds=2, repetitions=2),
        seed=1,
        gradient_sets=3,
        legacy=LegacyRecord(
            optimizer_class="bitsandbytes.PagedAdamW32bit",
            wall=spread(legacy.wall_ms),
            timings=legacy,
            managed_bytes=state_bytes,
            freed_bytes=state_bytes,
        ),
        candidates=[
            CandidateRecord(
                strategy=strategy,
                optimizer_class="pageahead.PagedAdamW32bit",
                paging="Paging()",
                wall=spread(ours.wall_ms),
                ratio=ratio(legacy.wall_ms, ours.wall_ms),
                timings=ours,
                managed_bytes=0,
                routes={
                    strategy: PathSummary(parameters=8, state_bytes=state_bytes, reasons=["large"])
                },
                comparison=Comparison(
                    tensors=24,
                    nbytes=80 * MIB,
                    differences=differences,
                    examples=["parameter 3, state1: 1 of 9 bytes differ"] * differences,
                ),
            )
        ],
        link=LinkRecord(to_device=[55.0], to_host=[54.0], duplex=[50.0, 51.0, 52.0])
        if device == "cuda"
        else None,
    )
