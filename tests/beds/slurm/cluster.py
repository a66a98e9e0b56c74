"""A real Slurm cluster on this machine: one slurmctld, one slurmd a node, its own munged, optional
accounting.

Every daemon is started in the foreground by us and ended by its pid. Several clusters run at once:
each has its own folder, ports and munge socket. `python -m tests.beds.slurm.cluster start` leaves
one up to play with, `stop` ends it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import psutil

from tests.beds import base
from tests.beds.base import BedError, wait
from tests.beds.debian import SBIN, find

from . import cluster_conf as conf
from .cluster_conf import Shape
from .packages import install

PREFIX = "orch-slurm-"
T = TypeVar("T")


class PortTaken(BedError):
    """A daemon has ended at its start: something else listens on its port."""


class Cluster(base.Bed):
    """`env` is what Slurm's commands need; `run` calls one and returns its output."""

    patience = 5

    def __init__(
        self, shape: Shape | None = None, home: Path | None = None, root: Path | None = None
    ) -> None:
        """`root`: the file system that holds Slurm, when it is not this machine's own (a later
        Debian)."""
        self.shape = shape or Shape()
        self.root = root
        self.home = home or Path(
            root or "/", tempfile.gettempdir().lstrip("/"), PREFIX + secrets.token_hex(4)
        )
        self.inside = (
            Path("/", self.home.relative_to(root)) if root else self.home
        )  # as the daemons see it
        self.host = socket.gethostname().split(".")[0]
        self.pids: dict[str, int] = {}
        self.ports = _free_ports(self.shape.nodes)

    # ------------------------------------------------------------------------------------------
    #     lifecycle

    def start(self) -> None:
        """Starts all daemons; once more, on other ports, if somebody else took one of the ports
        before its daemon could."""
        try:
            self._start()
        except PortTaken:
            self.stop()
            self.ports = _free_ports(self.shape.nodes)
            self._start()

    def _start(self) -> None:
        self._write_files()
        self._start_munge()
        if self.shape.accounting:
            self._start_accounting()
        self.start_controller(clean=True)
        if self.shape.accounting:
            user = ["user", "root", "DefaultAccount=orch"]
            self.run("sacctmgr", "-i", "add", "account", "orch")
            self.run(
                "sacctmgr",
                "-i",
                "modify",
                "user",
                "root",
                "set",
                "DefaultAccount=orch",
                check=False,
            )
            self.run("sacctmgr", "-i", "add", *user, check=False)
        for name in self.shape.names:
            self.start_node(name)
        self.wait(self._all_idle, 30, f"{self.shape.nodes} idle nodes", "slurmctld")

    def _all_idle(self) -> bool:
        self._check_daemons()
        return self.idle() == self.shape.nodes

    def _is_up(self) -> bool:
        self._check_daemons()
        return "is UP" in self.run("scontrol", "ping", check=False)

    def _check_daemons(self) -> None:
        """Raises PortTaken if a daemon that has been started has ended."""
        for name, pid in self.pids.items():
            if _gone(pid, 0):
                raise PortTaken(f"{name} has ended: {self.log_tail(name)}")

    def stop(self) -> None:
        """Jobs, nodes, controller, database, munge; then whatever still carries our SLURM_CONF;
        then the folder."""
        if "slurmctld" in self.pids:
            with suppress(
                subprocess.TimeoutExpired
            ):  # a controller that never came up must not keep the rest alive
                self.run(
                    "scancel", "--full", "--signal=KILL", "--user=root", check=False, timeout=10
                )
        order = [
            *(f"slurmd-{n}" for n in self.shape.names),
            "slurmctld",
            "slurmdbd",
            "mariadbd",
            "munged",
        ]
        for name in order:
            self._end(name, signal.SIGKILL if name.startswith("slurmd-") else signal.SIGTERM)
        # again and again: one may have forked in this moment
        wait(lambda: not [_signal(pid, signal.SIGKILL) for pid in self.processes()], 10, 0.05)
        shutil.rmtree(self.home, ignore_errors=True)

    def start_controller(self, clean: bool = False) -> None:
        self._daemon(
            "slurmctld", *(["-c"] if clean else ["-R"]), "-D", "-f", str(self.inside / "slurm.conf")
        )
        self.wait(self._is_up, 20, "slurmctld", "slurmctld")

    def stop_controller(self) -> None:
        self._end("slurmctld", signal.SIGTERM)

    def start_node(self, name: str, blind_to: Path | None = None, hangs: bool = False) -> None:
        """`blind_to`: a folder that the node sees empty, as when its mount is lost. `hangs`: its
        mount is dead."""
        argv = ["slurmd", "-D", "-N", name, "-f", str(self.inside / "slurm.conf")]
        if blind_to:
            argv[0] = find("slurmd") or "slurmd"
            mount = 'mount -t tmpfs none "$0" && exec "$@"'
            if hangs:  # a file system whose server never says a word
                mount = (
                    "exec 9<>/dev/fuse && mount -i -t fuse -o"
                    ' fd=9,rootmode=40000,user_id=0,group_id=0 dead "$0"'
                    # it keeps 9 open, which slurmd closes
                    ' && { tail --pid=$$ -f /dev/null & } && exec "$@"'
                )
            argv = ["unshare", "--mount", "sh", "-c", mount, str(blind_to), *argv]
        self._daemon(*argv, key=f"slurmd-{name}")

    def restart_node(self, name: str, blind_to: Path | None = None, hangs: bool = False) -> None:
        """A node's daemon once more, as `start_node` says."""
        self._end(f"slurmd-{name}", signal.SIGTERM)
        self.start_node(name, blind_to, hangs)
        self.wait(self._all_idle, 40, "idle nodes", "slurmctld")
        self.run("srun", f"--nodelist={name}", "--chdir=/", "true")  # the scheduler knows it too

    def kill_node(self, name: str) -> None:
        """The node vanishes, as when its power is cut: slurmd, step managers and job processes,
        none can say goodbye.

        All are stopped before the first is killed, and the job's processes die first, children
        before their parents: those of a stopped group that lose their parent would be woken by a
        SIGHUP. Pids do not tell who that is: they begin anew at the largest. A step manager is
        known as the parent of a process of its job.
        """
        node_pids = sorted(self.processes(b"SLURMD_NODENAME=" + name.encode() + b"\0"), key=_depth)
        parents = [parent for pid in node_pids if (parent := _of(pid, psutil.Process.parent))]
        managers = {
            parent.pid for parent in parents if _of(parent.pid, psutil.Process.name) == "slurmstepd"
        }
        everything = [self.pids[f"slurmd-{name}"], *managers, *node_pids]
        for pid in everything:
            _signal(pid, signal.SIGSTOP)
        for pid in reversed(everything):
            _signal(pid, signal.SIGKILL)
        self._end(f"slurmd-{name}", signal.SIGKILL)

    def reset(self) -> None:
        """Back to an empty cluster: no jobs, every daemon up, every node idle."""
        if "slurmctld" not in self.pids:
            self.start_controller()
        self.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        self.run("scancel", "--user=root", check=False)
        for name in self.shape.names:
            if f"slurmd-{name}" not in self.pids:
                self.start_node(name)
        if self.idle() != self.shape.nodes:
            self.run(
                "scontrol",
                "update",
                f"NodeName={','.join(self.shape.names)}",
                "State=RESUME",
                check=False,
            )
        self.wait(self._all_idle, 40, "empty cluster", "slurmctld")

    # ------------------------------------------------------------------------------------------
    #     questions

    @property
    def env(self) -> dict[str, str]:
        """This process's environment without Slurm's variables, pointed at the cluster."""
        environ = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM", "SBATCH", "SALLOC", "SQUEUE"))
        }
        return {
            **environ,
            "SLURM_CONF": str(self.inside / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:{SBIN}",
        }

    def run(self, *argv: str, check: bool = True, timeout: float = 120) -> str:
        argv = (*self.enter, *argv)
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=timeout, cwd=self.home
        )
        if check and done.returncode:
            raise BedError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    @property
    def enter(self) -> list[str]:
        """What comes before every program: nothing, or the way into the other root with a /proc of
        its own.

        The mounts live in a name space of the program alone, so that nothing has to be taken down.
        """
        if self.root is None:
            return []
        script = (
            'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
        )
        return ["unshare", "--mount", "sh", "-c", script, str(self.root)]

    def idle(self) -> int:
        """Nodes that are idle and answer: `idle*` does not."""
        return (
            self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False)
            .split()
            .count("idle")
        )

    def job_state(self, job: str) -> str:
        """squeue's word for a job; empty when the controller has forgotten it."""
        end = time.monotonic() + 60
        while True:
            try:
                return self.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()
            except BedError as error:
                if "Invalid job id" in str(error):
                    return ""
                if time.monotonic() > end:  # a controller without time does not answer
                    raise

    def job_details(self, job: str) -> str:
        """What Slurm shows and has logged of a job, for the message of a test that timed out."""
        log = (self.home / "log" / "slurmctld.log").read_text(errors="replace").splitlines()
        lines = [line for line in log if re.search(rf"JobId={job}\b|{job}_|down|drain", line)]
        shown = self.run("scontrol", "-d", "show", "job", job, check=False)
        nodes = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T %E", check=False)
        return "\n".join(["--- Slurm", shown, nodes, *lines[-30:]])

    def processes(self, variable: bytes = b"") -> list[int]:
        """Pids whose environment names this cluster (and holds `variable`): daemons, job steps and
        their children."""
        ours = f"SLURM_CONF={self.inside}/slurm.conf".encode() + b"\0"
        pids = []
        for pid in psutil.pids():
            with suppress(OSError):
                env = Path(f"/proc/{pid}/environ").read_bytes()
                pids += [pid] if pid != os.getpid() and ours in env and variable in env else []
        return pids

    # ------------------------------------------------------------------------------------------
    #     parts

    def _write_files(self) -> None:
        self.home.mkdir(mode=0o755)
        for folder in ("state", "spool", "run", "log", "dev", "munge", "db"):
            (self.home / folder).mkdir(mode=0o755)
        for gpu in range(self.shape.gpus):  # any character device will do; 1:3 is the null device
            os.mknod(self.home / "dev" / f"gpu{gpu}", 0o600 | 0o020000, os.makedev(1, 3))
        files = {
            "slurm.conf": conf.slurm_conf(self.shape, self.inside, self.host, self.ports),
            "gres.conf": conf.gres_conf(self.shape, self.inside),
            "topology.conf": conf.topology_conf(self.shape),
            "cgroup.conf": conf.cgroup_conf(
                v1=Path("/sys/fs/cgroup/freezer").is_dir(), later=self.root is not None
            ),
        }
        if self.shape.accounting:
            files["slurmdbd.conf"] = conf.slurmdbd_conf(self.inside, self.ports)
        for name, file_text in files.items():
            (self.home / name).write_text(file_text)
            (self.home / name).chmod(0o600 if name == "slurmdbd.conf" else 0o644)
        (self.home / "munge" / "key").write_bytes(secrets.token_bytes(128))
        (self.home / "munge" / "key").chmod(0o600)

    def _start_munge(self) -> None:
        munge = self.home / "munge"
        options = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "seed-file": "seed",
            "log-file": "log",
        }
        self._daemon(
            "munged",
            "-F",
            "--force",
            *(f"--{flag}={self.inside / 'munge' / name}" for flag, name in options.items()),
        )
        self.wait((munge / "socket").exists, 10, "munge socket", "munged")

    def _start_accounting(self) -> None:
        db = self.home / "db"
        sock = self.home / "run" / "mariadb.sock"
        # a MariaDB that starts clears its temporary folder, also of other MariaDBs' tables
        common = [
            "--no-defaults",
            f"--datadir={db}",
            f"--tmpdir={self.home / 'run'}",
            "--user=root",
        ]
        installer = find("mariadb-install-db") or "mariadb-install-db"
        self.run(
            installer,
            *common,
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            timeout=120,
        )
        options = [
            f"--socket={sock}",
            "--skip-networking",
            "--innodb-buffer-pool-size=32M",
            f"--pid-file={db}/pid",
        ]
        self._daemon("mariadbd", *common, *options)
        self.wait(sock.exists, 60, "database socket", "mariadbd")
        self._daemon("slurmdbd", "-D", extra={"MYSQL_UNIX_PORT": str(sock)})
        self.wait(lambda: _listening(self.ports.dbd), 60, "slurmdbd", "slurmdbd")

    def _daemon(
        self, program: str, *argv: str, key: str = "", extra: dict[str, str] | None = None
    ) -> None:
        key = key or program
        path = program if self.root else find(program)
        if path is None:
            raise BedError(f"{program} is not installed")
        process = self.popen(key, path, *argv, env=extra)
        self.pids[key] = process.pid
        _CHILDREN[process.pid] = process
        self.record(pids=self.pids)

    def _end(self, key: str, signum: signal.Signals) -> None:
        pid = self.pids.pop(key, None)
        if pid is None:
            return
        _signal(pid, signum)
        if not _gone(pid, 10):
            _signal(pid, signal.SIGKILL)
            _gone(pid, 5)


#: Popen objects of our daemons: polled so that an ended one is reaped and not left a zombie.
_CHILDREN: dict[int, subprocess.Popen] = {}


def _of(pid: int, question: Callable[[psutil.Process], T]) -> T | None:
    """The answer of a process to the question; None when it has ended."""
    with suppress(psutil.Error):
        return question(psutil.Process(pid))
    return None


def _depth(pid: int) -> int:
    """How many ancestors a process has."""
    return len(_of(pid, psutil.Process.parents) or ())


def _signal(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _gone(pid: int, seconds: float) -> bool:
    def gone() -> bool:
        if child := _CHILDREN.get(pid):
            return child.poll() is not None
        # where nobody reaps orphans, an ended daemon stays a zombie
        return _of(pid, psutil.Process.status) in (None, psutil.STATUS_ZOMBIE)

    return wait(gone, seconds, 0.05)


def _free_ports(nodes: int) -> conf.Ports:
    """Free ports below the kernel's ephemeral range, so that no outgoing connection takes one
    before its daemon."""
    with ExitStack() as stack:
        free_ports: list[int] = []
        while len(free_ports) < nodes + 2:
            # not `random`: Hypothesis may give all test workers the same state of it
            port = 10000 + secrets.randbelow(20000)
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
                free_ports.append(port)
            except OSError:
                continue
    return conf.Ports(free_ports[0], free_ports[1], free_ports[2:])


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def reap_stale() -> None:
    """Ends clusters whose owner died without stopping them (a killed test run)."""
    for home in base.orphans(PREFIX):
        _adopt(home).stop()


def _adopt(home: Path) -> Cluster:
    cluster = Cluster(home=home)
    cluster.pids = base.about(home)["pids"]
    return cluster


def main(argv: list[str]) -> int:
    """`start [nodes gpus]` prints how to use and end the cluster; `stop FOLDER` ends it."""
    if argv[:1] == ["stop"] and len(argv) == 2:
        _adopt(Path(argv[1])).stop()
        return 0
    if argv[:1] != ["start"] or not all(a.isdigit() for a in argv[1:]) or len(argv) not in (1, 3):
        print(
            "usage: python -m tests.beds.slurm.cluster start [NODES GPUS_PER_NODE] | stop FOLDER",
            file=sys.stderr,
        )
        return 64
    shape = Shape(nodes=int(argv[1]), gpus=int(argv[2])) if len(argv) == 3 else Shape()
    if reason := install():
        print(f"no test cluster: {reason}", file=sys.stderr)
        return 76
    cluster = Cluster(shape).__enter__()
    cluster.record(owner=0, pids=cluster.pids)
    print(cluster.run("sinfo"), end="")
    print(f"\nuse it:  export SLURM_CONF={cluster.home}/slurm.conf")
    print(
        "try it:  .venv/bin/orch submit --config-dir slurm cluster=testbed parallel=tp2_pp2_zero1"
        " --follow"
    )
    print(f"end it:  {sys.executable} -m {__spec__.name} stop {cluster.home}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
