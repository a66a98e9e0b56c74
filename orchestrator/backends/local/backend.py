"""The local backend, which uses this machine as a cluster. One detached supervisor per run plays
the scheduler."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from orchestrator import start
from orchestrator.backends.base import Backend, Resizing, decode_options, read_record, write_record
from orchestrator.errors import OrchError
from orchestrator.plan import load_plan
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit
from orchestrator.run.attempt import begin_attempt, check_newest
from orchestrator.run.create import check_program, create_run_folder
from orchestrator.run.environment import compose_environment
from orchestrator.run.folder import PRIVATE_UMASK, RunFolder
from orchestrator.run.intent import END, END_BY_FORCE, Intent, ask
from orchestrator.run.processes import Identity, holders, identity, kill_trees, send_signal
from orchestrator.run.request import LaunchRequest, SubmissionBundle, at_size, check_variables
from orchestrator.run.state import RunState, read_state, true_state
from orchestrator.run.variables import all_names

from . import namespaces
from .gpus import check_gpus, gpus_here
from .standstill import stopped_process


class LocalRecord(Frozen):
    """The processes of the run, as the supervisor writes them to backend.json."""

    supervisor: tuple[int, int]  # pid, start time in the kernel's ticks
    agents: dict[str, int] = {}  # node -> pid
    exit_codes: dict[str, int] = {}  # node -> exit code, negative: signal
    #: The descriptor under which all of them hold the network namespace of the switches.
    switches: int | None = None


class LocalOptions(Frozen):
    """`backend.options` of the local backend."""

    #: namespaces: one network namespace per node, with links of a given rate.
    network: Literal["host", "namespaces"] = "host"
    #: The rate of a node's link in its namespace, each way.
    link_gbit_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # The options below are for elastic runs, nodes=A..B.
    #: Agents beyond the nodes of the plan.
    spare_nodes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    #: Delay before the agent of a lost node is started again; None: never.
    restart_lost_nodes_after_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    #: How long new nodes must have been present before the run grows.
    grow_after_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0


class RunIsAlive(OrchError):
    """The run cannot be started because a process of it is alive."""


#: Signals by which `orch cancel` reaches the supervisor when the disk does not take the request.
CANCEL = signal.SIGUSR1
CANCEL_BY_FORCE = signal.SIGUSR2
_FORCE_S = 3.0  # time for a supervisor to kill its run by itself
_END_S = 60.0  # time for agents and supervisor to exit after the workers' grace period
_ELASTIC = ("spare_nodes", "restart_lost_nodes_after_s", "grow_after_s")


def read_options(request: LaunchRequest) -> LocalOptions:
    """The checked options of a request. OrchError (65) names the option that is wrong."""
    options = decode_options(request.backend_options, LocalOptions, "the local backend")
    if options.network == "namespaces" and options.link_gbit_per_s is None:
        raise OrchError(
            "backend.options.link_gbit_per_s: network=namespaces needs the rate of its links",
            Exit.CONFIG,
        )
    elastic_options = [name for name in _ELASTIC if name in request.backend_options]
    if elastic_options and not request.sizes:
        raise OrchError(
            f"backend.options.{elastic_options[0]} is for elastic runs, nodes=A..B, not for one"
            " size",
            Exit.CONFIG,
        )
    if options.spare_nodes and options.network == "namespaces":
        raise OrchError(
            "backend.options.spare_nodes: network=namespaces cannot have spare nodes",
            Exit.CONFIG,
        )
    return options


class LocalBackend(Backend, Resizing):
    """Runs whose nodes are simulated by processes of this machine."""

    name = "local"
    agent_flags = ("--lifeline",)
    on_this_machine = True

    def check(self, request: LaunchRequest) -> None:
        if sys.platform != "linux":
            raise OrchError(f"the local backend needs Linux, this is {sys.platform}", Exit.CAPACITY)
        if request.worker.bundled:
            start.command("trainer")
        options = read_options(request)
        if options.network == "namespaces":
            namespaces.check()
        check_gpus(request, options.spare_nodes)
        if request.device == "cpu":
            return
        have = gpus_here()
        need = request.nodes * request.gpus_per_node
        if request.nodes == 1 and need <= have:
            return
        requirement = (
            f"cluster {request.cluster} is {request.nodes} nodes of {request.gpus_per_node} GPUs"
        )
        raise OrchError(
            f"{requirement}; this machine has {machine()}: use cluster=local, or --dry-run",
            Exit.CAPACITY,
        )

    def check_start(self, request: LaunchRequest, environ: Mapping[str, str]) -> None:
        self.check(request)
        cwd = Path(request.code.root or request.worker.cwd, request.code.subfolder)
        _check_program(request, environ, cwd)

    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        request = bundle.request
        self.check_start(request, environ)
        with create_run_folder(bundle, self.name) as folder:
            ignored = ": git ignores it, so the copy lacks it; --in-place runs it where it is"
            _check_program(request, environ, Path(request.worker.cwd), ignored)
            self._start(folder, request, environ)
        return request.handle

    def resume(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        environ: Mapping[str, str],
    ) -> str:
        self.check(request)
        check_variables(request, environ)
        self._start(folder, request, environ, next_attempt=True)
        return request.handle

    def resize(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        nodes: int,
        environ: Mapping[str, str],
    ) -> str:
        """Requests another size, and waits until the next attempt has begun with it.

        The supervisor ends this attempt and begins the next. If no supervisor is alive, this
        process begins it. OrchError: 64 when the run is done by then or there is a newer request,
        76 when the run does not end in time; the request stays.
        """
        self.check(at_size(request, load_plan(folder.sized_plan(nodes))))
        if not self.is_alive(folder):  # a live supervisor has the variables
            check_variables(request, environ)
        intent = ask(
            folder,
            "run",
            nodes=nodes,
            began_with=read_state(folder).intent,
        )
        self._wake(folder)
        deadline = time.monotonic() + request.policy.grace_s + _END_S
        while True:
            alive = self.is_alive(folder)
            state = read_state(folder)
            check_newest(folder, intent)
            if state.intent >= intent.number:
                return request.handle
            if not alive and state.state == "done":
                raise OrchError(f"run {folder.run_id} is done: there is nothing left to do")
            if not alive:
                with contextlib.suppress(RunIsAlive):  # another command was faster
                    self._start(
                        folder,
                        request,
                        environ,
                        next_attempt=True,
                        intent=intent,
                    )
            if time.monotonic() > deadline:
                raise OrchError(
                    f"run {folder.run_id} has not ended yet; the request stays", Exit.CAPACITY
                )
            time.sleep(0.05)

    def cancel(self, folder: RunFolder, force: bool) -> None:
        if not self.is_alive(folder):
            read_record(folder, LocalRecord)  # reports a damaged record first
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        intent = None
        supervisor_signal = signal.SIGTERM
        agent_signal = signal.SIGTERM
        try:
            intent = ask(folder, "end", force=force)
        except OrchError:  # a full disk: the supervisor or the coordinator remembers a signal
            supervisor_signal = CANCEL_BY_FORCE if force else CANCEL
            agent_signal = END_BY_FORCE if force else END
        if not self._wake(folder, supervisor_signal):
            for agent in holders(folder.lock):  # no supervisor forwards it to them
                send_signal(agent, agent_signal)
                send_signal(agent, signal.SIGCONT)  # a stopped process would not receive it
        deadline = time.monotonic() + _FORCE_S
        while force and self.is_alive(folder):
            check_newest(folder, intent)
            if time.monotonic() > deadline:
                kill_trees(holders(folder.lock))
            time.sleep(0.05)
            if time.monotonic() > 2 * _FORCE_S + deadline:
                raise OrchError(
                    f"processes of run {folder.run_id} cannot be killed: see ps", Exit.CAPACITY
                )

    def _wake(self, folder: RunFolder, *signals: int) -> bool:
        """Sends these signals to the supervisor, and SIGCONT in case it was stopped.

        Returns False if there is no supervisor, or its record cannot be read.
        """
        try:
            record = read_record(folder, LocalRecord)
        except OrchError:  # damaged; the holders of the lock can be found without it
            return False
        return record is not None and all(
            [
                send_signal(Identity(*record.supervisor), signum)
                for signum in (*signals, signal.SIGCONT)
            ]
        )

    def is_alive(self, folder: RunFolder) -> bool:
        return folder.is_alive()

    def state(self, folder: RunFolder) -> RunState:
        state = true_state(folder, self.is_alive(folder))
        stopped = None if state.is_final else _stopped(folder)
        return replace(state, reason=stopped) if stopped else state

    def _start(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        environ: Mapping[str, str],
        next_attempt: bool = False,
        intent: Intent | None = None,
    ) -> None:
        """Starts the supervisor in a session of its own, away from this terminal, with the lock.

        `next_attempt`: the run has had an attempt. `intent`: the request that the next attempt
        obeys. RunIsAlive (64) while a process of the run is alive.
        """
        lock = folder.take_lock()
        if lock is None:
            raise RunIsAlive(f"run {folder.run_id} is running", Exit.USAGE)
        try:
            if next_attempt:
                try:
                    begin_attempt(folder, request, intent)
                except OSError as error:
                    message = (
                        f"the next attempt of run {folder.run_id} cannot be recorded: {error};"
                        " the request stays"
                    )
                    raise OrchError(message, Exit.CAPACITY) from None
            # the run's own copy of orch's code, where it has one
            roots = request.environment.python_path_first
            argv = [
                *start.command("orchestrator.backends.local.supervisor", roots),
                "--run-dir",
                str(folder.path),
            ]
            log = os.open(
                folder.logs / "supervisor.log",
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                0o600,
            )
            os.set_inheritable(lock, True)
            with os.fdopen(log, "wb") as output:
                process = subprocess.Popen(
                    [*argv, "--lock", str(lock)],
                    env=_environment(request, environ),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[lock],
                    start_new_session=True,
                    umask=PRIVATE_UMASK,
                )
            supervisor = identity(process.pid)
            if supervisor:
                record = LocalRecord(supervisor=(supervisor.pid, supervisor.started))
                # if the disk is full, the supervisor writes the record itself when there is room
                with contextlib.suppress(OSError):
                    write_record(folder, record)
            process.returncode = 0  # Popen must neither warn about the detached child nor wait
        finally:
            os.close(lock)


def _environment(request: LaunchRequest, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the agents. A program gets every variable of the shell that starts
    it, also those that were not set in the shell that submitted it."""
    environment = request.environment
    if not request.worker.bundled:
        names = sorted({*environment.names, *all_names(environ)})
        environment = replace(environment, names=names)
    return compose_environment(environment, environ)


def _check_program(
    request: LaunchRequest,
    environ: Mapping[str, str],
    cwd: Path,
    hint: str = "",
) -> None:
    if not request.worker.bundled:
        check_program(
            request.worker.argv,
            _environment(request, environ),
            cwd,
            hint,
        )


def _stopped(folder: RunFolder) -> str | None:
    """A message about a process of the run that a signal has stopped, or None."""
    try:
        record = read_record(folder, LocalRecord)
    except OrchError:
        return None
    if record is None:
        return None
    agents = {
        f"agent of {node}": identity(pid)
        for node, pid in record.agents.items()
        if node not in record.exit_codes
    }
    return stopped_process(folder.run_id, {"supervisor": Identity(*record.supervisor), **agents})


def machine() -> str:
    """A phrase about this machine's GPUs, CPUs and memory."""
    gpus = gpus_here()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{gpus or 'no'} GPU{'s' if gpus > 1 else ''}, {os.cpu_count()} CPUs, {memory:.0f} GiB of"
        " memory"
    )
