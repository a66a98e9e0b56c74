"""Driving `orch` against a test cluster, as a user would: the command line, and what it leaves in
the run folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.run.state import RunState
from tests.beds import base
from tests.beds.base import ROOT
from tests.beds.bundles import reports
from tests.beds.held.sitecustomize import environment

from .cluster import Cluster

#: Held before its last step until it is released: never over before it was interrupted, and at once
#: afterwards.
LONG = {"STEPS": 12, "STEP_S": 0.1, "SAVE": 1, "HOLD": 1}
CONF = ROOT / "slurm"
#: No torch; speaks the report protocol and misbehaves on request.
FAKE_WORKER = (sys.executable, str(ROOT / "tests" / "beds" / "worker.py"))


def refusals(stderr: str) -> list[str]:
    """The lines that refuse something; those before them say what a program will not find."""
    return [line for line in stderr.splitlines() if line.startswith("orch: error: ")]


class Orch:
    """One user's home on one cluster."""

    _server: base.CommandServer | None = None  # of all homes of this test process

    def __init__(self, cluster: Cluster, home: Path):
        self.cluster = cluster
        self.home = home
        self._worker_variables: dict[
            str, str
        ] = {}  # passed on at submission, so a resume needs them as well

    def __call__(
        self,
        *arguments: str,
        code: int | None = 0,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run `orch`; its exit code must be `code` (None: any). `env`: changes of the shell's
        variables; None: not set."""
        again = self._worker_variables if arguments[0] == "resume" else {}
        environ = {
            **self.cluster.env,
            "ORCH_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            **again,
            **(env or {}),
        }
        environ = {name: value for name, value in environ.items() if value is not None}
        return base.checked(
            self._serve().run(arguments, environ, self.home, timeout, cwd=self.home), code
        )

    @classmethod
    def _serve(cls) -> base.CommandServer:
        if cls._server is None or not cls._server.is_alive:
            cls._server = base.CommandServer("slurm")
        return cls._server

    def submit(self, *arguments: str, **options: Any) -> Run:
        """A run. `options`: as of `sent`."""
        submission = self.sent(*arguments, **options)
        return Run(self, submission["run_dir"], submission.get("script", ""))

    def sent(
        self,
        *arguments: str,
        verb: str = "submit",
        program: Sequence[str] | None = FAKE_WORKER,
        worker: Mapping[str, object] | None = None,
        held: int | None = None,
        shell: Mapping[str, str | None] | None = None,
        code: int = 0,
    ) -> Any:
        """What `orch submit --json` prints. `program`: None is the bundled trainer; `worker`:
        ORCH_TEST_ variables; `held`: the trainer waits before this step until it is released;
        `shell`: changes of the shell's variables, which the rule passes on or not."""
        environ = {f"ORCH_TEST_{name}": str(value) for name, value in (worker or {}).items()}
        if held:
            environ |= environment(held)
            arguments = (*arguments, "backend.hang_after_s=3600")  # who is held does not hang
        self._worker_variables |= environ
        passed = [argument for name in environ for argument in ("--env", name)]
        argv = [verb, "--json", "--in-place", *passed, "--config-dir", str(CONF), *arguments]
        return json.loads(
            self(
                *argv,
                *(["--", *program] if program else []),
                env={**environ, **(shell or {})},
                code=code,
            ).stdout
        )


class Run(base.Run):
    orch: Orch
    #: Every wait looks for its condition, so on a busy machine nothing but time is lost. A question
    #: to Slurm costs more processor time than the answer is worth.
    patience_s = 300.0
    ask_s = 1.0
    look_s = 0.2

    def __init__(self, orch: Orch, folder: str, script: str = ""):
        super().__init__(orch, folder)
        self.script = script
        # monotonic seconds; the last attempt has left the nodes
        self._requeued_since: float | None = None

    @property
    def job(self) -> str:
        return json.loads((self.folder / "backend.json").read_text())["job_id"]

    def step(self, at_least: int) -> None:
        """Until every rank has reported that step."""

        def reached() -> bool:
            last = dict.fromkeys(range(len(self.plan["ranks"])), 0)
            for line in reports(self.folder / "metrics"):
                last[line["rank"]] = line["step"]
            return min(last.values()) >= at_least

        self.until(f"step {at_least}", reached)

    def requeued(self) -> None:
        """Until the job is pending after an attempt, so with a node assignment."""
        placed = self.folder / "slurm" / "placement.json"
        pending = lambda: placed.exists() and self.orch.cluster.job_state(self.job) == "PENDING"  # noqa: E731
        self.until("requeued", pending, pause=self.ask_s / 2)

    def release(self) -> None:
        """Let workers that hold (ORCH_TEST_HOLD) go on to the end."""
        (self.folder / "go").touch()

    def start_next_attempt(self) -> None:
        """Until its next attempt, without the requeue delay, has its nodes assigned; workers no
        longer hold."""
        before = self.attempt
        self.requeued()
        self.release()

        def placed() -> bool:
            self.skip_requeue_delay()
            return self.attempt > before

        self.until("next attempt", placed, pause=self.ask_s)

    def skip_requeue_delay(self) -> None:
        """Skip the two minutes that a requeued job waits, once its last attempt has left the nodes.

        They have a reason: a node refuses a credential of the second in which it has revoked the
        last one of that job ("Job credential revoked"), and Slurm 22.05 takes that for a failure of
        the job.
        """
        cluster = self.orch.cluster
        state = cluster.job_state(self.job)
        assert state not in ("FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED"), (
            f"{state}\n{self.logs()}"
        )
        waits = state == "PENDING" and "completing" not in cluster.run(
            "sinfo", "-h", "-p", "main", "-o", "%T"
        )
        self._requeued_since = (self._requeued_since or time.monotonic()) if waits else None
        if waits and time.monotonic() - self._requeued_since > 2:
            cluster.run("scontrol", "update", f"JobId={self.job}", "StartTime=now", check=False)

    def finish(self) -> RunState:
        """Wait for the end of the run, skipping the delay after every requeue.

        Slurm 22.05 may need one requeue more than the fault did: it miscounts the GPUs of a job
        that is requeued while one of its nodes goes down, and the next attempt cannot start a step.
        """

        self.release()

        def over() -> bool:
            self.skip_requeue_delay()
            return self.orch.cluster.job_state(self.job) == "COMPLETED"

        self.until("the end of the job", over, pause=self.ask_s)
        return self.wait("done")

    @property
    def attempt(self) -> int:
        return json.loads((self.folder / "backend.json").read_text())["life"]

    @property
    def restarts(self) -> int:
        """How often Slurm says that it has requeued the job."""
        job_details = self.orch.cluster.run("scontrol", "show", "job", self.job)
        return int(job_details.split("Restarts=")[1].split()[0])

    @property
    def assignment(self) -> dict:
        return json.loads((self.folder / "slurm" / "placement.json").read_text())

    @property
    def attempts(self) -> int:
        """How often it has been put on nodes."""
        return len(list((self.folder / "slurm").glob("*.placement.json")))

    def saved(self) -> list[int]:
        """The step that each of four fake workers saved."""
        return [int((self.folder / f"saved-{rank}").read_text()) for rank in range(4)]

    def start_of(self, epoch: int) -> int:
        """The step after which rank 0 started in that epoch."""
        rank_log = (self.folder / "logs" / "rank-00000.log").read_text()
        return int(re.findall(r"starts after step (\d+)", rank_log)[epoch])

    def losses(self) -> dict[int, float]:
        """Step -> loss, as the run's metrics hold them; a step done twice must have had the
        same."""
        step_losses: dict[int, float] = {}
        for line in reports(self.folder / "metrics"):
            if line.get("loss") is not None:
                assert step_losses.setdefault(line["step"], line["loss"]) == line["loss"], (
                    f"step {line['step']}"
                )
        return step_losses

    def logs(self) -> str:
        log_files = [
            *sorted((self.folder / "logs").glob("slurm-*")),
            *sorted((self.folder / "logs").glob("agent-*"))[:1],
        ]
        ours = "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in log_files
        )
        return f"{ours}\n{self.orch.cluster.job_details(self.job)}"
