"""`pageahead doctor`: look, measure, advise, and show it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Literal

from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pageahead.doctor.advice import Choice, choices
from pageahead.doctor.findings import Finding, findings
from pageahead.doctor.speeds import Speeds, measure
from pageahead.experiment.environment import describe
from pageahead.experiment.evidence import Environment
from pageahead.experiment.identity import identify

__all__ = ["Diagnosis", "diagnose", "show"]

STYLES = {"good": "green", "info": "", "slow": "yellow", "bad": "bold red"}


class Diagnosis(BaseModel):
    """Everything that `pageahead doctor` found.

    Attributes:
        environment: versions, GPU and platform.
        parameters: of the model that `choices` are for.
        findings: what there is.
        speeds: what was measured; None without a GPU.
        choices: which settings follow; none without a GPU.
    """

    kind: Literal["doctor"] = "doctor"
    environment: Environment
    parameters: int
    findings: list[Finding]
    speeds: Speeds | None
    choices: list[Choice]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that does not work."""
        return all(finding.state != "bad" for finding in self.findings)


def diagnose(
    device: Literal["auto", "cpu", "cuda"], parameters: int, argv: Sequence[str]
) -> Diagnosis:
    """Look at this machine; on a GPU, measure it for a few seconds.

    Raises:
        IdentityError: there is no GPU although one was asked for, or bitsandbytes cannot use it.
    """
    identity = identify(device)
    run = datetime.now(timezone.utc).isoformat()
    found = findings(identity)
    speeds = measure(identity.device) if identity.type == "cuda" else None
    return Diagnosis(
        environment=describe(identity, run=run, argv=list(argv), link=None),
        parameters=parameters,
        findings=found,
        speeds=speeds,
        choices=[] if speeds is None else choices(identity.device, parameters, speeds),
    )


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print what was found, measured and advised."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for header in ("what", "found", "what to do"):
        table.add_column(header, overflow="fold")
    for one in diagnosis.findings:
        table.add_row(one.name, Text(one.value, STYLES[one.state]), one.advice)
    console.print(table)
    if diagnosis.speeds is None:
        console.print(
            f"Nothing was measured without a GPU: speeds, and the settings for "
            f"{diagnosis.parameters:,} parameters, are said on a machine that has one."
        )
        return
    console.print(_speeds(diagnosis.speeds))
    console.print(_choices(diagnosis.choices, diagnosis.parameters))


def _speeds(speeds: Speeds) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("measured")
    table.add_column("", justify="right")
    table.add_row("host to GPU, page-locked", f"{speeds.to_device:.1f} GB/s")
    table.add_row("GPU to host, page-locked", f"{speeds.to_host:.1f} GB/s")
    table.add_row("both at once, each way", f"{speeds.link.duplex_median:.1f} GB/s")
    if speeds.pageable is not None:
        table.add_row("host to GPU, pageable", f"{speeds.pageable:.1f} GB/s")
    table.add_row("GPU memory, read and written", f"{speeds.device_memory:,.0f} GB/s")
    for bits, elements in speeds.update_elements.items():
        table.add_row(f"AdamW's kernel, {bits}-bit state", f"{elements / 1e9:.1f} billion/s")
    return table


def _choices(chosen: Sequence[Choice], parameters: int) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for header in ("state", "setting", "here", f"why (AdamW, {parameters:,} parameters)"):
        table.add_column(header, overflow="fold")
    for one in chosen:
        table.add_row(f"{one.bits}-bit", one.setting, one.value, one.why)
    return table
