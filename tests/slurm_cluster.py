"""A SLURM cluster of two nodes on this machine, for as long as a test needs it: the real daemons."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

BINARIES = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
MAX_ARRAY = 2
_START_S = 20.0

_CONF = """
ClusterName=greenroom
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MessageTimeout=2
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
MaxArraySize={max_array}
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=brief Nodes=n1,n2 MaxTime=1 State=UP
"""


def why_not() -> str | None:
    """Return why no SLURM can be started here, or None."""
    missing = [name for name in BINARIES if shutil.which(name, path=_path()) is None]
    if missing:
        return f"SLURM is not installed here ({', '.join(missing)} not found)"
    return None if os.getuid() == 0 else "SLURM's daemons need root"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


class SlurmCluster:
    """One controller and two nodes, n1 and n2, of one CPU each; without accounting."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(256))
        key.chmod(0o600)
        conf = _CONF.format(
            host=socket.gethostname(), folder=folder, ports=free_ports(3), max_array=MAX_ARRAY
        )
        (folder / "slurm.conf").write_text(conf, encoding="utf-8")

    def start(self) -> None:
        """Start all daemons; TimeoutError if the nodes do not come up."""
        of = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
            "log-file": "munge.log",
        }
        files = [f"--{name}={self.folder / file}" for name, file in of.items()]
        self._start("munged", "munged", "--force", "--foreground", *files)
        self._wait_for("munge.socket", lambda: (self.folder / "munge.socket").exists())
        self.start_controller()
        for node in ("n1", "n2"):
            self.start_node(node)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until both nodes can take jobs."""
        states = ("sinfo", "-hN", "-pdebug", "-o%T")
        self._wait_for("two idle nodes", lambda: self.ask(*states) == "idle\nidle\n")

    def start_controller(self, *, forget: bool = False) -> None:
        """Start slurmctld; ``forget``: without any job that it had."""
        self._start("slurmctld", "slurmctld", "-D", "-c" if forget else "-i")

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.env,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_S
        while not is_there():
            if time.monotonic() > until:
                raise TimeoutError(f"SLURM did not start: no {what} after {_START_S} s")
            time.sleep(0.05)

    def ask(self, *command: str) -> str:
        """Return what one of SLURM's commands prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout

    def stop_daemon(self, name: str) -> None:
        """Kill slurmctld, or a node by its name."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.ask("scancel", "--user=root")
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for pid in self._left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _left(self) -> Iterator[int]:
        """Return the processes that the cluster began and that outlive it: those with its configuration."""
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        yield int(entry.name)


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Run a cluster; TimeoutError or OSError if it does not start."""
    folder = Path(tempfile.mkdtemp(prefix="greenroom-slurm-"))
    folder.chmod(0o755)  # munge wants everybody to reach its socket
    try:
        cluster = SlurmCluster(folder)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
