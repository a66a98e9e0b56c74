"""Leader election among a controller's replicas: one Lease, taken and renewed at the version that
was read.

The Lease decides which replica works; it does not fence. A replica that was suspended beyond its
time may still act for a moment: the ledger refuses its next decision, and only a decision gives
nodes to a run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.names import JsonObject
from orchestrator.errors import OrchError

NAME = "orch-controller"

log = logging.getLogger("orch.election")


class Election:
    """Takes part in the election as `identity`, this replica's name. Times in seconds; others may
    take over `lease_s` after the last renewal."""

    def __init__(
        self,
        cluster: Cluster,
        identity: str,
        lease_s: float = 15.0,
        renew_s: float = 3.0,
    ):
        self._cluster = cluster
        self._identity = identity
        self._lease_s = lease_s
        self._renew_s = renew_s
        # (version of another's Lease, since when it has not changed)
        self._seen: tuple[str, float] = ("", 0.0)
        self._renewed = float("-inf")
        self._end = threading.Event()

    @property
    def leads(self) -> bool:
        """Whether no other replica can have taken over yet, by this machine's own clock."""
        return time.monotonic() < self._renewed + self._lease_s * 2 / 3

    def wait(self) -> None:
        """Returns once this replica leads."""
        while not self._try():
            time.sleep(self._renew_s / 2)
        log.info("%s leads", self._identity)

    def keep(self, lost: Callable[[], None]) -> None:
        """Renews the Lease in a thread of its own; calls `lost` if another replica leads. After a
        late renewal, or without an answer, it keeps trying: until it has renewed, `leads` is False
        and nothing is done."""
        threading.Thread(target=self._keep, args=(lost,), name="election", daemon=True).start()

    def release(self) -> None:
        """Gives the Lease back, so that another replica need not wait for it to expire."""
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
                is_ours = self._try()
            except OrchError as error:
                log.warning("renewing the lease: %s", error.message)
                is_ours = True  # unknown, so the lease is kept until it is late
            if not is_ours and not self._end.is_set():
                lost()
                return

    def _try(self) -> bool:
        """Takes the Lease if it is free or ours. OrchError if the API server does not answer."""
        started = time.monotonic()
        try:
            lease = self._cluster.get("Lease", NAME)
        except OrchError:
            if self._renewed > float("-inf"):
                raise
            log.warning("no answer about the lease")
            return False
        if lease is None:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": NAME, "namespace": self._cluster.namespace},
                "spec": self._spec({}),
            }
            leads = self._cluster.create(body) is not None
        elif self._is_free(lease):
            lease["spec"] = self._spec(lease["spec"])
            leads = self._cluster.replace(lease) is not None
        else:
            leads = False
        if leads:
            self._renewed = started
        return leads

    def _is_free(self, lease: JsonObject) -> bool:
        """Tells whether the Lease is ours, given back, or not renewed for its duration by our own
        clock; clocks of two machines are never compared."""
        spec = lease["spec"]
        if spec.get("holderIdentity") == self._identity:
            return True
        # it was ours: what another replica has decided since is unknown here
        if self._renewed > float("-inf"):
            return False
        if not spec.get("holderIdentity"):
            return True
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = version, time.monotonic()
        duration = float(spec.get("leaseDurationSeconds") or self._lease_s)
        return time.monotonic() > self._seen[1] + duration

    def _spec(self, old_spec: JsonObject) -> JsonObject:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        was_ours = old_spec.get("holderIdentity") == self._identity
        transitions = int(old_spec.get("leaseTransitions") or 0)
        if old_spec and not was_ours:
            transitions += 1
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._lease_s),
            "acquireTime": old_spec.get("acquireTime", now) if was_ours else now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
