"""The bundled trainer under its agents: killed, restarted from a checkpoint, cancelled, resumed,
and the same loss."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.backends.local.backend import LocalBackend
from orchestrator.cli.main import main
from orchestrator.plan import Plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import from_bytes
from tests.beds.bundles import (
    events,
    make_bundle,
    no_namespaces,
    reports,
    wait_end,
    wait_for,
    wait_step,
)
from tests.beds.held.sitecustomize import environment, release
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.slow]


def plan(corpus, tmp_path, steps: int, **fields) -> Plan:
    data_fields = {
        "data_paths": [str(corpus)],
        "cache_dir": str(tmp_path / "cache"),
        "checkpoint_every_steps": 5,
    }
    layout = {"dp": 2, "nodes": 2, "zero": 1, "steps": steps, "seq_len": 32}
    fields = layout | data_fields | fields
    return make_plan(**fields)


def start(
    tmp_path, plan: Plan, run_id: str, env: dict[str, str] | None = None, **backend
) -> RunFolder:
    backend = {
        "grace_s": 30,
        "hang_after_s": 2 * PATIENCE_S,
        **backend,
    }  # who is held does not hang
    bundle = make_bundle(
        plan, tmp_path / "runs", run_id=run_id, command=(), backend=backend, env=env
    )
    LocalBackend().submit(bundle, os.environ)
    return RunFolder(tmp_path / "runs" / run_id)


def losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step, the last telling of it."""
    step_losses = {}
    for line in reports(folder.path / "metrics"):
        if line.get("loss") is not None:
            step_losses[line["step"]] = line["loss"]
    return step_losses


def test_killed_workers_and_a_cancel_do_not_change_the_loss(tmp_path, corpus, monkeypatch, capsys):
    steps = 40
    held = 25
    spec = plan(corpus, tmp_path, steps, trace_steps=2)
    undisturbed = start(
        tmp_path, plan(corpus, tmp_path, steps, trace_steps=2, nodes=1), "whole"
    )  # the same layout
    assert wait_end(undisturbed).state == "done", undisturbed.rank_log(0).read_text()
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    assert main(["report", "whole", "--rank", "1", "--json"]) == 0
    timeline = json.loads(capsys.readouterr().out)["timeline"]
    assert [step["name"] for step in timeline["steps"]] == ["step 1", "step 2"]
    assert all(step["peak"]["activations"] > 0 for step in timeline["steps"])

    broken = start(tmp_path, spec, "broken", env=environment(held), max_restarts=1)
    wait_step(broken, 12, workers=2)
    pids = json.loads(broken.backend.read_text())["agents"]
    victim = next(
        pid
        for pid in children_of(children_of(pids["node1"])[0])
        if comm(pid).startswith("orch-rank-")
    )
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: any(e["epoch"] == 1 for e in events(broken, "resumed")), what="resuming")
    wait_for(lambda: any(e["epoch"] == 1 for e in events(broken, "held")), what="progress")
    wait_for(lambda: max(losses(broken), default=0) == held - 1, what="its report")
    LocalBackend().cancel(broken, force=False)
    state = wait_end(broken)
    assert (state.state, state.reason) == ("cancelled", "cancelled by the user")
    assert state.epochs[0].cause.code == -9 and state.epochs[0].cause.node == "node1"
    release(broken.path, held)
    LocalBackend().resume(broken, from_bytes(broken.request.read_bytes()), os.environ)
    state = wait_end(broken)
    assert (state.state, state.epoch) == ("done", 2), broken.rank_log(0).read_text()
    assert losses(broken) == losses(undisturbed)  # to the bit, over a crash and a cancel
    report = json.loads(broken.report.read_text())
    assert report["steps"]["completed"] == steps and report["memory"]["params"]["measured"] > 0


@pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
def test_the_store_hears_the_nodes_of_the_run_and_no_other_machine(tmp_path, corpus):
    """A stranger is another address in the network of node1. torch's store would let it list and
    delete all keys."""
    shaped = {"network": "namespaces", "link_gbit_per_s": 0.5}
    folder = start(
        tmp_path, plan(corpus, tmp_path, 100_000, memory_every_steps=0), "net", options=shaped
    )
    wait_step(folder, 2, workers=2, timeout_s=120)
    pids = json.loads(folder.backend.read_text())["agents"]
    worker = next(
        pid
        for pid in children_of(children_of(pids["node0"])[0])
        if comm(pid).startswith("orch-rank-")
    )
    agent_sockets = listening(pids["node0"])
    (store,) = agent_sockets.keys() & listening(worker).keys()
    assert agent_sockets[store][0] == "10.0.0.1", "not on all interfaces"
    assert {address for address, _ in listening(worker).values()} <= {"10.0.0.1", "127.0.0.1"}
    enter = ["nsenter", "-t", str(pids["node1"]), "-n"]
    subprocess.run([*enter, "ip", "address", "add", "10.0.0.99/8", "dev", "eth0"], check=True)
    code = (
        "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1,"
        " (sys.argv[3], 0))"
    )
    asks = [*enter, sys.executable, "-S", "-c", code, "10.0.0.1", str(agent_sockets[store][1])]
    assert subprocess.run([*asks, "10.0.0.2"], check=False).returncode == 0
    stranger = subprocess.run([*asks, "10.0.0.99"], check=False, capture_output=True, text=True)
    assert "TimeoutError" in stranger.stderr
    LocalBackend().cancel(folder, force=True)
    wait_end(folder)


def listening(pid: int) -> dict[int, tuple[str, int]]:
    """Inode -> address and port of the IPv4 sockets on which a process listens."""
    inodes = set()
    sockets = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed in this moment
            if (name := os.readlink(f"/proc/{pid}/fd/{fd}")).startswith("socket:["):
                inodes.add(int(name[8:-1]))
    for version in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{version}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and int(rest[5]) in inodes:
                address, port = local.split(":")
                number = bytes.fromhex(address)[::-1]
                sockets[int(rest[5])] = str(ipaddress.ip_address(number)), int(port, 16)
    return sockets


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child_pid) for child_pid in file.read().split()]
