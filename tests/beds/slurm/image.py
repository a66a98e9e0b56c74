"""A container image for Charliecloud: a folder with its own interpreter, which has orch and
torch."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from orchestrator import start
from tests.beds.base import ROOT

PYTHON = "/opt/env/bin/python"


def make_image(folder: Path, submitters: Path) -> tuple[list[str], list[str]]:
    """Fills `folder`; returns the mounts that the image needs on nodes, and folders to hide inside
    (SRC:DST).

    Programs and packages are mounted, not copied. `submitters`: an empty folder, which takes the
    place of the virtual environment that orch is submitted from.
    """
    prefixes = (sys.base_prefix[1:], sys.prefix[1:])
    for name in (
        "dev",
        "proc",
        "sys",
        "tmp",
        "usr",
        "etc",
        "run",
        "opt/packages",
        "opt/env/bin",
        *prefixes,
    ):
        (folder / name).mkdir(
            parents=True, exist_ok=True
        )  # mount points: the runtime makes none in an image
    for name in ("orchestrator", "trainer", "conf", "tests"):
        (folder / "opt" / "orch" / name).mkdir(parents=True, exist_ok=True)
    (folder / "opt" / "orch" / start.FILE.name).write_text(start.FILE.read_text())
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf", "nsswitch.conf"):
        (folder / "etc" / name).write_text("hosts: files\n" if name == "nsswitch.conf" else "")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "opt" / "env" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "image.pth").write_text("/opt/packages\n/opt/orch\n")
    (folder / "opt" / "env" / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    (folder / "opt" / "env" / "bin" / "python").symlink_to(f"{sys.base_prefix}/bin/{version}")
    packages = sysconfig.get_paths()["purelib"]
    ours = [
        f"{ROOT / name}:/opt/orch/{name}"
        for name in ("orchestrator", "trainer", "conf", "tests", "orch_start.py")
    ]
    mounts = ["/usr", sys.base_prefix, f"{packages}:/opt/packages", *ours]
    return mounts, [f"{submitters}:{sys.prefix}"]
