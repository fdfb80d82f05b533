"""A process of its own for one request: ``python -m pageahead.experiment.worker FD REQUEST``.

Answers go as JSON lines to the file descriptor FD, so that whatever else prints to the standard
streams (bitsandbytes does, and ends the process on a CUDA error) cannot get between them.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TextIO

from pageahead.experiment.arms import RouteError
from pageahead.experiment.environment import describe
from pageahead.experiment.identity import IdentityError, identify, scrub
from pageahead.experiment.link import measure_link
from pageahead.experiment.measure import ManagedMemoryError, measure_cell
from pageahead.experiment.messages import (
    Answer,
    CellRequest,
    Failure,
    MeasureRequest,
    PeakRequest,
    ProbeRequest,
    ProfileRequest,
    Progress,
    Reply,
    TrainingRequest,
    requests,
)
from pageahead.experiment.peak import measure_peak
from pageahead.experiment.profile.collector import ProfileError
from pageahead.experiment.profile.measure import measure_profile
from pageahead.experiment.training.measure import measure_training
from pageahead.experiment.training.planning import DoesNotFitError

__all__ = ["main"]

#: Errors whose message is all that there is to say.
SPEAKING = (DoesNotFitError, IdentityError, ManagedMemoryError, ProfileError, RouteError)


def main(arguments: list[str]) -> int:
    """Answer one request; returns the exit status."""
    descriptor, text = arguments
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as channel:
        try:
            _send(channel, _answer(requests.validate_json(text), channel))
        except Exception as error:
            _send(channel, Failure(reason=scrub(_reason(error))))
            return 1
    return 0


def _answer(request: ProbeRequest | MeasureRequest, channel: TextIO) -> Answer:
    def report(phase: str, steps: int) -> None:
        _send(channel, Progress(phase=phase, steps=steps))

    if isinstance(request, CellRequest):
        return measure_cell(request, report)
    if isinstance(request, PeakRequest):
        return measure_peak(request, report)
    if isinstance(request, ProfileRequest):
        return measure_profile(request, report)
    if isinstance(request, TrainingRequest):
        return measure_training(request, report)
    identity = identify(request.device)
    link = measure_link(identity.device) if identity.type == "cuda" else None
    return describe(identity, run=request.run, argv=request.argv, link=link)


def _reason(error: Exception) -> str:
    """One line; where the error is not ours and speaks for itself, with where it was raised."""
    if isinstance(error, SPEAKING):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename}:{place.lineno}"
    return f"{type(error).__name__} in {where}: {error}"


def _send(channel: TextIO, reply: Reply) -> None:
    channel.write(reply.model_dump_json() + "\n")
    channel.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
