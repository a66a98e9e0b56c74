"""`python -m orchestrator.agent --run-dir DIR --node NAME`: what a backend starts on every node.

The exit code is the run's, by the table in `orchestrator.plan.exits`. The environment is what
workers will inherit.
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
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.run.folder import RunFolder, ending, first_read, read_secret
from orchestrator.run.intent import END, END_BY_FORCE
from orchestrator.run.request import read_request, used_nodes
from orchestrator.run.store_socket import own_addresses

from .leader.world_sizes import ScaleUpPolicy, WorldSizes
from .node.agent import Agent, NodeFacts
from .node.metrics import serve
from .node.recorder import Recorder
from .process import AgentProcess

_WILDCARD_ADDRESSES = ("0.0.0.0", "::")  # every interface: no address that anyone could be sent to
#: Signals by which schedulers announce an end. Slurm's `--signal` may be any of the last two.
_TERMINATION_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
#: The notice of a job's script to all processes of its steps, of which only agents hear it: the
#: workers' children must live until the workers have saved. It is repeated, as it may come before
#: an agent listens.
_JOB_SCRIPT_SIGNAL = signal.SIGURG

log = logging.getLogger("orch.agent")


def main(
    argv: list[str] | None = None,
    key: bytes | None = None,
    on_termination_signal: Callable[[], None] | None = None,
    root: Path = Path("/"),
) -> int:
    """`key`: the run's, where it does not lie in the run folder. `on_notice`: called when a signal
    asks this process to end; those that come once the agent has ended then wait for whatever the
    caller does next. `root`: where the machine's own files are."""
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
        "--address", default="127.0.0.1", help="where the other nodes reach this one"
    )
    parser.add_argument(
        "--metrics-fd", type=int, help="the metrics page: a listening socket of the launcher"
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="of this node's page; left out: the plan's on the first node",
    )
    parser.add_argument(
        "--coordinator",
        choices=("here", "elsewhere"),
        help="left out: on the node that the plan names first",
    )
    parser.add_argument(
        "--coordinator-port", type=int, default=0, help="where it listens; 0: any free port"
    )
    parser.add_argument(
        "--gpus", type=int, help="GPUs granted on this node; left out: those that the machine has"
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="the run goes on when nodes are lost, and when some come",
    )
    parser.add_argument(
        "--grow-after-s", type=float, default=60.0, help="not before nodes have stayed this long"
    )
    parser.add_argument(
        "--lifeline",
        action="store_true",
        help="standard input is a pipe of the launcher; its end is ours",
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
    if plan.hash != request.plan_hash and not args.elastic:
        raise OrchError(
            f"plan.json has hash {plan.hash[:12]}, the request names {request.plan_hash[:12]}",
            Exit.CONFIG,
        )
    nodes = used_nodes(plan)
    if args.node not in nodes and not args.elastic:
        raise OrchError(f"the plan gives no rank to node {args.node!r}", Exit.CONFIG)
    leads = args.node == nodes[0] if args.coordinator is None else args.coordinator == "here"
    recorder = Recorder(folder, args.node, plan)
    recorder.metrics.begin_epoch(-1)
    recorder.event("agent_started", pid=os.getpid())
    metrics = plan.job.metrics
    port = metrics.port if leads else 0
    if args.metrics_port is not None:
        port = args.metrics_port
    server, address = await _serve(recorder, metrics.host, port, args, folder)
    log.info(
        "node %s, pid %d, metrics on %s",
        args.node,
        os.getpid(),
        f"http://{address}/metrics" if address else "no port",
    )
    gpus = _gpus(plan) if args.gpus is None else args.gpus
    addresses = tuple(own_addresses())
    facts = NodeFacts(platform.node(), args.address, os.getpid(), gpus, _nics(), addresses)
    process = AgentProcess(
        folder, request, args.node, key, recorder, (args.address, args.coordinator_port)
    )
    connector = process.connector(
        ScaleUpPolicy(dwell_s=args.grow_after_s) if args.elastic else None
    )
    agent = Agent(folder, plan, request, args.node, facts, recorder, address, connector, root)
    _listen_to_signals(agent, on_termination_signal)
    if args.lifeline:
        _watch_lifeline(agent)
    if leads and not args.elastic:
        first_read(lambda: process.lead(WorldSizes.fixed(plan)))
    try:
        return await process.run(agent, args.elastic)
    finally:
        if (
            on_termination_signal
        ):  # process 1 of a pod does not get what comes while nobody handles it
            signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINATION_SIGNALS)
        if server:
            server.close()
        recorder.close()


async def _serve(
    recorder: Recorder, host: str, port: int, args: argparse.Namespace, folder: RunFolder
) -> tuple[asyncio.Server | None, str | None]:
    """The metrics page, and host:port of it. Nothing where it cannot be served: that ends no
    run."""
    try:
        server = await serve(recorder.metrics, host, port, args.metrics_fd, folder.discovery)
    except OSError as error:
        log.error("no metrics page on %s: %s", host, error)
        recorder.event("metrics_not_served", host=host, reason=str(error))
        return None, None
    bound = server.sockets[0].getsockname()
    if port and bound[1] != port and args.metrics_fd is None:
        log.warning("port %d of %s is taken: metrics are on port %d", port, host, bound[1])
    return server, f"{args.address if bound[0] in _WILDCARD_ADDRESSES else bound[0]}:{bound[1]}"


def _listen_to_signals(agent: Agent, on_termination_signal: Callable[[], None] | None) -> None:
    loop = asyncio.get_running_loop()

    def handle_signal(signum: signal.Signals, worker_signal: str) -> None:
        if on_termination_signal:
            on_termination_signal()
        agent.terminate(f"got {signum.name}", worker_signal)

    for signum in _TERMINATION_SIGNALS:
        # a program may know USR1 and USR2; whatever else it was, to a worker it is the usual
        # request to end
        worker_signal = signum.name if signum in (signal.SIGUSR1, signal.SIGUSR2) else "SIGTERM"
        loop.add_signal_handler(signum, handle_signal, signum, worker_signal)
    loop.add_signal_handler(END, agent.request_end, False)
    loop.add_signal_handler(END_BY_FORCE, agent.request_end, True)
    loop.add_signal_handler(
        _JOB_SCRIPT_SIGNAL, agent.terminate, "got the notice of the job's script", "SIGTERM", False
    )


def _watch_lifeline(agent: Agent) -> None:
    """End when the launcher ends: its side of our standard input closes, however it died. What it
    says there is the name of a signal that it got, and that may have come here as well."""
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()

    def readable() -> None:
        with contextlib.suppress(OSError):
            if signal_name := os.read(fd, 512):
                agent.terminate(
                    f"got {signal_name.decode(errors='replace').split()[0]}", can_force=False
                )
                return
        loop.remove_reader(fd)
        agent.terminate("the supervisor is gone", can_force=False)

    loop.add_reader(fd, readable)


def _gpus(plan: Plan) -> int:
    """GPUs of this machine, by the driver's device files; on a CPU cluster what the plan calls one
    node's share."""
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
