"""One run as it is now, from what is watched: the facts that its steps and its status follow
from."""

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
from .room import fitting
from .store import Store

_ASK_QUOTA_S = 15.0


def size_under(bundle: Bundle, given: Allocation | None) -> int:
    """The size of a run that holds `given`: the largest where it has none, or one that new words no
    longer know."""
    return given.size if given and given.size in bundle.plans else max(bundle.plans)


class RunReader:
    """For several threads."""

    def __init__(self, cluster: Cluster, store: Store, ledger: Ledger, decisions: Decisions):
        self._cluster = cluster
        self._store = store
        self._ledger = ledger
        self._decisions = decisions
        self._known: dict[
            str, tuple[str, int, Bundle, KubernetesOptions, PodNeeds]
        ] = {}  # by uid: of the first three
        self._quota: dict[str, tuple[float, str]] = {}
        self._living: dict[str, set[str]] = {}  # run -> uids of its pods
        self._spaces: dict[str, Cluster] = {}
        self._lock = threading.Lock()

    def space(self, namespace: str) -> Cluster:
        with self._lock:
            if namespace not in self._spaces:
                self._spaces[namespace] = self._cluster.within(namespace)
            return self._spaces[namespace]

    def forget(self, key: str, uid: str) -> None:
        self._known.pop(uid, None)
        self._living.pop(key, None)
        self._quota.pop(key, None)

    def read(
        self, run: TrainRun, bundle: Bundle | None, changed: bool
    ) -> tuple[steps.Seen, KubernetesOptions | None]:
        """`changed`: the bundle is of the words as they are now, and not of those before. OrchError
        (65) for options that make no sense."""
        key = run.key
        now = time.time()
        given = self._ledger.get(key)
        if (
            given is not None and given.uid != run.metadata.uid
        ):  # of one of the same name that was deleted
            given = structs.replace(given, ending=given.ending or "its TrainRun is another by now")
        pods = self._store.pods_of(key)
        seen = steps.Seen(
            run=run, job=self._job(run, bundle), pods=pods, allocation=given, planned=bundle is not None, now=now,
            crowded=self._decisions.crowded(key),
        )  # fmt: skip
        if bundle is None:
            return seen, None
        seen = structs.replace(seen, lost=self._lost(seen))
        size = size_under(bundle, given)
        options, needs = self.options(run, bundle, size)
        in_force = given.inputs if given is not None else run.status.inputs
        seen = structs.replace(seen, changed=changed and bool(in_force) and in_force != run.inputs)
        nodes, ready = self._store.nodes_now()
        out = set(self._decisions.bad(now))
        if given is not None:
            out |= {node for node, until in given.excluded.items() if until > now}
        fits = fitting(nodes, given.held, needs, options, out) if given else set()
        queued = not places_itself(options)
        hold = options.rendezvous_timeout_s
        quota = self._no_quota(seen, run) if seen.job is not None and not seen.job.finished else ""
        elastic = is_elastic(bundle, options)
        least = min(bundle.plans) if elastic else size
        found = structs.replace(
            seen, queued=queued, fits=fits, ready=ready, hold_s=hold, no_quota=quota, least=least
        )
        return found, options

    def options(
        self, run: TrainRun, bundle: Bundle, size: int
    ) -> tuple[KubernetesOptions, PodNeeds]:
        uid = run.metadata.uid
        inputs = run.inputs
        found = self._known.get(uid)
        if found is None or found[:2] != (inputs, size) or found[2] is not bundle:
            options = options_of(run, bundle)
            if options.gang != "none":
                options = structs.replace(options, gang=resolved(options, self._cluster.has))
            if options.kind != "job":
                text = (
                    "backend.options.kind: the controller makes Jobs; a JobSet is sent without it"
                    " (controller=never)"
                )
                raise OrchError(text, Exit.CONFIG)
            object_name(run.metadata.name, size, options.kind)
            found = self._known[uid] = (
                inputs,
                size,
                bundle,
                options,
                pod_needs(bundle.plans[size], options),
            )
        return found[3], found[4]

    def _job(self, run: TrainRun, bundle: Bundle | None) -> Job | None:
        return self._store.job_of(run, object_name(run.metadata.name, 1, "job"))

    def _lost(self, seen: steps.Seen) -> int:
        """Pods that went since the last look though nobody has asked for it. What goes while no
        controller is there is not counted."""
        key = seen.run.key
        job = seen.job
        living = {pod.metadata.uid for pod in seen.pods if not pod.ended and not pod.leaves}
        before, self._living[key] = self._living.get(key, set()), living
        ending = seen.run.spec.stopped or (seen.allocation is not None and seen.allocation.ending)
        if job is None or job.finished or job.leaves or ending:
            return 0
        succeeded = {pod.metadata.uid for pod in seen.pods if pod.status.phase == "Succeeded"}
        return len(before - living - succeeded)

    def _no_quota(self, seen: steps.Seen, run: TrainRun) -> str:
        """Why the Job's controller cannot make its pods, as its events say; asked for now and
        then."""
        job = seen.job
        assert job is not None
        missing = job.spec.completions - len([pod for pod in seen.pods if not pod.ended])
        born = seconds_of(job.metadata.creation_timestamp) or 0.0
        if job.spec.suspend or missing <= job.status.succeeded or seen.now - born < steps.QUOTA_S:
            self._quota.pop(run.key, None)
            return ""
        at, why = self._quota.get(run.key, (0.0, ""))
        if time.monotonic() - at > _ASK_QUOTA_S:
            about = f"involvedObject.name={job.metadata.name},type=Warning"
            events = self.space(run.metadata.namespace).list("Event", fields=about, absent_ok=True)
            late = [one for one in events if "exceeded quota" in one.get("message", "")]
            why = " ".join(late[-1]["message"].split())[:300] if late else ""
            self._quota[run.key] = time.monotonic(), why
        return why

    def why_waiting(self, run: TrainRun) -> str:
        if run.spec.draft:
            return "its submission is not complete"
        until = seconds_of(run.status.wait_until) or 0.0
        if until > time.time():
            return (
                f"{run.status.reason.partition('; tried again')[0]}; tried again at"
                f" {run.status.wait_until}"
            )
        return self._decisions.why.get(run.key) or "waiting for room"
