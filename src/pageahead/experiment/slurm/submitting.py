"""Handing jobs to Slurm, through submitit."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pageahead.experiment.environment import PACKAGE, source_sha256
from pageahead.experiment.slurm import job, records
from pageahead.experiment.slurm.asked import Kind, OptionError, merged, minutes
from pageahead.experiment.slurm.folder import Folder, Job, Order
from pageahead.experiment.slurm.records import RefusedRecord, SubmittedRecord
from pageahead.experiment.slurm.states import State

if TYPE_CHECKING:
    from submitit import SlurmExecutor

__all__ = ["MissingError", "Request", "done_already", "in_the_way", "script", "submit"]

NOT_INSTALLED = "`pageahead slurm submit` needs submitit: pip install 'pageahead[slurm]'"
#: srun has not taken the job's --cpus-per-task as its own since Slurm 22.05, and would leave the
#: command one CPU.
ALL_CPUS = '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
#: Before the time is up, so that the command can be stopped and the journal written. Slurm is
#: exact to a minute.
WARNING_SECONDS = 60


class MissingError(RuntimeError):
    """submitit is not installed, or there is no Slurm here."""


@dataclass(frozen=True)
class Request:
    """One job to submit.

    Attributes:
        order: what it does.
        sbatch: options of sbatch by their long names, a time limit among them.
        setup: shell commands that the job begins with.
        python: command that starts Python in the job; None for this Python.
    """

    order: Order
    sbatch: dict[str, str | bool]
    setup: Sequence[str] = ()
    python: str | None = None

    @classmethod
    def of(
        cls,
        kind: Kind,
        folder: Folder,
        command: Sequence[str],
        common: dict[str, str | bool],
        **more: Any,
    ) -> Request:
        """For one kind of device, whose options go before those that all jobs have in common."""
        order = Order(folder.path, kind.name, kind.expected, tuple(command))
        return cls(order, merged([common, kind.sbatch]), **more)


def script(request: Request) -> str:
    """What sbatch would be given. Slurm need not be there.

    Raises:
        MissingError, OptionError: as `submit`.
    """
    executor = _executor(request, dry=True)
    return executor._make_submission_file_text(executor._submitit_command_str, "dry-run")


def submit(request: Request) -> SubmittedRecord | RefusedRecord:
    """Submit one job; what became of it is in the folder, too.

    Raises:
        MissingError: submitit or Slurm is not there.
        OptionError: the time limit is none.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    folder = Folder(request.order.folder)
    executor = _executor(request, dry=False)
    about: dict[str, Any] = {
        "device_kind": request.order.kind,
        "expected": request.order.expected,
        "command": list(request.order.command),
        "evidence": request.order.evidence,
        "sbatch": request.sbatch,
    }
    record: SubmittedRecord | RefusedRecord
    try:
        # submitit prints what it then raises.
        with redirect_stderr(io.StringIO()):
            taken = executor.submit(job.run, request.order)
    except (FailedJobError, FailedSubmissionError) as error:
        reason = "; ".join(line.removeprefix("sbatch: ") for line in str(error).splitlines())
        record = RefusedRecord(time=records.now(), reason=reason, **about)
    else:
        record = SubmittedRecord(
            time=records.now(), job=taken.job_id, source_sha256=source_sha256(PACKAGE), **about
        )
    records.append(folder.jobs, record)
    return record


def in_the_way(order: Order, jobs: Sequence[Job], said: dict[str, State]) -> Job | None:
    """A job that has not ended and writes to the same evidence; two would mix their lines."""
    for one in jobs:
        state = said.get(one.id or "")
        if one.about.evidence == order.evidence and state is not None and not state.over:
            return one
    return None


def done_already(order: Order, jobs: Sequence[Job]) -> Job | None:
    """A job that has done just that with the same code, and all of it went well."""
    for one in reversed(jobs):
        good = one.finished is not None and one.finished.exit_status == 0
        if good and one.checked is not None and one.does(order):
            same = one.checked.environment.source_sha256 == source_sha256(PACKAGE)
            return one if same else None
    return None


def _executor(request: Request, *, dry: bool) -> SlurmExecutor:
    try:
        from submitit import SlurmExecutor
    except ImportError:
        raise MissingError(NOT_INSTALLED) from None

    class WithoutSlurm(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2

    options = dict(request.sbatch)
    limit = minutes(str(options.pop("time", "")))
    if "%" in str(request.order.folder):
        raise OptionError(f"{request.order.folder}: Slurm would read more into a '%'")
    make = WithoutSlurm if dry else SlurmExecutor
    try:
        # Timed out is timed out: it is up to the user to submit what is missing.
        executor = make(Folder(request.order.folder).logs, max_num_timeout=0, python=request.python)
    except RuntimeError as error:
        raise MissingError(str(error)) from None
    executor.update_parameters(
        job_name=f"pageahead-{request.order.kind}-{request.order.command[0]}",
        time=limit,
        signal_delay_s=min(WARNING_SECONDS, 60 * limit // 10),
        setup=[ALL_CPUS, *request.setup],
        wckey=None,  # submitit's default is a key that a site need not have
        additional_parameters=options,
    )
    return executor
