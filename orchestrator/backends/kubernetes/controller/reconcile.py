"""Reconciling one run: sees what there is, says it in the status, and takes the steps that
follow."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from msgspec import structs

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.cluster_view import profile
from orchestrator.backends.kubernetes.names import RUN
from orchestrator.backends.kubernetes.observer import failed_by_disruption
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.backends.kubernetes.phases import seconds_of
from orchestrator.backends.kubernetes.train_run import Bundle, Status, TrainRun, changed_fields
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan.exits import Exit
from orchestrator.run.state import FINAL, finish

from . import decide as steps
from .decisions import Ask, Decisions, Waiting
from .ledger import Allocation, Ledger
from .objects import give, is_elastic, make, manifest
from .planning import Planner, Unplannable
from .reports import Reports
from .room import Wish, wish_of
from .run_reader import RunReader, size_under
from .status import Report, begun, iso, next_status, plain, run_state, with_plan
from .store import Store

# the log of a run that has ended is read for so long, for what it says of its end
_LAST_WORD_S = 60.0
_LEAVE_S = 30  # of a pod that has to go where it cannot run
_BACKOFF_S = 60.0, 3600.0  # of a run whose start came to nothing: the first wait, and the longest

log = logging.getLogger("orch.reconcile")


class Reconciler:
    """For several threads, but never two for one run."""

    def __init__(
        self, cluster: Cluster, store: Store, ledger: Ledger, decisions: Decisions, planner: Planner, reports: Reports,
        again: Callable[[str, float], None], leads: Callable[[], bool],
    ):  # fmt: skip
        """`again(key, seconds)`: reconcile the run then. `leads`: whether this process may act at
        all."""
        self._cluster = cluster
        self._store = store
        self._ledger = ledger
        self._decisions = decisions
        self._planner = planner
        self._reports = reports
        self._again = again
        self._leads = leads
        self._reader = RunReader(cluster, store, ledger, decisions)

    def reconcile(self, key: str) -> None:
        """OrchError where the API server refuses a step, or does not answer: to be tried again."""
        run = self._store.runs.get(key)
        if run is None:
            self._clear(key)
            return
        found = self._planner.bundle(run) if not run.spec.draft else None
        try:
            bundle = found if isinstance(found, Bundle) else self._in_force(run)
            if isinstance(found, Unplannable) and bundle is None:
                raise OrchError(found.text, found.code)
            seen, options = self._reader.read(run, bundle, changed=isinstance(found, Bundle))
        except OrchError as error:
            self._refuse(run, error)
            return
        report = self._reports.get(key)
        late = run.is_over and seen.now > (seconds_of(run.status.ended_at) or 0.0) + _LAST_WORD_S
        told = late or _has_ended(report)
        if seen.job is not None and not (seen.job.finished and told):
            pods = sorted(
                (pod for pod in seen.pods if pod.running or pod.ended), key=lambda pod: pod.index
            )
            self._reports.watch(key, seen.job.generation, [pod.metadata.name for pod in pods])
        status = next_status(seen, bundle, report, self._reader.why_waiting(run))
        status = with_plan(status, found.text if isinstance(found, Unplannable) else "", seen.now)
        if seen.allocation and not seen.allocation.ending and bundle is not None:
            seen = self._upgraded(seen, bundle)
        todo = steps.decide(structs.replace(seen, run=structs.replace(run, status=status)))
        status = self._take(todo, seen, status, bundle, options)
        self._say(run, status)
        if status.over and seen.allocation is None and (seen.job is None or told):
            self._reports.forget(key)
        else:
            self._again(key, 5.0 if todo or seen.job is None else 15.0)

    def _in_force(self, run: TrainRun) -> Bundle | None:
        """What a run goes on under that is at work, while its new words are being planned, or
        cannot be."""
        at_work = self._ledger.get(run.key) is not None or run.status.state not in (
            "pending",
            *FINAL,
        )
        return self._planner.last(run) if at_work and run.status.inputs else None

    # ---------------------------------------------------------------------------------- acting

    def _upgraded(self, seen: steps.Seen, bundle: Bundle) -> steps.Seen:
        """An allocation that is of another plan or size than is wanted now has to end."""
        given = seen.allocation
        spec = seen.run.spec
        assert given is not None
        why = ""
        if seen.changed:
            why = "upgrade: it goes on under another plan, from what it saves now"
        elif (
            spec.nodes is not None and spec.nodes != len(given.nodes) and spec.nodes in bundle.plans
        ):
            why = f"resize to {spec.nodes} nodes: it saves, and goes on"
        if not why:
            return seen
        self._decisions.ask(seen.run.key, [steps.Yield(why)], None)
        return structs.replace(seen, allocation=structs.replace(given, ending=why))

    def _take(
        self, todo: list[steps.Step], seen: steps.Seen, status: Status, bundle: Bundle | None,
        options: KubernetesOptions | None,
    ) -> Status:  # fmt: skip
        """Take the steps; the status with what comes of them."""
        run = seen.run
        given = seen.allocation
        space = self._reader.space(run.metadata.namespace)
        asks = list[Ask]()
        wish = None
        waits: Waiting | None = None
        for step in todo:
            if not self._leads():
                raise OrchError("the lease is late", Exit.FENCED)
            match step:
                case steps.Wait():
                    assert bundle is not None and options is not None
                    if (seconds_of(status.wait_until) or 0.0) <= seen.now:
                        waits = self._waiting(run, status, bundle, options)
                    else:
                        self._again(run.key, (seconds_of(status.wait_until) or 0.0) - seen.now)
                case steps.Make():
                    assert bundle is not None and options is not None
                    status = self._make(step.generation, seen, status, bundle, options)
                case steps.Remove():
                    assert seen.job is not None
                    space.delete("Job", seen.job.metadata.name, "Foreground")
                    if step.force:
                        for pod in seen.pods:
                            space.delete("Pod", pod.metadata.name, grace_s=0)
                case steps.Give():
                    give(space, step.pod, step.node, step.together)
                case steps.Move():
                    log.info("%s: pod %s leaves %s: %s", run.key, step.pod, step.node, step.why)
                    with contextlib.suppress(
                        OrchError
                    ):  # gone, or a disruption budget forbids it for now
                        space.evict(step.pod, _LEAVE_S)
                    asks.append(steps.Exclude(step.node))
                case steps.Bury():
                    space.patch_status("Pod", step.pod, failed_by_disruption(step.node, seen.now))
                    space.delete("Pod", step.pod, grace_s=0)
                case steps.Release():
                    if not self._left(run, space):
                        asks.append(step)
                        status = self._released(status, given, seen.now)
                case steps.Discard():
                    space.delete("TrainRun", run.metadata.name)
                case steps.Replace() | steps.Exclude() | steps.Sick() | steps.Yield():
                    asks.append(step)
                case steps.Plan():
                    pass  # asking for the bundle has begun it
        self._decisions.wait(run.key, waits)
        if asks:
            if bundle is not None and options is not None and given is not None:
                wish = self._wish(run, given, bundle, options)
            self._decisions.ask(run.key, _merged(asks), wish)
        return status

    def _wish(
        self, run: TrainRun, given: Allocation, bundle: Bundle, options: KubernetesOptions
    ) -> Wish:
        """For single nodes of a run that has some."""
        size = size_under(bundle, given)
        _, needs = self._reader.options(run, bundle, size)
        if is_elastic(bundle, options):
            return wish_of(run.key, bundle.plans, options, needs, len(given.nodes), elastic=True)
        return Wish(run.key, [(size, bundle.plans[size])], options, needs)

    def _waiting(
        self, run: TrainRun, status: Status, bundle: Bundle, options: KubernetesOptions
    ) -> Waiting:
        _, needs = self._reader.options(run, bundle, max(bundle.plans))
        wish = wish_of(
            run.key, bundle.plans, options, needs, run.spec.nodes, is_elastic(bundle, options)
        )
        about = run.metadata
        return Waiting(
            -run.spec.priority,
            about.creation_timestamp + about.uid,
            wish,
            about.uid,
            status.generation + 1,
            run.inputs,
        )

    def _make(
        self,
        generation: int,
        seen: steps.Seen,
        status: Status,
        bundle: Bundle,
        options: KubernetesOptions,
    ) -> Status:
        run = seen.run
        given = seen.allocation
        plan = self._plan(given, run, bundle)
        topology = self._store.topology(
            profile(options), options.gpu_resource if plan.cluster.device == "cuda" else ""
        )
        found = manifest(run, bundle, plan, options, generation, topology, gated=not seen.queued)
        status = structs.replace(status, generation=generation, inputs=run.inputs)
        status = structs.replace(status, plan_hash=plan.hash, reason="its Job is being made")
        self._say(run, status)  # first: what is begun twice has the same number
        make(self._reader.space(run.metadata.namespace), found)
        return status

    def _plan(self, given: Allocation | None, run: TrainRun, bundle: Bundle) -> Plan:
        size = len(given.nodes) if given is not None else run.spec.nodes or max(bundle.plans)
        return bundle.plans.get(size) or bundle.largest

    def _released(self, status: Status, given: Allocation | None, now: float) -> Status:
        if given is None or not given.wait or status.over:
            return (
                status if not given or not given.ending else structs.replace(status, wait_until="")
            )
        first, most = _BACKOFF_S
        until = iso(now + min(most, first * 2**status.fails))
        return structs.replace(
            status, fails=status.fails + 1, wait_until=until, reason=given.ending
        )

    def _left(self, run: TrainRun, space: Cluster) -> bool:
        """Whether any pod of the run lives, asked of the API server itself: what is given back is
        given to others."""
        return _any_lives(space, run.metadata.name)

    def _clear(self, key: str) -> None:
        """Its TrainRun is gone, and what it owned goes with it; its nodes are given back when
        nothing is left there."""
        self._decisions.wait(key, None)
        self._reports.forget(key)
        if (given := self._ledger.get(key)) is None:
            return
        namespace, _, name = key.partition("/")
        space = self._reader.space(namespace)
        jobs = [
            job
            for job in space.list("Job", f"{RUN}={name}")
            if not job["metadata"].get("deletionTimestamp")
        ]
        for job in jobs:  # the garbage collector does so too, in its own time
            space.delete("Job", job["metadata"]["name"])
        if jobs or _any_lives(space, name):
            self._again(key, 2.0)
            return
        self._planner.forget(given.uid)
        self._reader.forget(key, given.uid)
        self._decisions.ask(key, [steps.Release()], None)

    # ---------------------------------------------------------------------------------- saying

    def _refuse(self, run: TrainRun, why: OrchError) -> None:
        """It cannot be planned, or asks for what there is not."""
        self._decisions.wait(run.key, None)
        if self._ledger.get(run.key) is not None or run.is_over:
            return
        status = begun(run)
        if why.exit == Exit.CAPACITY:
            self._say(run, structs.replace(status, reason=why.message))
            return
        now = time.time()
        known = run_state(status)
        kept = status.run
        if known is not None:
            kept = plain(finish(known, "failed", why.exit, why.message, at=now))
        said = {
            "reason": why.message,
            "exit_code": int(why.exit),
            "ended_at": iso(now),
            "inputs": run.inputs,
        }
        self._say(
            run,
            structs.replace(with_plan(status, why.message, now), state="failed", run=kept, **said),
        )

    def _say(self, run: TrainRun, status: Status) -> None:
        now = self._store.runs.get(run.key) or run
        change = changed_fields(now.status, status)
        if not change:
            return
        about = {"metadata": {"uid": run.metadata.uid}, "status": change}
        self._reader.space(run.metadata.namespace).change(
            "TrainRun", run.metadata.name, about, "/status"
        )


def _has_ended(report: Report) -> bool:
    return report.state is not None and report.state.is_final


def _any_lives(space: Cluster, name: str) -> bool:
    phases = (body.get("status", {}).get("phase") for body in space.list("Pod", f"{RUN}={name}"))
    return any(phase not in ("Succeeded", "Failed") for phase in phases)


def _merged(asks: list[Ask]) -> list[Ask]:
    """One wish for other nodes instead of several."""
    indices = sorted(
        {index for one in asks if isinstance(one, steps.Replace) for index in one.indices}
    )
    others: list[Ask] = [one for one in asks if not isinstance(one, steps.Replace)]
    return [*others, steps.Replace(indices)] if indices else others
