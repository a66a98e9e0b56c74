"""The exception that a verb turns into one line and an exit code, and the did-you-mean that ends
such lines."""

from __future__ import annotations

import re
from collections.abc import Iterable

from orchestrator.plan.exits import Exit


class OrchError(Exception):
    """An error that the user can act on.

    `message` is one line: what is wrong, where, the legal choices, a nearest match. `exit` is
    the process exit code.
    """

    def __init__(self, message: str, exit: int = Exit.USAGE):
        super().__init__(message)
        self.message = message
        self.exit = exit


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, signum: int):
        super().__init__()
        self.signum = signum


#: Package that not every install has -> the extra that installs it.
EXTRAS = {
    "torch": "trainer",
    "safetensors": "trainer",
    "submitit": "slurm",
    "kubernetes": "kubernetes",
    "urllib3": "kubernetes",
    "matplotlib": "plot",
    "tokenizers": "tokenizers",
}


def not_installed(package: str, feature: str = "this") -> OrchError:
    """Returns the refusal (65) of `feature` if one of `EXTRAS` is missing. It tells how to
    install everything that the extra installs."""
    packages = [name for name, extra in EXTRAS.items() if extra == EXTRAS[package]]
    return OrchError(f"{feature} needs {package}: {how_to_install(*packages)}", Exit.CONFIG)


def how_to_install(*packages: str) -> str:
    """Returns the command that installs these packages in the versions that orch requires.

    It never names orch: an index without our package may have a stranger's of that name. So it
    is the same however orch itself was installed: from a checkout, a file or an index, or not at
    all.
    """
    # The import takes 20 ms, which only a refusal pays.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements = requires("orch-train") or []
    except PackageNotFoundError:
        requirements = []
    lines = [line.partition(";")[0].strip() for line in requirements]
    bounded = {re.split(r"[^\w.-]", line)[0]: line for line in lines}
    return f"pip install {' '.join(repr(bounded.get(name, name)) for name in packages)}"


def check_installed(package: str, feature: str) -> None:
    """Raises OrchError (65) if one of `EXTRAS` that `feature` needs is missing. Imports nothing."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise not_installed(package, feature)


def nearest(typed: str, choices: Iterable[str]) -> str | None:
    """Returns the choice most like `typed` (case ignored), or None if nothing is close."""
    import difflib  # only a misspelt word pays for this import

    by_folded = {choice.casefold(): choice for choice in choices}
    folded = typed.casefold()
    matches = difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    if not matches:  # a prefix or a part of a long name is close too: "llama3" for "llama3_70b"
        matches = sorted(
            (c for c in by_folded if folded and (folded in c or c in folded)), key=len
        )[:1]
    return by_folded[matches[0]] if matches else None


def did_you_mean(typed: str, choices: Iterable[str], limit: int = 24) -> str:
    """Returns a phrase to end an error line with: `did you mean 'plan'? choices: list, plan,
    submit`.

    At most `limit` choices are listed, the rest are counted. Empty if there is nothing to choose
    from.
    """
    choices = list(choices)
    if not choices:
        return ""
    best = nearest(typed, choices)
    listed = ", ".join(choices[:limit])
    if len(choices) > limit:
        listed += f", ... ({len(choices) - limit} more)"
    suggestion = f"did you mean {best!r}? " if best else ""
    return f"{suggestion}choices: {listed}"
