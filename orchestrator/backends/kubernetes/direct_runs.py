"""Runs without a controller: whoever types `orch` sends their objects, looks after them, and takes them down.

One namespace's submitters take turns; nobody looks after a run while nobody asks for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from msgspec import structs

from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan, to_json
from orchestrator.run.bad_nodes import remembered
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.intent import ask, wants_end
from orchestrator.run.request import LaunchRequest, at_size, to_bytes
from orchestrator.run.state import RunState, prepare_resume, read_state, write_state

from .api.client import Cluster
from .cluster_view import ClusterSnapshot
from .options import read_options
from .record import KubernetesRecord, verdict

if TYPE_CHECKING:
    from .observer import RunObserver
    from .phases import RunStatus

_BROKEN_S = 180.0  # no submission takes that long between its first object and its Job


class DirectRuns:
    """`cluster(context, namespace)`; `observer()`: of now; `snapshot()`: of the nodes, where one was asked for."""

    def __init__(
        self,
        cluster: Callable[[str | None, str | None], Cluster],
        observer: Callable[[], RunObserver],
        snapshot: Callable[[], Future[ClusterSnapshot] | None],
    ):
        self._cluster, self._observer, self._snapshot = cluster, observer, snapshot

    def start(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        plan: Plan,
        environ: Mapping[str, str],
        generation: int,
        drafts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        from .submission import draft_objects, submit_objects

        if generation:
            request = _without_bad_nodes(folder, request)
        options = read_options(request.backend_options)
        cluster, fresh = self._cluster(options.context, options.namespace), self._snapshot()
        drafts = drafts or draft_objects(request, plan)
        submit_objects(cluster, folder, request, plan, environ, generation, drafts, fresh)

    def resume(
        self, folder: RunFolder, request: LaunchRequest, record: KubernetesRecord | None, environ: Mapping[str, str]
    ) -> None:
        from .submission import delete_run_objects

        if record:
            delete_run_objects(self._of(record), record.kind, record.name, folder.run_id)
        prepare_resume(folder)
        self.start(folder, request, load_plan(folder.plan), environ, record.generation + 1 if record else 0)

    def resize(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        record: KubernetesRecord | None,
        nodes: int,
        environ: Mapping[str, str],
    ) -> None:
        from .objects.pod import MARGIN_S, grace_seconds
        from .submission import delete_run_objects

        plan = load_plan(folder.sized_plan(nodes))
        request = at_size(request, plan)
        asked = ask(folder, "run", nodes=nodes, began_with=read_state(folder).intent)  # `resume` takes it up from here
        if record:
            grace = grace_seconds(plan, read_options(request.backend_options), request.policy.grace_s)
            delete_run_objects(self._of(record), record.kind, record.name, folder.run_id, 2.0 * grace + MARGIN_S)
        write_private(folder.plan, to_json(plan, indent=1) + b"\n")
        write_private(folder.request, to_bytes(request))
        prepare_resume(folder, plan, asked.number)
        self.start(folder, request, plan, environ, record.generation + 1 if record else 0)

    def cancel(self, folder: RunFolder, record: KubernetesRecord, force: bool) -> None:
        from .observer import save_last_report
        from .submission import delete_remains

        cluster = self._of(record)
        if not self.is_alive(folder, record):
            if delete_remains(cluster, record):
                ask(folder, "end", force=force)  # a submission that broke off: there is no Job to wait for
                return
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        ask(folder, "end", force=force)
        save_last_report(folder, self._observer().last_report(record, folder.run_id))
        cluster.delete(record.kind, record.name, "Foreground")
        if force:
            for pod in self._observer().observe(record, folder.run_id).pods:
                cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)

    def is_alive(self, folder: RunFolder, record: KubernetesRecord) -> bool:
        return not self._observer().status(record, folder.run_id).over

    def state(self, folder: RunFolder, record: KubernetesRecord) -> RunState:
        """OrchError where no cluster answers."""
        from .observer import force_delete_stuck_pods, save_last_report

        observer = self._observer()
        what, run = observer.status(record, folder.run_id), observer.observe(record, folder.run_id)
        if done := force_delete_stuck_pods(self._of(record), run, time.time()):
            what = structs.replace(what, text=done)
            observer.clear()
        if what.over and not record.sent and record.submission and time.time() > record.submitted_at + _BROKEN_S:
            what = self._broken_off(record, what)
            record = structs.replace(record, sent=True)  # nobody sends it any more
        if not (what.over and read_state(folder).is_final):
            save_last_report(folder, observer.last_report(record, folder.run_id))
        known = read_state(folder)
        state = verdict(known, what, wants_end(folder) is not None, record.sent)
        if state.is_final and state != known:
            state = structs.replace(state, ended_at=state.ended_at or time.time())
            write_state(folder, state)  # the cluster forgets; this folder does not
        return state

    def _of(self, record: KubernetesRecord) -> Cluster:
        return self._cluster(record.context, record.namespace)

    def _broken_off(self, record: KubernetesRecord, what: RunStatus) -> RunStatus:
        """A submission that was killed before its Job: what it left is deleted."""
        from .submission import delete_remains

        gone = delete_remains(self._of(record), record)
        left = f"; deleted what it left: {', '.join(gone)}" if gone else ""
        return structs.replace(what, text=f"its submission broke off before the Job was sent{left}")


def _without_bad_nodes(folder: RunFolder, request: LaunchRequest) -> LaunchRequest:
    """The request of a run that starts again, without the nodes that runs have found bad since it was submitted."""
    known = read_options(request.backend_options).exclude
    new = [node for node in remembered(folder, time.time()) if node not in known]
    if not new:
        return request
    print(f"orch: without {', '.join(new)}, found bad by earlier runs (orch nodes)", file=sys.stderr)
    return structs.replace(request, backend_options={**request.backend_options, "exclude": [*known, *new]})
