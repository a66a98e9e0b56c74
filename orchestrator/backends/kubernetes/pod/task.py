"""Process 1 of every pod of a run: `python -m orchestrator.backends.kubernetes.pod`.

It meets the other pods (rendezvous), maps the ranks to the nodes that the pods are on, runs this
pod's agent, and exits with a code that the Job's podFailurePolicy knows. Its input is the run's
ConfigMap and Secret; it needs no API access.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from orchestrator.backends.kubernetes import names
from orchestrator.backends.kubernetes.objects.payload import unpack_plan, unpack_topology
from orchestrator.backends.kubernetes.objects.pod import pod_exit
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, to_json
from orchestrator.plan.document import Frozen
from orchestrator.plan.worker import replica_dir
from orchestrator.run.create import accepted
from orchestrator.run.environment import compose_environment
from orchestrator.run.folder import RunFolder, ending, write_private
from orchestrator.run.request import AgentCommand, LaunchRequest, from_bytes, to_bytes, used_nodes
from orchestrator.run.state import RunState, pending_again, read_state, write_state

from .attempts import PeersLost, ProcessStart
from .program import unpack_code
from .rank_mapping import RankMapping, map_ranks, node_names
from .rendezvous import Join, Start, rendezvous
from .status_lines import StatusLineWriter

#: The kubelet shows this file in the pod's status, also once the pod's log is gone.
TERMINATION_MESSAGE = Path("/dev/termination-log")

log = logging.getLogger("orch.task")


class Pod(Frozen):
    """This pod, from the environment variables that Kubernetes sets."""

    index: int
    name: str
    node: str
    address: str
    service: str
    host_of_first: str  # DNS name of pod 0
    returns: int = 0  # earlier pods of this index whose failures the Job's rules ignored


class Input(Frozen):
    """The run's ConfigMap and Secret as they are mounted."""

    request: LaunchRequest
    planned: Plan
    config: bytes
    topology: bytes
    key: bytes
    environment: dict[str, str]
    sizes: dict[int, Plan] = {}  # an elastic run's plan of every size


class Placement(Frozen):
    """kubernetes/placement.json: what the plan became in this attempt of the pods."""

    pods: list[str]  # names of the pods by completion index
    nodes: list[str]  # the plan's name of each pod's node
    planned_hash: str
    plan_hash: str
    summary: str  # one line: the difference from the plan, and its predicted cost
    moved_ranks: int
    worst_levels: dict[str, list[str]]
    step_s: list[float]  # predicted seconds per step: [planned, real]


def main() -> int:
    process_start = ProcessStart.of_this_process()
    os.umask(0o077)
    # the root file system is read only
    os.environ |= {"HOME": "/tmp", "TMPDIR": "/tmp"}
    os.environ |= login_names(os.environ)
    # process 1 has no default actions: without a handler it would ignore the signal
    signal.signal(signal.SIGTERM, _handle_early_termination)
    # delivers signals that came while this process replaced itself
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        force=True,
    )
    try:
        run_input = read_input(Path(names.INPUT))
        pod = read_pod(os.environ, run_input.request)
        code, reason = _attempt(process_start, pod, run_input)
    except Exception as error:
        code, reason = ending(error)
        if code == Exit.INTERNAL:
            traceback.print_exc(file=sys.stdout)
    _write_termination_message(code, reason)
    return code


def _attempt(process_start: ProcessStart, pod: Pod, run_input: Input) -> tuple[int, str]:
    """Runs an attempt. Returns (exit code of the pod, why), or replaces this process for the next
    attempt."""
    try:
        return _run_attempt(pod, run_input)
    except PeersLost as lost:
        if not process_start.may_restart(lost):
            return _failed_attempt(pod, run_input, f"{lost.reason}, again and again")
        log.info("%s: meeting the other pods again", lost.reason)
        if read_options(run_input.request.backend_options).claim is None:
            # without a claim no checkpoint outlives the loss of a pod: the replicas of this one
            # would not fit those of a new pod 0
            shutil.rmtree(
                replica_dir(run_input.request.run_dir, pod.node).parent,
                ignore_errors=True,
            )
            shutil.rmtree(run_input.request.run_dir, ignore_errors=True)
        process_start.restart(lost)
    except OrchError as error:
        if error.exit != Exit.CAPACITY:
            raise
        return _failed_attempt(pod, run_input, error.message)


def _failed_attempt(pod: Pod, run_input: Input, reason: str) -> tuple[int, str]:
    """Returns the exit code and reason after a failed attempt: for another one, until there were
    too many."""
    most_returns = read_options(run_input.request.backend_options).max_pod_returns
    if pod.returns < most_returns:
        return int(Exit.RESTART), reason
    returns = (
        f"pod {pod.index} has come back {pod.returns} times"
        f" (backend.options.max_pod_returns={most_returns})"
    )
    return int(Exit.CAPACITY), f"{reason}; {returns}"


def login_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns USER and LOGNAME as a login would set them: libraries name their folders of compiled
    kernels by them, and fail if the user has no name, as in most pods. Values of the image stay."""
    name = environ.get("USER") or environ.get("LOGNAME")
    if not name:
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            name = "orch"
    return {variable: environ.get(variable) or name for variable in ("USER", "LOGNAME")}


def _handle_early_termination(*_: object) -> None:
    """Exits on a SIGTERM before the agent handles it: nothing has started, so nothing is saved."""
    _write_termination_message(int(Exit.RESTART), "asked to leave before the run had started")
    os._exit(int(Exit.RESTART))


def _write_termination_message(code: int, reason: str) -> None:
    # not through sys.stdout: a signal may arrive while that is being written to, and its buffer
    # cannot be entered twice
    os.write(1, f"orch: leaving with {code}: {reason}\n".encode())
    with contextlib.suppress(OSError):
        TERMINATION_MESSAGE.write_bytes(msgspec.json.encode({"code": code, "text": reason[:3000]}))


# ------------------------------------------------------------------------------------ input


def read_pod(environ: Mapping[str, str], request: LaunchRequest) -> Pod:
    """Reads this pod. OrchError (70) if our renderer did not create it."""
    kind = read_options(request.backend_options).kind
    service = names.object_name(request.run_id, len(request.agents), kind)
    returns = environ.get("ORCH_POD_RETURNS", "")
    try:
        return Pod(
            index=int(environ["JOB_COMPLETION_INDEX"]),
            name=environ["ORCH_POD"],
            node=environ["ORCH_POD_NODE"],
            address=environ["ORCH_POD_ADDRESS"],
            service=service,
            host_of_first=f"{names.job_name(service, kind)}-0.{service}",
            returns=int(returns) if returns.isdigit() else 0,
        )
    except (KeyError, ValueError) as error:
        raise OrchError(f"not a pod of an orch Job: {error}", Exit.INTERNAL) from None


def read_input(run: Path) -> Input:
    """Reads the input. OrchError (65, 78) if part of it is missing or damaged."""
    try:
        topology = run / "topology.bin"
        request = from_bytes((run / "request.json").read_bytes())
        if not os.path.isabs(request.worker.cwd):  # a program of the image
            worker = structs.replace(request.worker, cwd=os.path.abspath(request.worker.cwd))
            request = structs.replace(request, worker=worker)
        return Input(
            request=request,
            sizes={
                size: unpack_plan((run / f"plan.nodes{size}.bin").read_bytes())
                for size in request.sizes
            },
            planned=unpack_plan((run / "plan.bin").read_bytes()),
            config=(run / "config.yaml").read_bytes(),
            topology=topology.read_bytes() if topology.exists() else b"",
            key=_key((run / "key").read_text()),
            environment=msgspec.json.decode(
                (run / "environment.json").read_bytes(),
                type=dict[str, str],
            ),
        )
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise OrchError(f"input of the pod: {error}", Exit.CONFIG) from None


def _key(content: str) -> bytes:
    with contextlib.suppress(ValueError):
        if len(key := bytes.fromhex(content.strip())) == 32:
            return key
    raise OrchError("the run's Secret does not hold a 32-byte key in hex", Exit.SECURITY)


# -------------------------------------------------------------------------------------- one attempt


def _run_attempt(pod: Pod, run_input: Input) -> tuple[int, str]:
    """Runs from the rendezvous to the end of this pod's agent: (exit code of the pod, why)."""
    folder = RunFolder(Path(run_input.request.run_dir))
    _make_folder(folder, run_input)
    unpack_code(run_input.request, Path(names.INPUT), Path(names.CODE))
    if _is_done(folder):
        return int(Exit.DONE), "the run is done"
    if run_input.request.sizes:
        from .elastic_task import run_elastic

        return run_elastic(folder, pod, run_input)
    topology = unpack_topology(run_input.topology) if run_input.topology else None
    this_pod = Join(pod.index, pod.node, pod.address, pod.name)
    count = len(run_input.request.agents)
    assigned: list[RankMapping] = []

    def assign(members: list[Join]) -> str:
        assigned.append(map_ranks(run_input.planned, members, topology))
        _write_attempt(folder, run_input, members, assigned[0])
        log.info("%s", assigned[0].difference.text)
        return assigned[0].plan.hash

    start = asyncio.run(
        rendezvous(
            this_pod,
            count,
            host=pod.host_of_first,
            port=names.RENDEZVOUS_PORT,
            run=folder.run_id,
            key=run_input.key,
            timeout_s=read_options(run_input.request.backend_options).rendezvous_timeout_s,
            assign=assign,
        )
    )
    mapping = assigned[0] if assigned else _same_mapping(folder, run_input, start, topology)
    return _agent(folder, pod, run_input, start, mapping)


def _make_folder(folder: RunFolder, run_input: Input) -> None:
    """Creates the run folder, in the pod or on the claim that all pods share; several pods may
    create it at once."""
    Path(run_input.planned.job.data.cache_dir or names.ROOT).mkdir(parents=True, exist_ok=True)
    for subfolder in ("logs", "events", "metrics", "checkpoints", "kubernetes"):
        (folder.path / subfolder).mkdir(mode=0o700, parents=True, exist_ok=True)


def _is_done(folder: RunFolder) -> bool:
    """Tells whether the run is done, so that a replaced pod has nothing to do."""
    with contextlib.suppress(OrchError):
        return read_state(folder).state == "done"
    return False


def _same_mapping(
    folder: RunFolder,
    run_input: Input,
    start: Start,
    topology: Topology | None,
) -> RankMapping:
    """Recomputes the mapping that pod 0 made of the same members. OrchError (65) if this pod gets
    another one."""
    mapping = map_ranks(run_input.planned, start.members, topology)
    if mapping.plan.hash != start.plan_hash:
        message = (
            f"this pod maps the ranks as {mapping.plan.hash[:12]}, pod 0 as {start.plan_hash[:12]}"
        )
        raise OrchError(f"{message}: not the same orch in every pod", Exit.CONFIG)
    _write_plan(folder, run_input, mapping.plan)
    return mapping


def _agent(
    folder: RunFolder,
    pod: Pod,
    run_input: Input,
    start: Start,
    mapping: RankMapping,
) -> tuple[int, str]:
    node = mapping.names[pod.index]
    plan = mapping.plan
    ranks = [rank.rank for rank in plan.ranks if rank.node == node]
    if not ranks:
        return int(Exit.DONE), f"the plan needs no rank of {node}"
    first = start.members[0].address
    address = msgspec.json.encode({"host": first, "port": names.CONTROL_PORT})
    write_private(folder.coordinator, address, durable=False)
    return run_agent(
        folder,
        pod,
        run_input,
        node,
        status_lines=StatusLineWriter(folder, node, ranks, is_leader=pod.index == 0),
        coordinator="here" if pod.index == 0 else "elsewhere",
    )


def run_agent(
    folder: RunFolder,
    pod: Pod,
    run_input: Input,
    node: str,
    *,
    status_lines: StatusLineWriter,
    coordinator: str,
    extra_argv: Sequence[str] = (),
) -> tuple[int, str]:
    """Runs this pod's agent in this process from its start to its end: (exit code of the pod, why).

    PeersLost if another attempt has to follow and this pod may stay for it.
    """
    os.environ.update(run_input.environment)
    # variables that are set here stay
    environment = structs.replace(run_input.request.environment, names=list(os.environ))
    os.environ.update(compose_environment(environment, os.environ))
    os.chdir(folder.path)
    from orchestrator.agent.__main__ import main as agent_main

    argv = [
        "--run-dir",
        str(folder.path),
        "--node",
        node,
        "--address",
        pod.address,
    ]
    argv += [
        "--metrics-port",
        str(names.METRICS_PORT),
        "--coordinator-port",
        str(names.CONTROL_PORT),
    ]
    argv += ["--coordinator", coordinator, *extra_argv]
    terminated = threading.Event()
    started = time.monotonic()
    try:
        code = int(
            agent_main(
                argv,
                key=run_input.key,
                on_termination_signal=terminated.set,
            )
        )
    finally:
        status_lines.close()
    reason = _reason(folder, status_lines.led, code)
    if pod_exit(code) == Exit.RESTART and not terminated.is_set():
        raise PeersLost(reason, time.monotonic() - started)
    return pod_exit(code), reason


def _reason(folder: RunFolder, led: bool, code: int) -> str:
    """Returns why the pod exits. `led`: it was the leader, and so knows how the run ended."""
    if led:
        with contextlib.suppress(OrchError):
            state = read_state(folder)
            return f"{state.state}: {state.reason or ''}"
    return f"the agent ended with {code}"


# ------------------------------------------------------------------------------ files of an attempt


def _write_plan(folder: RunFolder, run_input: Input, plan: Plan) -> None:
    """Writes plan.json and request.json of this attempt. On a shared claim every pod writes the
    same bytes, if any."""
    agents = [AgentCommand(node=node, argv=[]) for node in used_nodes(plan)]
    request = structs.replace(
        run_input.request,
        plan_hash=plan.hash,
        agents=agents,
        nodes=len(agents),
    )
    for path, content in (
        (folder.plan, to_json(plan, indent=1) + b"\n"),
        (folder.request, to_bytes(request)),
    ):
        if not path.exists() or path.read_bytes() != content:
            write_private(path, content)


def _write_attempt(
    folder: RunFolder,
    run_input: Input,
    members: list[Join],
    mapping: RankMapping,
) -> None:
    """Writes, in pod 0 before it answers the others: plan, placement, and a state that the
    coordinator continues from."""
    folder.coordinator.unlink(missing_ok=True)
    _write_plan(folder, run_input, mapping.plan)
    write_private(folder.config, run_input.config)
    write_placement(folder, run_input, members, node_names(members), mapping)
    write_state(folder, fresh_state(folder, run_input, mapping))


def write_placement(
    folder: RunFolder,
    run_input: Input,
    members: Sequence[Join],
    nodes: Sequence[str],
    mapping: RankMapping,
) -> None:
    """Writes kubernetes/placement.json of this attempt. `nodes`: the plan's names of the members'
    nodes."""
    difference = mapping.difference
    placement = Placement(
        pods=[pod.pod for pod in members],
        nodes=list(nodes),
        planned_hash=run_input.planned.hash,
        plan_hash=mapping.plan.hash,
        summary=difference.text,
        moved_ranks=difference.moved_ranks,
        worst_levels=difference.worst_levels,
        step_s=difference.step_s,
    )
    raw = msgspec.json.format(msgspec.json.encode(placement), indent=1) + b"\n"
    write_private(folder.path / "kubernetes" / "placement.json", raw)


def fresh_state(folder: RunFolder, run_input: Input, mapping: RankMapping) -> RunState:
    """Returns a pending state, with the epochs of earlier attempts if the claim has kept them."""
    try:
        last_state = read_state(folder)
    except OrchError:
        last_state = accepted(run_input.request, run_input.request.backend)
    return pending_again(
        last_state,
        reason=mapping.difference.text,
        plan_hash=mapping.plan.hash,
    )
