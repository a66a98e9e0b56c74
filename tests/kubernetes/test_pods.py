"""What pods do among themselves: finding each other, the same rank map in each, what they say, how
they leave."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from orchestrator.agent.protocol import channel
from orchestrator.backends.kubernetes.objects.payload import pack_topology, unpack_topology
from orchestrator.backends.kubernetes.pod import status_lines, task
from orchestrator.backends.kubernetes.pod.attempts import PeersLost, ProcessStart
from orchestrator.backends.kubernetes.pod.rank_mapping import map_ranks, node_names
from orchestrator.backends.kubernetes.pod.rendezvous import Join, Start, rendezvous
from orchestrator.cluster.hostlist import expand
from orchestrator.cluster.model import Machine, Tier, Topology
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.ranks import check_ranks
from orchestrator.plan.worker import replica_dir
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import SCHEMA, RunState, write_state
from tests.beds.base import ROOT
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

KEY = bytes(range(32))
#: The address of pod 0: no other program of this machine speaks from it, so a port that is free
#: there stays free.
HOST = "127.0.3.1"


def pods(count: int, per_node: int = 1) -> list[Join]:
    return [Join(i, f"n{i // per_node}", HOST, f"run-{i}-abcde") for i in range(count)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


async def one(
    pod: Join,
    count: int,
    port: int,
    key: bytes = KEY,
    timeout_s: float = PATIENCE_S,
    delay: float = 0.0,
) -> Start:
    await asyncio.sleep(delay)
    settle = lambda members: f"hash of {len(members)}"  # noqa: E731
    return await rendezvous(
        pod,
        count,
        host=HOST,
        port=port,
        run="run",
        key=key,
        timeout_s=timeout_s,
        assign=settle,
    )


def test_all_pods_learn_of_all_whatever_order_they_come_in():
    async def together() -> list[Start]:
        port = free_port()
        count = 6
        delays = (0.3, 0.0, 0.5, 0.1, 0.0, 0.2)  # pod 0 is not the first
        return await asyncio.gather(
            *(one(h, count, port, delay=d) for h, d in zip(pods(count), delays, strict=True))
        )

    results = asyncio.run(together())
    assert len({json.dumps([structs.asdict(h) for h in go.members]) for go in results}) == 1
    assert results[0].members == pods(6)
    assert {go.plan_hash for go in results} == {"hash of 6"}


def test_a_pod_that_leaves_before_the_others_came_is_waited_for_again():
    async def together() -> list[Start]:
        port = free_port()
        first = asyncio.create_task(one(pods(3)[0], 3, port))
        leaver = asyncio.create_task(one(pods(3)[1], 3, port))
        await asyncio.sleep(0.5)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        replaced = Join(1, "elsewhere", HOST, "run-1-later")
        return await asyncio.gather(
            first, one(pods(3)[2], 3, port), one(replaced, 3, port, delay=0.4)
        )

    for go in asyncio.run(together()):
        assert [pod.node for pod in go.members] == ["n0", "elsewhere", "n2"]


def test_who_does_not_come_is_named_and_the_others_leave():
    with refusal(r"pods 1, 2 did not join within 0\.5 s", Exit.CAPACITY):
        asyncio.run(one(pods(3)[0], 3, free_port(), timeout_s=0.5))
    with refusal(r"did not complete the rendezvous within 0\.5 s", Exit.CAPACITY):
        asyncio.run(one(pods(3)[1], 3, free_port(), timeout_s=0.5))


def test_pod_0_is_looked_for_again_where_it_was_silent(monkeypatch):
    """Its name may show for a while the address that it had before: nobody answers there, and
    nobody refuses."""
    dead_host = "127.0.3.2"
    resolved = socket.getaddrinfo
    answers = itertools.chain([dead_host, dead_host], itertools.repeat(HOST))

    def resolve(host: str, *arguments, **options):
        return resolved(next(answers) if host == "run-0.run" else host, *arguments, **options)

    async def together(port: int) -> list[Start]:
        who = pods(2)
        there = rendezvous(
            who[1],
            2,
            host="run-0.run",
            port=port,
            run="run",
            key=KEY,
            timeout_s=PATIENCE_S,
            assign=lambda _: "",
        )
        return await asyncio.gather(one(who[0], 2, port), there)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(channel, "_REACH_S", 0.5)
    with silent(dead_host, free_port()) as port:
        began = time.monotonic()
        assert asyncio.run(together(port))[1].members == pods(2)
        assert time.monotonic() - began >= 1.0 and next(answers) == HOST  # both tries were cut off


@contextlib.contextmanager
def silent(host: str, port: int) -> Iterator[int]:
    """An address at which connections are neither taken nor refused: as many wait for that as
    may."""
    with contextlib.ExitStack() as open_ones:
        listener = open_ones.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(3):
            waits = open_ones.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex((host, port))
        yield port


def test_a_pod_of_another_run_is_turned_away():
    async def together() -> Start:
        port = free_port()
        stranger = asyncio.create_task(one(pods(2)[1], 2, port, key=bytes(32)))
        ours = asyncio.gather(one(pods(2)[0], 2, port), one(pods(2)[1], 2, port, delay=0.5))
        with refusal("", Exit.SECURITY):
            await stranger
        return (await ours)[0]

    assert asyncio.run(together()).members == pods(2)


def test_hundreds_of_silent_strangers_keep_no_pod_out(caplog, monkeypatch):
    """Nor do those that never leave by themselves."""
    monkeypatch.setattr(channel, "_GREETING_S", 2 * PATIENCE_S)

    async def together() -> Start:
        port = free_port()
        first = asyncio.create_task(one(pods(2)[0], 2, port))
        strangers = []
        while len(strangers) < 300:
            with contextlib.suppress(ConnectionRefusedError):  # the first pod does not listen yet
                strangers.append(await asyncio.open_connection(HOST, port))
        start = await asyncio.wait_for(one(pods(2)[1], 2, port), PATIENCE_S)
        await first
        for _, writer in strangers:
            writer.close()
        return start

    assert asyncio.run(together()).members == pods(2)
    refused = [record.created for record in caplog.records if "refused" in record.message]
    minutes = (refused[-1] - refused[0]) // 60
    assert len(refused) <= 2 + minutes, "one at once, one at the end"


# ------------------------------------------------------------------------------------------ rank
#     map

NETWORK = Topology(
    "tree",
    (
        Tier("leaf", {"l0": ("n0", "n3"), "l1": ("n1", "n2")}),
        Tier("spine", {"s": ("n0", "n1", "n2", "n3")}),
    ),
    machines={f"n{i}": Machine(gpus=8, free=i == 0) for i in range(4)},
)


def test_ranks_follow_the_network_not_the_indices_of_the_pods():
    """A pipeline of two nodes must end up under one leaf, whatever indices its pods have."""
    plan = make_plan(tp=2, pp=2, dp=2, nodes=4)
    mapping = map_ranks(plan, pods(4), NETWORK)
    assert check_ranks(mapping.plan) is None
    leaf = {"n0": "l0", "n3": "l0", "n1": "l1", "n2": "l1"}
    for group in mapping.plan.groups["model"]:
        assert len({leaf[mapping.plan.ranks[rank].node] for rank in group}) == 1
    assert mapping.names == ["n0", "n1", "n2", "n3"]


def test_every_pod_makes_the_same_plan():
    plan = make_plan(tp=2, pp=2, dp=2, nodes=4)
    packed = [
        map_ranks(plan, pods(4), unpack_topology(pack_topology(NETWORK))).plan.hash
        for _ in range(3)
    ]
    assert set(packed) == {map_ranks(plan, pods(4), NETWORK).plan.hash}


def test_pods_that_share_a_node_are_told_apart_and_kept_close():
    plan = make_plan(tp=2, pp=2, dp=2, nodes=4)
    mixed = [
        structs.replace(pod, node=f"n{i % 2}") for i, pod in enumerate(pods(4))
    ]  # 0 and 2, 1 and 3 together
    expand(",".join(node_names(mixed)))  # what a report of moved ranks must be able to write
    assert node_names(mixed) == ["n0.pod-0", "n1.pod-1", "n0.pod-2", "n1.pod-3"]
    mapping = map_ranks(plan, mixed, NETWORK)
    for group in mapping.plan.groups["model"]:
        assert len({mapping.plan.ranks[rank].node.split(".pod-")[0] for rank in group}) == 1


def test_damaged_topology_costs_the_network_not_the_run():
    assert unpack_topology(b"nonsense") is None
    plan = make_plan(tp=2, dp=2, nodes=2)
    assert check_ranks(map_ranks(plan, pods(2), None).plan) is None


# ------------------------------------------------------------------------------------------ what a
#     pod is told and says


@pytest.mark.parametrize("host", ["tiny-12", "gpu-node-7", "gpu-node-12", None])
def test_a_pod_knows_where_index_0_is(host):
    """It knows itself, too: from fields of its own and the run's request. On its node's network it
    has the node's name."""
    environ = {"JOB_COMPLETION_INDEX": "12", "ORCH_POD": "tiny-12-x", "ORCH_POD_NODE": "n7"}
    environ |= {"ORCH_POD_ADDRESS": "fd00::7", "ORCH_POD_RETURNS": ""} | (
        {"HOSTNAME": host} if host else {}
    )
    request = SimpleNamespace(run_id="tiny", agents=range(16), backend_options={})
    pod = task.read_pod(environ, request)
    assert (pod.host_of_first, pod.address, pod.node) == ("tiny-0.tiny", "fd00::7", "n7")
    assert [
        task.read_pod(environ | {"ORCH_POD_RETURNS": returns}, request).returns
        for returns in ("", "3")
    ] == [0, 3]
    request.backend_options = {"kind": "jobset"}
    assert task.read_pod(environ, request).host_of_first == "tiny-node-0-0.tiny"
    for name in ("JOB_COMPLETION_INDEX", "ORCH_POD", "ORCH_POD_NODE", "ORCH_POD_ADDRESS"):
        broken = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(OrchError, match="not a pod of an orch Job"):
            task.read_pod(broken, request)


def test_attempts_that_come_to_nothing_one_after_the_other_are_few():
    """A pod begins again in place for as long as that leads anywhere."""
    start = ProcessStart({"A": "b"}, "/")
    counts = []
    for lasted_s in (5, 0, 3600, 59, 1, 1, 1, 1):
        lost = PeersLost("a peer was lost", lasted_s)
        counts.append(start.short_attempts(lost))
        assert start.may_restart(lost) == (counts[-1] < 5)
        start = ProcessStart({**start.environ, "ORCH_SHORT_ATTEMPTS": str(counts[-1])}, "/")
    assert counts == [1, 2, 0, 1, 2, 3, 4, 5]


def test_without_a_claim_a_pod_begins_again_with_nothing(monkeypatch, tmp_path):
    """So does a pod that comes in the place of a lost one, which would else be fenced by this one's
    later epochs."""
    begun = []
    monkeypatch.setattr(ProcessStart, "restart", lambda self, lost: begun.append(lost.reason))

    def lose(*_: object) -> tuple[int, str]:
        raise PeersLost("node2 was lost", 100.0)

    monkeypatch.setattr(task, "_run_attempt", lose)
    for options, remains in (({}, False), ({"claim": "runs"}, True)):
        (tmp_path / "run").mkdir(exist_ok=True)
        copies = replica_dir(tmp_path / "run", "n1")
        copies.parent.parent.mkdir(mode=0o700, exist_ok=True)
        copies.mkdir(parents=True)
        bundle = SimpleNamespace(
            request=SimpleNamespace(backend_options=options, run_dir=str(tmp_path / "run"))
        )
        task._attempt(ProcessStart({}, "/"), SimpleNamespace(index=1, node="n1", returns=0), bundle)
        assert ((tmp_path / "run").exists(), copies.exists()) == (remains, remains)
        shutil.rmtree(copies.parent, ignore_errors=True)
    assert begun == ["node2 was lost"] * 2


@pytest.mark.parametrize(
    ("image", "name"),
    [({}, "orch"), ({"USER": "image"}, "image"), ({"LOGNAME": "image", "USER": ""}, "image")],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_a_user_without_a_name_has_one_in_a_pod(image, name):
    """Libraries ask for it with nothing but what process 1 has set."""
    script = """if True:
        import getpass, os, pwd
        from orchestrator.backends.kubernetes.pod.task import login_names
        os.setgroups([]), os.setgid(12345), os.setuid(12345)
        os.environ |= login_names(os.environ)
        print(os.getuid(), getpass.getuser(), os.environ["LOGNAME"])
    """
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | image
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["12345", name, name], done.stderr


@pytest.mark.parametrize("named", [True, False])
def test_a_user_with_a_name_keeps_it(monkeypatch, named):
    monkeypatch.setattr(
        task.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ada") if named else {}[uid]
    )
    assert task.login_names({}) == dict.fromkeys(("USER", "LOGNAME"), "ada" if named else "orch")
    assert task.login_names({"USER": "a", "LOGNAME": "b"}) == {"USER": "a", "LOGNAME": "b"}


def test_who_submits_does_not_wait_for_what_only_pods_need():
    """The submitter's imports are most of a short submission."""
    script = (
        "import sys, orchestrator.backends.kubernetes.backend as b; print({'asyncio', 'numpy'} &"
        " set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "set()\n", done.stderr


def test_every_line_is_copied_once_and_the_state_of_the_run_is_in_status_lines(tmp_path: Path):
    folder = RunFolder(tmp_path)
    fields = {
        "schema": SCHEMA,
        "run_id": "r",
        "backend": "kubernetes",
        "plan_hash": "h",
        "writer": "n0",
    }
    state = RunState(**fields, state="running", epoch=3, created_at=1, updated_at=2)
    for folder_name in ("logs", "metrics"):
        (tmp_path / folder_name).mkdir()
    folder.rank_log(3).write_text("of an earlier life\n")
    out = io.StringIO()
    ours = status_lines.StatusLineWriter(folder, "n0", [3, 4], is_leader=True, out=out)
    with folder.rank_log(3).open("a") as log:
        log.write("step 1\nstep")
        log.flush()
        time.sleep(0.6)
        log.write(" 2\nlast words")
    folder.rank_log(4).write_text("@orch {not ours}\n")
    write_state(folder, state)
    folder.metrics("n0").write_text('{"step": 1}\n')
    ours.close()
    lines = out.getvalue().splitlines()
    statuses = [parsed for line in lines if (parsed := status_lines.parse_status_line(line))]
    ranks = [parsed for line in lines if (parsed := status_lines.parse_rank_line(line))]
    assert [rank_line for rank, rank_line in ranks if rank == 3] == [
        "step 1",
        "step 2",
        "last words",
    ]
    assert [rank_line for rank, rank_line in ranks if rank == 4] == ["@orch {not ours}"]
    assert state in [
        msgspec.json.decode(s.state, type=RunState)
        for s in statuses
        if s.state != status_lines.NOTHING
    ]
    assert ("n0", {"step": 1}) in [(s.node, json.loads(bytes(s.step))) for s in statuses]
    assert status_lines.parse_status_line("@orch {broken") is None
    assert status_lines.parse_rank_line("[rank x] y") is None


@pytest.mark.process
def test_a_notice_before_anything_has_started_leaves_with_75(tmp_path: Path):
    """Process 1 has no default actions: a pod that waits for its peers must still obey SIGTERM at
    once."""
    # short sleeps, as in `rendezvous`: a signal just before a long sleep is handled at its end
    script = (
        "import orchestrator.backends.kubernetes.pod.task as task, time, sys; sys.request ="
        " None;task._run_attempt = lambda *_: (print('waiting', flush=True), [time.sleep(0.05) for"
        " _ in range(1200)]);task.read_pod = lambda *_: None; task.read_input = lambda *_:"
        " sys;sys.exit(task.main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == Exit.RESTART
    assert "leaving with 75" in out
