"""A real Slurm cluster of three nodes on this machine, from Debian's packages: unpacked, not installed, no systemd."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2", "libhwloc15"),
    *("liblua5.1-0", "libpmix2"),
)
NODES = ("n1", "n2", "n3")
PATIENCE_S = 120.0
# Ports that nothing else here uses; KillWait is how long a cancelled job has until it is killed.
_CONF = """
ClusterName=three
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
PluginDir={library}/slurm-wlm
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/backfill
ReturnToService=2
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=30
PartitionName=debug Nodes=n1,n2,n3 Default=YES MaxTime=10 State=UP
PartitionName=closed Nodes=n1 MaxTime=10 State=INACTIVE
"""
_NODE = "NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=1 RealMemory=2000 State=UNKNOWN\n"


class CannotRun(Exception):
    """Why there is no cluster here."""


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """What the environment of Slurm's commands needs. Raises CannotRun where no cluster can run here."""
    root = _unpacked(folder)
    library = next(root.glob("usr/lib/*-linux-gnu"))
    path = os.pathsep.join([str(root / "usr/bin"), str(root / "usr/sbin"), os.environ["PATH"]])
    libraries = os.pathsep.join([str(library), str(library / "slurm-wlm")])
    own = {"PATH": path, "LD_LIBRARY_PATH": libraries, "SLURM_MPI_TYPE": "none"}
    own["SLURM_CONF"] = str(folder / "slurm.conf")
    environment = {**os.environ, **own}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        _configure(folder, library)
        for command in _commands(folder, root):
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: _states(environment) == ["idle"] * len(NODES), folder)
        yield own
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        _end_left(folder)


def _unpacked(folder: Path) -> Path:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotRun("a Slurm cluster needs root and Debian's packages")
    packages, root = folder / "packages", folder / "root"
    packages.mkdir(parents=True)
    said = subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=packages, capture_output=True, text=True)
    if said.returncode:
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True)
        said = subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=packages, capture_output=True, text=True)
    if said.returncode:
        raise CannotRun(f"Debian's Slurm cannot be downloaded: {said.stderr.strip()[-200:]}")
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        link = root / "usr/sbin" / name
        if not link.exists():
            link.symlink_to(f"{name}-wlm")
    return root


def _configure(folder: Path, library: Path) -> None:
    for name in ("state", *NODES):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host, port = platform.node().partition(".")[0], 16000 + os.getpid() % 4000
    nodes = "".join(_NODE.format(name=name, host=host, port=port + 1 + i) for i, name in enumerate(NODES))
    text = _CONF.format(host=host, port=port, folder=folder, library=library)
    (folder / "slurm.conf").write_text(text.replace("PartitionName=debug", f"{nodes}PartitionName=debug"))


def _commands(folder: Path, root: Path) -> Iterator[list[str]]:
    files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    munge = [f"--socket={files['socket']}", f"--pid-file={files['pid']}", f"--log-file={files['log']}"]
    munge += [f"--key-file={folder / 'munge.key'}", f"--seed-file={files['seed']}"]
    yield ["munged", "--foreground", "--force", *munge]
    yield ["slurmctld", "-D"]
    for name in NODES:
        yield ["slurmd", "-D", "-N", name, "-d", str(root / "usr/sbin/slurmstepd")]


def _states(environment: dict[str, str]) -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    return said.stdout.split()


def _wait(until: object, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():  # type: ignore[operator]
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-300:]}" for log in folder.glob("*.log"))
            raise CannotRun(f"the cluster does not come up:\n{logs}")
        time.sleep(0.2)


def _end_left(folder: Path) -> None:
    """slurmstepd detaches itself."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if f"{folder}/".encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
