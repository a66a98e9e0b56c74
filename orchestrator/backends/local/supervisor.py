"""`python -m orchestrator.backends.local.supervisor`: the scheduler of one local run.

It starts one agent per simulated node, forwards a request to end, and waits for all agents. It
writes the final state to state.json when the coordinator could not. Each agent's standard input is
a pipe of which the supervisor holds the other end: when the supervisor dies in any way, the agents
save and end the run. If the cluster has network namespaces, the supervisor builds that network
first and starts each agent on its node. It is single-threaded because it forks.
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

_AGENT_EXIT_S = 20.0  # time for the agents to exit after the run's final state
_RETRY_S = 1.0  # between two tries to restart an agent
_HANDLED_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    CANCEL,
    CANCEL_BY_FORCE,
)

log = logging.getLogger("orch.supervisor")


class Supervisor:
    """Runs one attempt of a local run from the start of its agents to its recorded end."""

    def __init__(self, folder: RunFolder, request: LaunchRequest, lock: int):
        self._folder = folder
        self._request = request
        self._lock = lock
        self._agents: dict[str, subprocess.Popen] = {}
        self._exit_codes: dict[str, int] = {}
        self._network: Network | None = None
        self._exit_deadline: float | None = None
        self._end_requested = False  # the agents have been asked to end
        self._intent_of_attempt = read_state(folder).intent
        self._options = read_options(request)
        self._record_is_stale = False  # the last backend.json could not be written
        self._state_is_unreadable = False  # the last read of state.json failed
        self._restart_at: dict[str, float] = {}  # lost node -> monotonic time of its restart
        #: A request to end that came by signal because the disk was full.
        self._unwritten_intent: Intent | None = None
        self._stopped_agents = StoppedAgents(request.policy.heartbeat_timeout_s)
        self._kill_reasons: dict[str, str] = {}  # node -> why its agent was killed

    def run(self) -> int:
        """Runs the attempt; returns the run's exit code after all of its processes have ended."""
        become_subreaper()
        self._listen()
        self._folder.coordinator.unlink(missing_ok=True)  # left by an earlier attempt
        self._network = self._build_network()
        try:
            self._launcher = AgentLauncher(
                self._folder, self._request, self._options, self._lock, self._network
            )
            for node, argv in self._launcher.commands().items():
                self._agents[node] = self._launcher.start(node, argv)
            self._write_record()
            while len(self._exit_codes) < len(self._agents):
                self._handle_events(self._wait_for_signals(0.5))
        finally:
            unkillable = kill_descendants()
            if unkillable:
                log.error("processes %s cannot be killed", unkillable)
        return self._write_outcome()

    def _build_network(self) -> Network | None:
        """The network of the simulated nodes, or None where they share the host's."""
        rate = self._options.link_gbit_per_s
        if (
            self._options.network != "namespaces" or rate is None
        ):  # read_options has checked the rate
            return None
        wiring = Wiring.of(load_plan(self._folder.plan), rate)
        network = Network(wiring)
        log.info("%d nodes in network namespaces, %g Gbit/s each", len(wiring.nodes), rate)
        return network

    def begin_next_attempt(self) -> bool:
        """Begins another attempt if a user has requested one (resume or resize).

        Returns True if the caller must now run it, False if the run has ended.
        """
        intent = self._pending_intent()
        if intent is None or intent.want == "end":
            return False
        try:
            if insist(lambda: read_state(self._folder)).state == "done":
                return False
            log.info("next attempt: %s", intent.text)
            if insist(lambda: self._begin_attempt(intent)):
                return True
            self._write_outcome()
        except RECORD_ERRORS as error:  # the outcome is recorded; `orch resume` obeys the request
            log.error("the next attempt cannot begin: %s", error)
        return False

    def _begin_attempt(self, intent: Intent) -> bool:
        """Writes the files of the next attempt; returns False if a signal to end arrived first."""
        signals = self._wait_for_signals(0.0)
        self._record_cancel_signals(signals)
        if not signals:
            begin_attempt(self._folder, self._request, intent)
        return not signals

    def _record_cancel_signals(self, signals: list[signal.Signals]) -> None:
        """Keeps a cancel that arrived as a signal, because its request could not be written."""
        for signum in signals:
            if signum in (CANCEL, CANCEL_BY_FORCE):
                self._unwritten_intent = unwritten_end(force=signum == CANCEL_BY_FORCE)

    def _listen(self) -> None:
        """Turns signals into bytes of a pipe.

        sigtimedwait(2) would not do: CPython's returns a signal that nobody sent if the process
        was stopped for longer than the timeout.
        """
        self._wake, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for signum in _HANDLED_SIGNALS:
            signal.signal(signum, lambda *_: None)

    def _wait_for_signals(self, wait_s: float) -> list[signal.Signals]:
        """Waits at most `wait_s` for signals; returns those received, without SIGCHLD."""
        select.select([self._wake], [], [], wait_s)
        with contextlib.suppress(BlockingIOError):
            return [
                signal.Signals(number)
                for number in os.read(self._wake, 512)
                if number != signal.SIGCHLD
            ]
        return []

    def _handle_events(self, signals: list[signal.Signals]) -> None:
        """One turn of the supervisor: signals, requests, agents that ended, nodes to restart."""
        self._record_cancel_signals(signals)
        for signum in signals:
            self._forward_end_request(signum.name)
        if self._pending_intent():
            self._forward_end_request("requested by a user")
        any_exit = self._record_exits()
        if any_exit or self._record_is_stale:
            self._write_record()
        if self._exit_codes:  # an old worker must not run next to those of the next epoch
            kill_other_children({agent.pid for agent in self._agents.values()})
        self._kill_stopped_agents()
        self._restart_lost_nodes()
        if self._exit_deadline is None and self._is_over():
            self._exit_deadline = time.monotonic() + _AGENT_EXIT_S
        if self._exit_deadline is not None and time.monotonic() > self._exit_deadline:
            self._kill()

    def _record_exits(self) -> bool:
        """Reaps children and records the exit codes of agents; returns whether any agent ended."""
        nodes = {agent.pid: node for node, agent in self._agents.items()}
        any_exit = False
        for pid, code in reap_children():
            node = nodes.get(pid)
            if node is None:  # the orphan of a killed agent
                continue
            self._exit_codes[node] = code
            self._agents[node].returncode = code
            log.info("agent of %s: %s", node, meaning(code))
            any_exit = True
            self._schedule_restart(node, code)
        return any_exit

    def _pending_intent(self) -> Intent | None:
        """The user's request for which this attempt has to end, or None."""
        written = due(self._folder, self._intent_of_attempt)
        intents = [intent for intent in (written, self._unwritten_intent) if intent]
        return max(intents, key=lambda intent: (intent.force, intent.want == "end"), default=None)

    def _kill_stopped_agents(self) -> None:
        """Kills agents that a signal stopped and nobody has continued in time."""
        living = {
            node: agent.pid for node, agent in self._agents.items() if node not in self._exit_codes
        }
        for node, reason in self._stopped_agents.overdue(living).items():
            if node not in self._kill_reasons:
                log.error("%s", reason)
                self._kill_reasons[node] = reason
                os.kill(living[node], signal.SIGKILL)

    def _is_over(self) -> bool:
        """Whether the coordinator has ended the run; False while its state cannot be read."""
        try:
            over = read_state(self._folder).is_final
        except RECORD_ERRORS as error:
            if not self._state_is_unreadable:
                log.error("state.json cannot be read, retrying: %s", error)
            self._state_is_unreadable = True
            return False
        self._state_is_unreadable = False
        return over

    def _schedule_restart(self, node: str, code: int) -> None:
        """Plans the restart of a node that was lost, fenced or sent away, if the options allow it.

        A node that was found bad stays away. `_restart_lost_nodes` skips the restart once the run
        has ended.
        """
        delay_s = self._options.restart_lost_nodes_after_s
        can_return = code < 0 or code in (Exit.FENCED, Exit.CAPACITY, Exit.RESTART)
        if delay_s is not None and can_return:
            self._restart_at[node] = time.monotonic() + delay_s

    def _restart_lost_nodes(self) -> None:
        """Starts the agents of lost nodes whose delay has passed, like machines that rebooted.

        None is started once the run has ended or has been asked to end.
        """
        now = time.monotonic()
        due_nodes = [node for node, due_at in self._restart_at.items() if now >= due_at]
        for node in due_nodes:
            if not self._end_requested and not self._is_over():
                try:
                    command = self._launcher.commands()[node]
                    self._agents[node] = self._launcher.start(node, command)
                except (*RECORD_ERRORS, subprocess.SubprocessError) as error:
                    # no room for the log, no memory or an unreadable plan: try again later
                    log.error("node %s cannot be restarted yet: %s", node, error)
                    self._restart_at[node] = time.monotonic() + _RETRY_S
                    continue
                del self._exit_codes[node]
                self._kill_reasons.pop(node, None)
                log.info("node %s was restarted", node)
                self._write_record()
            del self._restart_at[node]

    def _forward_end_request(self, reason: str) -> None:
        """Forwards a request to end to every agent.

        An agent kills its workers at the second signal. A second `orch cancel` must not do that,
        so it is not forwarded; a forced one kills the agents at once.
        """
        intent = self._pending_intent()
        if intent and self._end_requested and not intent.force:
            return
        if not self._end_requested or not intent:
            log.info("asked to end (%s)%s", reason, f": {intent.text}" if intent else "")
        if intent and intent.force:
            self._end_requested = True
            self._kill()
            return
        self._end_requested = True
        self._signal(signal.SIGTERM)
        if intent:
            self._signal(signal.SIGCONT)  # a stopped process would not receive it

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)  # worker supervisors kill the workers

    def _signal(self, signum: int) -> None:
        """Signals every agent that has not been reaped, so that its pid is still its own.

        `Popen.send_signal` would reap an agent that has just ended, and `reap_children` would then
        miss its exit.
        """
        for node, agent in self._agents.items():
            if node not in self._exit_codes:
                os.kill(agent.pid, signum)

    def _write_record(self) -> None:
        """Writes backend.json; a full or failing disk ends no run, so a later turn tries again."""
        this_process = identity(os.getpid())
        assert this_process is not None
        pids = {node: agent.pid for node, agent in self._agents.items()}
        record = LocalRecord(
            supervisor=(this_process.pid, this_process.started),
            agents=pids,
            exit_codes=dict(self._exit_codes),
            switches=self._network.switches if self._network else None,
        )
        try:
            write_record(self._folder, record)
        except (OSError, OrchError) as error:
            if not self._record_is_stale:
                log.error("backend.json cannot be written, retrying: %s", error)
            self._record_is_stale = True
        else:
            self._record_is_stale = False

    def _write_outcome(self) -> int:
        """Writes the run's final state unless the coordinator has; returns the run's exit code."""
        state = insist(lambda: read_state(self._folder))
        intent = self._pending_intent()
        cancelled = intent is not None and intent.want == "end"
        code, end_state, cause = self._outcome_of_agents(state.epoch)
        if state.is_final and not (intent and cancelled and state.state == "stopped"):
            return state.exit_code or 0
        if intent and state.is_final:  # it stopped for an earlier request, and is cancelled now
            return self._write_final_state(
                finish(state, "cancelled", Exit.RESTART, intent.text, state.cause)
            )
        if intent:
            code = int(Exit.RESTART)
            end_state = "cancelled" if cancelled else "stopped"
        reason = intent.text if intent and intent.force else cause.text
        return self._write_final_state(
            finish(state, end_state, code, reason, cause, at=time.time(), writer="backend")
        )

    def _write_final_state(self, end: RunState) -> int:
        with contextlib.suppress(*RECORD_ERRORS):
            # nobody listens at that address any more, and a full disk needs the room
            self._folder.coordinator.unlink(missing_ok=True)
        with contextlib.suppress(*RECORD_ERRORS):
            insist(lambda: write_final_state(self._folder, end))
        return end.exit_code or 0

    def _outcome_of_agents(self, epoch: int) -> tuple[int, End, Cause]:
        """Exit code, final state and cause of the run, judged by its agents' exit codes.

        A killed agent is a lost node (76); any other code is the agent's own finding.
        """
        killed = [node for node, code in self._exit_codes.items() if code < 0]
        failed = [node for node, code in self._exit_codes.items() if code > 0]
        first = next(iter(killed + failed), None)
        if first is None:
            cause = Cause(kind="internal", text="agents ended without a final state", epoch=epoch)
            return int(Exit.INTERNAL), "failed", cause
        code = self._exit_codes[first]
        reason = self._kill_reasons.get(first, f"agent of {first}: {meaning(code)}")
        if code < 0:
            cause = Cause(kind="node_lost", text=reason, epoch=epoch, node=first, code=code)
            return int(Exit.CAPACITY), "failed", cause
        cause = Cause(
            kind="agent_exit", text=reason, epoch=epoch, node=first, code=code, log=self._log(first)
        )
        return code, "stopped" if code == Exit.RESTART else "failed", cause

    def _log(self, node: str) -> str:
        log_path = self._folder.agent_log(node)
        return str(log_path.relative_to(self._folder.path))


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
        request = first_read(lambda: read_request(folder))
        supervisor = Supervisor(folder, request, args.lock)
        code = supervisor.run()
        if supervisor.begin_next_attempt():
            # a new program in this process, so that nothing of the last attempt is left in memory
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
        failed = finish(
            state,
            "failed",
            code,
            reason,
            state.cause,
            at=time.time(),
        )
        write_state(folder, failed)


if __name__ == "__main__":
    sys.exit(main())
