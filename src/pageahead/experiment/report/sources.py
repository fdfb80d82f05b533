"""Which files a report is of, and their records by device."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pageahead.experiment.evidence import Environment
from pageahead.experiment.gate.decision import EvidenceError
from pageahead.experiment.gate.reading import Evidence, Record, gather, read_one

__all__ = ["Source", "devices", "of_device", "read", "strategies"]


@dataclass(frozen=True)
class Source:
    """An evidence file.

    Attributes:
        name: without its folder.
        size: in bytes.
        sha256: of the file as it is, packed or not.
        records: how many of each kind.
        problems: lines that are no records.
        evidence: the records themselves.
    """

    name: str
    size: int
    sha256: str
    records: dict[str, int]
    problems: Sequence[str]
    evidence: Evidence

    def is_about(self, device: str) -> bool:
        """Whether something in it was measured on a device, or only compared there."""
        gpus = (one.gpu.name for one in self.evidence.environments.values() if one.gpu)
        return device in (*devices(self.evidence), *gpus)


def read(paths: Sequence[Path]) -> tuple[list[Source], Evidence]:
    """Read files; one that is named twice counts once.

    Raises:
        OSError: a file cannot be read.
        EvidenceError: a file is empty, or no line of it is a record.
    """
    sources: list[Source] = []
    records: list[Record] = []
    for path in dict.fromkeys(paths):
        content = path.read_bytes()
        if not content.strip():
            raise EvidenceError(f"{path.name} is empty: there is no evidence in it")
        found, problems = read_one(path)
        if not found:
            raise EvidenceError(
                f"{path.name} has no record in {len(problems)} line(s); {problems[0]}"
                if problems
                else f"{path.name} has no line"
            )
        digest = hashlib.sha256(content).hexdigest()
        kinds = Counter(record.kind for record in found)
        sources.append(
            Source(
                path.name,
                len(content),
                digest,
                {str(kind): count for kind, count in kinds.items()},
                problems,
                gather(found),
            )
        )
        records += found
    evidence = gather(records)
    evidence.problems += [problem for source in sources for problem in source.problems]
    return sources, evidence


def devices(evidence: Evidence) -> list[str]:
    """On which devices there are measured cells or published figures of any."""
    names = [record.device_name for record in evidence.cells]
    names += [record.device_name for record in evidence.summaries]
    return list(dict.fromkeys(names))


def strategies(evidence: Evidence) -> list[str]:
    """Of which strategies there are."""
    names = [one.strategy for record in evidence.cells for one in record.candidates]
    names += [record.strategy for record in evidence.summaries]
    return list(dict.fromkeys(names))


def of_device(evidence: Evidence, device: str) -> Evidence:
    """What was measured on one device. Problems and failed set-ups are of no device."""
    at = {record.run: record.device_name for record in evidence.cells}
    at |= {record.run: record.device_name for record in evidence.peaks}
    at |= {record.run: record.device_name for record in evidence.profiles}

    def belongs(run: str, environment: Environment) -> bool:
        # A run that measured nothing, as one of `verify`, is known by its GPU alone.
        gpu = environment.gpu.name if environment.gpu is not None else None
        return at.get(run, gpu) == device

    kept = {
        run: environment
        for run, environment in evidence.environments.items()
        if belongs(run, environment)
    }
    return Evidence(
        environments=kept,
        cells=[one for one in evidence.cells if one.device_name == device],
        peaks=[one for one in evidence.peaks if one.device_name == device],
        profiles=[one for one in evidence.profiles if one.device_name == device],
        summaries=[one for one in evidence.summaries if one.device_name == device],
        failed=[one for one in evidence.failed if one.run in kept],
        left_out=[one for one in evidence.left_out if one.run in kept],
        verified=[one for one in evidence.verified if one.run in kept],
        verified_summaries=[one for one in evidence.verified_summaries if one.run in kept],
    )
