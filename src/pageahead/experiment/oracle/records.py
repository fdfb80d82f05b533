"""What a run of the oracle leaves behind: JSON lines, each validated when written and when read.

The first is the `Environment`; then what cannot be compared, one `ExcludedRecord` per reason; a
`CellRecord` per cell; and a `FailureRecord` for each failing cell that was made small. Committed
evidence may have a `SummaryRecord` of many cells instead, with a `SourceRecord` that says where the
cells are.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pageahead.experiment.evidence import Environment, PathSummary, append

__all__ = [
    "CellRecord",
    "Difference",
    "ExcludedRecord",
    "FailureRecord",
    "Record",
    "ReferenceCount",
    "ReferenceRecord",
    "SourceRecord",
    "SummaryRecord",
    "append",
]

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Difference(_Model):
    """The first element that differs, in the order of steps, parameters, names and elements."""

    step: int = 0
    """Number of the step after which it was seen, from 1."""
    parameter: int = 0
    """Position among the parameters of the layout."""
    name: str = ""
    """``parameter`` or the name of an entry of its state."""
    index: list[int] | None = None
    """Of the element; None where not an element differs but the entry itself."""
    expected: str
    found: str
    expected_bits: str | None = None
    found_bits: str | None = None
    differing: int | None = None
    """Elements of this tensor that differ."""
    elements: int | None = None
    remark: str = ""
    """Where a tolerance was exceeded: by how much."""


class ReferenceRecord(_Model):
    """What some of a cell's parameters were compared with."""

    name: str
    why: str
    """Why it is not simply bitsandbytes' class of the same name; empty if it is."""
    parameters: int
    tolerance: str | None
    """What may differ and why; None: nothing, bit for bit."""


class CellRecord(_Model):
    """One cell: legacy against one way of moving state."""

    kind: Literal["verify_cell"] = "verify_cell"
    run: str
    case: str
    """A line that ``pageahead verify --case`` takes."""
    family: str
    bits: int
    movement: str
    device: Literal["cpu", "cuda"]
    result: Literal["equal", "different", "wrong_path", "failed"]
    problem: str | None = None
    """What went wrong, where that is no difference."""
    difference: Difference | None = None
    references: list[ReferenceRecord] = []
    steps: int
    compared_steps: list[int] = []
    """After which steps; numbered from 1."""
    tensors: int = 0
    nbytes: int = 0
    """Of the tensors compared after one step."""
    routes: dict[str, PathSummary] = {}
    copies: int = 0
    """Between host and device, both directions."""
    copied_bytes: int = 0
    prefetched_bytes: int = 0
    legacy_managed_bytes: int = 0
    """Taken and given back by the references, which this cell may share with others."""
    seconds: float = 0.0
    """The candidate's, without the references'."""

    @property
    def bitwise(self) -> bool:
        """Whether nothing at all might differ."""
        return all(one.tolerance is None for one in self.references)


class ExcludedRecord(_Model):
    """Cells of the whole product that cannot be compared."""

    kind: Literal["verify_excluded"] = "verify_excluded"
    run: str
    reason: str
    cells: int


class FailureRecord(_Model):
    """A failing cell, and the smallest one found that fails in the same way."""

    kind: Literal["verify_failure"] = "verify_failure"
    run: str
    case: str
    smallest: str
    result: Literal["different", "wrong_path", "failed"]
    problem: str | None
    difference: Difference | None
    """In `smallest`."""
    attempts: int
    reproduced: bool
    """False: the cell did not fail again when it ran alone; `smallest` is `case` then."""
    command: str


class ReferenceCount(_Model):
    """How many cells were compared in one way; see `ReferenceRecord`."""

    why: str
    tolerance: str | None
    cells: int


class SummaryRecord(_Model):
    """The cells of one optimizer, width and movement, added up."""

    kind: Literal["verify_summary"] = "verify_summary"
    run: str
    family: str
    bits: int
    movement: str
    device: Literal["cpu", "cuda"]
    cells: Count
    results: dict[str, Count]
    """Cells by `CellRecord.result`."""
    bit_for_bit: Count
    """Of them, those in which nothing at all might differ."""
    steps: Count
    compared_steps: Count
    tensors: Count
    copies: Count
    copied_bytes: Count
    prefetched_bytes: Count
    references: list[ReferenceCount]

    @model_validator(mode="after")
    def _adds_up(self) -> SummaryRecord:
        if sum(self.results.values()) != self.cells:
            raise ValueError("results are not those of as many cells")
        if self.bit_for_bit > self.results.get("equal", 0):
            raise ValueError("more cells are equal bit for bit than are equal")
        return self


class SourceRecord(_Model):
    """Where summaries come from."""

    kind: Literal["verify_source"] = "verify_source"
    run: str
    cells_file: str
    """Beside this file: every `CellRecord`."""
    cells_sha256: str
    """Of its lines, unpacked."""


Record = Environment | ExcludedRecord | CellRecord | FailureRecord | SummaryRecord | SourceRecord
