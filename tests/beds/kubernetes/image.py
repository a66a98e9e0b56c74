"""Images without a registry: docker archives made from folders, for containerd to import.

The base is a minimal Debian with Python, made once by debootstrap and kept in the cache; on top of
it this tree's orch. Torch is too large for an image store a node: pods mount the site-packages of
the tests' own Python from a volume.
"""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import io
import json
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path

from orchestrator import start
from tests.beds import debian
from tests.beds.base import ROOT

from .building import cache

SUITE = "bookworm"  # has the Python 3.11 that torch's wheels in the tests' environment are for
NAME = "orch.test/orch:1"
PAUSE = "orch.test/pause:1"
SITE = "/opt/site"  # where pods mount the site-packages
HELD = "opt/held"  # where the image has what holds the trainer, if a variable says so
_PACKAGES = ("python3-minimal", "python3-venv", "libstdc++6", "libgomp1", "busybox-static")


def base() -> Path:
    """The cached root. RuntimeError with one line when it cannot be made."""
    root = cache() / f"root-{SUITE}"
    if reason := debian.root(root, SUITE, _PACKAGES):
        raise RuntimeError(reason)
    return root


def site_packages() -> Path:
    """The packages of this Python, whose version must be the image's."""
    if sys.version_info[:2] != (3, 11):
        raise RuntimeError(
            f"the image has Python 3.11, these tests run on {sys.version.split()[0]}"
        )
    return Path(sysconfig.get_paths()["purelib"])


def layer() -> Path:
    """The cached root as one file. RuntimeError as `base`."""
    root = base()
    archive = cache() / f"layer-{SUITE}.tar"
    with archive.with_suffix(".lock").open("w") as lock:  # another clone may be at it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            partial = archive.with_suffix(".part")
            without = ("--exclude=./var/lib/apt/lists/*", "--exclude=./var/cache/apt/*")
            subprocess.run(
                ["tar", "-C", str(root), *without, "-cf", str(partial), "."],
                check=True,
                timeout=300,
            )
            partial.rename(archive)
    return archive


def orch_archive(target: Path) -> None:
    """The image of orch: Debian, Python, this tree."""
    code = target.with_suffix(".code.tar")
    with tarfile.open(code, "w") as tar:
        for name in ("orchestrator", "trainer", "conf", start.FILE.name):
            # Compiled, as an installed package is: else every process of every pod compiles anew.
            compileall.compile_dir(ROOT / name, quiet=2)
            tar.add(ROOT / name, f"opt/orch/{name}")
        tar.add(ROOT / "tests/beds/held/sitecustomize.py", f"{HELD}/sitecustomize.py")
    environment = [f"PYTHONPATH=/opt/orch:{SITE}:/{HELD}", "PATH=/usr/bin:/bin", "LANG=C.UTF-8"]
    environment.append("PYTHONDONTWRITEBYTECODE=1")
    _archive(target, NAME, [layer(), code], {"Env": environment, "Cmd": ["python3"]})
    code.unlink()


def pause_archive(target: Path) -> None:
    only = target.with_suffix(".layer.tar")
    with tarfile.open(only, "w") as tar:
        tar.add(debian.find("busybox") or "/bin/busybox", "bin/busybox")
    _archive(target, PAUSE, [only], {"Entrypoint": ["/bin/busybox", "sleep", "2147483647"]})
    only.unlink()


def _archive(target: Path, name: str, layers: Sequence[Path], config: dict) -> None:
    digests = [_digest(layer) for layer in layers]
    files = {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]}
    image = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": files}
    raw = json.dumps(image).encode()
    config_name = f"{hashlib.sha256(raw).hexdigest()}.json"
    names = [f"{digest}/layer.tar" for digest in digests]
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": names}]).encode()
    with tarfile.open(target, "w") as tar:
        for entry, content in ((config_name, raw), ("manifest.json", manifest)):
            info = tarfile.TarInfo(entry)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for entry, layer in zip(names, layers, strict=True):
            tar.add(layer, entry)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
