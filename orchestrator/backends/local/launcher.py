"""Starts the agents of a local run, one a simulated node."""

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
    """`lock`: a descriptor of the run's lock, which agents hold as well. `network`: of the
    simulated nodes, if any."""

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
        launch_command = start.command(AGENT)
        commands = {
            agent.node: [*launch_command, *agent.argv[agent.argv.index(AGENT) + 1 :]]
            if AGENT in agent.argv
            else agent.argv
            for agent in self._request.agents
        }
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
        inherited_fds = [self._lock]  # they hold the run's lock with us
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
            environment["GLOO_SOCKET_IFNAME"] = (
                INTERFACE  # or it asks what the host's name resolves to
            )
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
        """Where the agent's metrics are read: a socket of this machine's network, into which the
        agent cannot reach. None where none can be opened: a run needs no metrics page."""
        metrics = load_plan(self._folder.plan).job.metrics
        port = metrics.port if node == self._request.agents[0].node else 0
        family = socket.AF_INET6 if ":" in metrics.host else socket.AF_INET
        try:
            return socket.create_server((metrics.host, port), family=family)
        except OSError:  # taken: any free one, as where agents open it themselves
            try:
                return socket.create_server((metrics.host, 0), family=family)
            except OSError as error:
                log.error("no metrics page on %s: %s", metrics.host, error)
                return None


def _become_agent(enter_namespace: Callable[[], None] | None) -> None:
    """In the child, between fork and exec."""
    signal.set_wakeup_fd(-1)  # what it hears is not ours
    if enter_namespace:
        enter_namespace()
