"""Runs without a controller: whoever types `orch` sends their objects, looks after them, and takes
them down.

One namespace's submitters take turns; nobody looks after a run while nobody asks for it.
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

_BROKEN_S = 180.0  # no submission takes that long between its first object and its Job


@contextlib.contextmanager
def _only_command(folder: RunFolder, wait_s: float) -> Iterator[None]:
    """Hold the run's lock. OrchError (76) while another command of this machine begins an attempt
    of it."""
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
    """`cluster(context, namespace)`; `observer()`: of now; `snapshot()`: of the nodes, where one
    was asked for."""

    def __init__(
        self,
        cluster: Callable[[str | None, str | None], Cluster],
        observer: Callable[[], RunObserver],
        snapshot: Callable[[], Future[ClusterSnapshot] | None],
    ):
        self._cluster = cluster
        self._observer = observer
        self._snapshot = snapshot
        self._ended: set[str] = (
            set()
        )  # runs that were cancelled from here though their folders did not take it

    def start(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        plan: Plan,
        environ: Mapping[str, str],
        drafts: Sequence[Mapping[str, Any]],
    ) -> None:
        """The first generation. `drafts`: of `draft_objects`."""
        with _only_command(folder, 0.5):
            self._send(folder, request, plan, environ, 0, drafts)

    def _send(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        plan: Plan,
        environ: Mapping[str, str],
        generation: int,
        drafts: Sequence[Mapping[str, Any]],
    ) -> None:
        """The caller holds the run's lock. OrchError (64) when the run is to end by now."""
        from .submission import delete_run_objects, submit_objects

        if generation:
            request = off_bad_nodes(folder, request)
        options = read_options(request.backend_options)
        cluster = self._cluster(options.context, options.namespace)
        fresh = self._snapshot()
        submit_objects(cluster, folder, request, plan, environ, generation, drafts, fresh)
        last = due(folder, read_state(folder).intent)
        record = read_record(folder, KubernetesRecord)
        if record and last and last.want == "end":  # `cancel` found no Job yet
            delete_run_objects(self._of(record), record.kind, record.name, folder.run_id)
            raise OrchError(f"run {folder.run_id} has received a newer request: {last.text}")

    def resume(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        record: KubernetesRecord | None,
        environ: Mapping[str, str],
    ) -> None:
        """From here on no other command begins an attempt of the run. A size that was asked for is
        taken up."""
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
        """OrchError: 64 when somebody asks for something else meanwhile, 76 when the run does not
        end: the request stays, and `resume` takes it up."""
        from .objects.pod import MARGIN_S, grace_seconds

        check_variables(request, environ)
        plan = load_plan(folder.sized_plan(nodes))
        asked = ask(folder, "run", nodes=nodes, began_with=read_state(folder).intent)
        grace = grace_seconds(plan, read_options(request.backend_options), request.policy.grace_s)
        with _only_command(folder, _BROKEN_S + 2.0 * grace):
            if (
                read_state(folder).intent < asked.number
            ):  # else the command that was waited for has done it
                self._begin(folder, request, environ, asked, 2.0 * grace + MARGIN_S)

    def _begin(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        environ: Mapping[str, str],
        asked: Intent | None,
        wait_s: float = 0.0,
    ) -> None:
        """The next generation, once nothing of the last one is left. The caller holds the run's
        lock."""
        from .submission import delete_run_objects, draft_objects

        before = asked or newest(folder)
        check_newest(folder, before)
        if record := read_record(
            folder, KubernetesRecord
        ):  # a command that was waited for may have written another
            delete_run_objects(self._of(record), record.kind, record.name, folder.run_id, wait_s)
        check_newest(folder, before)
        request, plan = begin_attempt(folder, request, asked)
        generation = record.generation + 1 if record else 0
        self._send(folder, request, plan, environ, generation, draft_objects(request, plan))

    def cancel(self, folder: RunFolder, record: KubernetesRecord, force: bool) -> None:
        """A full disk keeps nobody from it: then the run's folder does not say later that it was
        asked for."""
        from .submission import delete_remains

        cluster = self._of(record)
        if not self.is_alive(folder, record):
            # a command that is about to make the Job, or a submission that broke off
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
        """OrchError where no cluster answers."""
        from .observer import force_delete_stuck_pods

        observer = self._observer()
        what = observer.status(record, folder.run_id)
        run = observer.observe(record, folder.run_id)
        if done := force_delete_stuck_pods(self._of(record), run, time.time()):
            what = structs.replace(what, text=done)
            observer.clear()
        since = time.time() - record.submitted_at
        if (
            what.over
            and not record.sent
            and record.submission
            and since > _BROKEN_S
            and not folder.is_alive()
        ):
            what = self._broken_off(record, what)
            record = structs.replace(record, sent=True)  # nobody sends it any more
        if not (what.over and read_state(folder).is_final):
            self._save_last_report(folder, record)
        known = read_state(folder)
        cancelled = folder.run_id in self._ended or wants_end(folder) is not None
        state = verdict(known, what, cancelled, record.sent)
        if state.is_final and state != known:
            state = structs.replace(state, ended_at=state.ended_at or time.time())
            with contextlib.suppress(OSError):
                write_state(
                    folder, state
                )  # the cluster forgets; this folder does not, but on a full disk
        return state

    def _ask_to_end(self, folder: RunFolder, force: bool) -> None:
        try:
            ask(folder, "end", force=force)
        except OrchError as error:
            self._ended.add(folder.run_id)
            print(f"orch: warning: {error.message}; the run is ended all the same", file=sys.stderr)

    def _save_last_report(self, folder: RunFolder, record: KubernetesRecord) -> None:
        from .observer import save_last_report

        report = self._observer().last_report(record, folder.run_id)
        with contextlib.suppress(OSError):  # a full disk; the pods' logs hold it still
            save_last_report(folder, report)

    def _of(self, record: KubernetesRecord) -> Cluster:
        return self._cluster(record.context, record.namespace)

    def _broken_off(self, record: KubernetesRecord, what: RunStatus) -> RunStatus:
        """A submission that was killed before its Job: what it left is deleted."""
        from .submission import delete_remains

        gone = delete_remains(self._of(record), record)
        left = f"; deleted what it left: {', '.join(gone)}" if gone else ""
        return structs.replace(what, text=f"its submission broke off before the Job was sent{left}")
