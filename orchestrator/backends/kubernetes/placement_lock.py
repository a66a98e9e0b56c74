"""Lets one submitter per namespace at a time choose nodes and send its Job: the holder of the Lease
`orch-placement`.

The Lease is created, and deleted only at the exact version that was read, so neither of two waiters
nor a holder that was suspended ever deletes another's. Each machine measures the holder's time by
its own clock: from the moment when a waiter first saw the Lease, or when the holder requested it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from orchestrator.backends.kubernetes.names import JsonObject
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .api.client import Cluster

NAME = "orch-placement"


@contextlib.contextmanager
def placement_lock(
    cluster: Cluster,
    run_id: str,
    lease_s: int = 20,
    wait_s: float = 60.0,
) -> Iterator[Callable[[], None]]:
    """Holds the Lease. Yields a check to call before and after the Job is sent: it raises OrchError
    (76) if this submitter was suspended so long that another may have chosen the same nodes.

    A holder that died is overtaken after `lease_s` seconds. OrchError (76) if others hold the Lease
    for `wait_s`.
    """
    end = time.monotonic() + wait_s
    seen_version = ("", "")
    seen_at = 0.0
    requested_at = _now()
    while (lease := cluster.create(_lease(cluster, run_id, lease_s))) is None:
        holder_lease = cluster.get("Lease", NAME)
        if holder_lease is not None and _version(holder_lease) != seen_version:
            seen_version = _version(holder_lease)
            seen_at = time.monotonic()
        elif holder_lease is not None and time.monotonic() > seen_at + _duration(
            holder_lease, lease_s
        ):
            cluster.delete("Lease", NAME, only=seen_version)
        if time.monotonic() > end:
            raise OrchError(f"other submissions hold Lease {NAME}: try again", Exit.CAPACITY)
        time.sleep(0.3)
        requested_at = _now()

    def check() -> None:
        if _now() > requested_at + lease_s:
            message = (
                f"this command was suspended for {_now() - requested_at:.0f} s since its nodes were"
                " chosen: others may"
                " have them; try again"
            )
            raise OrchError(message, Exit.CAPACITY)

    try:
        yield check
    finally:
        with contextlib.suppress(OrchError):
            cluster.delete("Lease", NAME, only=_version(lease))


def _lease(cluster: Cluster, run_id: str, lease_s: int) -> JsonObject:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": NAME, "namespace": cluster.namespace},
        "spec": {
            "holderIdentity": f"{run_id}-{os.urandom(4).hex()}",
            "leaseDurationSeconds": lease_s,
            "acquireTime": now.replace("+00:00", "Z"),
        },
    }


def _version(lease: JsonObject) -> tuple[str, str]:
    return lease["metadata"]["uid"], lease["metadata"]["resourceVersion"]


def _duration(lease: JsonObject, usual_s: int) -> float:
    return float(lease["spec"].get("leaseDurationSeconds") or usual_s)


def _now() -> float:
    """Reads a clock that keeps running while a laptop sleeps, if the system has one."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
