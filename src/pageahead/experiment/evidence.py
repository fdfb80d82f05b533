"""What a run leaves behind: JSON lines, each validated when written and when read.

A run is one `Environment` record and then, cell by cell, a `CellRecord`, `PeakRecord`,
`ProfileRecord` or `TrainingRecord`, or a `FailedRecord` or `LeftOutRecord` that says why there is
none; or a single `SetupFailedRecord`. Every timing is kept; `Spread` and `Ratio` are what `summary`
makes of the wall times. A `SummaryRecord` is of another kind: figures published elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pageahead.experiment.cells import Residency
from pageahead.experiment.profile.records import ProfileRecord
from pageahead.experiment.protocol import Protocol, Sample
from pageahead.experiment.summary import Ratio, Spread

__all__ = [
    "CandidateRecord",
    "CellRecord",
    "Comparison",
    "Environment",
    "FailedRecord",
    "Gpu",
    "LeftOutRecord",
    "LegacyRecord",
    "LinkRecord",
    "Occupancy",
    "PathSummary",
    "PeakRecord",
    "ProfileRecord",
    "Record",
    "SetupFailedRecord",
    "SummaryRecord",
    "Timings",
    "TrainingArm",
    "TrainingGroup",
    "TrainingRecord",
    "append",
    "why_invalid",
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Speeds = Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]


class LinkRecord(_Model):
    """Bandwidth of page-locked copies in GB/s (1e9 bytes), one figure per sample."""

    to_device: Speeds
    to_host: Speeds
    duplex: Speeds
    """Each way, with both directions busy."""

    @property
    def duplex_median(self) -> float:
        return median(self.duplex)


class Gpu(_Model):
    """Which GPU, and what drives it."""

    name: str
    compute_capability: str
    memory_bytes: int
    driver: str | None
    cuda_runtime: str


class Environment(_Model):
    """One run: when, with what, on what."""

    kind: Literal["environment"] = "environment"
    version: Literal[1] = 1
    run: str
    """UTC time of the start, ISO 8601; the run's cell records carry it too."""
    argv: list[str]
    device: Literal["cpu", "cuda"]
    gpu: Gpu | None
    library: str
    """File name of the native library that bitsandbytes loaded."""
    torch: str
    bitsandbytes: str
    pageahead: str
    python: str
    platform: str
    cpu_count: int
    """CPUs this process may use."""
    commit: str | None
    dirty: bool | None
    """Whether the package's files differed from `commit`; None where there was no repository."""
    source_sha256: str
    """Over the package's own Python files, so that a run is tied to its code without git too."""
    link: LinkRecord | None
    slurm_job: str | None = None
    """Id of the Slurm job that it was part of; None outside of Slurm."""


class Timings(_Model):
    """Milliseconds, a list per round, in the order taken. See `protocol.Sample`."""

    wall_ms: list[list[float]]
    event_ms: list[list[float]] | None
    settle_ms: list[list[float]]

    @classmethod
    def of(cls, rounds: list[list[Sample]]) -> Timings:
        """Collect one optimizer's samples, to a tenth of a microsecond."""
        events = [
            [round(sample.event_ms, 4) for sample in one if sample.event_ms is not None]
            for one in rounds
        ]
        return cls(
            wall_ms=[[round(sample.wall_ms, 4) for sample in one] for one in rounds],
            event_ms=events if any(events) else None,
            settle_ms=[[round(sample.settle_ms, 4) for sample in one] for one in rounds],
        )


class Comparison(_Model):
    """The bitwise comparison with legacy after the last step."""

    tensors: int
    nbytes: int
    differences: int
    examples: list[str]

    @property
    def equal(self) -> bool:
        return self.differences == 0


class PathSummary(_Model):
    """The parameters that took one path."""

    parameters: int
    state_bytes: int
    reasons: list[str]


class LegacyRecord(_Model):
    """bitsandbytes' own optimizer in a cell."""

    optimizer_class: str
    wall: Spread
    timings: Timings
    managed_bytes: int
    freed_bytes: int
    """Managed memory given back at the end, which bitsandbytes itself never does."""
    resident: Timings | None = None
    """Steps after the others, on the state that the step before left on the device: what is left
    of a step when nothing has to come. None on the CPU and where nothing pages."""


class CandidateRecord(_Model):
    """One of our strategies in a cell."""

    strategy: str
    optimizer_class: str
    paging: str
    wall: Spread
    ratio: Ratio
    timings: Timings
    managed_bytes: int
    routes: dict[str, PathSummary]
    comparison: Comparison


class CellRecord(_Model):
    """One cell, measured in one process."""

    kind: Literal["cell"] = "cell"
    run: str
    cell: str
    optimizer: str
    layout: str
    residency: Residency = "host"
    """Where managed state was when a step began."""
    device: Literal["cpu", "cuda"]
    device_name: str
    library: str
    parameters: int
    elements: int
    state_bytes: int
    """Of ``state1`` and ``state2`` of the parameters that are paged."""
    cpu_divisor: int
    """By how much large parameters were made smaller; 1 on a GPU."""
    protocol: Protocol
    seed: int
    gradient_sets: int
    legacy: LegacyRecord
    candidates: list[CandidateRecord]
    link: LinkRecord | None
    """Measured before and after the timed rounds, in their process."""


class Occupancy(_Model):
    """Device memory around one way of training, in bytes; the highest of all its iterations."""

    own_peak: int
    """Its own: of the process's peak during an iteration, what others had before it subtracted."""
    process_peak: int
    """PyTorch's ``max_memory_allocated`` of an iteration: with what all other ways hold."""
    driver_used: int
    """What the driver says is taken of the GPU after an iteration, by anybody."""


class TrainingArm(_Model):
    """One way of training in a group. See `training.cells.ArmSpec`."""

    arm: str
    way: Literal["hbm", "model", "torch", "after", "during"]
    budget: int | float | None
    optimizer_class: str | None
    paging: str | None
    wall: Spread
    ratio: Ratio
    """To all state in HBM, in the same group: 1 is as fast."""
    timings: Timings
    state_bytes: int
    hbm_state_bytes: int
    """State that stays on the device, and the slots of what is streamed."""
    slot_bytes: int
    streamed_bytes: int
    """What comes in, and goes home, in each iteration."""
    link_bound_ms: float | None
    """`streamed_bytes` over the link's duplex bandwidth; None without a link."""
    bound_ms: float | None
    """What hides behind what: after backward, forward and backward and then the longer of update
    and transfer; during backward, the longer of the whole computation and the transfer."""
    occupancy: Occupancy | None
    routes: dict[str, PathSummary]
    comparison: Comparison | None
    """Parameters and state against the baseline's, bit for bit."""
    not_compared: str | None
    """Why, where there is no comparison."""


class TrainingGroup(_Model):
    """Ways that fitted in memory together and took turns; the first is the baseline."""

    arms: list[TrainingArm]


class TrainingRecord(_Model):
    """Whole iterations of a GPT: one cell, measured in one process."""

    kind: Literal["training"] = "training"
    run: str
    cell: str
    bits: Literal[8, 32]
    device: Literal["cpu", "cuda"]
    device_name: str
    library: str
    parameters: int
    layers: int
    width: int
    vocabulary: int
    sequences: int
    length: int
    """Tokens of each sequence."""
    protocol: Protocol
    """Its repetitions are the iterations of one way's turn in a round."""
    seed: int
    batches: int
    """Batches of random tokens, which iterations take in turn."""
    deterministic: bool
    """Whether the model's gradients were the same twice, bit for bit."""
    nondeterminism: str | None
    groups: list[TrainingGroup]
    left_out: dict[str, str]
    link: LinkRecord | None
    """Measured before and after, in the same process."""
    phase_seconds: dict[str, float] = {}
    """What the run itself spent its time on."""

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.sequences * self.length


class PeakRecord(_Model):
    """Device memory of one arm of a cell, alone in a fresh process, in bytes."""

    kind: Literal["peak"] = "peak"
    run: str
    cell: str
    arm: str
    """``legacy`` or a strategy."""
    device: Literal["cpu", "cuda"]
    device_name: str
    library: str
    steps: int
    samples: int
    """How often the driver was asked, by a thread beside the steps and after each step."""
    driver_before: Bytes
    """What the driver said was taken of the GPU, by anybody, before the first parameter."""
    driver_peak: Annotated[Bytes, Field(gt=0)]
    """The most that it said was taken since."""
    driver_ready: Bytes | None = None
    """Of that: what it held ready for managed memory at the end; None: not measured."""
    torch_peak: Bytes
    """PyTorch's ``max_memory_allocated``, which does not know of managed memory."""
    staging: Bytes
    """Of the driver's figure: the ring of device buffers; 0 where there is none."""

    @property
    def taken(self) -> int:
        """Bytes that the arm itself took at the most."""
        return max(0, self.driver_peak - self.driver_before - (self.driver_ready or 0))


class SummaryRecord(_Model):
    """Published figures of a cell, whose rounds nobody has. They can fail a gate, not pass it."""

    kind: Literal["summary"] = "summary"
    source: str
    """Where they were published."""
    cell: str
    strategy: str
    device: Literal["cuda"] = "cuda"
    device_name: str
    state_bytes: int
    legacy_ms: float = Field(gt=0)
    candidate_ms: float = Field(gt=0)
    """Medians."""
    rounds: int
    repetitions: int
    lowest: float = Field(gt=0)
    highest: float = Field(gt=0)
    """Range of legacy / candidate over the rounds."""
    equal: bool
    """Whether the results were said to be equal, bit for bit."""
    update_ms: float | None = None
    """Of a step on resident state, where that was published."""
    remark: str = ""


class FailedRecord(_Model):
    """A cell whose process failed."""

    kind: Literal["failed"] = "failed"
    run: str
    cell: str
    strategies: list[str]
    reason: str
    what: Literal["steps", "peak memory", "profile"] = "steps"
    """Which was to be measured."""


class SetupFailedRecord(_Model):
    """A run that ended before anything was measured. No evidence of anything else."""

    kind: Literal["setup_failed"] = "setup_failed"
    run: str
    argv: list[str]
    reason: str


class LeftOutRecord(_Model):
    """A strategy that was asked for and not measured in a cell."""

    kind: Literal["left_out"] = "left_out"
    run: str
    cell: str
    strategy: str
    reason: str


Record = (
    Environment
    | CellRecord
    | PeakRecord
    | ProfileRecord
    | SummaryRecord
    | TrainingRecord
    | FailedRecord
    | LeftOutRecord
    | SetupFailedRecord
)


def append(path: Path, record: BaseModel) -> None:
    """Add one line to the file at `path`, which is made if need be.

    Where a killed run left half a line, the record begins on a line of its own.

    Raises:
        OSError: it cannot be written; the error has the file's name.
    """
    try:
        with path.open("ab+") as file:
            torn = False
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            file.write(b"\n" * torn + record.model_dump_json().encode() + b"\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def why_invalid(error: ValidationError) -> str:
    """The first of what is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{first['msg']}{f' ({where})' if where else ''}"
