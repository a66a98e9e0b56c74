"""Says where the tests' Slurm daemons come from: what is installed, else Debian's packages where
root and apt are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.beds import debian

DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
ACCOUNTING = ("slurmdbd", "mariadbd", "sacctmgr")
PACKAGES = ("slurm-wlm", "munge")
ACCOUNTING_PACKAGES = ("slurmdbd", "mariadb-server")


def install(accounting: bool = False) -> str | None:
    """Makes the programs present, quietly and without starting services. None, or one line that
    says why it cannot."""
    programs = DAEMONS + (ACCOUNTING if accounting else ())
    if failed := debian.provide(programs, PACKAGES + (ACCOUNTING_PACKAGES if accounting else ())):
        return failed
    return (
        None
        if os.geteuid() == 0
        else "the Slurm test cluster needs root (device files, several slurmd on one host)"
    )


# ------------------------------------------------------------------------------------------ a later
#     Slurm

SUITE = "trixie"  # Slurm 24.11: topology/block and --segment
LATER = Path(tempfile.gettempdir(), f"orch-test-root-{SUITE}")


def install_later() -> str | None:
    """A later Debian with its Slurm in a folder of its own, LATER, kept for the next time. None, or
    why not.

    It takes some minutes and 300 MB, so it is made only when ORCH_TEST_LATER_SLURM is set, as `make
    test-slurm` does.
    """
    if os.geteuid() != 0:
        return "only root may enter another root"
    if LATER.is_dir():
        return None
    if not os.environ.get("ORCH_TEST_LATER_SLURM"):
        install_advice = "ORCH_TEST_LATER_SLURM=1 (or make test-slurm) installs it there"
        return f"Slurm of Debian {SUITE} is not in {LATER}; {install_advice}"
    return debian.root(LATER, SUITE, PACKAGES)
