"""Selects the variables of the submitting shell that reach a run. Only names: values are never
written down.

The names and prefixes below reach every run, and so do those of `backend.pass_env` and of
`--env`. A program on this machine gets all variables, as under torchrun. On other machines a
name that looks like a secret passes only if it is written in full.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

#: Variables that reach agents and workers everywhere.
PASSED = frozenset(
    {
        "HOME",
        "USER",
        "LOGNAME",
        "PATH",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "TERM",
        "VIRTUAL_ENV",
    }
    | {
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "TRITON_CACHE_DIR",
    }
    | {
        "CUDA_HOME",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG",
    }
)
PASSED_PREFIXES = (
    "LC_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "UCX_",
    "FI_",
)
#: Variables of one process or one terminal, not of its programs; set freshly for every worker.
_OF_THE_SHELL = frozenset({"_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "LS_COLORS"})
_OF_A_WORKER = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
)
_OF_A_LAUNCHER = ("ORCH_", "PET_", "TORCHELASTIC_", "ROLE_")
#: Prefixes of variables of a desktop or a login, which no program on another machine misses.
_OF_A_SESSION = (
    "XDG_",
    "SSH_",
    "DBUS_",
    "TERM_",
    "LESS",
    "BASH_FUNC_",
    "TMUX",
    "VTE_",
    "GPG_",
    "DISPLAY",
    "WAYLAND_",
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_SECRET = re.compile(
    r"(^|[_.-])(private|key|auth|pat|sshpass|(?<!^)pwd"
    r"|[a-z]*(token|secret|passw(or)?d|passphrase|credential|(api|access|secret)[-_]?key))s?"
    r"($|[_.-])",
    re.I,
)
#: Words that match the pattern and are not secrets: a token of text, or the name of a field.
_HARMLESS = re.compile(
    r"(tokens?_(per|id|ids)|(global|max|micro|num)_(batch_)?tokens?|tokens?izer)", re.I
)


def passed_names(names: Iterable[str]) -> list[str]:
    """Returns the names that the allow-list lets through."""
    return sorted(
        name
        for name in names
        if name in PASSED or (name.startswith(PASSED_PREFIXES) and not is_secret_name(name))
    )


def is_name(name: str) -> bool:
    """Tells whether every shell and scheduler accepts it as the name of a variable."""
    return _NAME.fullmatch(name) is not None


def all_names(names: Iterable[str]) -> list[str]:
    """Returns the variables for a program on its user's own machine: all but those of one shell,
    or of another launcher."""
    excluded = _OF_THE_SHELL | _OF_A_WORKER
    return sorted(
        name
        for name in names
        if is_name(name) and name not in excluded and not name.startswith(_OF_A_LAUNCHER)
    )


def matching(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Selects from `all_names` the names that are in `patterns`, and those that a pattern with
    `*` matches and that do not look like a secret."""

    def is_matched(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return [
        name
        for name in all_names(names)
        if name in patterns or (is_matched(name) and not is_secret_name(name))
    ]


def dropped_names(names: Iterable[str], passed: Collection[str]) -> list[str]:
    """Returns the variables that are not passed on and that a program may miss."""
    return [
        name
        for name in all_names(names)
        if name not in passed and not name.startswith(_OF_A_SESSION)
    ]


def is_secret_name(name: str) -> bool:
    """Tells whether a variable or key of that name usually holds a secret: HF_TOKEN,
    AWS_SECRET_ACCESS_KEY, api-key ..."""
    return bool(_SECRET.search(name)) and not _HARMLESS.search(name)
