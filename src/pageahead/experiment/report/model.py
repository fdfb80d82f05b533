"""Everything that a report says, made once and then rendered in either form."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pageahead._version import __version__
from pageahead.experiment.evidence import FailedRecord, LeftOutRecord, SetupFailedRecord
from pageahead.experiment.gate.decision import Decision, EvidenceError, decide
from pageahead.experiment.gate.reading import Evidence
from pageahead.experiment.gate.thresholds import THRESHOLDS, Thresholds
from pageahead.experiment.gate.wording import by_reason, why
from pageahead.experiment.report import sources
from pageahead.experiment.report.charts import (
    BandwidthChart,
    Mean,
    RatioChart,
    bandwidth_chart,
    means,
    ratio_chart,
)
from pageahead.experiment.report.headline import KeyFigure, headline
from pageahead.experiment.report.profiles import timelines
from pageahead.experiment.report.reproducing import Machine, Steps, machines, steps
from pageahead.experiment.report.rows import PeakRow, Row, peak_rows, rows
from pageahead.experiment.report.timelines import Picture, TimelineGroup, grouped, pictures

__all__ = ["Judgement", "Report", "build"]


@dataclass(frozen=True)
class Judgement:
    """One strategy on one device.

    Attributes:
        decision: the gate's.
        why: the reason for its verdict.
        key: the figures beside it.
        means: the geometric means of criterion 2.
        rows: every cell.
        ratios, bandwidth: what is drawn; None where there is nothing to draw.
        peaks: device memory.
        protocols: how often cells were measured.
        on_cpu: whether it was the CPU, where nothing crosses a link.
    """

    decision: Decision
    why: str
    key: Sequence[KeyFigure]
    means: Sequence[Mean]
    rows: Sequence[Row]
    ratios: RatioChart | None
    bandwidth: BandwidthChart | None
    peaks: Sequence[PeakRow]
    protocols: Sequence[str]
    on_cpu: bool

    @property
    def uncounted(self) -> dict[str, list[str]]:
        """Cells that are shown and do not count, by the reason."""
        return by_reason([f"{row.name}: {row.remark}" for row in self.rows if not row.counted])

    @property
    def anchor(self) -> str:
        """For links within the page."""
        words = f"{self.decision.strategy}-{self.decision.device}".lower()
        return "".join(letter if letter.isalnum() else "-" for letter in words)


@dataclass(frozen=True)
class Report:
    """The page.

    Attributes:
        judgements: a verdict for each device and strategy; none where no cell was measured.
        timelines: steps that were profiled.
        pictures: of timelines, handed in beside the evidence.
        failed, left_out: cells that were asked for and not measured.
        setups: runs that ended before they measured anything.
        problems: lines that are no records.
        published: where figures without rounds come from.
        machines: environments.
        steps: commands that made the evidence.
        again: commands that make this page from it.
        sources: the files.
        thresholds: the gate's lines.
        version: of this package.
    """

    judgements: Sequence[Judgement]
    timelines: Sequence[TimelineGroup]
    pictures: Sequence[Picture]
    failed: Sequence[FailedRecord]
    left_out: Sequence[LeftOutRecord]
    setups: Sequence[SetupFailedRecord]
    problems: Sequence[str]
    published: Sequence[str]
    machines: Sequence[Machine]
    steps: Sequence[Steps]
    again: Sequence[str]
    sources: Sequence[sources.Source]
    thresholds: Thresholds
    version: str

    @property
    def title(self) -> str:
        """The verdicts in a few words."""
        if not self.judgements:
            return "pageahead: no cell was measured"
        devices = {judgement.decision.device for judgement in self.judgements}
        where = f" on {devices.pop()}" if len(devices) == 1 else ""
        by_verdict: dict[str, list[str]] = {}
        for judgement in self.judgements:
            decision = judgement.decision
            what = decision.strategy if where else f"{decision.strategy} on {decision.device}"
            by_verdict.setdefault(decision.verdict, []).append(what)
        said = [f"{verdict} for {' and '.join(what)}" for verdict, what in by_verdict.items()]
        return f"pageahead: {', '.join(said)}{where}"


def build(
    paths: Sequence[Path],
    strategy: str | None = None,
    shown: Sequence[Path] = (),
    thresholds: Thresholds = THRESHOLDS,
) -> Report:
    """Read evidence and judge every strategy in it, or one, on every device.

    Args:
        paths: files of evidence.
        strategy: the only one to judge.
        shown: pictures of timelines.
        thresholds: the gate's lines.

    Raises:
        OSError: a file cannot be read.
        EvidenceError: a file has no record; there is nothing that a report could be about; or
            nothing of `strategy`.
    """
    files, evidence = sources.read(paths)
    judgements = []
    for device in sources.devices(evidence):
        here = sources.of_device(evidence, device)
        for one in sources.strategies(here):
            if strategy in (None, one):
                judgements.append(_judge(here, one, thresholds))
    if strategy is not None and not judgements:
        there = ", ".join(sources.strategies(evidence)) or "none"
        raise EvidenceError(f"no evidence of {strategy}; there is: {there}")
    others = (evidence.profiles, evidence.setups, evidence.failed, evidence.left_out)
    if not judgements and not any(others):
        if any("training" in file.records for file in files):
            raise EvidenceError(
                "no measured cell in this evidence, but whole iterations of training; "
                "`pageahead plot-training FILE -o PICTURE` draws them"
            )
        raise EvidenceError(
            "no measured cell in this evidence; `pageahead bench --preset matrix --out FILE` "
            "makes some"
        )
    return Report(
        judgements=judgements,
        timelines=grouped(timelines(evidence.profiles)),
        pictures=pictures(shown),
        failed=evidence.failed,
        left_out=evidence.left_out,
        setups=evidence.setups,
        problems=evidence.problems,
        published=list(dict.fromkeys(summary.source for summary in evidence.summaries)),
        machines=machines(evidence),
        steps=steps(evidence),
        again=_again(files, judgements),
        sources=files,
        thresholds=thresholds,
        version=__version__,
    )


def _judge(evidence: Evidence, strategy: str, thresholds: Thresholds) -> Judgement:
    decision = decide(evidence, strategy, thresholds)
    found = rows(evidence, decision)
    averages = means(found, thresholds)
    protocols = dict.fromkeys(
        record.protocol
        for record in evidence.cells
        if any(one.strategy == strategy for one in record.candidates)
    )
    return Judgement(
        decision=decision,
        why=why(decision),
        key=headline(averages, found, decision.criteria, thresholds),
        means=averages,
        rows=found,
        ratios=ratio_chart(found, thresholds),
        bandwidth=bandwidth_chart(found),
        peaks=peak_rows(evidence, strategy),
        protocols=[
            f"{one.warmups} warm-ups, then {one.rounds} rounds of {one.repetitions} steps of "
            f"each, interleaved"
            for one in protocols
        ],
        on_cpu=any(record.device == "cpu" for record in evidence.cells),
    )


def _again(files: Sequence[sources.Source], judgements: Sequence[Judgement]) -> list[str]:
    """The gate's commands, each with the files of one device, which is all it takes; and ours."""
    commands = []
    for judgement in judgements:
        device = judgement.decision.device
        here = [file for file in files if file.is_about(device)]
        if any(set(sources.devices(file.evidence)) - {device} for file in here):
            continue
        several = {name for file in here for name in sources.strategies(file.evidence)}
        chosen = ["--strategy", judgement.decision.strategy] if len(several) > 1 else []
        commands.append(["gate", *(file.name for file in here), *chosen])
    commands.append(["report", *(file.name for file in files), "-o", "report.html"])
    return [shlex.join(["pageahead", *words]) for words in commands]
