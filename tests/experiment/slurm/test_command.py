"""The command line and what runs in a job, without Slurm."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pageahead import cli
from pageahead.experiment import runner
from pageahead.experiment.environment import PACKAGE, source_sha256
from pageahead.experiment.slurm import job, records, states, submitting
from pageahead.experiment.slurm.folder import Folder, Order
from pageahead.experiment.slurm.records import (
    CheckedRecord,
    FinishedRecord,
    SetupFailedRecord,
    StartedRecord,
    SubmittedRecord,
)
from pageahead.experiment.slurm.states import SlurmError, State
from tests.experiment.support import environment

POPEN = subprocess.Popen
ROOT = Path(__file__).parents[3]
ABOUT = {
    "time": "2026-11-30T01:07:00+00:00",
    "device_kind": "cpu",
    "expected": "cpu",
    "command": ["bench", "--preset", "quick"],
    "evidence": "cpu-bench.jsonl",
}


def run(*words: object):
    return CliRunner().invoke(cli.app, ["slurm", *map(str, words)])


def said(result) -> str:
    """Without the frame and the line breaks of an error."""
    return " ".join(result.output.replace("│", "").split())


@pytest.fixture
def taken(monkeypatch):
    """The jobs that are submitted, instead of submitting them; Slurm knows of no others."""
    seen = []

    def submit(request):
        seen.append(request)
        return SubmittedRecord(job="7", sbatch={}, source_sha256="0" * 64, **ABOUT)

    monkeypatch.setattr(submitting, "submit", submit)
    monkeypatch.setattr(states, "ask", lambda jobs: {})
    return seen


def test_a_dry_run_prints_scripts_and_writes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no Slurm here
    words = ["submit", "-f", tmp_path / "runs", "-k", "h200:--gres=gpu:h200:1 -p hopper -t 30"]
    words += ["-k", "b300=B300 SXM6", "--partition", "all", "-A", "me", "--sbatch", "--mem=64G"]
    words += ["--setup", "module load cuda", "--python", "python3.12", "--dry-run"]
    result = run(*words, "bench", "--preset", "matrix", "--strategy", "streamed")
    assert result.exit_code == 0
    h200, b300 = result.stdout.split("# b300: evidence goes to b300-bench.jsonl")
    assert "# h200: evidence goes to h200-bench.jsonl" in h200
    for line in (
        "#SBATCH --gres=gpu:h200:1",
        "#SBATCH --partition=hopper",
        "#SBATCH --time=30",
        "#SBATCH --account=me",
        "#SBATCH --mem=64G",
        "#SBATCH --job-name=pageahead-h200-bench",
        "module load cuda",
        f"python3.12 -u -m submitit.core._submit {tmp_path}/runs/logs",
    ):
        assert line in h200
    assert "#SBATCH --partition=all" in b300
    assert "#SBATCH --time=120" in b300
    assert "gres" not in b300
    assert "wckey" not in result.stdout
    assert not (tmp_path / "runs").exists()


def test_the_docs_and_the_scripts_gate_what_their_jobs_leave() -> None:
    page = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    block = re.search(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL).group(1)
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    left = set()
    for words in commands:
        if words[:3] == ["pageahead", "slurm", "submit"]:
            result = run("submit", "--dry-run", *words[3:])
            assert result.exit_code == 0, result.output
            left |= set(re.findall(r"evidence goes to (\S+)", result.output))
    (gated,) = [words[2:] for words in commands if words[:2] == ["pageahead", "gate"]]
    assert {Path(one).name for one in gated} == {"h200-bench.jsonl", "h200-verify.jsonl"} <= left

    scripts = {name: (ROOT / "slurm" / f"{name}.sh").read_text() for name in ("bench", "verify")}
    gate = (ROOT / "slurm" / "gate.sh").read_text(encoding="utf-8")
    assert re.findall(r"\$FOLDER/\$KIND-(\w+)\.jsonl", gate) == ["bench", "verify"]
    for name, script in scripts.items():
        assert f'"evidence":"%s-{name}.jsonl"' in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-k cpu bench --preset matrx", "'matrx'"),
        ("-k cpu bench --nonsense", "--nonsense"),
        ("-k cpu bench --out x.jsonl", "evidence goes to the folder"),
        ("-k cpu gate x.jsonl", "a job can run bench, verify, profile, doctor"),
        ("-k cpu -k cpu=CPU bench", "one kind is given twice"),
        ("-k cpu --time soon bench", "'soon' is no time limit"),
        ("-k cpu:--array=1-2 bench", "--array is set by"),
        ("-k a/b bench", "does not begin with a name"),
        ("-k cpu:-t0 bench", "a time limit of 0"),
        ("bench", "--device-kind"),
    ],
)
def test_mistakes_are_found_before_anything_is_submitted(taken, tmp_path, words, message) -> None:
    result = run("submit", "-f", tmp_path, *words.split())
    assert result.exit_code == 2
    assert message in said(result)
    assert taken == []


def test_a_folder_into_which_slurm_would_read_more(taken, tmp_path) -> None:
    result = run("submit", "-f", tmp_path / "50%j", "-k", "cpu", "bench")
    assert (result.exit_code, taken) == (2, [])
    assert "'%'" in said(result)


def test_without_submitit_it_says_what_to_install(taken, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    result = run("submit", "-f", tmp_path, "-k", "cpu", "bench")
    assert result.exit_code == 2
    assert "needs submitit: pip install 'pageahead[slurm]'" in result.output


def test_without_slurm_it_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("submit", "-f", tmp_path, "-k", "cpu", "bench")
    assert result.exit_code == 2
    assert 'Could not detect "srun"' in result.output


@pytest.mark.parametrize(("given", "taken_over"), [({"SLURM_CPUS_PER_TASK": "3"}, "3"), ({}, "")])
def test_the_command_gets_all_cpus_of_its_job(tmp_path, given, taken_over) -> None:
    """srun does not take them by itself."""
    script = run("submit", "-f", tmp_path, "-k", "cpu", "--dry-run", "bench").stdout
    (line,) = [one for one in script.splitlines() if "SRUN_CPUS_PER_TASK" in one]
    shell = ["bash", "-euc", f'{line}; echo "${{SRUN_CPUS_PER_TASK:-}}"']
    done = subprocess.run(shell, env=given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == taken_over


def test_what_is_submitted_is_what_was_asked_for(taken, tmp_path) -> None:
    result = run("submit", "-f", tmp_path, "-k", "cpu", "bench", "--preset", "quick")
    assert result.exit_code == 0
    assert "cpu: job 7, evidence cpu-bench.jsonl" in result.output
    (request,) = taken
    assert request.order == Order(tmp_path, "cpu", "cpu", ("bench", "--preset", "quick"))
    assert request.sbatch == {"time": "2:00:00"}


def _told(folder: Path, status: int = 0, digest: str | None = None) -> None:
    """A job that has done `bench --preset quick` on the CPU."""
    records.append(
        Folder(folder).jobs,
        SubmittedRecord(job="3", sbatch={}, source_sha256="0" * 64, **ABOUT),
    )
    here = environment(device="cpu", source_sha256=digest or source_sha256(PACKAGE))
    for record in (
        StartedRecord(job="3", node="node1", **ABOUT),
        CheckedRecord(time=ABOUT["time"], environment=here),
        FinishedRecord(time=ABOUT["time"], exit_status=status, signal=None, stopped=None),
    ):
        records.append(Folder(folder).journal("3"), record)


@pytest.mark.parametrize(
    ("words", "changed", "submitted"),
    [
        ("bench --preset quick", {}, False),
        ("--again bench --preset quick", {}, True),
        ("bench --preset source", {}, True),
        ("bench --preset quick", {"status": 1}, True),
        ("bench --preset quick", {"digest": "1" * 64}, True),
    ],
)
def test_what_is_done_is_not_submitted_again(taken, tmp_path, words, changed, submitted) -> None:
    _told(tmp_path, **changed)
    result = run("submit", "-f", tmp_path, "-k", "cpu", *words.split())
    assert result.exit_code == 0
    assert len(taken) == submitted
    assert submitted or "job 3 did all of this, with the same code" in result.output


def test_two_jobs_do_not_write_to_one_file_at_once(taken, tmp_path, monkeypatch) -> None:
    _told(tmp_path)
    monkeypatch.setattr(states, "ask", lambda jobs: {"3": State("RUNNING")})
    words = ("bench", "--preset", "source")
    result = run("submit", "-f", tmp_path, "-k", "cpu", "-k", "h200", *words)
    assert result.exit_code == 2
    assert "cpu: not submitted, because job 3 has not ended" in result.output
    assert [request.order.kind for request in taken] == ["h200"]


def test_an_empty_folder_has_nothing_to_collect(tmp_path) -> None:
    result = run("collect", tmp_path)
    assert result.exit_code == 2
    assert "no jobs in" in result.output


def test_waiting_outlasts_a_controller_that_restarts(tmp_path, monkeypatch) -> None:
    _told(tmp_path)
    answers = [SlurmError("it restarts"), {"3": State("RUNNING")}, {"3": State("COMPLETED")}]

    def ask(jobs):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(states, "ask", ask)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    result = run("collect", "--wait", tmp_path)
    assert result.exit_code == 0
    assert "Slurm cannot be asked now: it restarts" in result.output
    assert "job 3: running" in result.output
    assert "done" in result.output


def test_status_shows_what_is_known_without_slurm(tmp_path, monkeypatch) -> None:
    _told(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    result = run("status", tmp_path)
    assert result.exit_code == 0
    assert "Slurm cannot be asked" in result.output
    assert "unknown" in result.output
    assert run("collect", tmp_path).exit_code == 2
    assert run("cancel", tmp_path).exit_code == 2


@pytest.mark.parametrize("command", ["status", "collect", "cancel"])
def test_a_folder_without_jobs_is_said_and_ends_with_2(command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(states, "ask", lambda jobs: pytest.fail("Slurm was asked"))
    result = run(command, tmp_path)
    assert result.exit_code == 2
    assert f"Error: {tmp_path}: no jobs in it; name the --folder" in result.output
    result = run(command, tmp_path / "none")
    assert result.exit_code == 2
    assert f"Error: {tmp_path / 'none'}: no such folder" in result.output
    assert not (tmp_path / "none").exists()


# What runs in a job.


@pytest.fixture
def in_job(monkeypatch, tmp_path):
    """Run an order as job 5 does; the device is played."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setattr(runner, "ask", lambda request, progress: environment())

    def play(*words: str, expected: str = "a gpu"):
        try:
            job.run(Order(tmp_path, "any", expected, words))
            status: object = 0
        except SystemExit as ended:
            status = ended.code
        return status, records.read(tmp_path / "logs" / "5_journal.jsonl")[0]

    return play


def _program(monkeypatch, text: str) -> None:
    """Python text in place of `pageahead`."""

    def start(words, **options):
        return POPEN([sys.executable, "-c", text, *words[3:]], **options)

    monkeypatch.setattr(job.subprocess, "Popen", start)


def test_a_job_keeps_a_journal(in_job, monkeypatch, tmp_path) -> None:
    _program(monkeypatch, "import sys; open(sys.argv[-1], 'a').write(' '.join(sys.argv[1:-1]))")
    status, journal = in_job("bench", "--preset", "quick")
    assert status == 0
    assert [record.kind for record in journal] == ["started", "checked", "finished"]
    assert journal[1].environment == environment()
    assert (tmp_path / "any-bench.jsonl").read_text() == "bench --preset quick --out"


def test_a_job_ends_as_its_command_does(in_job, monkeypatch) -> None:
    _program(monkeypatch, "raise SystemExit(1)")
    status, journal = in_job("bench")
    assert (status, journal[-1].exit_status) == (1, 1)
    _program(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    status, journal = in_job("bench")
    assert (status, journal[-1].exit_status, journal[-1].signal) == (137, None, "SIGKILL")


def test_another_device_ends_the_job_before_the_command(in_job, monkeypatch, tmp_path) -> None:
    _program(monkeypatch, "raise AssertionError")
    status, journal = in_job("bench", expected="H200")
    assert status == 2
    assert journal[-1] == SetupFailedRecord(
        time=journal[-1].time, reason="device kind any: expected H200, but the device here is A GPU"
    )
    assert not (tmp_path / "any-bench.jsonl").exists()


def test_a_device_that_cannot_be_looked_at_does_too(in_job, monkeypatch) -> None:
    def fail(request, progress):
        raise runner.WorkerError("--device cuda: no GPU")

    monkeypatch.setattr(runner, "ask", fail)
    status, journal = in_job("bench")
    assert (status, journal[-1].reason) == (2, "--device cuda: no GPU")


def test_what_is_printed_is_evidence_of_a_command_without_out(
    in_job, monkeypatch, tmp_path
) -> None:
    _program(monkeypatch, "import sys; print(sys.argv[1:])")
    assert in_job("doctor")[0] == 0
    assert (tmp_path / "any-doctor.json").read_text() == "['doctor', '--json']\n"
    _program(monkeypatch, "raise SystemExit(2)")
    assert in_job("doctor")[0] == 2
    assert not (tmp_path / "any-doctor.json").exists()


@pytest.fixture
def interrupted(monkeypatch):
    """A command that sleeps, and a signal to this process a second after its start."""
    before = signal.getsignal(signal.SIGUSR2)

    def by(number: signal.Signals) -> None:
        def start(words, **options):
            process = POPEN([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
            return process

        monkeypatch.setattr(job.subprocess, "Popen", start)

    yield by
    signal.signal(signal.SIGUSR2, before)


def test_a_cancelled_job_ends_its_command_and_says_so(in_job, interrupted) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    interrupted(signal.SIGTERM)
    status, journal = in_job("bench")
    assert status == 143
    assert (journal[-1].signal, journal[-1].stopped) == ("SIGTERM", "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_job_whose_time_is_up_ends_its_command_and_says_so(in_job, interrupted, tmp_path) -> None:
    def as_submitit_does(number: int, frame: object) -> None:
        raise RuntimeError("Job not requeued because: timed-out and not checkpointable.")

    signal.signal(signal.SIGUSR2, as_submitit_does)
    interrupted(signal.SIGUSR2)
    with pytest.raises(RuntimeError, match="timed-out"):
        in_job("bench")
    last = records.read(tmp_path / "logs" / "5_journal.jsonl")[0][-1]
    assert (last.exit_status, "timed-out" in last.stopped) == (None, True)


def test_the_signal_of_submitit_does_not_end_the_command_by_itself(in_job, monkeypatch) -> None:
    handler = signal.getsignal(signal.SIGUSR2)
    _program(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGUSR2)")
    assert in_job("bench")[0] == 0
    assert signal.getsignal(signal.SIGUSR2) == handler


def test_a_job_that_is_stopped_as_its_command_ends_does_not_take_that_for_success(
    in_job, monkeypatch, tmp_path
) -> None:
    """A wait that is interrupted after the fact loses the status, and the next one says 0."""

    class Interrupted(POPEN):
        def wait(self, timeout=None):
            if timeout is None:
                os.waitpid(self.pid, 0)
                raise RuntimeError("Job not requeued because: timed-out")
            return super().wait(timeout)

    words = [sys.executable, "-c", "raise SystemExit(1)"]
    monkeypatch.setattr(job.subprocess, "Popen", lambda _, **more: Interrupted(words, **more))
    with pytest.raises(RuntimeError, match="timed-out"):
        in_job("bench")
    last = records.read(tmp_path / "logs" / "5_journal.jsonl")[0][-1]
    assert (last.exit_status, last.stopped) == (None, "Job not requeued because: timed-out")


def test_the_command_of_the_shell_scripts(in_job, monkeypatch, tmp_path) -> None:
    _program(monkeypatch, "")
    words = ["job", "-f", tmp_path, "-k", "any=A GPU", "bench", "--preset", "quick"]
    assert run(*words).exit_code == 0
    (started, *_) = records.read(tmp_path / "logs" / "5_journal.jsonl")[0]
    assert (started.device_kind, started.expected) == ("any", "A GPU")
    assert started.command == ["bench", "--preset", "quick"]
    for wrong in ("any:-p x", "a/b"):
        assert run("job", "-f", tmp_path, "-k", wrong, "bench").exit_code == 2
