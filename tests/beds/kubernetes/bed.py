"""A real Kubernetes on this machine: control plane, DNS, real nodes with containers, simulated
nodes, Kueue, JobSet.

A bed lives in network, mount and process name spaces of its own, so several never meet, and ending
their first process ends everything in them. `python -m tests.beds.kubernetes.bed start` leaves one
up to play with, `stop` ends it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.beds import base
from tests.beds.base import BedError, wait
from tests.beds.debian import SBIN, find

from . import bed_conf as conf
from .building import build, module_folder, program

PREFIX = "orch-kubernetes-"
CORE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")


@dataclass(frozen=True)
class Shape:
    nodes: int = 0  # real ones, with kubelet and containers
    simulated: int = 0  # without; there is nobody to miss their heartbeats, so not beside real ones
    kueue: bool = False
    jobset: bool = False
    api_only: bool = False  # nothing acts on what the API server holds
    gangs: bool = False  # with Kubernetes' own gang scheduling, an alpha feature

    @property
    def programs(self) -> tuple[str, ...]:
        node_programs = ("kubelet", "kube-proxy", "coredns") if self.nodes else ()
        if self.api_only:
            return ("kube-apiserver", "kubectl")
        return (
            *CORE,
            *node_programs,
            *(("kueue",) if self.kueue else ()),
            *(("jobset",) if self.jobset else ()),
        )


def refusal(shape: Shape) -> str | None:
    """One line that says what this machine lacks beside the programs (rights in the kernel, an
    image, CRDs), or None."""
    from . import image

    script = "mount -t tmpfs tmpfs /run && ip link add cni0 type bridge"
    if shape.nodes:
        script += (
            " && iptables -t nat -S >/dev/null && cd /sys/fs/cgroup && if [ -d cpu ]; then cd"
            " cpu; fi"
        )
        script += ' && made=$(mktemp -d orch-XXXX) && rmdir "$made"'
    argv = [
        "unshare",
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--propagation",
        "private",
        "sh",
        "-ec",
    ]
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{SBIN}"}
    done = subprocess.run([*argv, script], capture_output=True, text=True, env=env, timeout=60)
    if done.returncode:
        return (
            "this root may not do what it takes"
            f" ({(done.stderr.strip().splitlines() or ['no message'])[-1]})"
        )
    try:
        if shape.nodes:
            image.base()
            image.site_packages()
        for name in ("kueue", "jobset") if shape.kueue else ():
            module_folder(name, f"sigs.k8s.io/{name}")
    except (RuntimeError, OSError) as error:
        return str(error)
    return None


class Bed(base.Bed):
    """`kubectl` and `run` act inside the bed; `env` is what they get."""

    def __init__(self, shape: Shape | None = None, home: Path | None = None):
        self.shape = shape or Shape()
        self.home = home or Path(tempfile.gettempdir(), PREFIX + secrets.token_hex(4))
        self.first = 0  # pid, outside, of the first process of the bed's name spaces
        self._of_thread = threading.local()

    # ------------------------------------------------------------------------------------------
    #     life

    def start(self) -> None:
        if reason := build(self.shape.programs):
            raise BedError(reason)
        self._open()
        self._write_files()
        self._control_plane()
        if self.shape.nodes:
            self.daemon(
                "coredns", program("coredns"), "-conf", str(self.home / "Corefile"), "-dns.port=53"
            )
            self.daemon("kube-proxy", program("kube-proxy"), f"--config={self.home}/proxy.yaml")
        from . import addons, nodes

        if self.shape.nodes:
            nodes.start_all(self)
        if self.shape.simulated:
            addons.simulated(self)
        if self.shape.jobset:
            addons.jobset(self)
        if self.shape.kueue:
            addons.kueue(self)
        for index in range(self.shape.nodes):
            nodes.wait_ready(self, f"node-{index}")

    def stop(self) -> None:
        """The name spaces' first process; with it the kernel ends all others, their network and
        their mounts."""
        if self.first:
            with suppress(ProcessLookupError):
                os.kill(self.first, signal.SIGKILL)
            wait(lambda: not _inside(self.first, self._space), 20)
            if self._holder.poll() is None:
                self._holder.wait(timeout=10)
            self.first = 0
        wait(lambda: shutil.rmtree(self.home, ignore_errors=True) or not self.home.exists(), 5)
        _remove_cgroups()

    # ------------------------------------------------------------------------------------------
    #     acting inside

    @property
    def enter(self) -> list[str]:
        return ["nsenter", "--target", str(self.first), "--net", "--mount", "--pid"]

    @property
    def env(self) -> dict[str, str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KUBE")}
        return {
            **environ,
            "KUBECONFIG": str(self.home / "admin.kubeconfig"),
            "PATH": f"{os.environ['PATH']}:{SBIN}",
        }

    def run(
        self,
        *argv: str,
        check: bool = True,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        input: str = "",
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.enter, *argv], env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=timeout,
            input=input, cwd=cwd or self.home,
        )  # fmt: skip
        if check and done.returncode:
            raise BedError(
                f"{' '.join(argv)}: exit {done.returncode}:"
                f" {(done.stderr or done.stdout).strip()[-2000:]}"
            )
        return done

    @property
    def commands(self) -> base.CommandServer:
        """This thread's server of `orch` inside the bed."""
        if not hasattr(self._of_thread, "commands"):
            env = {**self.env, "PYTHONPATH": str(base.ROOT)}
            self._of_thread.commands = base.CommandServer("kubernetes", self.enter, env)
        return self._of_thread.commands

    def kubectl(self, *argv: str, check: bool = True, timeout: float = 60, input: str = "") -> str:
        return self.run(
            str(program("kubectl")), *argv, check=check, timeout=timeout, input=input
        ).stdout

    def get(self, *argv: str) -> dict:
        return json.loads(self.kubectl("get", *argv, "-o", "json"))

    def apply(self, *objects: Mapping) -> None:
        bodies = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl(
            "apply",
            "--server-side",
            "--force-conflicts",
            "-f",
            "-",
            input=json.dumps(bodies),
            timeout=120,
        )

    def daemon(
        self, name: str, path: Path | str, *argv: str, env: Mapping[str, str] | None = None
    ) -> None:
        """Started in the bed, in the background; its output in log/<name>.log. It ends with the
        bed, or by `end`."""
        self.popen(name, str(path), *argv, env=env)

    def end(
        self, marker: str, signum: signal.Signals = signal.SIGTERM, seconds: float = 15
    ) -> None:
        """Every process of the bed whose command line holds `marker`."""
        for pid in self.pids(marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        if not wait(lambda: not self.pids(marker), seconds) and signum != signal.SIGKILL:
            self.end(marker, signal.SIGKILL)

    def pids(self, marker: str = "") -> list[int]:
        matching_pids = []
        for pid in _inside(self.first, self._space):
            with suppress(OSError):
                if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    matching_pids.append(pid)
        return matching_pids

    # ------------------------------------------------------------------------------------------
    #     parts

    def _open(self) -> None:
        self.home.mkdir(mode=0o755)
        for folder in ("log", "pki", "etcd", "pv"):
            (self.home / folder).mkdir(mode=0o755)
        argv = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        argv += ["--propagation", "private", "sleep", "infinity"]
        self._holder = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        if not wait(lambda: children.read_text().split(), 10):
            raise BedError("unshare: no name spaces (is this root?)")
        self.first = int(children.read_text().split()[0])
        own_space = os.readlink("/proc/self/ns/mnt")
        wait(lambda: os.readlink(f"/proc/{self.first}/ns/mnt") != own_space, 5)
        self._space = os.readlink(f"/proc/{self.first}/ns/mnt")
        self.record(first=self.first)
        script = (
            "mount -t tmpfs tmpfs /run && mkdir -p /run/lock && ip link set lo up && ip link add"
            f" cni0 type bridge && ip addr add {conf.HOST}/16 dev cni0 && ip link set cni0 up &&"
            " sysctl -qw net.ipv4.ip_forward=1"
        )
        wait(lambda: self.run("sh", "-c", "test -d /proc/1/ns", check=False).returncode == 0, 5)
        self.run("sh", "-c", script)

    def _write_files(self) -> None:
        files = {
            "tokens.csv": conf.tokens_csv(),
            "admin.kubeconfig": conf.kubeconfig(),
            "Corefile": conf.corefile(self.home),
            "proxy.yaml": conf.proxy_yaml(self.home),
            "resolv.conf": f"nameserver {conf.HOST}\n",
        }
        for name, file_text in files.items():
            (self.home / name).write_text(file_text)
            (self.home / name).chmod(0o600 if name.startswith(("tokens", "admin")) else 0o644)
        pki = self.home / "pki"
        self.run("openssl", "genrsa", "-out", str(pki / "sa.key"), "2048")
        self.run(
            "openssl", "rsa", "-in", str(pki / "sa.key"), "-pubout", "-out", str(pki / "sa.pub")
        )

    def _control_plane(self) -> None:
        etcd = find("etcd") or "etcd"
        flags = [
            "--data-dir",
            str(self.home / "etcd"),
            "--unsafe-no-fsync",
            "--quota-backend-bytes=4294967296",
        ]
        # Else a cache of objects that do not change stays behind what others write, and refuses to
        # be read.
        flags.append("--experimental-watch-progress-notify-interval=1s")
        self.daemon("etcd", etcd, *flags, "--log-level=warn")
        self.start_apiserver()
        if self.shape.api_only:
            return
        self.start_controllers()
        ready = ("get", "serviceaccount", "default", "--request-timeout=5s")
        self.wait(
            lambda: self.kubectl(*ready, check=False),
            90,
            "service account",
            "kube-controller-manager",
        )

    def start_controllers(self, own_rates: bool = False) -> None:
        """Starts the controllers and the scheduler. `own_rates`: neither asks the API server more
        often than Kubernetes lets it by default."""
        flags = conf.manager_flags(self.home, not self.shape.simulated, own_rates)
        self.daemon("kube-controller-manager", program("kube-controller-manager"), *flags)
        (self.home / "scheduler.yaml").write_text(conf.scheduler_yaml(self.home, own_rates))
        flags = [f"--config={self.home}/scheduler.yaml", "--secure-port=0"]
        flags += (
            ["--feature-gates=GenericWorkload=true,GangScheduling=true"] if self.shape.gangs else []
        )
        self.daemon("kube-scheduler", program("kube-scheduler"), *flags)

    def start_apiserver(self) -> None:
        flags = conf.apiserver_flags(self.home, self.shape.gangs)
        self.daemon("kube-apiserver", program("kube-apiserver"), *flags)
        ready = ("get", "--raw", "/readyz", "--request-timeout=5s")
        self.wait(
            lambda: self.kubectl(*ready, check=False) == "ok", 120, "API server", "kube-apiserver"
        )


def _inside(first: int, space: str) -> list[int]:
    """Pids, as seen from outside, of every process in a mount name space."""
    inner_pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.readlink(entry / "ns" / "mnt") == space:
                    inner_pids.append(int(entry.name))
    return inner_pids


def _remove_cgroups() -> None:
    """Empty ones that containers have left. The last bed takes them all: one that stays needs its
    weight (nodes)."""
    if list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        return
    for group in Path("/sys/fs/cgroup").glob("*/k8s.io"):
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)


def reap_stale() -> None:
    """Ends beds whose owner died without stopping them (a killed test run)."""
    for home in base.orphans(PREFIX):
        _end_recorded(home)


def _end_recorded(home: Path) -> None:
    with suppress(OSError, ValueError, KeyError):
        first = base.about(home)["first"]
        if b"sleep" in Path(f"/proc/{first}/cmdline").read_bytes():
            space = os.readlink(f"/proc/{first}/ns/mnt")
            os.kill(first, signal.SIGKILL)
            wait(lambda: not _inside(first, space), 20)
    shutil.rmtree(home, ignore_errors=True)
    _remove_cgroups()


def main(argv: Sequence[str]) -> int:
    home = Path(tempfile.gettempdir(), PREFIX + "play")
    if list(argv) == ["stop"]:
        _end_recorded(home)
        return 0
    if list(argv) != ["start"]:
        print("start or stop", file=sys.stderr)
        return 64
    if (
        reason := build()
    ):  # what the tests use beside it, too: from now on `make test` has a cluster
        print(reason, file=sys.stderr)
        return 1
    bed = Bed(Shape(nodes=2, kueue=True, jobset=True), home)
    bed.__enter__()
    bed.record(owner=0, first=bed.first)
    print(f"enter it: {' '.join(bed.enter)} env KUBECONFIG={home}/admin.kubeconfig bash")
    print(f"kubectl:  {program('kubectl')}   end it: python -m tests.beds.kubernetes.bed stop")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
