"""Reads one run as it is now from the watched objects: the facts that its steps and its status
follow from."""

from __future__ import annotations

import threading
import time

from msgspec import structs

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.fitting import PodNeeds, pod_needs
from orchestrator.backends.kubernetes.names import object_name
from orchestrator.backends.kubernetes.objects.gang import resolved
from orchestrator.backends.kubernetes.options import KubernetesOptions, places_itself
from orchestrator.backends.kubernetes.phases import seconds_of
from orchestrator.backends.kubernetes.train_run import Bundle, TrainRun
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from . import decide as steps
from .decisions import Decisions
from .ledger import Allocation, Ledger
from .objects import is_elastic, options_of
from .observed import Job
from .program_code import CodeChecks
from .room import fitting
from .store import Store

_READ_QUOTA_S = 15.0


def size_under(bundle: Bundle, allocation: Allocation | None) -> int:
    """Returns the size of a run with this allocation: the largest if it has none, or one of a size
    that new words no longer have."""
    return allocation.size if allocation and allocation.size in bundle.plans else max(bundle.plans)


class RunReader:
    """Reads runs. Several threads may use it."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        ledger: Ledger,
        decisions: Decisions,
    ):
        self._cluster = cluster
        self._store = store
        self._ledger = ledger
        self._decisions = decisions
        # uid -> (inputs, size, bundle, and what follows from them: options, needs)
        self._known: dict[str, tuple[str, int, Bundle, KubernetesOptions, PodNeeds]] = {}
        self._quota: dict[str, tuple[float, str]] = {}
        self._living: dict[str, set[str]] = {}  # run -> uids of its pods
        self._clusters: dict[str, Cluster] = {}  # by namespace
        self._code = CodeChecks()
        self._lock = threading.Lock()

    def within(self, namespace: str) -> Cluster:
        with self._lock:
            if namespace not in self._clusters:
                self._clusters[namespace] = self._cluster.within(namespace)
            return self._clusters[namespace]

    def forget(self, key: str, uid: str) -> None:
        self._known.pop(uid, None)
        self._living.pop(key, None)
        self._quota.pop(key, None)
        self._code.forget(uid)

    def read(
        self,
        run: TrainRun,
        bundle: Bundle | None,
        changed: bool,
    ) -> tuple[steps.Seen, KubernetesOptions | None]:
        """Reads the run. `changed`: the bundle was made from the current words, not from earlier
        ones.

        OrchError: 65 for options that make no sense, 76 and 78 for a program that cannot start.
        """
        key = run.key
        now = time.time()
        allocation = self._ledger.get(key)
        # an allocation of a deleted run of the same name
        if allocation is not None and allocation.uid != run.metadata.uid:
            allocation = structs.replace(
                allocation, ending=allocation.ending or "its TrainRun is another by now"
            )
        seen = steps.Seen(
            run=run,
            job=self._job(run, bundle),
            pods=self._store.pods_of(key),
            allocation=allocation,
            planned=bundle is not None,
            now=now,
            crowded=self._decisions.crowded(key),
        )
        if bundle is None:
            return seen, None
        self._check_code(seen, bundle)
        seen = structs.replace(seen, lost=self._lost(seen))
        size = size_under(bundle, allocation)
        options, needs = self.options(run, bundle, size)
        in_force = allocation.inputs if allocation is not None else run.status.inputs
        no_quota = ""
        if seen.job is not None and not seen.job.finished:
            no_quota = self._no_quota(seen, run)
        _, ready = self._store.nodes_now()
        seen = structs.replace(
            seen,
            changed=changed and bool(in_force) and in_force != run.inputs,
            queued=not places_itself(options),
            fits=self._fitting(allocation, needs, options, now),
            ready=ready,
            hold_s=options.rendezvous_timeout_s,
            no_quota=no_quota,
            least=min(bundle.plans) if is_elastic(bundle, options) else size,
        )
        return seen, options

    def _check_code(self, seen: steps.Seen, bundle: Bundle) -> None:
        """Checks the program of a run that waits for its start, or for another one."""
        status = seen.run.status
        is_at_work = seen.job is not None and seen.job.generation > status.ended_generation
        if is_at_work or seen.allocation or seen.run.is_over or seen.run.spec.stopped:
            return
        self._code.check(self.within(seen.run.metadata.namespace), seen.run, bundle)

    def _fitting(
        self,
        allocation: Allocation | None,
        needs: PodNeeds,
        options: KubernetesOptions,
        now: float,
    ) -> set[str]:
        """Returns those of the run's nodes that its pods may use now."""
        if allocation is None:
            return set()
        excluded = set(self._decisions.bad(now))
        excluded |= {node for node, until in allocation.excluded.items() if until > now}
        nodes, _ = self._store.nodes_now()
        return fitting(nodes, allocation.held, needs, options, excluded)

    def options(
        self,
        run: TrainRun,
        bundle: Bundle,
        size: int,
    ) -> tuple[KubernetesOptions, PodNeeds]:
        """Returns the run's options and its pods' needs. OrchError (65) for options that a
        controller cannot serve."""
        uid = run.metadata.uid
        inputs = run.inputs
        cached = self._known.get(uid)
        if cached is not None and cached[:2] == (inputs, size) and cached[2] is bundle:
            return cached[3], cached[4]
        options = options_of(run, bundle)
        if options.gang != "none":
            options = structs.replace(options, gang=resolved(options, self._cluster.has))
        if options.kind != "job":
            message = (
                "backend.options.kind: the controller makes Jobs; a JobSet is sent without it"
                " (controller=never)"
            )
            raise OrchError(message, Exit.CONFIG)
        object_name(run.metadata.name, size, options.kind)  # refuses a name that is too long
        needs = pod_needs(bundle.plans[size], options)
        self._known[uid] = (inputs, size, bundle, options, needs)
        return options, needs

    def _job(self, run: TrainRun, bundle: Bundle | None) -> Job | None:
        return self._store.job_of(run, object_name(run.metadata.name, 1, "job"))

    def _lost(self, seen: steps.Seen) -> int:
        """Counts the pods that disappeared since the last look though nobody asked for it. Pods
        that disappear while no controller runs are not counted."""
        key = seen.run.key
        job = seen.job
        living = {pod.metadata.uid for pod in seen.pods if not pod.ended and not pod.leaves}
        previously_living = self._living.get(key, set())
        self._living[key] = living
        ending = seen.run.spec.stopped or (seen.allocation is not None and seen.allocation.ending)
        if job is None or job.finished or job.leaves or ending:
            return 0
        succeeded = {pod.metadata.uid for pod in seen.pods if pod.status.phase == "Succeeded"}
        return len(previously_living - living - succeeded)

    def _no_quota(self, seen: steps.Seen, run: TrainRun) -> str:
        """Returns why the Job controller cannot create its pods, from the Job's events, which are
        read at intervals."""
        job = seen.job
        assert job is not None
        missing = job.spec.completions - len([pod for pod in seen.pods if not pod.ended])
        created_at = seconds_of(job.metadata.creation_timestamp) or 0.0
        if (
            job.spec.suspend
            or missing <= job.status.succeeded
            or seen.now - created_at < steps.QUOTA_S
        ):
            self._quota.pop(run.key, None)
            return ""
        read_at, reason = self._quota.get(run.key, (0.0, ""))
        if time.monotonic() - read_at > _READ_QUOTA_S:
            fields = f"involvedObject.name={job.metadata.name},type=Warning"
            cluster = self.within(run.metadata.namespace)
            events = cluster.list("Event", fields=fields, absent_ok=True)
            messages = [event.get("message", "") for event in events]
            denials = [message for message in messages if "exceeded quota" in message]
            reason = " ".join(denials[-1].split())[:300] if denials else ""
            self._quota[run.key] = time.monotonic(), reason
        return reason

    def why_waiting(self, run: TrainRun) -> str:
        if run.spec.draft:
            return "its submission is not complete"
        until = seconds_of(run.status.wait_until) or 0.0
        if until > time.time():
            reason, _, _ = run.status.reason.partition("; tried again")
            return f"{reason}; tried again at {run.status.wait_until}"
        return self._decisions.reasons.get(run.key) or "waiting for room"
