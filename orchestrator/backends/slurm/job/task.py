"""`python -m orchestrator.slurm.task`: the commands that the job script runs inside an allocation.

place    once per attempt, on the first node: assigns the ranks to the nodes that Slurm granted
agent    on every node: runs the agent, with the node's Slurm name and its own address
outcome  once per attempt, after the agents: returns the run's exit code, and ends the run if no
    coordinator could
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import start
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, meaning
from orchestrator.run.folder import RunFolder, ending, first_read, write_private
from orchestrator.run.intent import wants_end
from orchestrator.run.request import AGENT, LaunchRequest, read_request
from orchestrator.run.state import Cause, FinalPhase, RunState, finish, read_state

if TYPE_CHECKING:
    from .takeover import BatchStepTakeover

_TERMINATED = 128 + signal.SIGTERM  # srun's exit code when its tasks were killed by SIGTERM


def main(argv: list[str] | None = None) -> int:
    os.umask(0o077)
    args = _parse(argv)
    folder = RunFolder(args.run_dir)
    try:
        if args.command == "place":
            _check_version(os.environ)  # once: all nodes have one image
            return _place(folder, args.nodes)
        if args.command == "outcome":
            return _outcome(folder, args.code)
        return _agent(folder)
    except Exception as error:
        code, message = ending(error)
        if code == Exit.INTERNAL:
            traceback.print_exc()
    print(f"orch: {message}", file=sys.stderr)
    if args.command == "place":
        with contextlib.suppress(OrchError, OSError):
            _end_run(folder, code, message)
    return code


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orchestrator.slurm.task")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("place", "agent", "outcome"):
        command_parser = commands.add_parser(name)
        command_parser.add_argument("--run-dir", required=True, type=Path)
        if name == "place":
            command_parser.add_argument(
                "--nodes",
                required=True,
                type=Path,
                help="output of the probe step",
            )
        if name == "outcome":
            command_parser.add_argument(
                "--code",
                required=True,
                type=int,
                help="srun's exit code",
            )
    return parser.parse_args(argv)


def _check_version(environ: Mapping[str, str]) -> None:
    """Raises OrchError (65) in an image whose orch is not the version that submitted the run."""
    submitted_version = environ.get("ORCH_SUBMITTER")
    if submitted_version and submitted_version != (image_version := start.code_version()):
        raise OrchError(
            f"the image has orch {image_version}, the run was submitted by orch"
            f" {submitted_version}: use one version",
            Exit.CONFIG,
        )


def _place(folder: RunFolder, nodes: Path) -> int:
    from orchestrator.backends.slurm.record import REQUEUED_EXITS

    from .node_assignment import assign_nodes

    state = read_state(folder)
    if (
        os.environ.get("SLURM_RESTART_COUNT")
        and state.is_final
        and state.exit_code not in REQUEUED_EXITS
    ):
        # Slurm requeues a job whose batch node was lost, even if the run has ended on the other
        # nodes meanwhile
        write_private(Path(folder.path, "slurm", "over"), f"{state.exit_code or 0}\n".encode())
        return state.exit_code or 0
    assignment = assign_nodes(folder, nodes.read_text(errors="replace"), os.environ)
    print(f"orch: {assignment.summary}", file=sys.stderr)
    return 0


# ------------------------------------------------------------------------------------------ agent


def _agent(folder: RunFolder) -> int:
    node = os.environ.get("SLURMD_NODENAME")
    if not node:
        raise OrchError("SLURMD_NODENAME is not set: agents are started by srun", Exit.INTERNAL)
    request = _read_request(folder, node)
    if node not in {agent.node for agent in request.agents}:
        print(f"orch: the plan has no rank on {node}", file=sys.stderr)
        return 0
    address = own_address(node, os.environ, several=len(request.agents) > 1)
    _redirect_output(folder.agent_log(node))
    os.environ.update(environment(request, os.environ))
    os.chdir(folder.path)
    argv = ["--run-dir", str(folder.path), "--node", node, "--address", address]
    granted = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("ROCR_VISIBLE_DEVICES")
    if granted:
        argv += ["--gpus", str(len(granted.split(",")))]
    if request.sizes:
        return _elastic_agent(folder, node, request, argv)
    from orchestrator.agent.__main__ import main as agent_main

    return int(agent_main(argv))


def _read_request(folder: RunFolder, node: str) -> LaunchRequest:
    """The run's request. OrchError (74) if this node does not see the run folder."""
    try:
        first_read(lambda: folder.request.stat())
    except OSError as error:
        message = f"node {node} does not see the run folder {folder.path} ({error.strerror})"
        raise OrchError(message, Exit.NODE) from None
    return first_read(lambda: read_request(folder))


def _redirect_output(path: Path) -> None:
    """Appends this process's standard output and error to a log that only the user can read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(path, flags, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _elastic_agent(
    folder: RunFolder,
    node: str,
    request: LaunchRequest,
    argv: list[str],
) -> int:
    """Runs the agent in a child process that is restarted after a crash; returns its exit code."""
    from .agent_supervisor import supervise

    takeover = _start_takeover(folder, node, request)
    agent = [*start.command(AGENT), *argv, "--elastic", "--lifeline"]
    code = supervise(
        agent,
        lambda: read_state(folder).is_final,
        request.policy.max_restarts,
    )
    if read_state(folder).is_final:
        # the script's watchdog ends the agents' step some time after this
        Path(folder.path, "slurm", "ended").touch(0o600)
        if takeover:
            takeover.run_until_job_ends()
    return code


def _start_takeover(
    folder: RunFolder,
    node: str,
    request: LaunchRequest,
) -> BatchStepTakeover | None:
    """Starts a takeover.

    Returns None on the script's own node, and in a container without Slurm's commands.
    """
    from orchestrator.backends.slurm.options import read_options

    from .node_assignment import current_job_id
    from .takeover import BatchStepTakeover

    script_node = os.environ.get("ORCH_SCRIPT_NODE", node)
    if node == script_node or not shutil.which("scontrol"):
        return None
    options = read_options(request.backend_options)
    takeover = BatchStepTakeover(
        folder=folder,
        node=node,
        script_node=script_node,
        job=current_job_id(os.environ),
        options=options,
        environ=dict(os.environ),
    )
    takeover.start()
    return takeover


def environment(request: LaunchRequest, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to change for agents and workers.

    These are the request's values, torchrun's defaults where nobody has set a variable, and search
    paths with the request's folders first. All others stay: sbatch exported only the allowed names,
    Slurm and the site's set-up added GPUs and modules.
    """
    unset = {
        name: value for name, value in request.environment.defaults.items() if name not in environ
    }
    variables = unset | request.environment.values
    image = environ.get("ORCH_SUBMITTER")  # its own interpreter first, not the submitter's
    path_first = [str(Path(sys.executable).parent)] if image else request.environment.path_first
    pairs = (("PATH", path_first), ("PYTHONPATH", request.environment.python_path_first))
    for variable, first in pairs:
        folders = [*first, *filter(None, environ.get(variable, "").split(":"))]
        if folders:
            variables[variable] = ":".join(dict.fromkeys(folders))
    return variables


def own_address(node: str, environ: Mapping[str, str], several: bool) -> str:
    """The IP address at which the job's other nodes reach this one.

    It is the source address that the kernel would use towards srun's node. If that is the loopback
    although there are `several` nodes (srun runs on this node, odd /etc/hosts), the node's name is
    resolved instead. The loopback remains if there is no other address, as on a test cluster inside
    one machine.
    """
    source_address = _address_towards(environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
    if source_address and not (several and source_address.startswith("127.")):
        return source_address
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(node, None, type=socket.SOCK_STREAM):
            if not str(address[0]).startswith(("127.", "::1")):
                return str(address[0])
    return source_address or "127.0.0.1"


def _address_towards(peer: str) -> str:
    if not peer:
        return ""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # UDP: nothing is sent
        return str(probe.getsockname()[0])
    return ""


# ------------------------------------------------------------------------------------------ outcome


def _outcome(folder: RunFolder, code: int) -> int:
    """The exit code that the coordinator wrote. If it was killed before that, the run ends here."""
    from orchestrator.backends.slurm.record import exclude, last_log_error

    state = read_state(folder)
    if state.is_final:
        exclude(folder, _unhealthy_nodes(folder, state))
        return state.exit_code or 0
    if code == _TERMINATED:  # before the agents could handle it
        return _end_run(
            folder,
            int(Exit.RESTART),
            "asked to end before the workers had started",
            code,
        )
    reason = f"the coordinator is gone; srun ended with {meaning(code)}"
    agent_error = last_log_error(folder, "agent-*.log")  # e.g. of an agent that could not start
    if agent_error:
        reason += f"; {agent_error}"
    return _end_run(folder, int(Exit.CAPACITY), reason, code)


def _unhealthy_nodes(folder: RunFolder, state: RunState) -> list[str]:
    """Nodes that this attempt found unhealthy.

    They come from causes with exit code 74, of its epochs and of its end, and from the state's
    excluded nodes.
    """
    from .node_assignment import read_assignment

    assignment = read_assignment(folder)
    last_epoch = assignment.after_epoch if assignment else -1
    causes = [epoch.cause for epoch in state.epochs if epoch.epoch > last_epoch]
    node_causes = [cause for cause in causes if cause and cause.code == Exit.NODE]
    if state.cause and state.exit_code == Exit.NODE:
        node_causes.append(state.cause)
    return list(
        dict.fromkeys([*(cause.node for cause in node_causes if cause.node), *state.excluded])
    )


def _end_run(
    folder: RunFolder,
    code: int,
    message: str,
    srun_code: int | None = None,
) -> int:
    """Writes the run's final state where no coordinator can; returns its exit code.

    `srun_code`: srun's exit code.
    """
    phase: FinalPhase = "stopped" if code == Exit.RESTART else "failed"
    reason = message
    state = read_state(folder)
    if wants_end(folder):
        code = int(Exit.RESTART)
        phase = "cancelled"
        reason = f"cancelled; {message}"
    cause = Cause(
        kind="scheduler",
        text=message,
        epoch=state.epoch,
        code=srun_code,
    )
    from orchestrator.observe.report import write_final_state

    write_final_state(
        folder,
        finish(
            state,
            phase,
            code,
            reason,
            cause,
            at=time.time(),
            writer="backend",
        ),
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
