"""Spreading requests over worker processes, and going on when one of them dies.

A thread per worker hands it one request after the other and passes on what it answers. Where a
worker dies or falls silent, the case it was at has failed; the cases behind it go to a new worker.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from pageahead.experiment.oracle.case import parse_case
from pageahead.experiment.oracle.messages import CheckRequest, Done, Request, ShrinkRequest
from pageahead.experiment.oracle.process import StoppedError, WorkerDiedError, WorkerProcess
from pageahead.experiment.oracle.records import CellRecord, FailureRecord
from pageahead.experiment.oracle.worker import answer, command_for

__all__ = ["ask_all", "ask_here"]

Answer = CellRecord | FailureRecord
Start = Callable[[threading.Event], WorkerProcess]


def ask_here(requests: Sequence[Request]) -> Iterator[Answer]:
    """Answer requests in this process, one after the other."""
    for request in requests:
        for reply in answer(request):
            if not isinstance(reply, Done):
                yield reply


def ask_all(
    requests: Sequence[Request], workers: int, *, start: Start = WorkerProcess
) -> Iterator[Answer]:
    """Yield the answers to all requests as they come, from several processes.

    A request whose worker died is answered all the same, by records that say so. Closing the
    iterator ends the workers.

    Args:
        requests: handed out in order.
        workers: how many processes at most.
        start: makes one.
    """
    waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Answer | BaseException | None] = queue.SimpleQueue()
    running = min(workers, len(requests))
    for request in [*requests, *[None] * running]:
        waiting.put(request)
    stop = threading.Event()

    def serve() -> None:
        try:
            for found in _served(waiting, stop, start):
                answers.put(found)
            answers.put(None)
        except StoppedError:
            pass
        except BaseException as error:  # to be raised where the answers are wanted
            answers.put(error)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(running)]
    for thread in threads:
        thread.start()
    try:
        while running:
            found = answers.get()
            if found is None:
                running -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _served(
    waiting: queue.SimpleQueue[Request | None], stop: threading.Event, start: Start
) -> Iterator[Answer]:
    """The answers to the requests that one worker, or its successors, came to take."""
    worker: WorkerProcess | None = None
    left: Request | None = None
    try:
        while (request := left or waiting.get()) is not None:
            left = None
            worker = worker or start(stop)
            given = 0
            try:
                for found in worker.ask(request):
                    given += 1
                    yield found
            except WorkerDiedError as died:
                worker.close()
                worker = None
                lost, left = _divided(request, given)
                yield from _failed(lost, str(died))
    finally:
        if worker is not None:
            worker.close()


def _divided(request: Request, given: int) -> tuple[Request, Request | None]:
    """What has failed of a request of which some cases were answered, and what may still be done.

    Without an answer to any, their reference may be what fails: not to be tried again for each.
    """
    if isinstance(request, ShrinkRequest) or not given:
        return request, None
    lost = request.model_copy(update={"cases": request.cases[given : given + 1]})
    behind = request.cases[given + 1 :]
    return lost, request.model_copy(update={"cases": behind}) if behind else None


def _failed(request: Request, reason: str) -> Iterator[Answer]:
    """Records that say why there are no others."""
    if isinstance(request, CheckRequest):
        for case in request.cases:
            yield _lost(request, case, reason)
    else:
        yield FailureRecord(
            run=request.run,
            case=request.case,
            smallest=request.case,
            result=request.result,
            problem=f"could not be made smaller: {reason}",
            difference=None,
            attempts=0,
            reproduced=True,
            command=command_for(request.case, request.device),
        )


def _lost(request: CheckRequest, text: str, reason: str) -> CellRecord:
    case = parse_case(text)
    return CellRecord(
        run=request.run,
        case=text,
        family=case.family,
        bits=case.bits,
        movement=str(case.movement),
        device=request.device,
        result="failed",
        problem=reason,
        steps=case.steps,
    )
