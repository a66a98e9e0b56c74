"""The machine of a newcomer: Debian with Python, git and make and nothing else, and a fresh clone.

A process of its own namespaces is the machine's first one, so that runs in the background live on
between two commands and all of them end with the machine. Only the cache of the package manager
comes from outside, since a newcomer's line would be measured otherwise.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.beds import debian
from tests.house.rooms import ROOT
from tests.patience import wait_for

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "git", "make", "python3")
KEPT = Path.home() / ".cache" / "orch-newcomer" / f"{SUITE}-root"
#: The clone, as the newcomer's commands name it.
CLONE = Path("/srv/orch")
_CACHE = Path(".cache/uv")
_CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
#: Variables by which this machine finds its package index and trusts it.
_OF_INDEXES = ("PIP_", "UV_", "SSL_CERT_")
_MACHINE = """
mount --bind "$1/$2" "$3/root/$2"
mount -t tmpfs -o mode=1777 tmpfs "$3/dev/shm"
exec chroot "$3" sh -c 'mount -t proc proc /proc; touch /booted; while :; do sleep 3600; done'
"""


def refusal() -> str | None:
    """Makes the Debian that is kept for copies. Returns one line if this machine cannot have it."""
    if os.geteuid() != 0:
        return "only root may make a root folder"
    return debian.root(KEPT, SUITE, PACKAGES)


class Newcomer:
    """A running machine. `root`: its root folder, seen from outside."""

    def __init__(self, root: Path, first_process: int):
        self.root = root
        self._first_process = first_process

    def enter(self, folder: Path, environ: Mapping[str, str]) -> list[str]:
        """Returns the words before a command that runs on this machine, in a folder of it."""
        variables = [f"{name}={text}" for name, text in environ.items()]
        namespaces = ["nsenter", f"--target={self._first_process}", "--mount", "--pid", "--root"]
        return [*namespaces, f"--wd={self.root}{folder}", "env", "-i", *variables]


@contextmanager
def newcomer(folder: Path) -> Iterator[Newcomer]:
    """Starts the machine in `folder` with a clone of this repository; ends and removes it."""
    root = folder / "root"
    subprocess.run(["cp", "-a", str(KEPT), str(root)], check=True)
    _copy_settings(root)
    clone = f"{root}{CLONE}"
    subprocess.run(["git", "clone", "-q", str(ROOT), clone], check=True)
    home = Path.home()
    (home / _CACHE).mkdir(parents=True, exist_ok=True)
    (root / "root" / _CACHE).mkdir(parents=True)
    (root / "dev" / "shm").mkdir(exist_ok=True)
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    script = ["sh", "-ec", _MACHINE, "sh", str(home), str(_CACHE), str(root)]
    with subprocess.Popen([*unshare, *script]) as process:
        try:
            wait_for((root / "booted").exists, what="the machine")
            yield Newcomer(root, _only_child(process.pid))
        finally:
            process.send_signal(signal.SIGKILL)
    shutil.rmtree(root)


def _only_child(process: int) -> int:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(children[0])


def _copy_settings(root: Path) -> None:
    """Copies what this machine knows of its network: names, certificates and package indexes."""
    for name in ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", str(_CERTIFICATES)):
        source = Path("/", name)
        if source.exists():
            shutil.copy(source.resolve(), root / name)


def variables() -> dict[str, str]:
    """Returns the variables of a login on the machine, with those of this one's package indexes."""
    indexes = {name: text for name, text in os.environ.items() if name.startswith(_OF_INDEXES)}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**indexes, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "PATH": path}
