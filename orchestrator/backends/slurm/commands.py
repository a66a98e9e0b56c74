"""Calling Slurm's commands: argument lists, a clean environment, a limit on time, and errors turned into one line."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

from .queue import Job, merge, parse_sacct, parse_squeue, sacct_argv, squeue_argv

#: What a Slurm command says when it fails -> exit code and what to do about it. The first match counts.
_COMPLAINTS: tuple[tuple[str, Exit, str], ...] = (
    (r"invalid partition|partition.*(not (found|exist)|does not exist)", Exit.CONFIG, "backend.options.partition"),
    (r"invalid account", Exit.CONFIG, "backend.options.account"),
    (r"invalid qos", Exit.CONFIG, "backend.options.qos"),
    (r"invalid feature", Exit.CONFIG, "backend.options.constraint"),
    (r"invalid wckey", Exit.CONFIG, "backend.options.wckey"),
    (r"reservation", Exit.CONFIG, "backend.options.reservation"),
    (r"invalid generic resource|invalid gres", Exit.CONFIG, "backend.options.gpu_request and gpu_type"),
    (r"time limit", Exit.CONFIG, "backend.options.time"),
    (
        r"invalid node name|node count|invalid.*segment|topology",
        Exit.CONFIG,
        "the cluster, exclude and topology options",
    ),
    (r"dependency", Exit.CONFIG, "backend.options.dependency"),
    (r"access.*denied|permission denied|not permitted", Exit.SECURITY, "whether you may use it"),
    (r"qos policy|accounting.*policy|limit", Exit.CAPACITY, "`sacctmgr show assoc` for the limit"),
    (r"requested node configuration|resources", Exit.CAPACITY, "`sinfo` for the nodes that there are"),
    (r"slurmctld.* is DOWN", Exit.CAPACITY, "`scontrol ping`"),
    (r"configuration source|configless|ClusterName", Exit.CAPACITY, "SLURM_CONF: no Slurm cluster is configured here"),
    (r"temporarily unable", Exit.CAPACITY, "again later: the queue is full (MaxJobCount)"),
    (r"unable to contact|connection refused|timed out|no route|controller", Exit.CAPACITY, "`scontrol ping`"),
)
#: Variables that change what a command prints or does; the site's and the user's own must not reach us.
_FOREIGN = re.compile(r"(SBATCH|SALLOC|SRUN|SQUEUE|SINFO|SACCT|SCANCEL|SPRIO)_|SLURM_(?!CONF|JWT|CONF_SERVER)")
_FULL = "temporarily unable to accept job"


class Slurm:
    """One cluster, as its commands on PATH reach it."""

    def __init__(self, environ: Mapping[str, str] | None = None, timeout_s: float = 60.0):
        environ = os.environ if environ is None else environ
        self.environ = {name: value for name, value in environ.items() if not _FOREIGN.match(name)}
        self.environ |= {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C.UTF-8"}
        self._timeout_s = timeout_s

    def run(self, argv: Sequence[str], absent_ok: bool = False) -> str:
        """Output of a command. OrchError with one line when it fails; "" when `absent_ok` and it is not installed."""
        try:
            done = self._call(argv, self._timeout_s)
        except FileNotFoundError:
            if absent_ok:
                return ""
            raise _absent(argv[0]) from None
        except subprocess.TimeoutExpired:
            text = f"{argv[0]}: no answer within {self._timeout_s:g} s"
            raise OrchError(f"{text}; look at `scontrol ping`", Exit.CAPACITY) from None
        if done.returncode:
            raise self.complaint(argv[0], done.stderr or done.stdout)
        return done.stdout

    def sbatch(self, script: str, *flags: str) -> str:
        """Submit a script file; the job id. A full queue is told at once: sbatch itself would try for two minutes."""
        code, out, err = self._sbatch(["sbatch", "--parsable", *flags, script])
        if code:
            raise self.complaint("sbatch", err or out)
        return out.strip().split(";")[0]

    def start_estimate(self, text: str, *flags: str) -> str:
        """When a job of this script text would start if it were submitted now: local ISO-8601 time, "" when unknown.

        Nothing is submitted. OrchError for what Slurm would refuse, and for what no nodes of today could run.
        """
        code, out, err = self._sbatch(["sbatch", "--test-only", *flags], text)
        start = estimated_start(err + out)
        if code and not start:
            raise self.complaint("sbatch", err + out)
        return start

    def _sbatch(self, argv: Sequence[str], text: str = "") -> tuple[int, str, str]:
        """(exit code, output, errors) of sbatch with `text` on its standard input."""
        try:
            process = subprocess.Popen(
                argv, env=self.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except FileNotFoundError:
            raise _absent(argv[0]) from None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(text.encode())
        out, err = _read_both(process, self._timeout_s, lambda text: _FULL in text)
        return process.returncode, out, err

    def step(self, argv: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a step that goes on beside us; its standard input and output are pipes."""
        try:
            return subprocess.Popen(
                argv, env=self.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        except FileNotFoundError:
            raise _absent(argv[0]) from None

    def jobs(self, ids: Sequence[str]) -> dict[str, Job]:
        """All of our jobs in at most two calls: what the controller remembers, and for the others the accounting."""
        self.check_controller()
        live = parse_squeue(self.run(squeue_argv()))
        missing = [id_ for id_ in ids if id_ not in live or _ended(live[id_])]
        return merge(live, self._accounted(missing)) if missing else live

    def check_controller(self) -> None:
        """OrchError (76) at once when no controller answers, where other commands would try for MessageTimeout."""
        said = self.run(["scontrol", "ping"])
        if "is UP" not in said:
            raise self.complaint("scontrol", said)

    def _call(self, argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def _accounted(self, ids: Sequence[str]) -> dict[str, Job]:
        """Empty where the site keeps no accounts, or its database is away: squeue and the run folder must do."""
        try:
            return parse_sacct(self.run(sacct_argv(ids), absent_ok=True))
        except OrchError:
            return {}

    def cancel(self, job: str, *flags: str) -> None:
        self.run(["scancel", *flags, job])

    def nodes(self) -> str:
        return self.run(["scontrol", "--oneliner", "--detail", "show", "nodes"])

    def topology(self) -> str:
        """Empty where the site has no topology plugin."""
        try:
            return self.run(["scontrol", "show", "topology"])
        except OrchError:
            return ""

    def partition(self, name: str | None) -> dict[str, str]:
        """Key -> value of a partition, the default one for None; empty when there is no such partition."""
        text = self.run(["scontrol", "--oneliner", "show", "partition"])
        for line in text.splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if fields.get("PartitionName") == name or (name is None and fields.get("Default") == "YES"):
                return fields
        return {}

    def kill_wait_s(self) -> int | None:
        """Seconds between SIGTERM and SIGKILL of an ending job."""
        found = re.search(r"^KillWait\s*=\s*([0-9]+)", self.run(["scontrol", "show", "config"]), re.M)
        return int(found[1]) if found else None

    def complaint(self, program: str, text: str) -> OrchError:
        """What a command's own words come to: one line, an exit code, where to look."""
        line = first_complaint(text)
        for pattern, exit, look in _COMPLAINTS:
            if re.search(pattern, line, re.I):
                hint = self._choices(line)
                return OrchError(f"{program}: {line}; {hint or 'look at ' + look}", exit)
        return OrchError(f"{program}: {line}", Exit.CONFIG)

    def _choices(self, line: str) -> str:
        """For a wrong partition or account: what there is."""
        lower = line.lower()
        if "partition" in lower and "account" not in lower:
            argv = ["sinfo", "--noheader", "--format=%R"]
        elif "invalid account" in lower:
            argv = ["sacctmgr", "-nP", "show", "assoc", f"user={os.environ.get('USER', 'root')}", "format=account"]
        else:
            return ""
        try:
            found = subprocess.run(
                argv, env=self.environ, capture_output=True, text=True, timeout=10, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            return ""
        names = sorted(set(found.split()))
        wrong = re.search(r"specified: ?(\S+)", line)
        return did_you_mean(wrong[1] if wrong else "", names) if names else ""


def estimated_start(text: str) -> str:
    """The time in what `sbatch --test-only` says, "" when there is none."""
    found = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    return found[1] if found else ""


def first_complaint(text: str) -> str:
    """The line that says what is wrong, without the program's name; the last line where several complain."""
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"batch job submission failed|allocation failure", line, re.I)]
    specific = [line for line in lines if re.search(r"invalid|specified|unable|is DOWN", line, re.I)]
    chosen = specific[0] if specific else telling[0] if telling else lines[-1] if lines else "it failed without a word"
    return re.sub(r"[\x00-\x1f\x7f]", " ", chosen)[:300].removeprefix("Batch job submission failed: ")


def _ended(job: Job) -> bool:
    from .states import meaning

    return meaning(job.state).over


def _absent(program: str) -> OrchError:
    return OrchError(f"{program} is not on PATH: is this a login node of a Slurm cluster?", Exit.CAPACITY)


def _read_both(process: subprocess.Popen, timeout_s: float, give_up: Callable[[str], bool]) -> tuple[str, str]:
    """Output and errors of a process; ended early when `give_up` says so of its errors, or when it takes too long."""
    texts = {process.stdout: b"", process.stderr: b""}
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(max(0.0, end - time.monotonic())):
                chunk = os.read(key.fd, 65536)
                texts[key.fileobj] += chunk
                if not chunk:
                    selector.unregister(key.fileobj)
            if give_up(texts[process.stderr].decode(errors="replace")) or time.monotonic() > end:
                process.kill()
                break
    process.wait()
    for stream in texts:
        stream.close()
    if time.monotonic() > end and process.returncode:
        texts[process.stderr] += b"\nsbatch: error: timed out"
    return texts[process.stdout].decode(errors="replace"), texts[process.stderr].decode(errors="replace")
