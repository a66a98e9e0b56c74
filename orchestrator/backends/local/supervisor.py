"""`python -m orchestrator.backends.local.supervisor`: the scheduler of one local run.

It starts one agent a simulated node, passes on a request to end, and waits for all. It writes the
final state to state.json when the coordinator could not. Each agent's standard input is a pipe of
which the supervisor holds the other end, so when the supervisor dies in any way, the agents save
and end the run. If the cluster has network namespaces, it builds that network first and starts each
agent on its node. Single-threaded, because it forks.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.backends.base import write_record
from orchestrator.errors import OrchError
from orchestrator.observe.report import write_final_state
from orchestrator.plan import Exit, load_plan, meaning
from orchestrator.run.attempt import begin_attempt
from orchestrator.run.folder import RECORD_ERRORS, RunFolder, ending, first_read, insist
from orchestrator.run.intent import Intent, due, unwritten_end
from orchestrator.run.processes import (
    become_subreaper,
    identity,
    kill_descendants,
    kill_other_children,
    reap_children,
)
from orchestrator.run.request import LaunchRequest, read_request
from orchestrator.run.state import Cause, End, RunState, finish, read_state, write_state

from .backend import CANCEL, CANCEL_BY_FORCE, LocalRecord, read_options
from .launcher import AgentLauncher
from .namespaces import Network, Wiring
from .standstill import StoppedAgents

_LEAVE_S = 20.0  # for agents to exit after the run's final state
_AGAIN_S = 1.0  # between attempts to write or start what failed
_HEARD = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, CANCEL, CANCEL_BY_FORCE)

log = logging.getLogger("orch.supervisor")


class Supervisor:
    def __init__(self, folder: RunFolder, request: LaunchRequest, lock: int):
        self._folder = folder
        self._request = request
        self._lock = lock
        self._agents: dict[str, subprocess.Popen] = {}
        self._codes: dict[str, int] = {}
        self._network: Network | None = None
        self._deadline: float | None = None
        self._asked = False  # the agents, to end
        self._began_with = read_state(folder).intent
        self._options = read_options(request)
        self._unwritten = False  # the disk did not take the last record
        self._unread = False  # nor gave the last state
        self._back: dict[str, float] = {}  # lost node -> monotonic time at which it comes back
        self._told: Intent | None = None  # a request to end that found no room on the disk
        self._standstill = StoppedAgents(request.policy.heartbeat_timeout_s)
        self._given_up: dict[str, str] = {}  # node -> why its agent was killed

    def run(self) -> int:
        """The run's exit code, after every process of it has ended."""
        become_subreaper()
        self._listen()
        self._folder.coordinator.unlink(missing_ok=True)  # of an earlier attempt
        options = self._options
        if (
            options.network == "namespaces" and options.link_gbit_per_s is not None
        ):  # one needs the other
            wiring = Wiring.of(load_plan(self._folder.plan), options.link_gbit_per_s)
            self._network = Network(wiring)
            log.info(
                "%d nodes in network namespaces, %g Gbit/s each",
                len(wiring.nodes),
                options.link_gbit_per_s,
            )
        try:
            self._launcher = AgentLauncher(
                self._folder, self._request, options, self._lock, self._network
            )
            for node, argv in self._launcher.commands().items():
                self._agents[node] = self._launcher.start(node, argv)
            self._remember()
            while len(self._codes) < len(self._agents):
                self._hear(self._signals(0.5))
        finally:
            unkillable = kill_descendants()
            if unkillable:
                log.error("processes %s cannot be killed", unkillable)
        return self._last_word()

    def begins_again(self) -> bool:
        """Whether people asked for another attempt, which is ready to begin then."""
        intent = self._asked_for()
        if intent is None or intent.want == "end":
            return False
        try:
            if insist(lambda: read_state(self._folder)).state == "done":
                return False
            log.info("next attempt: %s", intent.text)
            if insist(lambda: self._begin(intent)):
                return True
            self._last_word()
        except (
            RECORD_ERRORS
        ) as error:  # this attempt has ended well, and the request stays for a resume
            log.error("the next attempt cannot begin: %s", error)
        return False

    def _begin(self, intent: Intent) -> bool:
        """Puts the next attempt in force; False where a signal to end has come while nothing of the
        run lives."""
        signals = self._signals(0.0)
        self._keep_in_mind(signals)
        if not signals:
            begin_attempt(self._folder, self._request, intent)
        return not signals

    def _keep_in_mind(self, signals: list[signal.Signals]) -> None:
        """Requests of people that come by signals alone."""
        for signum in signals:
            if signum in (CANCEL, CANCEL_BY_FORCE):
                self._told = unwritten_end(force=signum == CANCEL_BY_FORCE)

    def _listen(self) -> None:
        """Signals become bytes of a pipe. (sigtimedwait(2) of CPython gives a signal that nobody
        sent when the process was stopped beyond its time.)"""
        self._wake, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in _HEARD:
            signal.signal(signum, lambda *_: None)

    def _signals(self, wait_s: float) -> list[signal.Signals]:
        """Those that came, SIGCHLD left out, waited for at most so long."""
        select.select([self._wake], [], [], wait_s)
        with contextlib.suppress(BlockingIOError):
            return [
                signal.Signals(number)
                for number in os.read(self._wake, 512)
                if number != signal.SIGCHLD
            ]
        return []

    def _hear(self, signals: list[signal.Signals]) -> None:
        self._keep_in_mind(signals)
        for signum in signals:
            self._end(signum.name)
        if self._asked_for():
            self._end("as people asked")
        nodes = {agent.pid: node for node, agent in self._agents.items()}
        changed = False
        for pid, code in reap_children():
            if pid in nodes:  # the others are orphans of a killed agent
                self._codes[nodes[pid]] = self._agents[nodes[pid]].returncode = code
                log.info("agent of %s: %s", nodes[pid], meaning(code))
                changed = True
                self._may_come_back(nodes[pid], code)
        if changed or self._unwritten:
            self._remember()
        if self._codes:  # an old worker must not live beside those of the next epoch
            kill_other_children({agent.pid for agent in self._agents.values()})
        self._give_up_stopped()
        self._bring_back()
        if self._deadline is None and self._is_over():
            self._deadline = time.monotonic() + _LEAVE_S
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._kill()

    def _asked_for(self) -> Intent | None:
        """What people want, if this attempt has to end for it; also where the disk did not take
        their request."""
        intents = [intent for intent in (due(self._folder, self._began_with), self._told) if intent]
        return max(intents, key=lambda intent: (intent.force, intent.want == "end"), default=None)

    def _give_up_stopped(self) -> None:
        living = {
            node: agent.pid for node, agent in self._agents.items() if node not in self._codes
        }
        for node, reason in self._standstill.given_up(living).items():
            if node not in self._given_up:
                log.error("%s", reason)
                self._given_up[node] = reason
                os.kill(living[node], signal.SIGKILL)

    def _is_over(self) -> bool:
        """Whether the coordinator has ended the run. A state that cannot be read now ends
        nothing."""
        try:
            over = read_state(self._folder).is_final
        except RECORD_ERRORS as error:
            if not self._unread:
                log.error("the state cannot be read, and will be: %s", error)
            self._unread = True
            return False
        self._unread = False
        return over

    def _may_come_back(self, node: str, code: int) -> None:
        """Lost, cut off, or told to leave; not one that was found bad, and not after the run's end
        (`_bring_back`)."""
        delay_s = self._options.restart_lost_nodes_after_s
        if delay_s is not None and (code < 0 or code in (Exit.FENCED, Exit.CAPACITY, Exit.RESTART)):
            self._back[node] = time.monotonic() + delay_s

    def _bring_back(self) -> None:
        """Agents of lost nodes, as a machine that is up again: while the run goes on and nobody
        wants it to end."""
        for node in [node for node, due_at in self._back.items() if time.monotonic() >= due_at]:
            if not self._asked and not self._is_over():
                try:
                    self._agents[node] = self._launcher.start(node, self._launcher.commands()[node])
                except (
                    *RECORD_ERRORS,
                    subprocess.SubprocessError,
                ) as error:  # no log, no memory, no plan: later
                    log.error("node %s cannot come back yet: %s", node, error)
                    self._back[node] = time.monotonic() + _AGAIN_S
                    continue
                del self._codes[node]
                self._given_up.pop(node, None)
                log.info("node %s is back", node)
                self._remember()
            del self._back[node]

    def _end(self, reason: str) -> None:
        """Pass a request to end on to every agent. They take the second signal for impatience, and
        kill; a second `orch cancel` is none, and a forced one asks nobody.
        """
        intent = self._asked_for()
        if intent and self._asked and not intent.force:
            return
        if not self._asked or not intent:
            log.info("asked to end (%s)%s", reason, f": {intent.text}" if intent else "")
        if intent and intent.force:
            self._asked = True
            self._kill()
            return
        self._asked = True
        self._signal(signal.SIGTERM)
        if intent:
            self._signal(signal.SIGCONT)  # a stopped one would not hear it

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)  # worker supervisors kill the workers

    def _signal(self, signum: int) -> None:
        """To all agents that have not been waited for, whose numbers are theirs still.
        (`Popen.send_signal` waits for those that have just ended: nobody would hear of their
        ends.)"""
        for node, agent in self._agents.items():
            if node not in self._codes:
                os.kill(agent.pid, signum)

    def _remember(self) -> None:
        this_process = identity(os.getpid())
        assert this_process is not None
        pids = {node: agent.pid for node, agent in self._agents.items()}
        record = LocalRecord(
            supervisor=(this_process.pid, this_process.started),
            agents=pids,
            exit_codes=dict(self._codes),
            switches=self._network.switches if self._network else None,
        )
        try:
            write_record(self._folder, record)
        except (
            OSError,
            OrchError,
        ) as error:  # a full or failing disk ends no healthy run: it is written later
            if not self._unwritten:
                log.error("backend.json cannot be written, and will be: %s", error)
            self._unwritten = True
        else:
            self._unwritten = False

    def _last_word(self) -> int:
        """The coordinator's, or ours when it was killed before it could speak."""
        state = insist(lambda: read_state(self._folder))
        intent = self._asked_for()
        cancelled = intent is not None and intent.want == "end"
        code, end_state, cause = self._judge(state.epoch)
        if state.is_final and not (intent and cancelled and state.state == "stopped"):
            return state.exit_code or 0
        if intent and state.is_final:  # it had stopped for something that was asked before
            return self._write_end(
                finish(state, "cancelled", Exit.RESTART, intent.text, state.cause)
            )
        if intent:
            code = int(Exit.RESTART)
            end_state = "cancelled" if cancelled else "stopped"
        reason = intent.text if intent and intent.force else cause.text
        return self._write_end(
            finish(state, end_state, code, reason, cause, at=time.time(), writer="backend")
        )

    def _write_end(self, end: RunState) -> int:
        with contextlib.suppress(*RECORD_ERRORS):
            self._folder.coordinator.unlink(
                missing_ok=True
            )  # nobody listens there, and a full disk needs its room
        with contextlib.suppress(*RECORD_ERRORS):
            insist(lambda: write_final_state(self._folder, end))
        return end.exit_code or 0

    def _judge(self, epoch: int) -> tuple[int, End, Cause]:
        """From the agents' ends: a killed one is a lost node (76), any other code says what it
        found."""
        killed = [node for node, code in self._codes.items() if code < 0]
        failed = [node for node, code in self._codes.items() if code > 0]
        first = next(iter(killed + failed), None)
        if first is None:
            return (
                int(Exit.INTERNAL),
                "failed",
                Cause(kind="internal", text="agents left without a word", epoch=epoch),
            )
        code = self._codes[first]
        reason = self._given_up.get(first, f"agent of {first}: {meaning(code)}")
        if code < 0:
            return (
                int(Exit.CAPACITY),
                "failed",
                Cause(kind="node_lost", text=reason, epoch=epoch, node=first, code=code),
            )
        cause = Cause(
            kind="agent_exit", text=reason, epoch=epoch, node=first, code=code, log=self._log(first)
        )
        return code, "stopped" if code == Exit.RESTART else "failed", cause

    def _log(self, node: str) -> str:
        return str(self._folder.agent_log(node).relative_to(self._folder.path))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.local.supervisor")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--lock", required=True, type=int)
    args = parser.parse_args(argv)
    os.umask(0o077)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    folder = RunFolder(args.run_dir)
    try:
        supervisor = Supervisor(folder, first_read(lambda: read_request(folder)), args.lock)
        code = supervisor.run()
        if (
            supervisor.begins_again()
        ):  # as a new program in this process: nothing of the last attempt is left in it
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        return code
    except Exception as error:
        code, message = ending(error)
        log.error("%s", message, exc_info=code == Exit.INTERNAL)
        _failed(folder, code, f"supervisor: {error}" if code == Exit.INTERNAL else message)
        return code


def _failed(folder: RunFolder, code: int, reason: str) -> None:
    with contextlib.suppress(Exception):
        state = read_state(folder)
        write_state(folder, finish(state, "failed", code, reason, state.cause, at=time.time()))


if __name__ == "__main__":
    sys.exit(main())
