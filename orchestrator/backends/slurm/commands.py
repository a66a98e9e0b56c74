"""Runs Slurm's commands with a clean environment and time limits, and turns failures into one-line
OrchErrors.

`Slurm` is one cluster, as the commands on PATH reach it. No other module here starts a Slurm
command.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import PRIVATE_UMASK

from .queue import Job, merge, parse_sacct, parse_squeue, sacct_argv, squeue_argv
from .states import job_state

#: Pattern of an error message, exit code, and where the user should look. The first match counts.
_ERRORS: tuple[tuple[str, Exit, str], ...] = (
    (
        r"invalid partition|partition.*(not (found|exist)|does not exist)",
        Exit.CONFIG,
        "backend.options.partition",
    ),
    (r"invalid account", Exit.CONFIG, "backend.options.account"),
    (r"invalid qos", Exit.CONFIG, "backend.options.qos"),
    (r"invalid feature", Exit.CONFIG, "backend.options.constraint"),
    (r"invalid wckey", Exit.CONFIG, "backend.options.wckey"),
    (r"reservation", Exit.CONFIG, "backend.options.reservation"),
    (
        r"invalid generic resource|invalid gres",
        Exit.CONFIG,
        "backend.options.gpu_request and gpu_type",
    ),
    (r"time limit", Exit.CONFIG, "backend.options.time"),
    (
        r"invalid node name|node count|invalid.*segment|topology",
        Exit.CONFIG,
        "the cluster, exclude and topology options",
    ),
    (r"dependency", Exit.CONFIG, "backend.options.dependency"),
    (r"access.*denied|permission denied|not permitted", Exit.SECURITY, "whether you may use it"),
    (r"qos policy|accounting.*policy|limit", Exit.CAPACITY, "`sacctmgr show assoc` for the limit"),
    (
        r"requested node configuration|resources",
        Exit.CAPACITY,
        "`sinfo` for the nodes that there are",
    ),
    (r"slurmctld.* is DOWN", Exit.CAPACITY, "`scontrol ping`"),
    (
        r"configuration source|configless|ClusterName",
        Exit.CAPACITY,
        "SLURM_CONF: no Slurm cluster is configured here",
    ),
    (r"temporarily unable", Exit.CAPACITY, "again later: the queue is full (MaxJobCount)"),
    (
        r"unable to contact|connection refused|timed out|no route|controller",
        Exit.CAPACITY,
        "`scontrol ping`",
    ),
)
#: Variables of the site or the user that would change what a command prints or does. The commands
#: do not get them.
_IGNORED_VARIABLES = re.compile(
    r"(SBATCH|SALLOC|SRUN|SQUEUE|SINFO|SACCT|SCANCEL|SPRIO)_|SLURM_(?!CONF|JWT|CONF_SERVER)"
)
_QUEUE_FULL = b"temporarily unable to accept job"


class Slurm:
    """One Slurm cluster, as the commands on PATH reach it."""

    def __init__(self, environ: Mapping[str, str] | None = None, timeout_s: float = 60.0):
        """`environ`: the commands' environment, by default this process's. `timeout_s`: the limit
        of each command."""
        environ = os.environ if environ is None else environ
        self.environ = {
            name: value for name, value in environ.items() if not _IGNORED_VARIABLES.match(name)
        }
        self.environ |= {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C.UTF-8"}
        self._timeout_s = timeout_s

    def run(self, argv: Sequence[str], absent_ok: bool = False) -> str:
        """Runs a command; returns its output, "" when `absent_ok` and it is not installed.

        OrchError: 76 when it is not installed or does not answer within the time limit, else as
        `to_error` says.
        """
        try:
            completed = subprocess.run(
                argv,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
                start_new_session=True,
            )
        except FileNotFoundError:
            if absent_ok:
                return ""
            raise _not_installed(argv[0]) from None
        except subprocess.TimeoutExpired:
            problem = f"{argv[0]}: no answer within {self._timeout_s:g} s"
            raise OrchError(f"{problem}; look at `scontrol ping`", Exit.CAPACITY) from None
        if completed.returncode:
            raise self.to_error(argv[0], completed.stderr or completed.stdout)
        return completed.stdout

    def sbatch(self, script: str, *flags: str) -> str:
        """Submits a script file; returns the job id. OrchError when Slurm refuses.

        A full queue is refused (76) at once; sbatch itself would retry for two minutes.
        """
        code, out, err = self._communicate(
            [
                "sbatch",
                "--parsable",
                *flags,
                script,
            ]
        )
        if code:
            raise self.to_error("sbatch", err or out)
        return out.strip().split(";")[0]

    def start_estimate(self, script: str, *flags: str) -> str:
        """Estimates when a job with this script would start (`sbatch --test-only`).

        Returns local ISO-8601 time, "" when unknown. Nothing is submitted. OrchError when Slurm
        would refuse the job, or when no nodes of today could run it (76).
        """
        code, out, err = self._communicate(["sbatch", "--test-only", *flags], script)
        start = parse_estimate(err + out)
        if code and not start:
            raise self.to_error("sbatch", err + out)
        return start

    def check_script(self, script: str) -> None:
        """Raises OrchError if Slurm would refuse this script.

        A job that only has to wait for nodes passes.
        """
        try:
            self.start_estimate(script)
        except OrchError as error:
            if error.exit != Exit.CAPACITY:
                raise

    def start(
        self,
        argv: Sequence[str],
        errors: int | IO[bytes] = subprocess.PIPE,
        *,
        alone: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Starts a command with pipes for standard input and output. OrchError (76) if absent.

        `alone`: this terminal's Ctrl-C does not reach the command, so that the answer about what
        Slurm has done is not cut off.
        """
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(
                argv,
                env=self.environ,
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                start_new_session=alone,
                umask=PRIVATE_UMASK,
            )
        except FileNotFoundError:
            raise _not_installed(argv[0]) from None

    def _communicate(self, argv: Sequence[str], script: str = "") -> tuple[int, str, str]:
        """Exit code, output and errors of sbatch with `script` as input.

        sbatch is killed when the queue is full or the time is up.
        """
        process = self.start(argv, alone=True)
        assert process.stdin and process.stdout and process.stderr
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(script.encode())
        out = bytearray()
        err = bytearray()
        end = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
            for stream, received in ((process.stdout, out), (process.stderr, err)):
                selector.register(stream, selectors.EVENT_READ, received)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, end - time.monotonic())):
                    chunk = os.read(key.fd, 65536)
                    key.data.extend(chunk)
                    if not chunk:
                        selector.unregister(key.fileobj)
                if _QUEUE_FULL in err or time.monotonic() > end:
                    process.kill()
                    break
            process.wait()
        if time.monotonic() > end and process.returncode:
            err += b"\nsbatch: error: timed out"
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")

    def jobs(self, ids: Sequence[str]) -> dict[str, Job]:
        """Job id -> job, for all of the user's jobs that the controller still knows.

        Of `ids`, those that have ended or that it has forgotten come from accounting. There are at
        most two calls, whatever the number of ids. OrchError (76) when no controller answers.
        """
        self.check_controller()
        live = parse_squeue(self.run(squeue_argv()))
        missing = [id_ for id_ in ids if id_ not in live or job_state(live[id_].state).ended]
        return merge(live, self._from_accounting(missing)) if missing else live

    def check_controller(self) -> None:
        """Raises OrchError (76) if no controller answers.

        This fails at once, where other commands would retry for MessageTimeout.
        """
        answer = self.run(["scontrol", "ping"])
        if "is UP" not in answer:
            raise self.to_error("scontrol", answer)

    def _from_accounting(self, ids: Sequence[str]) -> dict[str, Job]:
        """Jobs from accounting; none if the site has no accounting or its database is silent."""
        try:
            return parse_sacct(self.run(sacct_argv(ids), absent_ok=True))
        except OrchError:
            return {}

    def cancel(self, job: str, *flags: str) -> None:
        self.run(["scancel", *flags, job])

    def nodes(self) -> str:
        """Output of `scontrol show nodes`, one node per line."""
        return self.run(["scontrol", "--oneliner", "--detail", "show", "nodes"])

    def topology(self) -> str:
        """Output of `scontrol show topology`, "" where the site has no topology plugin."""
        try:
            return self.run(["scontrol", "show", "topology"])
        except OrchError:
            return ""

    def partition(self, name: str | None) -> dict[str, str]:
        """Fields of a partition (None: the default one), empty when there is no such partition."""
        output = self.run(["scontrol", "--oneliner", "show", "partition"])
        for line in output.splitlines():
            fields = dict(field.split("=", 1) for field in line.split() if "=" in field)
            if fields.get("PartitionName") == name or (
                name is None and fields.get("Default") == "YES"
            ):
                return fields
        return {}

    def kill_wait_s(self) -> int | None:
        """Seconds between SIGTERM and SIGKILL of an ending job, None when not configured."""
        match = re.search(
            r"^KillWait\s*=\s*([0-9]+)",
            self.run(["scontrol", "show", "config"]),
            re.M,
        )
        return int(match[1]) if match else None

    def to_error(self, program: str, output: str) -> OrchError:
        """The OrchError for a failed command's output.

        Its message is one line that says where to look; `_ERRORS` determines the exit code.
        """
        line = error_line(output)
        for pattern, exit, look in _ERRORS:
            if re.search(pattern, line, re.I):
                hint = self._choices(line)
                return OrchError(f"{program}: {line}; {hint or 'look at ' + look}", exit)
        return OrchError(f"{program}: {line}", Exit.CONFIG)

    def _choices(self, line: str) -> str:
        """Names the legal partitions or accounts, nearest first, if the error is an unknown one.

        Returns "" for other errors.
        """
        lower = line.lower()
        if "partition" in lower and "account" not in lower:
            argv = ["sinfo", "--noheader", "--format=%R"]
        elif "invalid account" in lower:
            argv = [
                "sacctmgr",
                "-nP",
                "show",
                "assoc",
                f"user={os.environ.get('USER', 'root')}",
                "format=account",
            ]
        else:
            return ""
        try:
            output = subprocess.run(
                argv, env=self.environ, capture_output=True, text=True, timeout=10, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            return ""
        names = sorted(set(output.split()))
        if not names:
            return ""
        unknown_name = re.search(r"specified: ?(\S+)", line)
        return did_you_mean(unknown_name[1] if unknown_name else "", names)


def parse_estimate(output: str) -> str:
    """The start time in the output of `sbatch --test-only`, "" when there is none."""
    match = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", output)
    return match[1] if match else ""


_SPECIFIC_ERROR = re.compile(r"invalid|specified|unable|is DOWN", re.I)
_GENERAL_ERROR = re.compile(r"batch job submission failed|allocation failure", re.I)


def error_line(output: str) -> str:
    """The most specific line of a command's error output, without the program's name."""
    lines = [
        re.sub(r"^\w+: (error|fatal): ", "", line.strip())
        for line in output.splitlines()
        if line.strip()
    ]
    specific = [line for line in lines if _SPECIFIC_ERROR.search(line)]
    general = [line for line in lines if _GENERAL_ERROR.search(line)]
    last = lines[-1:] or ["it failed without a message"]
    line = [*specific, *general, *last][0]
    printable = re.sub(r"[\x00-\x1f\x7f]", " ", line)[:300]
    return printable.removeprefix("Batch job submission failed: ")


def _not_installed(program: str) -> OrchError:
    return OrchError(
        f"{program} is not on PATH: is this a login node of a Slurm cluster?", Exit.CAPACITY
    )
