"""Reconciles one run: reads its objects, writes its status, and takes the steps that follow."""

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
from .objects import is_elastic, make, manifest, ungate
from .planning import Planner, Unplannable
from .reports import Reports
from .room import NodeRequest, node_request
from .run_reader import RunReader, size_under
from .status import Report, begun, iso, next_status, plain, run_state, with_plan
from .store import Store

# how long the log of a run that has ended is read for its last report
_LAST_WORD_S = 60.0
_EVICTION_GRACE_S = 30
_MISSING_S = 15.0  # between two looks for what a run lacks to start
_BACKOFF_S = 60.0, 3600.0  # first and longest wait of a run whose starts fail

log = logging.getLogger("orch.reconcile")


class Reconciler:
    """Reconciles runs. Several threads may use it, but never two for one run."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        store: Store,
        ledger: Ledger,
        decisions: Decisions,
        planner: Planner,
        reports: Reports,
        again: Callable[[str, float], None],
        leads: Callable[[], bool],
    ):
        """`again(key, seconds)` lets the run be reconciled after that time. `leads()`: whether this
        process may act at all."""
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
        """Reconciles the run. OrchError if the API server refuses a step, or does not answer: the
        caller tries again."""
        run = self._store.runs.get(key)
        if run is None:
            self._clear(key)
            return
        planned = self._planner.bundle(run) if not run.spec.draft else None
        problem = planned.reason if isinstance(planned, Unplannable) else ""
        try:
            bundle = self._bundle(run, planned)
            seen, options = self._reader.read(run, bundle, changed=isinstance(planned, Bundle))
        except OrchError as error:
            self._refuse(run, error)
            return
        report = self._reports.get(key)
        complete = _has_ended(report) or _is_late(seen)
        if seen.job is not None and not (seen.job.finished and complete):
            self._watch_reports(seen, seen.job.generation)
        status = next_status(seen, bundle, report, self._reader.why_waiting(run))
        status = with_plan(status, problem, seen.now)
        if seen.allocation and not seen.allocation.ending and bundle is not None:
            seen = self._upgraded(seen, bundle)
        todo = steps.decide(structs.replace(seen, run=structs.replace(run, status=status)))
        status = self._take(todo, seen, status, bundle, options)
        self._write_status(run, status)
        if status.over and seen.allocation is None and (seen.job is None or complete):
            self._reports.forget(key)
            return
        self._again(key, 5.0 if todo or seen.job is None else 15.0)

    def _bundle(self, run: TrainRun, planned: Bundle | Unplannable | None) -> Bundle | None:
        """Returns the bundle of the current words, or else the one in force. OrchError if the words
        cannot be planned and none is in force."""
        if isinstance(planned, Bundle):
            return planned
        bundle = self._in_force(run)
        if isinstance(planned, Unplannable) and bundle is None:
            raise OrchError(planned.reason, planned.code)
        return bundle

    def _watch_reports(self, seen: steps.Seen, generation: int) -> None:
        started = [pod for pod in seen.pods if pod.running or pod.ended]
        started.sort(key=lambda pod: pod.index)
        names = [pod.metadata.name for pod in started]
        self._reports.watch(seen.run.key, generation, names)

    def _in_force(self, run: TrainRun) -> Bundle | None:
        """Returns the plans under which a living run continues while its new words are being
        planned, or cannot be."""
        started = run.status.state not in ("pending", *FINAL)
        at_work = started or self._ledger.get(run.key) is not None
        return self._planner.last(run) if at_work and run.status.inputs else None

    # ---------------------------------------------------------------------------------- acting

    def _upgraded(self, seen: steps.Seen, bundle: Bundle) -> steps.Seen:
        """Ends an allocation whose plan or size differs from the spec's."""
        allocation = seen.allocation
        spec = seen.run.spec
        assert allocation is not None
        if seen.changed:
            reason = "upgrade: it saves, and continues under another plan"
        elif spec.nodes in bundle.plans and spec.nodes != len(allocation.nodes):
            reason = f"resize to {spec.nodes} nodes: it saves, and continues"
        else:
            return seen
        self._decisions.ask(seen.run.key, [steps.Yield(reason)], None)
        return structs.replace(seen, allocation=structs.replace(allocation, ending=reason))

    def _take(
        self,
        todo: list[steps.Step],
        seen: steps.Seen,
        status: Status,
        bundle: Bundle | None,
        options: KubernetesOptions | None,
    ) -> Status:
        """Takes the steps, and returns the status with their results."""
        run = seen.run
        cluster = self._reader.within(run.metadata.namespace)
        asks = list[Ask]()
        waiting: Waiting | None = None
        for step in todo:
            if not self._leads():
                raise OrchError("the lease is late", Exit.FENCED)
            match step:
                case steps.Wait():
                    assert bundle is not None and options is not None
                    waiting = self._waiting_now(seen, status, bundle, options)
                case steps.Make():
                    assert bundle is not None and options is not None
                    status = self._make(step.generation, seen, status, bundle, options)
                case steps.Release() if not _has_live_pods(cluster, run.metadata.name):
                    asks.append(step)
                    status = self._released(status, seen.allocation, seen.now)
                case steps.Move():
                    self._act(step, seen, cluster)
                    asks.append(steps.Exclude(step.node))
                case steps.Replace() | steps.Exclude() | steps.MarkBad() | steps.Yield():
                    asks.append(step)
                case _:
                    self._act(step, seen, cluster)
        self._decisions.wait(run.key, waiting)
        if asks:
            self._ask(asks, seen, bundle, options)
        return status

    def _ask(
        self,
        asks: list[Ask],
        seen: steps.Seen,
        bundle: Bundle | None,
        options: KubernetesOptions | None,
    ) -> None:
        request = None
        if bundle is not None and options is not None and seen.allocation is not None:
            request = self._node_request(seen.run, seen.allocation, bundle, options)
        self._decisions.ask(seen.run.key, _merged(asks), request)

    def _waiting_now(
        self, seen: steps.Seen, status: Status, bundle: Bundle, options: KubernetesOptions
    ) -> Waiting | None:
        """Returns the run's request for nodes, or None while it has to wait after a failed
        start."""
        wait_until = seconds_of(status.wait_until) or 0.0
        if wait_until > seen.now:
            self._again(seen.run.key, wait_until - seen.now)
            return None
        return self._waiting(seen.run, status, bundle, options)

    def _act(self, step: steps.Step, seen: steps.Seen, cluster: Cluster) -> None:
        """Takes a step that only sends requests to the API server; other steps do nothing here."""
        match step:
            case steps.Remove():
                assert seen.job is not None
                cluster.delete("Job", seen.job.metadata.name, "Foreground")
                if step.force:
                    for pod in seen.pods:
                        cluster.delete("Pod", pod.metadata.name, grace_s=0)
            case steps.Ungate():
                ungate(cluster, step.pod, step.node, step.together)
            case steps.Move():
                key = seen.run.key
                log.info("%s: pod %s leaves %s: %s", key, step.pod, step.node, step.reason)
                # gone, or a disruption budget forbids it for now
                with contextlib.suppress(OrchError):
                    cluster.evict(step.pod, _EVICTION_GRACE_S)
            case steps.ForceDelete():
                cluster.patch_status("Pod", step.pod, failed_by_disruption(step.node, seen.now))
                cluster.delete("Pod", step.pod, grace_s=0)
            case steps.Discard():
                meta = seen.run.metadata  # one that became a run meanwhile has another version
                cluster.delete("TrainRun", meta.name, only=(meta.uid, meta.resource_version))
            case steps.Plan():
                pass  # asking the planner for the bundle has started it

    def _node_request(
        self, run: TrainRun, allocation: Allocation, bundle: Bundle, options: KubernetesOptions
    ) -> NodeRequest:
        """Builds the request for single nodes of a run that has an allocation."""
        size = size_under(bundle, allocation)
        _, needs = self._reader.options(run, bundle, size)
        if is_elastic(bundle, options):
            nodes = len(allocation.nodes)
            return node_request(run.key, bundle.plans, options, needs, nodes=nodes, elastic=True)
        return NodeRequest(run.key, [(size, bundle.plans[size])], options, needs)

    def _waiting(
        self, run: TrainRun, status: Status, bundle: Bundle, options: KubernetesOptions
    ) -> Waiting:
        _, needs = self._reader.options(run, bundle, max(bundle.plans))
        elastic = is_elastic(bundle, options)
        request = node_request(
            run.key, bundle.plans, options, needs, nodes=run.spec.nodes, elastic=elastic
        )
        meta = run.metadata
        return Waiting(
            priority=-run.spec.priority,
            created=meta.creation_timestamp + meta.uid,
            request=request,
            uid=meta.uid,
            generation=status.generation + 1,
            inputs=run.inputs,
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
        allocation = seen.allocation
        plan = self._plan(allocation, run, bundle)
        gpu = options.gpu_resource if plan.cluster.device == "cuda" else ""
        start = manifest(
            run,
            bundle,
            plan,
            options,
            generation=generation,
            topology=self._store.topology(profile(options), gpu),
            gated=not seen.queued,
        )
        status = structs.replace(status, generation=generation, inputs=run.inputs)
        status = structs.replace(status, plan_hash=plan.hash, reason="its Job is being made")
        self._write_status(run, status)  # first: a start that is repeated has the same number
        make(self._reader.within(run.metadata.namespace), start)
        return status

    def _plan(self, allocation: Allocation | None, run: TrainRun, bundle: Bundle) -> Plan:
        size = (
            len(allocation.nodes) if allocation is not None else run.spec.nodes or max(bundle.plans)
        )
        return bundle.plans.get(size) or bundle.largest

    def _released(self, status: Status, allocation: Allocation | None, now: float) -> Status:
        if allocation is None:
            return status
        if not allocation.wait or status.over:
            return structs.replace(status, wait_until="") if allocation.ending else status
        first, longest = _BACKOFF_S
        return structs.replace(
            status,
            fails=status.fails + 1,
            wait_until=iso(now + min(longest, first * 2**status.fails)),
            reason=allocation.ending,
        )

    def _clear(self, key: str) -> None:
        """Cleans up after a deleted TrainRun, whose objects go with it: its nodes are released once
        no pod is left on them."""
        self._decisions.wait(key, None)
        self._reports.forget(key)
        allocation = self._ledger.get(key)
        if allocation is None:
            return
        namespace, _, name = key.partition("/")
        cluster = self._reader.within(namespace)
        jobs = cluster.list("Job", f"{RUN}={name}")
        jobs = [job for job in jobs if not job["metadata"].get("deletionTimestamp")]
        for job in jobs:  # the garbage collector would do so too, later
            cluster.delete("Job", job["metadata"]["name"])
        if jobs or _has_live_pods(cluster, name):
            self._again(key, 2.0)
            return
        self._planner.forget(allocation.uid)
        self._reader.forget(key, allocation.uid)
        self._decisions.ask(key, [steps.Release()], None)

    # ---------------------------------------------------------------------------------- reporting

    def _refuse(self, run: TrainRun, error: OrchError) -> None:
        """Reports a run that cannot be planned, or asks for something that does not exist."""
        self._decisions.wait(run.key, None)
        if self._ledger.get(run.key) is not None or run.is_over:
            return
        status = begun(run)
        if error.exit == Exit.CAPACITY:
            self._write_status(run, structs.replace(status, reason=error.message))
            self._again(run.key, _MISSING_S)
            return
        now = time.time()
        last_state = run_state(status)
        run_document = status.run
        if last_state is not None:
            run_document = plain(finish(last_state, "failed", error.exit, error.message, at=now))
        status = structs.replace(
            with_plan(status, error.message, now),
            state="failed",
            run=run_document,
            reason=error.message,
            exit_code=int(error.exit),
            ended_at=iso(now),
            inputs=run.inputs,
        )
        self._write_status(run, status)

    def _write_status(self, run: TrainRun, status: Status) -> None:
        """Patches the TrainRun's status if it differs from the last one."""
        current = self._store.runs.get(run.key) or run
        change = changed_fields(current.status, status)
        if not change:
            return
        patch = {"metadata": {"uid": run.metadata.uid}, "status": change}
        cluster = self._reader.within(run.metadata.namespace)
        cluster.change("TrainRun", run.metadata.name, patch, "/status")


def _has_ended(report: Report) -> bool:
    return report.state is not None and report.state.is_final


def _is_late(seen: steps.Seen) -> bool:
    """Tells whether the run ended so long ago that no last report is expected any more."""
    ended_at = seconds_of(seen.run.status.ended_at) or 0.0
    return seen.run.is_over and seen.now > ended_at + _LAST_WORD_S


def _has_live_pods(cluster: Cluster, name: str) -> bool:
    """Tells whether any pod of the run lives. It asks the API server itself, because what is
    released is given to other runs."""
    phases = (body.get("status", {}).get("phase") for body in cluster.list("Pod", f"{RUN}={name}"))
    return any(phase not in ("Succeeded", "Failed") for phase in phases)


def _merged(asks: list[Ask]) -> list[Ask]:
    """Merges several requests for other nodes into one."""
    indices: set[int] = set()
    merged: list[Ask] = []
    for ask in asks:
        if isinstance(ask, steps.Replace):
            indices.update(ask.indices)
        else:
            merged.append(ask)
    return [*merged, steps.Replace(sorted(indices))] if indices else merged
