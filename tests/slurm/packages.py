"""Where the tests' Slurm daemons come from: what is installed, else Debian's packages where root and apt are."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
ACCOUNTING = ("slurmdbd", "mariadbd", "sacctmgr")
PACKAGES = ("slurm-wlm", "munge")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server")
#: Debian's packages start their services on installation unless this script, asked first, says no (exit 101).
POLICY = Path("/usr/sbin/policy-rc.d")
SBIN = "/usr/sbin:/sbin"


def find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def missing(accounting: bool) -> list[str]:
    return [p for p in DAEMONS + (ACCOUNTING if accounting else ()) if find(p) is None]


def install(accounting: bool = False) -> str | None:
    """Makes the programs present, quietly and without starting services. None, or one line that says why it cannot."""
    absent = missing(accounting)
    if not absent:
        return (
            None
            if os.geteuid() == 0
            else "the Slurm test cluster needs root (device files, several slurmd on one host)"
        )
    if os.geteuid() != 0:
        return f"{', '.join(absent)} not installed, and only root may install them"
    if find("apt-get") is None:
        return f"{', '.join(absent)} not installed, and this machine has no apt-get"
    if os.environ.get("ORCH_TEST_NO_INSTALL"):
        return f"{', '.join(absent)} not installed, and ORCH_TEST_NO_INSTALL is set"
    wanted = PACKAGES + (ACCOUNTING_PACKAGES if accounting else ())
    failed = _apt(wanted)
    absent = missing(accounting)
    return f"apt-get could not install {' '.join(wanted)}: {failed}" if absent else None


def _apt(packages: tuple[str, ...]) -> str:
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
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        return "no answer within 600 s"
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------ a later Slurm

SUITE = "trixie"  # Slurm 24.11: topology/block and --segment
LATER = Path(tempfile.gettempdir(), f"orch-test-root-{SUITE}")


def install_later() -> str | None:
    """A later Debian with its Slurm in a folder of its own, LATER, kept for the next time. None, or why not.

    It takes some minutes and 300 MB, so it is made only when ORCH_TEST_LATER_SLURM is set, as `make test-slurm` does.
    """
    if os.geteuid() != 0:
        return "only root may enter another root"
    if LATER.is_dir():
        return None
    if not os.environ.get("ORCH_TEST_LATER_SLURM"):
        return (
            f"Slurm of Debian {SUITE} is not in {LATER}; ORCH_TEST_LATER_SLURM=1 (or make test-slurm) installs it there"
        )
    if find("apt-get") is None:
        return "this machine has no apt-get"
    if find("debootstrap") is None and (failed := _apt(("debootstrap",))):
        return f"apt-get could not install debootstrap: {failed}"
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(COMPONENT)"], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    mirrors = [line.split()[0] for line in targets if line.endswith("/debian/ main")]
    if not mirrors:
        return "apt names no Debian mirror"
    part = LATER.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(part), mirrors[0]]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired:
        return "debootstrap took more than 900 s"
    if done.returncode:
        return f"debootstrap failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    part.rename(LATER)
    return None
