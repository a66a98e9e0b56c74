"""The local backend: this machine as a cluster. A detached supervisor a run stands for the
scheduler."""

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
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import END, END_BY_FORCE, Intent, ask
from orchestrator.run.processes import Identity, holders, identity, kill_trees, send_signal
from orchestrator.run.request import (
    LaunchRequest,
    SubmissionBundle,
    at_size,
    check_variables,
    compose_environment,
)
from orchestrator.run.state import RunState, read_state, true_state

from . import namespaces
from .gpus import check_gpus, gpus_here
from .standstill import stopped_process


class LocalRecord(Frozen):
    """backend.json: the processes of the run, as the supervisor knows them."""

    supervisor: tuple[int, int]  # pid, start time in the kernel's ticks
    agents: dict[str, int] = {}  # node -> pid
    exit_codes: dict[str, int] = {}  # node -> exit code, negative: signal
    switches: int | None = (
        None  # descriptor by which all of them hold the namespace of the network's switches
    )


class LocalOptions(Frozen):
    """`backend.options` of the local backend."""

    network: Literal["host", "namespaces"] = (
        "host"  # namespaces: one a node, with links of a given rate
    )
    link_gbit_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = (
        None  # of a node in its namespace, each way
    )
    # of elastic runs, nodes=A..B:
    spare_nodes: Annotated[int, msgspec.Meta(ge=0, le=64)] = (
        0  # more agents than the plan has nodes
    )
    restart_lost_nodes_after_s: Annotated[float, msgspec.Meta(ge=0)] | None = (
        None  # None: they stay away
    )
    grow_after_s: Annotated[float, msgspec.Meta(ge=0)] = (
        60.0  # not before nodes have stayed this long
    )


class RunIsAlive(OrchError):
    """Something of the run lives: it cannot be started."""


#: `orch cancel` to the supervisor, where the disk does not take the request.
CANCEL = signal.SIGUSR1
CANCEL_BY_FORCE = signal.SIGUSR2
_FORCE_S = 3.0  # for a supervisor to kill its run by itself
_END_S = 60.0  # after the workers' grace, for agents and supervisor to go
_ELASTIC = ("spare_nodes", "restart_lost_nodes_after_s", "grow_after_s")


def read_options(request: LaunchRequest) -> LocalOptions:
    """Raises OrchError (65) naming the option that is wrong."""
    options = decode_options(request.backend_options, LocalOptions, "the local backend")
    if options.network == "namespaces" and options.link_gbit_per_s is None:
        raise OrchError(
            "backend.options.link_gbit_per_s: what rate have the links of network=namespaces?",
            Exit.CONFIG,
        )
    if not request.sizes and (
        elastic_options := [key for key in _ELASTIC if key in request.backend_options]
    ):
        raise OrchError(
            f"backend.options.{elastic_options[0]} is for elastic runs, nodes=A..B, not for one size",
            Exit.CONFIG,
        )
    if options.spare_nodes and options.network == "namespaces":
        raise OrchError(
            "backend.options.spare_nodes: network=namespaces has no place for spare nodes",
            Exit.CONFIG,
        )
    return options


class LocalBackend(Backend, Resizing):
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

    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        request = bundle.request
        self.check(request)
        _check_program(
            request, environ, Path(request.code.root or request.worker.cwd, request.code.subfolder)
        )
        with create_run_folder(bundle, self.name) as folder:
            ignored = ": git ignores it, so the copy lacks it; --in-place runs it where it is"
            _check_program(request, environ, Path(request.worker.cwd), ignored)
            self._start(folder, request, environ)
        return request.handle

    def resume(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> str:
        self.check(request)
        check_variables(request, environ)
        self._start(folder, request, environ, next_attempt=True)
        return request.handle

    def resize(
        self, folder: RunFolder, request: LaunchRequest, nodes: int, environ: Mapping[str, str]
    ) -> str:
        """Asks for another size, and waits until the next attempt has begun with it. The supervisor
        ends this attempt and begins the next; where none lives, it is begun from here.

        OrchError: 64 when the run is done by then or somebody asks for something else, 76 when it
        does not end: the request stays.
        """
        self.check(at_size(request, load_plan(folder.sized_plan(nodes))))
        if not self.is_alive(folder):  # a supervisor that lives has the variables
            check_variables(request, environ)
        intent = ask(folder, "run", nodes=nodes, began_with=read_state(folder).intent)
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
                    self._start(folder, request, environ, next_attempt=True, intent=intent)
            if time.monotonic() > deadline:
                raise OrchError(
                    f"run {folder.run_id} has not ended yet; the request stays", Exit.CAPACITY
                )
            time.sleep(0.05)

    def cancel(self, folder: RunFolder, force: bool) -> None:
        if not self.is_alive(folder):
            read_record(folder, LocalRecord)  # a damaged one is said first
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        intent = None
        supervisor_signal = signal.SIGTERM
        agent_signal = signal.SIGTERM
        try:
            intent = ask(folder, "end", force=force)
        except OrchError:  # a full disk: the supervisor keeps it in mind, or the coordinator
            supervisor_signal = CANCEL_BY_FORCE if force else CANCEL
            agent_signal = END_BY_FORCE if force else END
        if not self._wake(folder, supervisor_signal):
            for agent in holders(folder.lock):  # nobody passes it on to them
                send_signal(agent, agent_signal)
                send_signal(agent, signal.SIGCONT)  # a stopped one would not hear it
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
        """Sends these signals to the supervisor, and lets it go on if it was stopped. False if it
        is no more."""
        try:
            record = read_record(folder, LocalRecord)
        except OrchError:  # damaged: who holds the lock is known all the same
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
        """Starts the supervisor: own session, nothing of this terminal, holding the run's lock.
        `again`: the run has had an attempt; `asked`: what the next one obeys. RunIsAlive (64) while
        something of it runs."""
        lock = folder.take_lock()
        if lock is None:
            raise RunIsAlive(f"run {folder.run_id} is running", Exit.USAGE)
        try:
            if next_attempt:
                try:
                    begin_attempt(folder, request, intent)
                except OSError as error:
                    message = (
                        f"the next attempt of run {folder.run_id} cannot be written down: {error};"
                        " the request stays"
                    )
                    raise OrchError(message, Exit.CAPACITY) from None
            roots = (
                request.environment.python_path_first
            )  # a copy of our own code, where the run has one
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
                    env=compose_environment(request.environment, environ),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[lock],
                    start_new_session=True,
                )
            supervisor = identity(process.pid)
            if supervisor:
                with contextlib.suppress(
                    OSError
                ):  # a full disk: it runs, and writes this itself when there is room
                    write_record(
                        folder, LocalRecord(supervisor=(supervisor.pid, supervisor.started))
                    )
            process.returncode = 0  # it is nobody's child from here on: no warning, no wait
        finally:
            os.close(lock)


def _check_program(
    request: LaunchRequest, environ: Mapping[str, str], cwd: Path, hint: str = ""
) -> None:
    if not request.worker.bundled:
        check_program(
            request.worker.argv, compose_environment(request.environment, environ), cwd, hint
        )


def _stopped(folder: RunFolder) -> str | None:
    """Which process of a run was stopped by a signal, so that it does not go on; None for none."""
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
    """What this machine has, in words."""
    gpus = gpus_here()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{gpus or 'no'} GPU{'s' if gpus > 1 else ''}, {os.cpu_count()} CPUs, {memory:.0f} GiB of"
        " memory"
    )
