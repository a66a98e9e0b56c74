"""Selects the variables of the submitting shell that reach a run, by one rule for every backend.
Only names: values are never written down.

A program on this machine gets every variable, as under torchrun, except those of one shell or of
another launch. A run elsewhere gets the names that the user wrote in full (`--env`,
`backend.pass_env`), and what a pattern of `backend.passed` or `backend.pass_env` matches. A pattern
passes no name that looks like a secret. Where the machines share no folders, it also passes no
variable that means something on this machine only, such as a path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from orchestrator.plan.document import Frozen

#: Variables of one process or one terminal, not of its programs; set freshly for every worker.
_OF_THE_SHELL = frozenset({"_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "LS_COLORS"})
_OF_A_WORKER = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
)
_OF_A_LAUNCHER = ("ORCH_", "PET_", "TORCHELASTIC_", "ROLE_")
#: Variables that mean something on this machine only, whatever their value.
_OF_A_MACHINE = frozenset(
    {
        "HOME",
        "USER",
        "LOGNAME",
        "PATH",
        "SHELL",
        "TMPDIR",
        "TERM",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "PYTHONHOME",
        "PYTHONPATH",
        "XDG_CACHE_HOME",
        "CUDA_VISIBLE_DEVICES",
    }
)
#: An absolute path, or one below the home folder, at the start of a value or of an item of it. Two
#: slashes are a URL, but not those of `file:`.
_PATH = re.compile(r"(^|[:,;=\s])(/(?!/)|~|file:/)")
#: Variables of a desktop or a login. Every machine has its own, so no message names them.
_OF_A_SESSION = re.compile(
    r"(XDG|SSH|DBUS|VTE|GPG|LESS|TMUX|WAYLAND)_.*|LESS|TMUX|DISPLAY|TERM_PROGRAM.*|COLORTERM"
    r"|HOME|USER|LOGNAME|PATH|SHELL|TERM|TMPDIR|LANG|LC_.*|MAIL|HOSTNAME|HOST|EDITOR|PAGER"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_SECRET = re.compile(
    r"(^|[_.-])(private|key|auth|pat|sshpass|(?<!^)pwd"
    r"|[a-z]*(token|secret|passw(or)?d|passphrase|credential|(api|access|secret)[-_]?key))s?"
    r"\d*($|[_.-])",
    re.I,
)
#: Words that match the pattern and are about tokens of text. The rest of a name still counts.
_TOKENS_OF_TEXT = re.compile(
    r"(?<![a-z])(tokens_per|token_ids?|(global|max|micro|num)_(batch_)?tokens)(?![a-z])", re.I
)


class Dropped(Frozen):
    """The variables that a program elsewhere does not get and may miss, by the reason."""

    secrets: list[str] = []
    of_this_machine: list[str] = []
    unlisted: list[str] = []  # no pattern matches them


class Selection(Frozen):
    """The variables of a shell, by whether they reach a run."""

    passed: list[str]
    dropped: Dropped


def select_variables(
    names: Collection[str],
    *,
    in_full: Collection[str],
    patterns: Collection[str],
    of_this_machine: Collection[str] = (),
) -> Selection:
    """Applies the rule for a run elsewhere to the names of a shell. `in_full`: the names that the
    user wrote; `of_this_machine`: the result of `machine_names`, or nothing where the machines
    share folders."""
    passed = [name for name in names if name in in_full]
    secrets = []
    local = []
    unlisted = []
    for name in filter(is_name, all_names({*names} - {*in_full})):
        if is_secret_name(name):
            secrets.append(name)
        elif name in of_this_machine:
            local.append(name)
        elif any(fnmatchcase(name, pattern) for pattern in patterns):
            passed.append(name)
        else:
            unlisted.append(name)
    dropped = Dropped(
        secrets=_without_session(secrets),
        of_this_machine=_without_session(local),
        unlisted=_without_session(unlisted),
    )
    return Selection(passed=sorted(passed), dropped=dropped)


def _without_session(names: Iterable[str]) -> list[str]:
    return [name for name in names if not _OF_A_SESSION.fullmatch(name)]


def machine_names(environ: Mapping[str, str]) -> frozenset[str]:
    """Returns the variables that mean something on this machine only: search paths, the login, its
    GPUs, and all whose value holds a path."""
    paths = {name for name, value in environ.items() if _PATH.search(value)}
    return _OF_A_MACHINE | paths


def is_name(name: str) -> bool:
    """Tells whether every shell and scheduler accepts it as the name of a variable."""
    return _NAME.fullmatch(name) is not None


def is_utf8(value: str) -> bool:
    """Tells whether a text can be written as UTF-8. Python reads other bytes as surrogates, which
    nothing can encode."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def all_names(names: Iterable[str]) -> list[str]:
    """Returns the variables for a program on its user's own machine: all but those of one shell,
    or of another launcher. Functions that bash exports are among them."""
    excluded = _OF_THE_SHELL | _OF_A_WORKER
    return sorted(
        name
        for name in names
        if name not in excluded and not name.startswith(_OF_A_LAUNCHER) and is_utf8(name)
    )


_MOST_NAMES = 8  # names that a message shows for each reason


def describe_dropped(dropped: Dropped) -> list[str]:
    """Returns one message about the variables that are not passed on, or none."""
    reasons = [
        _reason(dropped.secrets, "look like secrets"),
        _reason(dropped.of_this_machine, "paths or GPUs of this machine"),
        _reason(dropped.unlisted, "not in backend.passed"),
    ]
    listed = "; ".join(filter(None, reasons))
    remedy = "--env NAME passes one, backend.pass_env=[PATTERN] several"
    return [f"variables not passed on: {listed}. {remedy}"] if listed else []


def _reason(names: list[str], reason: str) -> str:
    if not names:
        return ""
    rest = len(names) - _MOST_NAMES
    further = f" and {rest} more" if rest > 0 else ""
    return f"{', '.join(names[:_MOST_NAMES])}{further} ({reason})"


def is_secret_name(name: str) -> bool:
    """Tells whether a variable or key of that name usually holds a secret: HF_TOKEN,
    AWS_SECRET_ACCESS_KEY, api-key ..."""
    return bool(_SECRET.search(_TOKENS_OF_TEXT.sub("", name)))
