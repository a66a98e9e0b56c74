"""Plays a fault schedule against a real local run, and checks what must hold whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from orchestrator.backends.base import read_record
from orchestrator.backends.local.backend import LocalBackend, LocalRecord
from orchestrator.errors import OrchError
from orchestrator.plan import load_plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import newest
from orchestrator.run.processes import Identity, identity, send_signal
from orchestrator.run.request import read_request
from orchestrator.run.state import read_state
from tests.agent.test_elastic import start
from tests.beds.bundles import events
from tests.patience import PATIENCE_S

from .schedule import Action, Schedule

_LOOK_S = 0.02
_MOMENT_S = 3.0


class Broken(AssertionError):
    """Something that must always hold did not."""


def victim(folder: RunFolder, name: str) -> Identity | None:
    """The process that has this part (see VICTIMS) in the run, None where there is none.

    The kernel gives numbers again: it is known by its start time too, and an agent by the folder
    of its run.
    """
    kind = name.rstrip("0123456789")
    with contextlib.suppress(OrchError, psutil.Error, KeyError, IndexError, AttributeError):
        record = read_record(folder, LocalRecord)
        if kind == "supervisor":
            return Identity(*record.supervisor)
        node = read_state(folder).writer if kind == "coordinator" else f"node{name[-1]}"
        process = psutil.Process(record.agents[node])
        target = identity(process.pid)
        if str(folder.path) not in process.cmdline():
            return None  # another process has its number by now
        for _ in range({"watcher": 1, "worker": 2}.get(kind, 0)):
            process = process.children()[0]
            target = identity(process.pid)
        return target
    return None


class Play:
    """`folder`: of a run of three nodes that saves when it is asked to end."""

    def __init__(self, runs: Path, schedule: Schedule):
        self.schedule = schedule
        options = {} if schedule.back_s is None else {"restart_lost_nodes_after_s": schedule.back_s}
        self.folder = start(runs, 3, 2, 1, run_id=f"seed-{schedule.seed}", **options)
        self.said: list[str] = []  # what the verbs answered
        self._verbs: list[threading.Thread] = []
        self._paused: list[Identity] = []
        self._wrong: list[str] = []
        self._killed = False

    def run(self) -> None:
        """Raises Broken."""
        try:
            self._until(
                lambda: read_state(self.folder).state == "running", "workers at the beginning"
            )
            for action in self.schedule.actions:
                self._wait(action.moment)
                time.sleep(action.after_s)
                self._do(action)
            self._continue()
            self._join()
            self._end()
            self._check_end()
            self._resumes()
            if self._wrong:
                raise Broken("; ".join(self._wrong))
        finally:
            self._continue()
            self._clear_up()

    def _wait(self, moment: str) -> None:
        """Until that moment comes, or three seconds have passed."""
        end = time.monotonic() + _MOMENT_S
        intent_before = newest(self.folder)
        while moment and time.monotonic() < end:
            state = read_state(self.folder)
            if moment == ("final" if state.is_final else state.state) or (
                moment == "asked" and newest(self.folder) != intent_before
            ):
                return
            time.sleep(0.002)

    # ---------------------------------------------------------------------------------- deeds

    def _do(self, action: Action) -> None:
        match action.deed:
            case "kill" | "pause":
                self._killed = True
                if process := victim(self.folder, action.victim):
                    send_signal(
                        process, signal.SIGKILL if action.deed == "kill" else signal.SIGSTOP
                    )
                    if action.deed == "pause":
                        self._paused.append(process)
                        if action.for_s:
                            threading.Timer(
                                action.for_s, send_signal, [process, signal.SIGCONT]
                            ).start()
            case "delete":
                (self.folder.path / action.victim).unlink(missing_ok=True)
            case "submit_signal":
                if process := victim(self.folder, "supervisor"):
                    send_signal(process, signal.SIGTERM)
            case "cancel" | "force":
                self._verb(lambda: LocalBackend().cancel(self.folder, action.deed == "force"))
            case "resize":
                self._verb(lambda: self._resize(action.nodes))
            case "resume":
                self._verb(
                    lambda: LocalBackend().resume(
                        self.folder, read_request(self.folder), os.environ
                    )
                )

    def _resize(self, nodes: int) -> None:
        LocalBackend().resize(self.folder, read_request(self.folder), nodes, os.environ)

    def _verb(self, verb: Callable[[], object]) -> None:
        def call() -> None:
            try:
                verb()
                self.said.append("done")
            except OrchError as error:
                self.said.append(error.message)
                if "\n" in error.message:
                    self._wrong.append(f"more than one line: {error.message!r}")
            except BaseException as error:
                self._wrong.append(f"a verb ended with {type(error).__name__}: {error}")

        thread = threading.Thread(target=call, daemon=True)
        self._verbs.append(thread)
        thread.start()

    def _continue(self) -> None:
        for process in self._paused:
            send_signal(process, signal.SIGCONT)

    # ---------------------------------------------------------------------------------- what must
    #     hold

    def _join(self) -> None:
        for verb in self._verbs:
            verb.join(PATIENCE_S)
            if verb.is_alive():
                raise Broken("a verb does not return")

    def _end(self) -> None:
        """Nobody need ask where somebody has: what was asked is obeyed by itself."""
        intent = newest(self.folder)
        if (intent is None or intent.want != "end") and self.folder.is_alive():
            with contextlib.suppress(OrchError):  # it has just ended
                LocalBackend().cancel(self.folder, force=False)
        self._until(lambda: not self.folder.is_alive(), "the end of all processes")

    def _check_end(self) -> None:
        state = LocalBackend().state(self.folder)
        intent = newest(self.folder)
        if not state.is_final or state.exit_code is None or not state.reason:
            raise Broken(f"ended as {state.state} with {state.exit_code}: {state.reason}")
        # Nobody paused the coordinator, so the machine did: silence and delay may come of that.
        starved = not self._paused and events(self.folder, "was_away")
        if state.state == "failed" and not self._killed and not starved:
            raise Broken(f"failed without a fault: {state.reason}")
        if state.state == "failed" and state.cause is None:
            raise Broken(f"failed without a cause: {state.reason}")
        ended_at = state.ended_at or state.updated_at
        owed = (
            intent
            and intent.want == "end"
            and intent.number > state.intent
            and intent.at < ended_at - 2.0
        )
        if intent and owed and state.state != "cancelled" and not starved:
            raise Broken(
                f"cancelled {ended_at - intent.at:.1f} s before its end, and {state.state}:"
                f" {state.reason}"
            )
        epochs = [epoch.epoch for epoch in state.epochs]
        if epochs != sorted(set(epochs)):
            raise Broken(f"epochs {epochs}")
        if survivors := [process.pid for process in self._left()]:
            raise Broken(f"processes {survivors} are left")
        plan = load_plan(self.folder.plan)
        request = read_request(self.folder)
        if plan.hash != state.plan_hash or (
            plan.hash not in {request.plan_hash} and not request.sizes
        ):
            raise Broken(f"plan.json is {plan.hash[:12]}, state.json says {state.plan_hash[:12]}")

    def _resumes(self) -> None:
        """No end may wedge the folder: the run goes on, and can be ended again."""
        before = read_state(self.folder).epoch
        intent = newest(self.folder)
        LocalBackend().resume(self.folder, read_request(self.folder), os.environ)

        def runs() -> bool:
            state = LocalBackend().state(self.folder)
            if state.is_final:
                raise Broken(f"resumed, it ended as {state.state}: {state.reason}")
            return state.state == "running" and state.epoch > before

        self._until(runs, "workers after a resume")
        size = len(load_plan(self.folder.plan).ranks)
        if intent and intent.want == "run" and intent.nodes and intent.nodes != size:
            raise Broken(f"{intent.nodes} nodes were asked for last, {size} run")
        LocalBackend().cancel(self.folder, force=False)
        self._until(lambda: not self.folder.is_alive(), "the end after a resume")
        state = LocalBackend().state(self.folder)
        if (state.state, state.exit_code) != ("cancelled", 75):
            raise Broken(f"cancelled after a resume, it ended as {state.state}: {state.reason}")
        if survivors := [process.pid for process in self._left()]:
            raise Broken(f"processes {survivors} are left after a resume")

    def _left(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    command = " ".join(process.cmdline())
                    run_dir = process.environ().get("ORCH_RUN_DIR", "")
                    if str(self.folder.path) in command.split() or run_dir == str(self.folder.path):
                        yield process

    def _until(self, condition: Callable[[], bool], event: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end:
                raise Broken(f"{event} did not come within {PATIENCE_S:g} s\n{self._papers()}")
            time.sleep(_LOOK_S)

    def _papers(self) -> str:
        texts = [
            f"asked: {newest(self.folder)}",
            f"answers: {self.said}",
            self.folder.state.read_text(),
        ]
        for log in sorted(self.folder.logs.glob("*.log")):
            if not log.name.startswith("rank-"):
                texts.append(f"== {log.name}\n" + log.read_text(errors="replace")[-1500:])
        return "\n".join(texts)

    def _clear_up(self) -> None:
        with contextlib.suppress(OrchError):
            LocalBackend().cancel(self.folder, force=True)
        for process in self._left():
            with contextlib.suppress(psutil.Error):
                process.kill()


def failure(runs: Path, schedule: Schedule) -> str:
    """What a schedule breaks, "" for nothing."""
    try:
        Play(runs, schedule).run()
    except Broken as error:
        return str(error)
    return ""
