"""A backend as another package would add it, by an entry point of the group `orch.backends`:
`backend.name=spawn`.

Agents are children of one process a run, `python third_party_backend.py RUN_DIR LOCK`, which holds
the run's lock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from orchestrator.backends.base import Backend, decode_options, read_record, write_record
from orchestrator.errors import OrchError
from orchestrator.observe.report import write_final_state
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit
from orchestrator.run.create import create_run_folder
from orchestrator.run.environment import compose_environment
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import ask, wants_end
from orchestrator.run.processes import Identity, identity, send_signal
from orchestrator.run.request import LaunchRequest, SubmissionBundle, read_request
from orchestrator.run.state import RunState, finish, prepare_resume, read_state, true_state


class SpawnOptions(Frozen):
    nice: Annotated[int, Meta(ge=0, le=19)] = 0


class SpawnRecord(Frozen):
    supervisor: tuple[int, int]  # pid, start time


class SpawnBackend(Backend):
    name = "spawn"
    on_this_machine = True

    def check(self, request: LaunchRequest) -> None:
        decode_options(request.backend_options, SpawnOptions, self.name)
        if request.device != "cpu":
            raise OrchError("spawn has no GPUs: use cluster=local", Exit.CAPACITY)

    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        self.check(bundle.request)
        with create_run_folder(bundle, self.name) as folder:
            return self._start(folder, bundle.request, environ)

    def resume(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> str:
        if self.is_alive(folder):
            raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
        prepare_resume(folder)
        return self._start(folder, request, environ)

    def cancel(self, folder: RunFolder, force: bool) -> None:
        record = read_record(folder, SpawnRecord)
        if record is None or not self.is_alive(folder):
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        ask(folder, "end", force=force)
        send_signal(Identity(*record.supervisor), signal.SIGTERM)

    def is_alive(self, folder: RunFolder) -> bool:
        return folder.is_alive()

    def state(self, folder: RunFolder) -> RunState:
        return true_state(folder, self.is_alive(folder))

    def _start(self, folder: RunFolder, request: LaunchRequest, environ: Mapping[str, str]) -> str:
        lock = folder.take_lock()
        argv = [sys.executable, __file__, str(folder.path), str(lock)]
        env = compose_environment(request.environment, environ) | {
            "PYTHONPATH": os.pathsep.join(sys.path)
        }
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        child = subprocess.Popen(argv, env=env, pass_fds=[lock], start_new_session=True, **quiet)
        write_record(folder, SpawnRecord((child.pid, identity(child.pid).started)))
        child.returncode = 0  # nobody's child from here on
        os.close(lock)
        return request.handle


def supervise(folder: RunFolder, lock: int) -> None:
    agents = [
        subprocess.Popen(agent.argv, pass_fds=[lock], cwd=folder.path)
        for agent in read_request(folder).agents
    ]

    def end(*_: object) -> None:
        wish = wants_end(folder)
        for agent in agents:
            agent.send_signal(signal.SIGKILL if wish and wish.force else signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    codes = [agent.wait() for agent in agents]
    if not (state := read_state(folder)).is_final:
        phase, code = (
            ("cancelled", Exit.RESTART) if wants_end(folder) else ("failed", Exit.CAPACITY)
        )
        write_final_state(
            folder, finish(state, phase, code, f"agents ended with {codes}", at=time.time())
        )


if __name__ == "__main__":
    supervise(RunFolder(Path(sys.argv[1])), int(sys.argv[2]))
