"""`python -m orchestrator.agent --run-dir DIR --node NAME`: the program that backends start per
node.

The exit code is the run's (`orchestrator.plan.exits`). Workers inherit its environment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.run.folder import RunFolder, ending, first_read, read_secret
from orchestrator.run.intent import END, END_BY_FORCE
from orchestrator.run.request import LaunchRequest, read_request, used_nodes
from orchestrator.run.store_socket import own_addresses

from .leader.world_sizes import ScaleUpPolicy, WorldSizes
from .node.agent import Agent, NodeFacts
from .node.metrics_server import serve
from .node.recorder import Recorder
from .process import AgentProcess

_WILDCARD_ADDRESSES = ("0.0.0.0", "::")  # every interface; nobody can connect to these
#: Signals by which schedulers announce an end. Slurm's `--signal` may be either of the last two.
_TERMINATION_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
#: The termination signal of a job script to all processes of its steps. Only agents handle it: the
#: workers' children must live until the workers have saved. The script repeats it, since it may
#: send the first one before an agent has installed its handler.
_JOB_SCRIPT_SIGNAL = signal.SIGURG

log = logging.getLogger("orch.agent")


def main(
    argv: list[str] | None = None,
    key: bytes | None = None,
    on_termination_signal: Callable[[], None] | None = None,
    root: Path = Path("/"),
) -> int:
    """Runs the agent and returns the exit code.

    `key`: the run's key, if it is not in the run folder. `on_termination_signal`: called when a
    signal asks this process to end; signals that arrive after the agent has ended are blocked for
    the caller's next step. `root`: the root of the machine's own files.
    """
    args = _parse(argv)
    os.umask(0o077)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        force=True,
    )
    try:
        return asyncio.run(_run(args, key, on_termination_signal, root))
    except Exception as error:
        code, message = ending(error)
        log.error("%s", message, exc_info=code == Exit.INTERNAL)
        return code


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="orchestrator.agent", description="The agent of one node of one run."
    )
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--node", required=True, help="this node's name in the plan")
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        help="where the other nodes reach this one",
    )
    parser.add_argument(
        "--metrics-fd",
        type=int,
        help="descriptor of a listening socket for the metrics page",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="port of the metrics page; by default the plan's on the first node, else any free one",
    )
    parser.add_argument(
        "--coordinator",
        choices=("here", "elsewhere"),
        help="where the coordinator runs; by default on the plan's first node",
    )
    parser.add_argument(
        "--coordinator-port",
        type=int,
        default=0,
        help="port of the coordinator; 0: any free port",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        help="GPUs granted on this node; by default all GPUs of the machine",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="the run continues when nodes are lost or join",
    )
    parser.add_argument(
        "--grow-after-s",
        type=float,
        default=60.0,
        help="seconds for which nodes must have stayed before the run grows",
    )
    parser.add_argument(
        "--lifeline",
        action="store_true",
        help="end when standard input, a pipe of the launcher, is closed",
    )
    return parser.parse_args(argv)


async def _run(
    args: argparse.Namespace,
    key: bytes | None,
    on_termination_signal: Callable[[], None] | None,
    root: Path,
) -> int:
    folder = RunFolder(args.run_dir)
    key = key or first_read(lambda: read_secret(folder.key))
    request = first_read(lambda: read_request(folder))
    plan = first_read(lambda: load_plan(folder.plan))
    if not args.elastic:
        _check_plan(plan, request, args.node)
    leads = _leads(args, plan)
    recorder = Recorder(folder, args.node, plan)
    recorder.metrics.begin_epoch(-1)
    recorder.event("agent_started", pid=os.getpid())
    server, address = await _serve_metrics(args, folder, plan, recorder, leads)
    process = AgentProcess(
        folder,
        request,
        args.node,
        key=key,
        recorder=recorder,
        listen_address=(args.address, args.coordinator_port),
    )
    agent = Agent(
        folder,
        plan,
        request,
        node=args.node,
        facts=_node_facts(args, plan),
        recorder=recorder,
        metrics_address=address,
        connector=process.connector(
            ScaleUpPolicy(dwell_s=args.grow_after_s) if args.elastic else None
        ),
        root=root,
    )
    _listen_to_signals(agent, on_termination_signal)
    if args.lifeline:
        _watch_lifeline(agent)
    if leads and not args.elastic:
        first_read(lambda: process.lead(WorldSizes.fixed(plan)))
    try:
        return await process.run(agent, args.elastic)
    finally:
        if on_termination_signal:
            # The kernel drops signals to a pod's process 1 that has no handler; blocked ones stay
            # pending.
            signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINATION_SIGNALS)
        if server:
            server.close()
        recorder.close()


def _check_plan(plan: Plan, request: LaunchRequest, node: str) -> None:
    """Raises OrchError if the plan of a run with fixed nodes is another one, or lacks the node."""
    if plan.hash != request.plan_hash:
        raise OrchError(
            f"plan.json has hash {plan.hash[:12]}, the request names {request.plan_hash[:12]}",
            Exit.CONFIG,
        )
    if node not in used_nodes(plan):
        raise OrchError(f"the plan gives no rank to node {node!r}", Exit.CONFIG)


def _leads(args: argparse.Namespace, plan: Plan) -> bool:
    """Returns whether the coordinator starts on this node."""
    if args.coordinator is None:
        return bool(args.node == used_nodes(plan)[0])
    return bool(args.coordinator == "here")


async def _serve_metrics(
    args: argparse.Namespace,
    folder: RunFolder,
    plan: Plan,
    recorder: Recorder,
    leads: bool,
) -> tuple[asyncio.Server | None, str | None]:
    """Serves the metrics page; returns the server and host:port of the page, or (None, None).

    A page that cannot be served does not end the run.
    """
    host = plan.job.metrics.host
    port = plan.job.metrics.port if leads else 0
    if args.metrics_port is not None:
        port = args.metrics_port
    try:
        server = await serve(recorder.metrics, host, port, args.metrics_fd, folder.discovery)
    except OSError as error:
        log.error("no metrics page on %s: %s", host, error)
        recorder.event("metrics_not_served", host=host, reason=str(error))
        log.info("node %s, pid %d, metrics on no port", args.node, os.getpid())
        return None, None
    bound_host, bound_port, *_ = server.sockets[0].getsockname()
    if port and bound_port != port and args.metrics_fd is None:
        log.warning("port %d of %s is taken: metrics are on port %d", port, host, bound_port)
    shown_host = args.address if bound_host in _WILDCARD_ADDRESSES else bound_host
    address = f"{shown_host}:{bound_port}"
    log.info("node %s, pid %d, metrics on http://%s/metrics", args.node, os.getpid(), address)
    return server, address


def _node_facts(args: argparse.Namespace, plan: Plan) -> NodeFacts:
    return NodeFacts(
        host=platform.node(),
        address=args.address,
        pid=os.getpid(),
        gpus=_gpus(plan) if args.gpus is None else args.gpus,
        nics=_nics(),
        addresses=tuple(own_addresses()),
    )


def _listen_to_signals(agent: Agent, on_termination_signal: Callable[[], None] | None) -> None:
    loop = asyncio.get_running_loop()

    def handle_signal(signum: signal.Signals, worker_signal: str) -> None:
        if on_termination_signal:
            on_termination_signal()
        agent.terminate(f"got {signum.name}", worker_signal)

    for signum in _TERMINATION_SIGNALS:
        # A program may handle USR1 and USR2 itself; for all others workers get SIGTERM.
        worker_signal = signum.name if signum in (signal.SIGUSR1, signal.SIGUSR2) else "SIGTERM"
        loop.add_signal_handler(signum, handle_signal, signum, worker_signal)
    loop.add_signal_handler(END, agent.request_end, False)
    loop.add_signal_handler(END_BY_FORCE, agent.request_end, True)
    terminate = partial(
        agent.terminate,
        "got the termination signal of the job script",
        can_force=False,
    )
    loop.add_signal_handler(_JOB_SCRIPT_SIGNAL, terminate)


def _watch_lifeline(agent: Agent) -> None:
    """Ends the agent when the launcher ends, which closes standard input however it died.

    The launcher writes there the name of a signal that it received; this process may have received
    the signal as well.
    """
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()

    def readable() -> None:
        with contextlib.suppress(OSError):
            if packet := os.read(fd, 512):
                signal_name = packet.decode(errors="replace").split()[0]
                agent.terminate(f"got {signal_name}", can_force=False)
                return
        loop.remove_reader(fd)
        agent.terminate("the supervisor is gone", can_force=False)

    loop.add_reader(fd, readable)


def _gpus(plan: Plan) -> int:
    """Returns this machine's GPUs by its device files, or the plan's count on a CPU cluster."""
    if plan.cluster.device == "cpu":
        return plan.cluster.gpus_per_node
    return sum(1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))


def _nics() -> int:
    try:
        return len(os.listdir("/sys/class/infiniband"))
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
