"""Starts the agents of a local run, one per simulated node."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable

from orchestrator import start
from orchestrator.plan import load_plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import AGENT, LaunchRequest

from .backend import LocalOptions
from .gpus import gpus_of_node
from .namespaces import INTERFACE, Network

log = logging.getLogger("orch.supervisor")


class AgentLauncher:
    """Starts agents that hold the run's lock (the descriptor `lock`) on their simulated nodes.

    `network` is None where the nodes share the host's network.
    """

    def __init__(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        options: LocalOptions,
        lock: int,
        network: Network | None,
    ):
        self._folder = folder
        self._request = request
        self._options = options
        self._lock = lock
        self._network = network

    def commands(self) -> dict[str, list[str]]:
        """Node -> the command of its agent."""
        commands = {agent.node: _with_this_python(agent.argv) for agent in self._request.agents}
        if not self._request.sizes:
            return commands
        first, *_ = self._request.agents
        for index in range(self._options.spare_nodes):
            spare = f"spare-{index}"
            commands[spare] = [
                spare if argument == first.node else argument for argument in commands[first.node]
            ]
        elastic = ["--elastic", "--grow-after-s", str(self._options.grow_after_s)]
        return {node: [*argv, *elastic] for node, argv in commands.items()}

    def start(self, node: str, argv: list[str]) -> subprocess.Popen:
        log = os.open(
            self._folder.agent_log(node),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
        inherited_fds = [self._lock]  # the agent holds the run's lock too
        environment = os.environ | gpus_of_node(node, self._request, os.environ)
        enter_namespace = None
        listener = None
        if self._network:
            listener = self._listener(node)
            inherited_fds.append(self._network.switches)
            argv = [*argv, "--address", self._network.wiring.address(node)]
            if listener:
                inherited_fds.append(listener.fileno())
                argv += ["--metrics-fd", str(listener.fileno())]
            # without it gloo takes the interface of the host name's address
            environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            enter_namespace = self._network.enter(node)
        with os.fdopen(log, "wb") as output, listener or contextlib.nullcontext():
            return subprocess.Popen(
                argv,
                cwd=self._folder.path,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=inherited_fds,
                start_new_session=True,
                preexec_fn=lambda: _become_agent(enter_namespace),
            )

    def _listener(self, node: str) -> socket.socket | None:
        """The socket on which the agent serves its metrics, in the network of this machine.

        The agent cannot open it from its namespace. Returns None where no socket can be opened,
        since a run does not need a metrics page.
        """
        metrics = load_plan(self._folder.plan).job.metrics
        port = metrics.port if node == self._request.agents[0].node else 0
        family = socket.AF_INET6 if ":" in metrics.host else socket.AF_INET
        try:
            return socket.create_server((metrics.host, port), family=family)
        except OSError:  # the port is taken: any free one, as agents do that open it themselves
            try:
                return socket.create_server((metrics.host, 0), family=family)
            except OSError as error:
                log.error("no metrics page on %s: %s", metrics.host, error)
                return None


def _with_this_python(argv: list[str]) -> list[str]:
    """The agent's command with this process's interpreter and code in place of the submitter's."""
    if AGENT not in argv:
        return argv
    return [*start.command(AGENT), *argv[argv.index(AGENT) + 1 :]]


def _become_agent(enter_namespace: Callable[[], None] | None) -> None:
    """Prepares the child between fork and exec."""
    signal.set_wakeup_fd(-1)  # the child's signals must not wake the supervisor
    if enter_namespace:
        enter_namespace()
