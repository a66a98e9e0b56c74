"""The kubernetes backend: objects rendered from the plan, sent as they are, watched through the API server alone.

The run folder on the submitter's machine is a cache: the key, what was sent, and what the pods have reported. The run
itself is in the cluster, with its checkpoints on a claim.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import structs

from orchestrator.backends.base import (
    Backend,
    LogMirroring,
    NodeExec,
    NodeRemoval,
    Prefetching,
    Rendering,
    Resizing,
    TopologySource,
    read_record,
    write_record,
)
from orchestrator.errors import OrchError, check_installed
from orchestrator.plan import Exit, Plan, load_plan, to_json
from orchestrator.plan.codec import from_json
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.intent import ask, wants_end
from orchestrator.run.request import LaunchRequest, SubmissionBundle, at_size, to_bytes
from orchestrator.run.state import RunState, prepare_resume, read_state, write_state

from .api.client import Cluster, in_background
from .cluster_view import ClusterSnapshot, read_snapshot
from .names import CONTAINER, RUNS
from .options import read_options
from .record import KubernetesRecord, verdict

if TYPE_CHECKING:
    from orchestrator.cluster.model import Topology
    from orchestrator.config.schema import Config

    from .api.exec import PodCommand
    from .observer import RunObserver
    from .phases import RunStatus

_FRESH_S = 15.0  # an older snapshot is read again
_BROKEN_S = 180.0  # no submission takes that long between its first object and its Job


class KubernetesBackend(Backend, Prefetching, Rendering, Resizing, LogMirroring, TopologySource, NodeExec, NodeRemoval):
    name = "kubernetes"
    agent_is_init = True
    shares_folders = False
    replaces_lost_nodes = True

    def __init__(self) -> None:
        self._clusters: dict[tuple[str | None, str | None], Cluster] = {}
        self._ahead: tuple[float, Future[ClusterSnapshot]] | None = None  # and when it was asked for

    @cached_property
    def _observer(self) -> RunObserver:
        from .observer import RunObserver  # not for those who only submit

        return RunObserver(self._cluster)

    def check(self, request: LaunchRequest) -> None:
        """Whether a cluster answers, and the options make sense."""
        options = read_options(request.backend_options)
        self._cluster(options.context, options.namespace).version()

    def script(self, request: LaunchRequest, plan: Plan) -> str:
        """The objects of a run as `submit` sends them, but for the key, which is drawn then."""
        from .objects.render import to_yaml
        from .submission import draft_objects

        return to_yaml(draft_objects(request, plan))

    def look_ahead(self, config: Config) -> None:
        """Ask the cluster, in the background, for what `submit` will want to know once the job is planned."""
        with contextlib.suppress(OrchError):  # `submit` raises it
            options = read_options(config.backend.options)
            places = options.queue is None and config.cluster.device != "cpu"
            cluster = self._cluster(options.context, options.namespace)
            self._ahead = time.monotonic(), in_background(lambda: read_snapshot(cluster, options, places))

    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        from .submission import draft_objects

        request = bundle.request
        check_installed("kubernetes", "submitting to Kubernetes")
        plan = from_json(bundle.contents["plan.json"])
        drafts = draft_objects(request, plan)  # what cannot be rendered leaves no folder behind
        with create_run_folder(bundle, self.name) as folder:
            self._start(folder, request, plan, environ, 0, drafts)
        return request.handle

    def render(self, bundle: SubmissionBundle) -> str:
        """Everything that `submit` does but the sending. A cluster need not be there; then nothing is known of it."""
        from .objects.render import render, to_yaml
        from .submission import draft_objects, manifest_of, record_of

        request, options = bundle.request, read_options(bundle.request.backend_options)
        plan, space = from_json(bundle.contents["plan.json"]), options.namespace or ""
        draft_objects(request, plan)
        with create_run_folder(bundle, self.name) as folder:
            manifest = manifest_of(folder, request, plan, options, os.environ, space)
            record = record_of(request, options, space)
            write_record(folder, record, durable=True)  # so that it is found once somebody has applied it
            return to_yaml(render(manifest))

    def resume(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> str:
        """The next generation of the same run: its old objects go, new ones come, on the nodes that there are now."""
        from .submission import delete_run_objects

        record = read_record(folder, KubernetesRecord)
        if self.is_alive(folder):
            raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
        if record:
            delete_run_objects(self._cluster_of(record), record.kind, record.name, folder.run_id)
        prepare_resume(folder)
        self._start(folder, request, load_plan(folder.plan), environ, record.generation + 1 if record else 0)
        return request.handle

    def resize(self, folder: RunFolder, request: LaunchRequest, nodes: int, environ: Mapping[str, str]) -> str:
        """The next generation, under the plan that was submitted for that many nodes. A living run saves and leaves
        first."""
        from .objects.pod import MARGIN_S, grace_seconds
        from .submission import delete_run_objects

        plan, record = load_plan(folder.sized_plan(nodes)), read_record(folder, KubernetesRecord)
        request = at_size(request, plan)
        asked = ask(folder, "run", nodes=nodes, began_with=read_state(folder).intent)  # `resume` takes it up from here
        if record:
            grace = grace_seconds(plan, read_options(request.backend_options), request.policy.grace_s)
            delete_run_objects(
                self._cluster_of(record), record.kind, record.name, folder.run_id, 2.0 * grace + MARGIN_S
            )
        write_private(folder.plan, to_json(plan, indent=1) + b"\n")
        write_private(folder.request, to_bytes(request))
        prepare_resume(folder, plan, asked.number)
        self._start(folder, request, plan, environ, record.generation + 1 if record else 0)
        return request.handle

    def cancel(self, folder: RunFolder, force: bool) -> None:
        """Delete the Job: its pods get SIGTERM and their grace period to save; by force they get none."""
        from .submission import delete_remains

        record = read_record(folder, KubernetesRecord)
        if record is None or not self.is_alive(folder):
            if record is not None and delete_remains(self._cluster_of(record), record):
                ask(folder, "end", force=force)  # a submission that broke off: there is no Job to wait for
                return
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        ask(folder, "end", force=force)
        cluster = self._cluster_of(record)
        self._save_last_report(folder, record)
        cluster.delete(record.kind, record.name, "Foreground")
        if force:
            for pod in self._observer.observe(record, folder.run_id).pods:
                cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)
        self._observer.clear()

    def is_alive(self, folder: RunFolder) -> bool:
        record = read_record(folder, KubernetesRecord)
        return record is not None and not self._observer.status(record, folder.run_id).over

    def state(self, folder: RunFolder) -> RunState:
        """From the cluster's objects and pod 0's status lines; while no cluster answers, from the run folder alone."""
        from .observer import force_delete_stuck_pods

        record = read_record(folder, KubernetesRecord)
        if record is None:
            return read_state(folder)
        try:
            what, run = self._observer.status(record, folder.run_id), self._observer.observe(record, folder.run_id)
            if done := force_delete_stuck_pods(self._cluster_of(record), run, time.time()):
                what = structs.replace(what, text=done)
                self._observer.clear()
            if what.over and not record.sent and record.submission and time.time() > record.submitted_at + _BROKEN_S:
                what = self._broken_off(record, what)
                record = structs.replace(record, sent=True)  # nobody sends it any more
            if not (what.over and read_state(folder).is_final):
                self._save_last_report(folder, record)
        except OrchError as error:
            state = read_state(folder)
            text = f"{state.state} when last heard of; now unknown: {error.message}"
            return state if state.is_final else structs.replace(state, reason=text)
        known = read_state(folder)
        state = verdict(known, what, wants_end(folder) is not None, record.sent)
        if state.is_final and state != known:
            state = structs.replace(state, ended_at=state.ended_at or time.time())
            write_state(folder, state)  # the cluster forgets; this folder does not
        return state

    def exec_on_node(
        self, folder: RunFolder, request: LaunchRequest, node: str, argv: Callable[[str, int], list[str]]
    ) -> PodCommand:
        """`pods/exec` into the node's pod."""
        cluster, pod = self._pod_of(folder, node)
        python = [read_options(request.backend_options).python, "-P"]
        return cluster.command(pod, CONTAINER, [*python, *argv(f"{RUNS}/{folder.run_id}", 1)])

    def why_not_removed(self, request: LaunchRequest) -> str:
        if read_options(request.backend_options).claim is None:
            return "without backend.options.claim no checkpoint outlives its pods, so nothing could be resumed"
        return ""

    def remove_node(self, folder: RunFolder, node: str, grace_s: int | None) -> None:
        """Delete the node's pod, or evict it as a drain does."""
        cluster, pod = self._pod_of(folder, node)
        if grace_s is None:
            cluster.delete("Pod", pod, grace_s=0)
        else:
            cluster.evict(pod, grace_s)

    @contextlib.contextmanager
    def mirror(self, folder: RunFolder, follow: bool) -> Iterator[None]:
        """The pods' logs in the run folder, once or for as long as the body runs."""
        from .log_mirror import copy_logs, follow_logs  # imports asyncio, which `submit` does without

        record = read_record(folder, KubernetesRecord)
        if record is None or not self._observer.observe(record, folder.run_id).pods:
            yield
            return
        self._save_last_report(folder, record)
        cluster = self._cluster_of(record)
        if follow:
            with follow_logs(folder, cluster, lambda: self._observer.observe(record, folder.run_id)):
                yield
        else:
            copy_logs(folder, cluster, self._observer.observe(record, folder.run_id))
            yield

    def live_topology(self, which: str) -> Topology:
        """`which`: a profile of node labels, "" to find out."""
        from .cluster_view import live_topology, profile_named

        return live_topology(Cluster(), profile_named(which or "auto"))

    # ---------------------------------------------------------------------------------- parts

    def _pod_of(self, folder: RunFolder, node: str) -> tuple[Cluster, str]:
        """The run's cluster, and the name of the pod that is this node of the run now."""
        from .log_mirror import pod_node_names
        from .phases import index_of

        record = read_record(folder, KubernetesRecord)
        if record is None:
            raise OrchError(f"run {folder.run_id} has no pods", Exit.USAGE)
        pods = self._observer.observe(record, folder.run_id).pods
        names = pod_node_names(pods)
        found = next((pod["metadata"]["name"] for pod in pods if names[index_of(pod)] == node), None)
        if found is None:
            raise OrchError(f"node {node} of run {folder.run_id} has no pod now", Exit.CAPACITY)
        return self._cluster_of(record), found

    def _cluster(self, context: str | None, namespace: str | None) -> Cluster:
        return self._clusters.setdefault((context, namespace), Cluster(context, namespace))

    def _cluster_of(self, record: KubernetesRecord) -> Cluster:
        return self._cluster(record.context, record.namespace)

    def _start(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        plan: Plan,
        environ: Mapping[str, str],
        generation: int,
        drafts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        from .submission import draft_objects, submit_objects

        options = read_options(request.backend_options)
        cluster = self._cluster(options.context, options.namespace)
        ahead, self._ahead = self._ahead, None
        fresh = ahead[1] if ahead and time.monotonic() < ahead[0] + _FRESH_S else None
        drafts = drafts or draft_objects(request, plan)
        submit_objects(cluster, folder, request, plan, environ, generation, drafts, fresh)
        self.__dict__.pop("_observer", None)  # what it has observed is of before

    def _broken_off(self, record: KubernetesRecord, what: RunStatus) -> RunStatus:
        """A submission that was killed before its Job: what it left is deleted."""
        from .submission import delete_remains

        gone = delete_remains(self._cluster_of(record), record)
        left = f"; deleted what it left: {', '.join(gone)}" if gone else ""
        return structs.replace(what, text=f"its submission broke off before the Job was sent{left}")

    def _save_last_report(self, folder: RunFolder, record: KubernetesRecord) -> None:
        """Keep what pod 0 last reported of the run: its log goes with its pod."""
        state = read_state(folder)
        report = self._observer.last_report(record, folder.run_id)
        if report.state is not None:
            write_state(folder, structs.replace(report.state, created_at=state.created_at, summary=state.summary))
        if report.step and report.node:
            write_private(folder.metrics(report.node), report.step, durable=False)
