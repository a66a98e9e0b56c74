"""Launch requests for hand-made plans, and local runs of them, without configuration files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest

from orchestrator.backends.base import read_record
from orchestrator.backends.local import namespaces
from orchestrator.backends.local.backend import LocalBackend, LocalRecord
from orchestrator.config.schema import BackendSpec, MetricsSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import Intent
from orchestrator.run.processes import Identity, send_signal
from orchestrator.run.request import Code, LaunchRequest, Site, SubmissionBundle, make_request
from orchestrator.run.state import RunState, true_state
from tests.patience import PATIENCE_S, wait_for

WORKER = str(Path(__file__).with_name("worker.py"))
for _kind in (Intent, LaunchRequest, LocalRecord, Plan, RunState):
    # msgspec crashes where two threads of a test are the first to decode one of them.
    msgspec.json.Decoder(_kind)


class SmallConfig(msgspec.Struct, frozen=True):
    """The part of a Config that a request reads."""

    backend: BackendSpec
    choices: dict[str, str] = {}
    metrics: MetricsSpec = MetricsSpec()


def make_bundle(
    plan: Plan,
    runs: Path,
    *,
    run_id: str = "test-run",
    command: Sequence[str] = (sys.executable, WORKER),
    backend: dict | None = None,
    code: Code | None = None,
    names: Sequence[str] = ("PATH", "HOME"),
    join_timeout_s: float = 30.0,
    env: dict[str, str] | None = None,
    sizes: Mapping[int, Plan] = MappingProxyType({}),
    agent_flags: Sequence[str] = LocalBackend.agent_flags,
    **wishes: object,
) -> SubmissionBundle:
    """`wishes`: what the stand-in worker is to do, as STEPS=9 (see worker.py)."""
    fields = {
        "name": "local",
        "max_restarts": 0,
        "grace_s": 5.0,
        "heartbeat_timeout_s": 15.0,
        "min_nodes_grace_s": 0,
    }
    fields |= backend or {}
    site = Site(
        run_id=run_id,
        home=str(runs.parent),
        runs_dir=str(runs),
        python=sys.executable,
        environment_names=list(names),
        cwd=str(runs.parent),
        code=code or Code(kind="none"),
        agent_flags=list(agent_flags),
        join_timeout_s=join_timeout_s,
    )
    assert all(wish.isupper() for wish in wishes), wishes
    env = {f"ORCH_TEST_{wish}": str(value) for wish, value in wishes.items()} | (env or {})
    return make_request(
        SmallConfig(BackendSpec(**fields, env=env)), plan, site, command, sizes=sizes
    )


def submit(plan: Plan, runs: Path, **options: object) -> RunFolder:
    """Start a run of the stand-in worker; see `make_bundle`."""
    return submitted(make_bundle(plan, runs, **options))


def submitted(bundle: SubmissionBundle) -> RunFolder:
    LocalBackend().submit(bundle, os.environ)
    return RunFolder(Path(bundle.request.run_dir))


def kill_runs(runs: Path) -> None:
    """End whatever a failed test leaves alive, by its own pids: without its supervisor a run saves
    and stops."""
    for run in runs.glob("*"):
        with contextlib.suppress(OrchError):  # of a run that a test has damaged
            if record := read_record(RunFolder(run), LocalRecord):
                send_signal(Identity(*record.supervisor), signal.SIGKILL)


@contextlib.contextmanager
def refusal(says: str, *exits: int) -> Iterator[None]:
    """What is done in it must be refused: in one line, where the pattern is found, with one of
    these exit codes."""
    with pytest.raises(OrchError, match=says or None) as refused:
        yield
    assert refused.value.exit in exits and "\n" not in refused.value.message, refused.value


def wait_end(folder: RunFolder, timeout_s: float = PATIENCE_S) -> RunState:
    """The final state, after every process of the run has gone."""
    try:
        wait_for(lambda: not folder.is_alive(), timeout_s, f"end of {folder.run_id}")
    except AssertionError as error:
        logs = "\n".join(
            f"== {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.logs.iterdir())
        )
        raise AssertionError(f"{error}\n{folder.state.read_text()}\n{logs}") from None
    return true_state(folder, alive=False)


def wait_state(folder: RunFolder, *states: str, timeout_s: float = PATIENCE_S) -> RunState:
    return wait_for(
        lambda: (s := true_state(folder, folder.is_alive())).state in states and s,
        timeout_s,
        str(states),
    )


def wait_step(
    folder: RunFolder, step: int, workers: int = 4, timeout_s: float = PATIENCE_S
) -> None:
    """Until that many workers have reported that step."""
    mark = re.compile(rb'"step": ?%d,' % step)

    def seen() -> bool:
        return (
            sum(
                len(mark.findall(p.read_bytes())) for p in (folder.path / "metrics").glob("*.jsonl")
            )
            >= workers
        )

    wait_for(seen, timeout_s, f"step {step}")


def no_namespaces() -> str:
    """Why no node of this machine can have a network of its own, "" where one can."""
    try:
        namespaces.check()
    except OrchError as error:
        return error.message
    return ""


def reports(files: Path) -> list[dict]:
    """Every line of a folder's .jsonl files, but for a last one that is being written."""
    complete = (path.read_text().rpartition("\n")[0] for path in sorted(files.glob("*.jsonl")))
    return [json.loads(line) for content in complete for line in content.splitlines()]


def events(folder: RunFolder, name: str) -> list[dict]:
    """The events of that name, of all nodes."""
    return [event for event in reports(folder.path / "events") if event["name"] == name]
