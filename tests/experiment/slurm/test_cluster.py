"""Against a real Slurm of one node, which these tests start on loopback and end.

Jobs take tens of seconds, most of it imports: those that need nothing from each other are submitted
together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from pageahead import cli
from pageahead.experiment.evidence import CellRecord, Environment
from pageahead.experiment.gate.reading import read_one
from pageahead.experiment.slurm import records
from pageahead.experiment.slurm.records import EndedRecord, RefusedRecord, SubmittedRecord
from tests.experiment.slurm.cluster import Cluster, NoSlurmError, running
from tests.experiment.support import read
from tests.processes import environment

pytestmark = pytest.mark.timeout(600)

REQUIRED = "PAGEAHEAD_TEST_SLURM"
"""Set to ``required``: without a Slurm these tests fail instead of being skipped."""
SCRIPTS = Path(__file__).parents[3] / "slurm"
#: The smallest cells there are, on the CPU.
BENCH = ("bench", "--preset", "quick", "--strategy", "streamed", "--device", "cpu")
SMALL = (*BENCH, "--select", "adamw8/mixed")
TWO = (*BENCH, "--select", "adamw8")
ENOUGH_SECONDS = 240.0


@dataclass
class Site:
    """A Slurm, and folders for its jobs.

    Attributes:
        cluster: the Slurm.
        path: where the folders are.
    """

    cluster: Cluster
    path: Path

    def pageahead(self, *words: object) -> Result:
        """Run the command as users of the cluster do."""
        return CliRunner().invoke(
            cli.app, [str(word) for word in words], env=environment(**self.cluster.environment)
        )

    def slurm(self, command: str, folder: str, *words: object) -> Result:
        return self.pageahead("slurm", command, *words, self.path / folder)

    def submit(self, folder: str, *words: object) -> Result:
        return self.pageahead("slurm", "submit", "--folder", self.path / folder, *words)

    def sbatch(self, script: str, folder: str, *options: str, **variables: str) -> str:
        """Submit one of the scripts as their first lines say; the job's id."""
        given = {"FOLDER": str(self.path / folder), "PYTHON": sys.executable, **variables}
        done = subprocess.run(
            ["sbatch", "--parsable", *options, SCRIPTS / script],
            capture_output=True,
            text=True,
            cwd=self.path,
            env=environment(**self.cluster.environment, **given),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def collected(self, folder: str) -> tuple[int, dict[str, EndedRecord], str]:
        """Wait for the jobs of a folder: exit status, the last end of each kind, what was said."""
        done = self.slurm("collect", folder, "--wait")
        found = self.jobs(folder, EndedRecord)
        return done.exit_code, {one.device_kind: one for one in found}, done.output

    def jobs(self, folder: str, kind: type) -> list:
        written, problems = records.read(self.path / folder / "jobs.jsonl")
        assert problems == []
        return [record for record in written if isinstance(record, kind)]

    def cells(self, folder: str, kind: str) -> list[str]:
        """The names of the cells in the evidence of a kind of device; none if there is no file."""
        path = self.path / folder / f"{kind}-bench.jsonl"
        if not path.exists():
            return []
        whole, _ = read_one(path)
        return [record.cell for record in whole if isinstance(record, CellRecord)]


def until(done: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + ENOUGH_SECONDS
    while not done():
        assert time.monotonic() < give_up, f"{what}: not within {ENOUGH_SECONDS:g} s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    """With the jobs submitted that several tests, or none but one, wait for."""
    try:
        with running() as cluster:
            found = Site(cluster, tmp_path_factory.mktemp("site"))
            # Its minute passes while the others run.
            found.submit("late", "-k", "cpu", "--time", "1", "--setup", "sleep 600", *SMALL)
            yield found
    except NoSlurmError as error:
        if os.environ.get(REQUIRED) == "required":
            raise
        pytest.skip(f"no Slurm here: {error}")


@pytest.fixture(scope="module")
def first(site: Site) -> Site:
    """One job that goes well, one on another device than expected, one that Slurm refuses."""
    kinds = ("-k", "cpu", "-k", "h200:--gres=gpu:h200:1 -p short", "-k", "b300:-p nowhere")
    done = site.submit("first", *kinds, "--time=5", *SMALL)
    assert done.exit_code == 2, done.stderr
    assert "b300: Slurm did not take it" in done.stderr
    assert site.slurm("status", "first").exit_code == 0
    return site


def test_a_job_leaves_evidence_and_says_where_it_came_from(first: Site) -> None:
    status, ended, said = first.collected("first")
    assert status == 1  # not all went well
    job = ended["cpu"]
    assert (job.outcome, job.state, job.exit_code, job.exit_status) == (
        "done",
        "COMPLETED",
        "0:0",
        0,
    )
    assert (job.node, job.measured) == ("node1", 1)
    assert job.submitted <= job.started < job.ended
    assert job.logs == [f"logs/{job.job}_0_log.out", f"logs/{job.job}_0_log.err"]
    assert "adamw8" in (first.path / "first" / job.logs[0]).read_text()
    (measured_in, cell) = read(first.path / "first" / job.evidence)
    assert isinstance(measured_in, Environment)
    assert isinstance(cell, CellRecord)
    assert measured_in.slurm_job == job.job
    assert cell.cell == "adamw8/mixed"
    assert job.environment.source_sha256 == measured_in.source_sha256
    assert measured_in.argv[-2:] == ["--out", "cpu-bench.jsonl"]  # no folder of this machine
    assert "job " + job.job in said


def test_evidence_is_what_the_gate_reads(first: Site) -> None:
    first.collected("first")
    done = first.pageahead("gate", first.path / "first" / "cpu-bench.jsonl")
    assert done.exit_code == 2
    assert "measured, but no part of the gate: adamw8/mixed" in " ".join(done.stdout.split())


def test_another_device_is_a_failed_set_up_and_no_evidence(first: Site) -> None:
    job = first.collected("first")[1]["h200"]
    assert (job.outcome, job.state, job.exit_code) == ("setup_failed", "FAILED", "2:0")
    assert job.reason == "device kind h200: expected h200, but the device here is CPU"
    assert (job.measured, job.environment) == (0, None)
    assert not (first.path / "first" / job.evidence).exists()


def test_a_job_that_slurm_refuses_is_a_failed_set_up(first: Site) -> None:
    (refused,) = first.jobs("first", RefusedRecord)
    assert refused.device_kind == "b300"
    assert "invalid partition" in refused.reason
    assert "setup failed" in first.collected("first")[2]


def test_a_dry_run_prints_what_is_submitted(first: Site) -> None:
    words = ("-k", "h200:--gres=gpu:h200:1 -p short", "--time=5", "--dry-run", *SMALL)
    printed = first.submit("first", *words).stdout
    submitted = next(
        one for one in first.jobs("first", SubmittedRecord) if one.device_kind == "h200"
    )
    script = first.path / "first" / "logs" / f"{submitted.job}_submission.sh"
    assert script.read_text().strip() == printed.split("\n", 1)[1].strip()


def test_submitting_again_submits_what_is_missing(first: Site) -> None:
    first.collected("first")
    kinds = ("-k", "cpu", "-k", "h200=CPU:--gres=gpu:h200:1 -c 3")
    done = first.submit("first", *kinds, "--time=5", *SMALL)
    assert done.exit_code == 0, done.output
    assert "did all of this, with the same code" in done.stdout
    submitted = first.jobs("first", SubmittedRecord)
    assert [one.device_kind for one in submitted] == ["cpu", "h200", "h200"]
    assert "CPUs/Task=3" in first.cluster.ask("scontrol", "show", "job", submitted[-1].job)
    assert first.slurm("cancel", "first").stdout == f"cancelled: {submitted[-1].job}\n"


@pytest.fixture(scope="module")
def stopped(site: Site) -> Site:
    """Two jobs, of which one is told that its time is up, one is cancelled after a cell."""
    kinds = ("-k", "cancelled=CPU", "-k", "warned=CPU")
    assert site.submit("stopped", *kinds, "--time=9", *TWO).exit_code == 0
    jobs = {one.device_kind: one.job for one in site.jobs("stopped", SubmittedRecord)}
    refused = site.submit("stopped", "-k", "cancelled=CPU", *TWO)
    assert refused.exit_code == 2
    assert f"because job {jobs['cancelled']} has not ended" in refused.stderr
    journal = site.path / "stopped" / "logs" / f"{jobs['warned']}_journal.jsonl"
    until(lambda: len(records.read(journal)[0]) == 2, "the command of the job that is warned")
    site.cluster.ask("scancel", "--signal=USR2", jobs["warned"])
    until(lambda: site.cells("stopped", "cancelled"), "a cell of the job that is cancelled")
    done = site.slurm("cancel", "stopped", "-k", "cancelled")
    assert done.stdout == f"cancelled: {jobs['cancelled']}\n"
    return site


def test_a_cancelled_job_is_told_with_what_it_left(stopped: Site) -> None:
    status, ended, said = stopped.collected("stopped")
    job = ended["cancelled"]
    assert status == 1
    assert (job.outcome, job.state, job.exit_status) == ("cancelled", "CANCELLED", None)
    assert job.reason == "it left 1 measurement in cancelled-bench.jsonl"
    assert job.measured == 1
    assert "Once the reason is gone, submit the same again" in said
    assert stopped.pageahead("gate", stopped.path / "stopped" / job.evidence).exit_code == 2


def test_a_job_whose_time_is_nearly_up_ends_its_command(stopped: Site) -> None:
    job = stopped.collected("stopped")[1]["warned"]
    assert (job.outcome, job.measured) == ("timed_out", 0)
    processes = [one for one in psutil.process_iter(["cmdline"]) if _of(one, stopped.path)]
    assert processes == []


def _of(process: psutil.Process, path: Path) -> bool:
    return any(str(path / "stopped") in word for word in process.info["cmdline"] or [])


def test_a_stopped_job_is_gone_on_with(stopped: Site) -> None:
    before = stopped.collected("stopped")[1]["cancelled"]
    done = stopped.submit("stopped", "-k", "cancelled=CPU", "--time=9", "--wait", *TWO)
    job = stopped.jobs("stopped", EndedRecord)[-1]
    assert done.exit_code == 1  # the one that was warned has not been submitted again
    assert job.job != before.job
    assert (job.outcome, job.measured) == ("done", 1)
    assert sorted(stopped.cells("stopped", "cancelled")) == ["adamw8/8x1Mi", "adamw8/mixed"]
    said = (stopped.path / "stopped" / job.logs[1]).read_text()
    assert "1 measurements are in" in said


@pytest.mark.parametrize(
    ("options", "exit_code", "reason"),
    [
        (("--setup", "exit 3"), "3:0", "ended before the command began (Slurm says FAILED"),
        (("--python", "/nowhere/python"), None, "No such file or directory"),
    ],
)
def test_a_job_that_does_not_get_as_far_as_python(
    site: Site, tmp_path, options, exit_code, reason
) -> None:
    folder = str(tmp_path / "runs")
    done = site.submit(folder, "-k", "cpu", "--time=5", *options, "--wait", *SMALL)
    assert done.exit_code == 1, done.stderr
    (job,) = site.jobs(folder, EndedRecord)
    assert (job.outcome, job.measured, job.state) == ("setup_failed", 0, "FAILED")
    assert exit_code in (None, job.exit_code)
    assert reason in job.reason


@pytest.fixture(scope="module")
def scripts(site: Site) -> Site:
    """One job of each script, the gate's after the others."""
    options = ("--time=5",)
    small = {"KIND": "cpu", "DEVICE": "cpu"}
    bench = {"PRESET": "quick", "SELECT": "adamw8/mixed"}
    jobs = [site.sbatch("bench.sh", "plain", *options, **small, **bench)]
    select = "adam/8/float16/streamed/heterogeneous"
    jobs.append(site.sbatch("verify.sh", "plain", *options, **small, SELECT=select))
    site.sbatch("gate.sh", "plain", f"--dependency=afterany:{':'.join(jobs)}", **small)
    wrong = [
        site.sbatch("bench.sh", "wrong", *options, KIND="h200", **bench),
        site.sbatch("bench.sh", "wrong", *options, KIND="b300", SETUP="/nowhere/file", **bench),
    ]
    for folder, ids in (("plain", jobs), ("wrong", wrong)):
        logs = site.path / folder / "logs"
        for job in ids:
            until((logs / f"{job}_journal.jsonl").exists, "the start of a job")
    return site


def test_scripts_for_sbatch_leave_the_same(scripts: Site) -> None:
    status, _, said = scripts.collected("plain")
    assert status == 0, said
    bench, verify = sorted(scripts.jobs("plain", EndedRecord), key=lambda one: one.evidence)
    assert (bench.outcome, bench.evidence, bench.measured) == ("done", "cpu-bench.jsonl", 1)
    assert (verify.outcome, verify.evidence) == ("done", "cpu-verify.jsonl")
    assert verify.measured > 0
    assert bench.logs == [f"logs/{bench.job}_0_log.out", f"logs/{bench.job}_0_log.err"]
    assert "Next: pageahead gate plain/cpu-bench.jsonl plain/cpu-verify.jsonl" in said
    verdict = scripts.path / "plain" / "cpu-gate.txt"
    until(lambda: verdict.exists() and "adamw8/mixed" in verdict.read_text(), "the gate's verdict")
    assert "INCOMPLETE" in verdict.read_text()


def test_scripts_record_failed_set_ups(scripts: Site) -> None:
    status, ended, _ = scripts.collected("wrong")
    assert status == 1
    assert {one.outcome for one in ended.values()} == {"setup_failed"}
    assert "expected h200, but the device here is CPU" in ended["h200"].reason
    assert "file: No such file" in ended["b300"].reason
    assert "/nowhere" not in ended["b300"].reason  # no machine's folders
    assert list((scripts.path / "wrong").glob("*-bench.jsonl")) == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_are_clean() -> None:
    subprocess.run(["shellcheck", *SCRIPTS.glob("*.sh")], check=True)


def test_a_job_that_takes_too_long_is_told(site: Site) -> None:
    job = site.collected("late")[1]["cpu"]
    assert (job.outcome, job.state) == ("timed_out", "TIMEOUT")
    assert job.reason == "it measured nothing new"


def test_nothing_is_left_of_a_cluster() -> None:
    """Also of a job that does not want to end."""
    try:
        with running() as cluster:
            stubborn = "trap '' TERM; echo started; sleep 600"
            cluster.ask("sbatch", f"--output={cluster.folder}/said", "--wrap", stubborn)
            until((cluster.folder / "said").exists, "the job's start")
            assert _belonging(cluster.folder)
    except NoSlurmError as error:
        pytest.skip(f"no Slurm here: {error}")
    assert _belonging(cluster.folder) == []
    assert not cluster.folder.exists()


def _belonging(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_CONF", "").startswith(str(folder)):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            pass
    return found
