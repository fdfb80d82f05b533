"""A process that answers requests: ``python -m pageahead.experiment.oracle.worker FD``.

Requests come as JSON lines on the standard input; answers go to the file descriptor FD, so that
whatever else prints to the standard streams cannot get between them. bitsandbytes ends the process
on a CUDA error: who asked sees how far it got.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import TypeGuard

import torch

from pageahead.experiment.oracle.case import parse_case
from pageahead.experiment.oracle.check import check_group
from pageahead.experiment.oracle.messages import Done, Reply, Request, ShrinkRequest, requests
from pageahead.experiment.oracle.records import CellRecord, FailureRecord
from pageahead.experiment.oracle.shrink import shrink

__all__ = ["answer", "command_for", "main"]


def main(arguments: list[str]) -> int:
    """Answer requests until there are no more; returns the exit status."""
    # What was imported so far stays: the collector need not look at it after every cell.
    gc.freeze()
    with os.fdopen(int(arguments[0]), "w", encoding="utf-8") as channel:
        for line in sys.stdin:
            for reply in answer(requests.validate_json(line)):
                if _broken(reply):
                    # Every case after this one would fail, too: they are for another process.
                    print(reply.problem, file=sys.stderr)
                    return 1
                channel.write(reply.model_dump_json() + "\n")
                channel.flush()
    return 0


def answer(request: Request) -> Iterator[Reply]:
    """Do what is asked; the last reply is `Done`."""
    device = device_of(request.device)
    if isinstance(request, ShrinkRequest):
        yield _shrunk(request, device)
    else:
        cases = [parse_case(text) for text in request.cases]
        yield from check_group(cases, device, run=request.run, every_step=request.every_step)
    yield Done()


def _broken(reply: Reply) -> TypeGuard[CellRecord]:
    """Whether this process cannot use its GPU any more: an illegal access ends a CUDA context."""
    if not isinstance(reply, CellRecord) or reply.result != "failed" or reply.device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def device_of(kind: str) -> torch.device:
    """The device of this kind that this process uses."""
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def command_for(case: str, device: str) -> str:
    """A line for a shell that checks one case."""
    return f"pageahead verify --device {device} --case '{case}'"


def _shrunk(request: ShrinkRequest, device: torch.device) -> FailureRecord:
    found = shrink(parse_case(request.case), request.result, device)
    record: CellRecord | None = found.record
    return FailureRecord(
        run=request.run,
        case=request.case,
        smallest=str(found.case),
        result=request.result,
        problem=record.problem if record else None,
        difference=record.difference if record else None,
        attempts=found.attempts,
        reproduced=record is not None,
        command=command_for(str(found.case), request.device),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
