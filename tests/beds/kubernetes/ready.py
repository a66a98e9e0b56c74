"""`python -m tests.beds.kubernetes.ready`: makes the test cluster's programs present, or prints why
it cannot.

With ORCH_TEST_KUBERNETES=1, which `.ci/run` and `make test-kubernetes` set, what is missing is
built, beside whatever else `make test` runs, with a line on stderr for each program. Where that is
not asked for or cannot be, the reason is printed, with which the tier's tests are skipped; so `make
test` on a new machine takes minutes. ORCH_TEST_KUBERNETES=0 turns the whole tier off.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.beds.debian import find, provide

from . import building
from .bed import Shape, refusal

SWITCH = "ORCH_TEST_KUBERNETES"
WHY = "ORCH_TEST_KUBERNETES_WHY_NOT"
#: For all programs together: a machine whose other tiers take as long has no time to lose by giving
#: up.
MOST_S = 5400.0
DISK_GB = 12  # Go's module and build caches, and the programs: 11.2 GB


def main() -> None:
    if reason := why_not(os.environ):
        print(reason)


def why_not(environ: Mapping[str, str]) -> str | None:
    """One line that says why the tier cannot run; None when every program is there now."""
    if environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if not (missing := building.missing(tuple(building.PROGRAMS))):
        return None
    obstacle = f"{', '.join(missing)} not built"
    if not environ.get(SWITCH):
        return (
            f"{obstacle}: that takes long, so only `.ci/run` and `make test-kubernetes` do it, once"
            " for all"
        )
    if os.geteuid() != 0:
        return f"{obstacle}, and only root may have name spaces with a network of their own"
    if find("go") is None:
        return f"{obstacle}, and this machine has no Go"
    if (free := shutil.disk_usage(Path.home()).free / 1e9) < DISK_GB:
        return f"{obstacle}, and that takes {DISK_GB} GB, of which {free:.0f} are free"
    if reason := provide(building.DEBIAN_PROGRAMS, building.DEBIAN) or refusal(Shape(simulated=1)):
        return reason  # known before minutes of building
    end = time.monotonic() + MOST_S
    for count, name in enumerate(missing, 1):
        say(f"the Kubernetes tier builds {name}, {count} of {len(missing)}, once for all")
        started = time.monotonic()
        if reason := building.build((name,), seconds=max(1.0, end - started)):
            say(f"the Kubernetes tier goes without: {reason}")
            return reason
        say(f"{name} is built, {time.monotonic() - started:.0f} s")
    return None


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
