"""`python -m orchestrator.kubernetes.task`: process 1 of every pod of a run.

It meets the other pods (rendezvous), maps the ranks to the nodes that the pods were placed on, runs
this pod's agent, and ends with a code that the Job's podFailurePolicy knows. Its input is the run's
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
from orchestrator.run.folder import RunFolder, ending, write_private
from orchestrator.run.request import (
    AgentCommand,
    LaunchRequest,
    compose_environment,
    from_bytes,
    to_bytes,
    used_nodes,
)
from orchestrator.run.state import RunState, pending_again, read_state, write_state

from .lives import Beginning, PeersLost
from .rank_mapping import RankMapping, map_ranks, node_names
from .rendezvous import Join, Start, rendezvous
from .status_lines import StatusLineWriter

#: The kubelet shows this file in the pod's status, also once the pod's log is gone.
TERMINATION_MESSAGE = Path("/dev/termination-log")

log = logging.getLogger("orch.task")


class Pod(Frozen):
    """This pod, from the environment that Kubernetes gives it."""

    index: int
    name: str
    node: str
    address: str
    service: str
    host_of_first: str  # DNS name of pod 0
    returns: int = 0  # pods of this index before it whose ends the Job's rules have ignored


class Input(Frozen):
    """The run's ConfigMap and Secret, as they are mounted."""

    request: LaunchRequest
    planned: Plan
    config: bytes
    topology: bytes
    key: bytes
    environment: dict[str, str]
    sizes: dict[int, Plan] = {}  # of an elastic run: the plan of every size


class Placement(Frozen):
    """kubernetes/placement.json: what the plan became in this attempt of the pods."""

    pods: list[str]  # by completion index
    nodes: list[str]  # what the plan calls each of them
    planned_hash: str
    plan_hash: str
    summary: str  # one line: where it differs from the plan, and at what predicted cost
    moved_ranks: int
    worst_levels: dict[str, list[str]]
    step_s: list[float]  # predicted seconds of a step: [planned, real]


def main() -> int:
    beginning = Beginning.of_this_process()
    os.umask(0o077)
    os.environ |= {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "PYTHONUNBUFFERED": "1",
    }  # the root file system is read only
    os.environ |= login_names(os.environ)
    signal.signal(
        signal.SIGTERM, _on_early_notice
    )  # process 1 has no default actions: without this it would be ignored
    signal.pthread_sigmask(
        signal.SIG_SETMASK, ()
    )  # what came while this process became itself again
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        force=True,
    )
    try:
        given = read_input(Path(names.INPUT))
        pod = read_pod(os.environ, given.request)
        code, text = _live(beginning, pod, given)
    except Exception as error:
        code, text = ending(error)
        if code == Exit.INTERNAL:
            traceback.print_exc(file=sys.stdout)
    _write_termination_message(code, text)
    return code


def _live(beginning: Beginning, pod: Pod, given: Input) -> tuple[int, str]:
    """One attempt: (exit code of the pod, why), or another beginning of this process for the next
    one."""
    try:
        return _run_attempt(pod, given)
    except PeersLost as lost:
        if not beginning.may_go_on(lost):
            return _in_vain(pod, given, f"{lost.text}, again and again")
        log.info("%s: meeting the other pods again", lost.text)
        if read_options(given.request.backend_options).claim is None:
            # nothing of such a run outlives the loss of a pod: what this one has would not fit what
            # a new pod 0 has
            shutil.rmtree(replica_dir(given.request.run_dir, pod.node).parent, ignore_errors=True)
            shutil.rmtree(given.request.run_dir, ignore_errors=True)
        beginning.again(lost)
    except OrchError as error:
        if error.exit != Exit.CAPACITY:
            raise
        return _in_vain(pod, given, error.message)


def _in_vain(pod: Pod, given: Input, text: str) -> tuple[int, str]:
    """What a pod leaves with whose attempt came to nothing: for another one, until there were too
    many."""
    most = read_options(given.request.backend_options).max_pod_returns
    if pod.returns < most:
        return int(Exit.RESTART), text
    why = (
        f"pod {pod.index} has come back {pod.returns} times"
        f" (backend.options.max_pod_returns={most})"
    )
    return int(Exit.CAPACITY), f"{text}; {why}"


def login_names(environ: Mapping[str, str]) -> dict[str, str]:
    """USER and LOGNAME, as a login sets them: libraries name their folders of compiled kernels by
    them, and fail where the user has no name, as most of a pod's have none. What the image has set
    stays."""
    name = environ.get("USER") or environ.get("LOGNAME")
    if not name:
        try:
            name = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            name = "orch"
    return {variable: environ.get(variable) or name for variable in ("USER", "LOGNAME")}


def _on_early_notice(*_: object) -> None:
    """SIGTERM before the agent handles it: nothing has started, nothing is to be saved."""
    _write_termination_message(int(Exit.RESTART), "asked to leave before the run had started")
    os._exit(int(Exit.RESTART))


def _write_termination_message(code: int, text: str) -> None:
    # past sys.stdout: a notice may come while that is written to, and its buffer refuses to be
    # entered twice
    os.write(1, f"orch: leaving with {code}: {text}\n".encode())
    with contextlib.suppress(OSError):
        TERMINATION_MESSAGE.write_bytes(msgspec.json.encode({"code": code, "text": text[:3000]}))


# ------------------------------------------------------------------------------------------ what is
#     given


def read_pod(environ: Mapping[str, str], request: LaunchRequest) -> Pod:
    """OrchError (70) when the pod was not made by our renderer."""
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
    """OrchError (65, 78) when something of it is missing or damaged."""
    try:
        topology = run / "topology.bin"
        request = from_bytes((run / "request.json").read_bytes())
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
                (run / "environment.json").read_bytes(), type=dict[str, str]
            ),
        )
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise OrchError(f"input of the pod: {error}", Exit.CONFIG) from None


def _key(text: str) -> bytes:
    with contextlib.suppress(ValueError):
        if len(key := bytes.fromhex(text.strip())) == 32:
            return key
    raise OrchError("the run's Secret does not hold a 32-byte key in hex", Exit.SECURITY)


# ------------------------------------------------------------------------------------------ one
#     attempt


def _run_attempt(pod: Pod, given: Input) -> tuple[int, str]:
    """From the rendezvous to the end of this pod's agent: (exit code of the pod, why)."""
    folder = RunFolder(Path(given.request.run_dir))
    _make_folder(folder, given)
    if (before := _is_done(folder)) is not None:
        return int(Exit.DONE), before
    if given.request.sizes:
        from .elastic_task import run_elastic

        return run_elastic(folder, pod, given)
    topology = unpack_topology(given.topology) if given.topology else None
    own = Join(pod.index, pod.node, pod.address, pod.name)
    count = len(given.request.agents)
    assigned: list[RankMapping] = []

    def assign(members: list[Join]) -> str:
        assigned.append(map_ranks(given.planned, members, topology))
        _write_attempt(folder, given, members, assigned[0])
        log.info("%s", assigned[0].difference.text)
        return assigned[0].plan.hash

    within_s = read_options(given.request.backend_options).rendezvous_timeout_s
    start = asyncio.run(
        rendezvous(
            own,
            count,
            pod.host_of_first,
            names.RENDEZVOUS_PORT,
            folder.run_id,
            given.key,
            within_s,
            assign,
        )
    )
    mapping = assigned[0] if assigned else _same_mapping(folder, given, start, topology)
    return _agent(folder, pod, given, start, mapping)


def _make_folder(folder: RunFolder, given: Input) -> None:
    """The run folder, in the pod or on the claim that all pods share; several pods may make it at
    once."""
    Path(given.planned.job.data.cache_dir or names.ROOT).mkdir(parents=True, exist_ok=True)
    for part in ("logs", "events", "metrics", "checkpoints", "kubernetes"):
        (folder.path / part).mkdir(mode=0o700, parents=True, exist_ok=True)


def _is_done(folder: RunFolder) -> str | None:
    """A pod that comes back after its run is done has nothing to do: why, else None."""
    with contextlib.suppress(OrchError):
        if read_state(folder).state == "done":
            return "the run is done"
    return None


def _same_mapping(
    folder: RunFolder, given: Input, start: Start, topology: Topology | None
) -> RankMapping:
    """The mapping that pod 0 made of the same members. OrchError (65) when this pod comes to
    another."""
    mapping = map_ranks(given.planned, start.members, topology)
    if mapping.plan.hash != start.plan_hash:
        text = (
            f"this pod maps the ranks as {mapping.plan.hash[:12]}, pod 0 as {start.plan_hash[:12]}"
        )
        raise OrchError(f"{text}: not the same orch in every pod", Exit.CONFIG)
    _write_plan(folder, given, mapping.plan)
    return mapping


def _agent(
    folder: RunFolder, pod: Pod, given: Input, start: Start, mapping: RankMapping
) -> tuple[int, str]:
    node = mapping.names[pod.index]
    plan = mapping.plan
    ranks = [rank.rank for rank in plan.ranks if rank.node == node]
    if not ranks:
        return int(Exit.DONE), f"the plan needs no rank of {node}"
    first = start.members[0].address
    where = msgspec.json.encode({"host": first, "port": names.CONTROL_PORT})
    write_private(folder.coordinator, where, durable=False)
    status_lines = StatusLineWriter(folder, node, ranks, is_leader=pod.index == 0)
    return run_agent(
        folder, pod, given, node, status_lines, "here" if pod.index == 0 else "elsewhere"
    )


def run_agent(
    folder: RunFolder,
    pod: Pod,
    given: Input,
    node: str,
    status_lines: StatusLineWriter,
    coordinator: str,
    *more: str,
) -> tuple[int, str]:
    """This pod's agent, from its start to its end, in this process: (exit code of the pod, why).

    PeersLost where another attempt has to follow and this pod may stay for it.
    """
    os.environ.update(given.environment)
    everything = structs.replace(
        given.request.environment, names=list(os.environ)
    )  # what is set here stays
    os.environ.update(compose_environment(everything, os.environ))
    os.chdir(folder.path)
    from orchestrator.agent.__main__ import main as agent_main

    argv = ["--run-dir", str(folder.path), "--node", node, "--address", pod.address]
    argv += [
        "--metrics-port",
        str(names.METRICS_PORT),
        "--coordinator-port",
        str(names.CONTROL_PORT),
    ]
    argv += ["--coordinator", coordinator, *more]
    noticed = threading.Event()
    began = time.monotonic()
    try:
        code = int(agent_main(argv, key=given.key, on_termination_signal=noticed.set))
    finally:
        status_lines.close()
    text = _reason(folder, status_lines.led, code)
    if pod_exit(code) == Exit.RESTART and not noticed.is_set():
        raise PeersLost(text, time.monotonic() - began)
    return pod_exit(code), text


def _reason(folder: RunFolder, tells: bool, code: int) -> str:
    """The pod's last word. `tells`: it knows how the run ended."""
    if tells:
        with contextlib.suppress(OrchError):
            state = read_state(folder)
            return f"{state.state}: {state.reason or ''}"
    return f"the agent ended with {code}"


# ------------------------------------------------------------------------------------------ files
#     of an attempt


def _write_plan(folder: RunFolder, given: Input, plan: Plan) -> None:
    """plan.json and request.json of this attempt. On a shared claim every pod writes the same
    bytes, if need be."""
    agents = [AgentCommand(node=node, argv=[]) for node in used_nodes(plan)]
    request = structs.replace(given.request, plan_hash=plan.hash, agents=agents, nodes=len(agents))
    for path, content in (
        (folder.plan, to_json(plan, indent=1) + b"\n"),
        (folder.request, to_bytes(request)),
    ):
        if not path.exists() or path.read_bytes() != content:
            write_private(path, content)


def _write_attempt(
    folder: RunFolder, given: Input, members: list[Join], mapping: RankMapping
) -> None:
    """Pod 0, before it answers the others: plan, placement, and a state that the coordinator
    continues from."""
    folder.coordinator.unlink(missing_ok=True)
    _write_plan(folder, given, mapping.plan)
    write_private(folder.config, given.config)
    write_placement(folder, given, members, node_names(members), mapping)
    write_state(folder, fresh_state(folder, given, mapping))


def write_placement(
    folder: RunFolder,
    given: Input,
    members: Sequence[Join],
    nodes: Sequence[str],
    mapping: RankMapping,
) -> None:
    """kubernetes/placement.json of this attempt. `nodes`: what the plan calls those of the
    members."""
    found = mapping.difference
    placement = Placement(
        pods=[pod.pod for pod in members],
        nodes=list(nodes),
        planned_hash=given.planned.hash,
        plan_hash=mapping.plan.hash,
        summary=found.text,
        moved_ranks=found.moved_ranks,
        worst_levels=found.worst_levels,
        step_s=found.step_s,
    )
    raw = msgspec.json.format(msgspec.json.encode(placement), indent=1) + b"\n"
    write_private(folder.path / "kubernetes" / "placement.json", raw)


def fresh_state(folder: RunFolder, given: Input, mapping: RankMapping) -> RunState:
    """Pending again, with the epochs of earlier attempts where the claim has kept them."""
    try:
        before = read_state(folder)
    except OrchError:
        before = accepted(given.request, given.request.backend)
    return pending_again(before, reason=mapping.difference.text, plan_hash=mapping.plan.hash)


if __name__ == "__main__":
    sys.exit(main())
