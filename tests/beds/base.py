"""What the test beds share: a home, an owner that may die, daemons with logs; and `orch`, run there
as by a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from orchestrator.run.processes import identity, is_alive
from orchestrator.run.state import RunState

ROOT = Path(__file__).resolve().parents[2]


class BedError(RuntimeError):
    """The cluster could not be brought up; the message ends with the last lines of the log that
    knows why."""


class Bed(ABC):
    """A cluster in a folder of its own. Use as a context manager."""

    home: Path
    patience = 1  # how much longer things may take on a machine that does much else

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @property
    @abstractmethod
    def enter(self) -> list[str]:
        """What comes before every program that is to run in the bed."""

    @property
    @abstractmethod
    def env(self) -> dict[str, str]: ...

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def record(self, owner: int | None = None, **about: object) -> None:
        """Note who may end this bed: `owner`, by default this process; 0: nobody, so that it
        stays."""
        about["owner"] = os.getpid() if owner is None else owner
        (self.home / "bed.json").write_text(json.dumps(about))

    def popen(
        self, name: str, *argv: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        """A daemon of the bed; its output goes to log/<name>.log."""
        with (self.home / "log" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*self.enter, *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home,
                env={**self.env, **(env or {})}, start_new_session=True,
            )  # fmt: skip

    def wait(
        self, ready: Callable[[], object], seconds: float, event: str, log: str | None = None
    ) -> None:
        if not wait(ready, self.patience * seconds, 0.3):
            raise BedError(
                f"no {event} within {self.patience * seconds:.0f}"
                f" s\n{self.log_tail(log) if log else ''}"
            )

    def log_tail(self, name: str, lines: int = 20) -> str:
        path = self.home / "log" / f"{name}.log"
        return (
            "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            if path.exists()
            else f"no {name}.log"
        )


class CommandServer:
    """Runs `orch` in children of one process (tests/beds/server.py), which ends with this one.

    `enter`: the way to where it runs. One line at a time: each thread needs one of its own.
    """

    def __init__(
        self, backend: str, enter: Sequence[str] = (), env: Mapping[str, str] | None = None
    ):
        argv = [*enter, sys.executable, "-m", "tests.beds.server", backend]
        self._process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], output: Path, seconds: float, cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """`output`: a folder for what it says."""
        out = output / f".out-{self._process.pid}"
        err = output / f".err-{self._process.pid}"
        files = {"cwd": str(cwd), "out": str(out), "err": str(err)}
        wish = json.dumps({"argv": argv, "env": dict(env), "seconds": seconds, **files})
        print(wish, file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, "the server of command lines has ended: see its error above"
        code = int(answer)
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


def wait(ready: Callable[[], object], seconds: float, pause: float = 0.1) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def about(home: Path) -> dict[str, Any]:
    """What `Bed.record` noted there."""
    return json.loads((home / "bed.json").read_text())


def orphans(prefix: str) -> Iterator[Path]:
    """Homes of beds whose owner died without stopping them (a killed test run)."""
    for home in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, ValueError, KeyError):
            if (owner := about(home)["owner"]) and not (
                (process := identity(owner)) and is_alive(process)
            ):
                yield home


class Run:
    """A run as its user sees it; a failed wait shows `logs`."""

    patience_s = 900.0
    ask_s = 2.0
    look_s = 0.5  # between questions to `orch`, each a process, and looks at files

    def __init__(self, orch: Any, folder: str):
        self.orch = orch
        self.folder = Path(folder)
        self.id = self.folder.name

    @property
    def inside(self) -> Path:
        """The run folder as its processes have it."""
        return self.folder

    @property
    def plan(self) -> dict:
        return json.loads((self.inside / "plan.json").read_text())

    def state(self) -> RunState:
        return msgspec.convert(
            json.loads(self.orch("status", "--json", self.id).stdout)["state"], RunState
        )

    def wait(self, *states: str, seconds: float | None = None) -> RunState:
        end = time.monotonic() + (seconds or self.patience_s)
        while (state := self.state()).state not in states:
            assert time.monotonic() < end, (
                f"{state.state} ({state.reason}), not {states}\n{self.logs()}"
            )
            assert not state.is_final, (
                f"ended {state.state} ({state.reason}), not {states}\n{self.logs()}"
            )
            time.sleep(self.ask_s)
        return state

    def until(
        self,
        event: str,
        ready: Callable[[], object],
        seconds: float | None = None,
        pause: float | None = None,
    ) -> None:
        seconds = seconds or self.patience_s
        assert wait(ready, seconds, pause or self.look_s), (
            f"not within {seconds} s: {event}\n{self.logs()}"
        )

    def logs(self) -> str:
        raise NotImplementedError


def checked(
    done: subprocess.CompletedProcess[str], code: int | None
) -> subprocess.CompletedProcess[str]:
    """`orch` must have ended with this code (None: any)."""
    assert code is None or done.returncode == code, (
        f"{done.args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done
