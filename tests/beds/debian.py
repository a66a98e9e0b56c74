"""Debian packages that a test needs: used where they are installed, added where root and apt are,
else said plainly."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SBIN = "/usr/sbin:/sbin"
#: Debian's packages start their services on installation unless this script, asked first, says no
#: (exit 101).
POLICY = Path("/usr/sbin/policy-rc.d")
LOCK = Path(tempfile.gettempdir(), "orch-test-apt.lock")


def find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def provide(programs: tuple[str, ...], packages: tuple[str, ...]) -> str | None:
    """Makes `programs` present, quietly and without starting services. None, or one line that says
    why it cannot."""

    def absent() -> list[str]:
        return [program for program in programs if find(program) is None]

    def refusal() -> str | None:
        if os.geteuid() != 0:
            return "only root may install them"
        if find("apt-get") is None:
            return "this machine has no apt-get"
        return "ORCH_TEST_NO_INSTALL is set" if os.environ.get("ORCH_TEST_NO_INSTALL") else None

    if not absent():
        return None
    if reason := refusal():
        return f"{', '.join(absent())} not installed, and {reason}"
    with LOCK.open("w") as lock:  # apt does not wait for another apt
        fcntl.flock(lock, fcntl.LOCK_EX)
        failed = apt(packages) if absent() else ""
    return f"apt-get could not install {' '.join(packages)}: {failed}" if absent() else None


def apt(packages: tuple[str, ...]) -> str:
    """Empty, or the last line of apt's complaint."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        for attempt in (["apt-get", "update", "-qq"], command):
            done = subprocess.run(attempt, env=env, capture_output=True, text=True, timeout=600)
        return (
            "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
        )
    except subprocess.TimeoutExpired:
        return "no answer within 600 s"
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


def root(folder: Path, suite: str, packages: Sequence[str]) -> str | None:
    """A minimal Debian with these packages in a folder, made once and kept. None, or one line that
    says why not."""
    if folder.is_dir():
        return None
    if find("apt-get") is None:
        return "this machine has no apt-get"
    if reason := provide(("debootstrap",), ("debootstrap",)):
        return reason
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(COMPONENT)"]
    targets = subprocess.run(
        command, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    mirrors = [line.split()[0] for line in targets if line.endswith("/debian/ main")]
    if not mirrors:
        return "apt names no Debian mirror"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:  # another clone may be at it
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (
            None
            if folder.is_dir()
            else _debootstrap(folder, suite, packages, mirrors[0], lock.fileno())
        )


def _debootstrap(
    folder: Path, suite: str, packages: Sequence[str], mirror: str, lock: int
) -> str | None:
    partial_folder = folder.with_suffix(".part")
    shutil.rmtree(partial_folder, ignore_errors=True)
    # Ended in its middle it leaves /proc mounted in the folder: for nobody but itself. While it
    # lives it has the lock.
    argv = ["unshare", "--mount", "--propagation", "private", "debootstrap", "--variant=minbase"]
    argv += [f"--include={','.join(packages)}", suite, str(partial_folder), mirror]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=900, check=False, pass_fds=(lock,)
        )
    except subprocess.TimeoutExpired:
        return "debootstrap took more than 900 s"
    if done.returncode:
        return f"debootstrap failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    partial_folder.rename(folder)
    return None
