"""Compares the variables of a program under orch with those under a real torchrun, one by one.

A program prints its variables, values of secrets as digests. Each bed runs it with a shell that
sets `SHELL`, and `differences` says what is not as the rule of docs/programs.md has it.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.patience import PATIENCE_S

SECRETS = {"MY_TOKEN": "hush-7Zk2-by-name", "HF_TOKEN": "hush-7Zk2-by-pattern"}
#: What the user's shell sets, over a default of torchrun's and over one of orch's, too.
SHELL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "PYTHONUNBUFFERED": "yes",
    "NCCL_DEBUG": "WARN",
    "WANDB_MODE": "offline",
    "HF_HOME": "/home/of-the-user/hf",
    "MY_DATA": "/data/of-mine",
    "MY_OTHER": "other",
    **SECRETS,
}
IN_FULL = ("--env", "MY_DATA", "--env", "MY_TOKEN")
MARK = "variables: "
PROBE = f"""
import hashlib, json, os
shown = dict(os.environ)
for name in {sorted(SECRETS)}:
    if name in shown:
        shown[name] = hashlib.sha256(shown[name].encode()).hexdigest()
print("{MARK}" + json.dumps(shown), flush=True)
"""
PROGRAM = ("python3", "-c", PROBE)
#: Variables that both set, each to what its own run has.
_OF_THE_RUN = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
}
_SEARCH_PATHS = ("PATH", "PYTHONPATH")
#: Variables of one shell, which no program of orch's gets.
_OF_THE_SHELL = {"_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "LS_COLORS"}

Variables = dict[str, str]


def printed(log: str) -> Variables:
    """The variables that the program printed into this log."""
    (line,) = [line for line in log.splitlines() if line.startswith(MARK)]
    return json.loads(line.removeprefix(MARK))


def under_torchrun(environ: Mapping[str, str], folder: Path) -> list[Variables]:
    """The variables of two workers that a real torchrun starts in this environment."""
    flags = ["--nproc-per-node=2", "--redirects=3", f"--log-dir={folder}", "--no-python"]
    argv = [sys.executable, "-m", "torch.distributed.run", *flags, sys.executable, "-c", PROBE]
    subprocess.run(argv, env=environ, check=True, capture_output=True, timeout=PATIENCE_S)
    return [
        printed(next(folder.glob(f"*/attempt_0/{rank}/stdout.log")).read_text()) for rank in (0, 1)
    ]


def numbers(rank: int, nodes: int, per_node: int) -> Variables:
    """The variables that tell a worker who it is."""
    world = nodes * per_node
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
    }
    return {name: str(value) for name, value in values.items()}


def differences(
    ranks: Sequence[Variables],
    environ: Mapping[str, str],
    folder: Path,
    *,
    nodes: int,
    dropped: Sequence[str] = (),
    own: str = "",
) -> list[str]:
    """Every variable of these ranks that is not as the rule says, compared with torchrun in the
    same environment. `dropped`: those that must not arrive; `own`: a pattern of further ones, which
    the backend or its machines set."""
    torchrun = under_torchrun(environ, folder)
    for rank, variables in enumerate(torchrun):
        assert numbers(rank, 1, 2).items() <= variables.items(), "the numbers are torchrun's own"
    shown = {**environ} | {name: digest(name) for name in SECRETS}
    wrong = []
    for rank, variables in enumerate(ranks):
        expected = torchrun[0] | numbers(rank, nodes, len(ranks) // nodes)
        for name in sorted({*expected, *variables, *dropped}):
            value = variables.get(name)
            if name in dropped:
                right = value is None
            elif name in _OF_THE_RUN:
                right = bool(value)
            elif name in _OF_THE_SHELL:
                right = value is None or own
            elif name in _SEARCH_PATHS and value:
                right = {*expected.get(name, "").split(":")} <= {*value.split(":"), ""}
            elif (
                name in expected
                and not name.startswith("ORCH_")
                and not (re.fullmatch(own, name) and name not in SHELL)
            ):
                right = value == expected[name]
            else:
                right = re.fullmatch(f"ORCH_.*|PYTHONUNBUFFERED|{own}", name) is not None
            if not right:
                seen = f"{value!r}, under torchrun {expected.get(name)!r}"
                wrong.append(f"rank {rank}: {name} is {seen}, in the shell {shown.get(name)!r}")
    return wrong


def digest(name: str) -> str:
    """What the program prints for the value of a secret."""
    return hashlib.sha256(SECRETS[name].encode()).hexdigest()


def of_a_login() -> str:
    """A pattern of the variables that this user's login shell sets, which a scheduler may read."""
    argv = ["env", "-i", f"HOME={Path.home()}", "bash", "-lc", "env -0"]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split("\0")
    return "|".join(re.escape(line.partition("=")[0]) for line in lines if line)


def holders(folder: Path) -> list[Path]:
    """The files of a folder that hold the value of a secret."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(value.encode() in path.read_bytes() for value in SECRETS.values())
    ]
