"""argparse with our conventions: one-line errors with an exit code, no abbreviations, flags that
every verb has."""

from __future__ import annotations

import argparse
from typing import NoReturn

from orchestrator.cli.verbs import Verb
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_WIDTH = 80


class Parser(argparse.ArgumentParser):
    tail = ""  # what follows the flags on the command line, for the usage line

    def error(self, message: str) -> NoReturn:
        raise OrchError(f"{self.prog}: {message}", Exit.USAGE)

    def format_usage(self) -> str:
        text = super().format_usage().rstrip()
        if text.endswith(self.tail):  # argparse may hand our own text back
            return f"{text}\n"
        last = text.rsplit("\n", 1)[-1]
        apart = "\n" + " " * 10 if len(last) + len(self.tail) > _WIDTH else ""
        return f"{text}{apart}{self.tail}\n"

    def format_help(self) -> str:
        plain = super().format_usage()
        return super().format_help().replace(plain, self.format_usage(), 1)

    def flags(self) -> list[str]:
        """Returns every long flag that `--help` shows, for completion and did-you-mean."""
        return sorted(
            flag
            for flag, action in self._option_string_actions.items()
            if flag.startswith("--") and action.help != argparse.SUPPRESS
        )


def make_parser(name: str, verb: Verb) -> Parser:
    """The parser of one verb with the common flags; a verb may define a common flag anew."""
    parser = Parser(
        prog=f"orch {name}", description=verb.help, allow_abbrev=False, conflict_handler="resolve"
    )
    parser.tail = (" [key=value ...]" if verb.overrides else "") + (
        " [-- program args]" if verb.command else ""
    )
    parser.add_argument("--json", action="store_true", help="print JSON; errors too")
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an internal error"
    )
    if verb.overrides:
        parser.add_argument(
            "--config-dir", metavar="DIR", help="a folder of your own group files, searched first"
        )
    return parser


def add_any(parser: argparse.ArgumentParser) -> None:
    """The flag of the verbs that search layouts without a program to run them."""
    text = (
        "for a program of your own: parallel=auto also chooses what the bundled trainer does"
        " not run"
    )
    parser.add_argument("--any", action="store_true", help=text)
