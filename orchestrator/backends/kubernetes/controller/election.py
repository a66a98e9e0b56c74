"""Leader election among a controller's replicas: one Lease, taken and renewed at the version that
was read.

The Lease decides who works; it does not fence. Who was paused beyond its time may still act for a
moment: its next decision is refused by the ledger, and nothing is given to anybody but by a
decision.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.errors import OrchError

NAME = "orch-controller"

log = logging.getLogger("orch.election")


class Election:
    """`identity`: of this replica. Times in seconds; `lease_s` since the last renewal others may
    take over."""

    def __init__(
        self, cluster: Cluster, identity: str, lease_s: float = 15.0, renew_s: float = 3.0
    ):
        self._cluster = cluster
        self._identity = identity
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._seen: tuple[str, float] = (
            "",
            0.0,
        )  # version of another's Lease, and since when it stands still
        self._renewed = float("-inf")
        self._end = threading.Event()

    @property
    def leads(self) -> bool:
        """Whether nobody else can have taken over yet, by this machine's own clock."""
        return time.monotonic() < self._renewed + self._lease_s * 2 / 3

    def wait(self) -> None:
        """Returns when this replica leads."""
        while not self._try():
            time.sleep(self._renew_s / 2)
        log.info("%s leads", self._identity)

    def keep(self, lost: Callable[[], None]) -> None:
        """Renews in a thread of its own; `lost` when somebody else leads. Late, or without an
        answer, it goes on trying: until it has renewed, `leads` is False and nothing is done."""
        threading.Thread(target=self._keep, args=(lost,), name="election", daemon=True).start()

    def release(self) -> None:
        """Another replica need not wait for the Lease to expire."""
        self._end.set()
        try:
            lease = self._cluster.get("Lease", NAME)
            if lease and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._cluster.replace(lease)
        except OrchError as error:
            log.warning("the lease is not given back: %s", error.message)

    def _keep(self, lost: Callable[[], None]) -> None:
        while not self._end.wait(self._renew_s):
            try:
                held = self._try()
            except OrchError as error:
                log.warning("renewing the lease: %s", error.message)
                held = True  # as far as is known
            if not held and not self._end.is_set():
                lost()
                return

    def _try(self) -> bool:
        """Takes the Lease if it is free or ours. OrchError where the API server does not answer."""
        began = time.monotonic()
        try:
            lease = self._cluster.get("Lease", NAME)
        except OrchError:
            if self._renewed > float("-inf"):
                raise
            log.warning("no answer about the lease")
            return False
        if lease is None:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": self._spec({})}
            body["metadata"] = {"name": NAME, "namespace": self._cluster.namespace}
            taken = self._cluster.create(body) is not None
        elif self._is_free(lease):
            lease["spec"] = self._spec(lease["spec"])
            taken = self._cluster.replace(lease) is not None
        else:
            taken = False
        if taken:
            self._renewed = began
        return taken

    def _is_free(self, lease: dict[str, Any]) -> bool:
        """Ours, given back, or not renewed for its time by our own clock; clocks of two machines
        are not compared."""
        spec = lease["spec"]
        if spec.get("holderIdentity") == self._identity:
            return True
        if self._renewed > float(
            "-inf"
        ):  # it was ours: what another has decided since is not known here
            return False
        if not spec.get("holderIdentity"):
            return True
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = version, time.monotonic()
        return time.monotonic() > self._seen[1] + float(
            spec.get("leaseDurationSeconds") or self._lease_s
        )

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        ours = before.get("holderIdentity") == self._identity
        changes = int(before.get("leaseTransitions") or 0) + (0 if ours or not before else 1)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._lease_s),
            "acquireTime": before.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": changes,
        }
