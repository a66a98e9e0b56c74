"""One submitter of a namespace at a time chooses nodes and sends its Job: whoever holds the Lease
`orch-placement`.

It is made, and deleted at the very version that was read, so neither of two waiters nor a holder
that was away ever deletes another's. How long a holder has had it is measured by each machine's own
clock: from the moment a waiter has first seen it, or the holder has asked for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .api.client import Cluster

NAME = "orch-placement"


@contextlib.contextmanager
def placement_lock(
    cluster: Cluster, run_id: str, lease_s: int = 20, wait_s: float = 60.0
) -> Iterator[Callable[[], None]]:
    """Hold the Lease. Yields what to call before and after the Job is sent: it raises OrchError
    (76) when this submitter has stood still for so long that another may have chosen the same
    nodes.

    A holder that died is overtaken after `lease_s` seconds. OrchError (76) when others hold it for
    `wait_s`.
    """
    end = time.monotonic() + wait_s
    seen = ("", "")
    seen_at = 0.0
    asked = _now()
    while (lease := cluster.create(_lease(cluster, run_id, lease_s))) is None:
        found = cluster.get("Lease", NAME)
        if found is not None and _version(found) != seen:
            seen = _version(found)
            seen_at = time.monotonic()
        elif found is not None and time.monotonic() > seen_at + _duration(found, lease_s):
            cluster.delete("Lease", NAME, only=seen)
        if time.monotonic() > end:
            raise OrchError(f"other submissions hold Lease {NAME}: try again", Exit.CAPACITY)
        time.sleep(0.3)
        asked = _now()

    def check() -> None:
        if _now() > asked + lease_s:
            text = (
                f"stood still for {_now() - asked:.0f} s since its nodes were chosen: others may"
                " have them; try again"
            )
            raise OrchError(text, Exit.CAPACITY)

    try:
        yield check
    finally:
        with contextlib.suppress(OrchError):
            cluster.delete("Lease", NAME, only=_version(lease))


def _lease(cluster: Cluster, run_id: str, lease_s: int) -> dict[str, Any]:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": NAME, "namespace": cluster.namespace},
        "spec": {
            "holderIdentity": f"{run_id}-{os.urandom(4).hex()}",
            "leaseDurationSeconds": lease_s,
            "acquireTime": (
                datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            ),
        },
    }


def _version(lease: dict[str, Any]) -> tuple[str, str]:
    return lease["metadata"]["uid"], lease["metadata"]["resourceVersion"]


def _duration(lease: dict[str, Any], usual_s: int) -> float:
    return float(lease["spec"].get("leaseDurationSeconds") or usual_s)


def _now() -> float:
    """Of a clock that goes on while a laptop sleeps, where the system has one."""
    return (
        time.clock_gettime(time.CLOCK_BOOTTIME)
        if hasattr(time, "CLOCK_BOOTTIME")
        else time.monotonic()
    )
