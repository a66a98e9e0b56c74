"""Which variables of the shell that submits reach a run. Names alone: values are never written
down.

Everywhere the names and prefixes below, those of `backend.pass_env` and of `--env`. A program on
this machine gets all variables, as under torchrun. Elsewhere what looks like a secret passes by its
whole name only.
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
#: Of one process or one terminal, not of its programs; set anew for every worker.
_OF_THE_SHELL = frozenset({"_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "LS_COLORS"})
_OF_A_WORKER = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
)
_OF_A_LAUNCHER = ("ORCH_", "PET_", "TORCHELASTIC_", "ROLE_")
#: Of a desktop or a login, which no program on another machine misses.
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
#: Words that match the pattern and are none: the token is one of text, the key a field.
_HARMLESS = re.compile(
    r"(tokens?_(per|id|ids)|(global|max|micro|num)_(batch_)?tokens?|tokens?izer)", re.I
)


def passed_names(names: Iterable[str]) -> list[str]:
    """Those of `names` that the allow-list lets through."""
    return sorted(
        n for n in names if n in PASSED or (n.startswith(PASSED_PREFIXES) and not is_secret_name(n))
    )


def is_name(name: str) -> bool:
    """Whether every shell and scheduler takes it for the name of a variable."""
    return _NAME.fullmatch(name) is not None


def all_names(names: Iterable[str]) -> list[str]:
    """What a program on the machine of its user gets: all but what belongs to one shell, or to
    another launch."""
    apart = _OF_THE_SHELL | _OF_A_WORKER
    return sorted(
        n for n in names if is_name(n) and n not in apart and not n.startswith(_OF_A_LAUNCHER)
    )


def matching(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Of `all_names` those that are named, and those that a pattern with `*` means and that look
    like no secret."""
    return [
        n
        for n in all_names(names)
        if n in patterns or (not is_secret_name(n) and any(fnmatchcase(n, one) for one in patterns))
    ]


def dropped_names(names: Iterable[str], kept: Collection[str]) -> list[str]:
    """What a program may miss that is not passed on."""
    return [n for n in all_names(names) if n not in kept and not n.startswith(_OF_A_SESSION)]


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of that name usually holds a secret: HF_TOKEN,
    AWS_SECRET_ACCESS_KEY, api-key ..."""
    return bool(_SECRET.search(name)) and not _HARMLESS.search(name)
