"""Runs without a controller: the commands of a user's machine send their objects, manage them, and
delete them.

The submitters of one namespace take turns; between commands nobody manages a run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from msgspec import structs

from orchestrator.backends.base import off_bad_nodes, read_record
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.run.attempt import begin_attempt, check_newest
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import Intent, ask, due, newest, wants_end
from orchestrator.run.request import LaunchRequest, check_variables
from orchestrator.run.state import RunState, read_state, write_state

from .api.client import Cluster
from .cluster_view import ClusterSnapshot
from .options import read_options
from .record import KubernetesRecord, verdict

if TYPE_CHECKING:
    from .observer import RunObserver
    from .phases import RunStatus

_BROKEN_S = 180.0  # no submission takes longer from its first object to its Job


@contextlib.contextmanager
def _only_command(folder: RunFolder, wait_s: float) -> Iterator[None]:
    """Holds the run's lock. OrchError (76) while another command of this machine starts an attempt
    of the run."""
    lock = folder.take_lock(wait_s)
    if lock is None:
        raise OrchError(
            f"another command is starting run {folder.run_id}: try again", Exit.CAPACITY
        )
    try:
        yield
    finally:
        os.close(lock)


class DirectRuns:
    """Manages runs by their objects. `cluster(context, namespace)`; `observer()`: the current
    observer; `snapshot()`: the snapshot that `look_ahead` started, or None."""

    def __init__(
        self,
        cluster: Callable[[str | None, str | None], Cluster],
        observer: Callable[[], RunObserver],
        snapshot: Callable[[], Future[ClusterSnapshot] | None],
    ):
        self._cluster = cluster
        self._observer = observer
        self._snapshot = snapshot
        # runs cancelled by this process whose folders could not record it
        self._ended: set[str] = set()

    def start(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        plan: Plan,
        environ: Mapping[str, str],
        drafts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Starts the first generation. `drafts`: the result of `draft_objects`."""
        with _only_command(folder, 0.5):
            self._send(
                folder,
                request,
                plan,
                environ,
                generation=0,
                drafts=drafts,
            )

    def _send(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        plan: Plan,
        environ: Mapping[str, str],
        *,
        generation: int,
        drafts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Sends the objects of a generation. The caller holds the run's lock. OrchError (64) if the
        run was meanwhile asked to end."""
        from .submission import delete_run_objects, submit_objects

        if generation:
            request = off_bad_nodes(folder, request)
        options = read_options(request.backend_options)
        cluster = self._cluster(options.context, options.namespace)
        submit_objects(
            cluster,
            folder,
            request,
            plan,
            environ,
            generation=generation,
            drafts=drafts,
            snapshot=self._snapshot(),
        )
        intent = due(folder, read_state(folder).intent)
        record = read_record(folder, KubernetesRecord)
        if record and intent and intent.want == "end":  # `cancel` found no Job yet
            delete_run_objects(
                self._of(record),
                record.kind,
                record.name,
                folder.run_id,
            )
            raise OrchError(f"run {folder.run_id} has received a newer request: {intent.text}")

    def resume(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        record: KubernetesRecord | None,
        environ: Mapping[str, str],
    ) -> None:
        """Starts another attempt, at the size that was last asked for. Until it returns, no other
        command starts one."""
        check_variables(request, environ)
        with _only_command(folder, 0.5):
            self._observer().clear()
            if record and self.is_alive(folder, record):
                raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
            self._begin(folder, request, environ, None)

    def resize(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        record: KubernetesRecord | None,
        nodes: int,
        environ: Mapping[str, str],
    ) -> None:
        """Ends the run if it is alive, and starts it at that size.

        OrchError: 64 if somebody asks for something else meanwhile, 76 if the run does not end: the
        intent is kept, and `resume` carries it out.
        """
        from .objects.pod import MARGIN_S, grace_seconds

        check_variables(request, environ)
        plan = load_plan(folder.sized_plan(nodes))
        intent = ask(
            folder,
            "run",
            nodes=nodes,
            began_with=read_state(folder).intent,
        )
        grace = grace_seconds(plan, read_options(request.backend_options), request.policy.grace_s)
        with _only_command(folder, _BROKEN_S + 2.0 * grace):
            # else the command that held the lock has carried the intent out
            if read_state(folder).intent < intent.number:
                self._begin(
                    folder,
                    request,
                    environ,
                    intent,
                    2.0 * grace + MARGIN_S,
                )

    def _begin(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        environ: Mapping[str, str],
        intent: Intent | None,
        wait_s: float = 0.0,
    ) -> None:
        """Starts the next generation once nothing of the last one is left. The caller holds the
        run's lock."""
        from .submission import delete_run_objects, draft_objects

        newest_intent = intent or newest(folder)
        check_newest(folder, newest_intent)
        # read under the lock: the command that held it may have written another record
        record = read_record(folder, KubernetesRecord)
        if record:
            delete_run_objects(
                self._of(record),
                record.kind,
                record.name,
                folder.run_id,
                wait_s,
            )
        check_newest(folder, newest_intent)
        request, plan = begin_attempt(folder, request, intent)
        self._send(
            folder,
            request,
            plan,
            environ,
            generation=record.generation + 1 if record else 0,
            drafts=draft_objects(request, plan),
        )

    def cancel(self, folder: RunFolder, record: KubernetesRecord, force: bool) -> None:
        """Ends the run. On a full disk the run's folder cannot record the cancellation; the run is
        ended nevertheless."""
        from .submission import delete_remains

        cluster = self._of(record)
        if not self.is_alive(folder, record):
            # a command is about to create the Job, or a submission broke off
            if folder.is_alive() or delete_remains(cluster, record):
                self._ask_to_end(folder, force)
                return
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        self._ask_to_end(folder, force)
        self._save_last_report(folder, record)
        cluster.delete(record.kind, record.name, "Foreground")
        if force:
            for pod in self._observer().observe(record, folder.run_id).pods:
                cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)

    def is_alive(self, folder: RunFolder, record: KubernetesRecord) -> bool:
        return not self._observer().status(record, folder.run_id).over

    def state(self, folder: RunFolder, record: KubernetesRecord) -> RunState:
        """Reads the run's state. OrchError if no cluster answers."""
        from .observer import force_delete_stuck_pods

        observer = self._observer()
        status = observer.status(record, folder.run_id)
        run = observer.observe(record, folder.run_id)
        if deletions := force_delete_stuck_pods(self._of(record), run, time.time()):
            status = structs.replace(status, reason=deletions)
            observer.clear()
        if status.over and self._is_broken_off(folder, record):
            status = self._clean_up(record, status)
            record = structs.replace(record, sent=True)  # nobody sends it any more
        if not (status.over and read_state(folder).is_final):
            self._save_last_report(folder, record)
        last_state = read_state(folder)
        cancelled = folder.run_id in self._ended or wants_end(folder) is not None
        state = verdict(last_state, status, cancelled, record.sent)
        if state.is_final and state != last_state:
            state = structs.replace(state, ended_at=state.ended_at or time.time())
            # the cluster will forget the run; the folder keeps its end, unless the disk is full
            with contextlib.suppress(OSError):
                write_state(folder, state)
        return state

    def _is_broken_off(self, folder: RunFolder, record: KubernetesRecord) -> bool:
        """Tells whether the run's submission was killed before it sent the Job."""
        if record.sent or not record.submission:
            return False
        return time.time() - record.submitted_at > _BROKEN_S and not folder.is_alive()

    def _ask_to_end(self, folder: RunFolder, force: bool) -> None:
        try:
            ask(folder, "end", force=force)
        except OrchError as error:
            self._ended.add(folder.run_id)
            print(f"orch: warning: {error.message}; the run is ended all the same", file=sys.stderr)

    def _save_last_report(self, folder: RunFolder, record: KubernetesRecord) -> None:
        from .observer import save_last_report

        report = self._observer().last_report(record, folder.run_id)
        with contextlib.suppress(OSError):  # a full disk: the pods' logs still hold the report
            save_last_report(folder, report)

    def _of(self, record: KubernetesRecord) -> Cluster:
        return self._cluster(record.context, record.namespace)

    def _clean_up(self, record: KubernetesRecord, status: RunStatus) -> RunStatus:
        """Deletes what a submission left that was killed before it sent the Job."""
        from .submission import delete_remains

        message = "its submission broke off before the Job was sent"
        deleted = delete_remains(self._of(record), record)
        if deleted:
            message += f"; deleted what it left: {', '.join(deleted)}"
        return structs.replace(status, reason=message)
