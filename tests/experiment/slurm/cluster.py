"""A Slurm of one node, on loopback, for as long as a test needs it.

Everything is in a temporary folder and on ports that were free: no file of the system's and no
service is touched, and several may run at once.
"""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

KEEPER = Path(__file__).with_name("keeper.py")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
START_SECONDS = 60.0

# No accounting, as in many small installations: pageahead must do without `sacct`. Nothing is
# confined (no cgroups), because a container may not. The node claims to have more CPUs than there
# may be, so that several jobs run at once, and a GPU that does not exist.
CONFIGURATION = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
KillWait=5
InactiveLimit=0
MinJobAge=3600
GresTypes=gpu
NodeName=DEFAULT CPUs=16 RealMemory=1024 Gres=gpu:h200:4 Features=big State=UNKNOWN
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1
PartitionName=all Nodes=node1 Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
PartitionName=short Nodes=node1 MaxTime=10 State=UP
"""


class NoSlurmError(RuntimeError):
    """Slurm cannot be started here; the message says why."""


@dataclass(frozen=True)
class Cluster:
    """A Slurm that runs.

    Attributes:
        folder: where all its files are.
        environment: what its client programs need.
    """

    folder: Path
    environment: dict[str, str]

    def ask(self, *command: str) -> str:
        """What a client program prints."""
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **self.environment}
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout


@contextmanager
def running() -> Iterator[Cluster]:
    """Start one; end it, its jobs included.

    Raises:
        NoSlurmError: it cannot be started.
    """
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        raise NoSlurmError(
            f"not installed: {', '.join(missing)} (Debian and Ubuntu: apt-get install slurm-wlm "
            f"munge)"
        )
    with ExitStack() as stack:
        # Not under pytest's folders, whose names are too long for a socket.
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        _configure(folder)
        environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        keeper = subprocess.Popen(
            [sys.executable, str(KEEPER), json.dumps(_commands(folder))],
            stdin=subprocess.PIPE,
            stdout=(folder / "output").open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        stack.callback(_end, keeper)
        cluster = Cluster(folder, environment)
        _wait(cluster)
        yield cluster


def _end(keeper: subprocess.Popen[bytes]) -> None:
    assert keeper.stdin is not None
    keeper.stdin.close()
    keeper.wait()


def _configure(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    controller_port, node_port = _free_ports(2)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            name=f"test{os.getpid()}",
            host=socket.gethostname().split(".")[0],
            controller_port=controller_port,
            node_port=node_port,
            user=getpass.getuser(),
            folder=folder,
        )
    )
    for number in range(4):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu Type=h200 File={folder}/gpu[0-3]\n")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def _commands(folder: Path) -> list[list[str]]:
    """In the foreground, all of them."""
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
    munged += [f"--socket={folder}/munge.socket", f"--log-file={folder}/munged.log"]
    munged += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"]
    return [munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", "node1"]]


def _wait(cluster: Cluster) -> None:
    """Until the node takes jobs."""
    give_up = time.monotonic() + START_SECONDS
    said = ""
    while time.monotonic() < give_up:
        try:
            said = cluster.ask("sinfo", "--noheader", "--format=%T")
        except RuntimeError as error:
            said = str(error)
        if "idle" in said:
            return
        time.sleep(0.2)
    logs = [
        f"{path.name}: {line}"
        for path in [*sorted(cluster.folder.glob("*.log")), cluster.folder / "output"]
        if path.exists()
        for line in path.read_text(errors="replace").splitlines()[-8:]
    ]
    raise NoSlurmError("\n".join([f"no node took jobs within {START_SECONDS:g} s: {said}", *logs]))
