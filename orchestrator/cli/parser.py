"""The argument parser of the verbs: argparse with one-line errors and an exit code, without
abbreviations, and with the flags that every verb has."""

from __future__ import annotations

import argparse
from typing import NoReturn

from orchestrator.cli.examples import epilog
from orchestrator.cli.verbs import Verb
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_WIDTH = 80


class _Formatter(argparse.HelpFormatter):
    """Folds descriptions and keeps the lines of an epilog as they are."""

    def _fill_text(self, paragraph: str, width: int, indent: str) -> str:
        if "\n" in paragraph:
            return paragraph
        return super()._fill_text(paragraph, width, indent)


class Parser(argparse.ArgumentParser):
    tail = ""  # the arguments after the flags, as the usage line shows them

    def error(self, message: str) -> NoReturn:
        raise OrchError(f"{self.prog}: {message}", Exit.USAGE)

    def format_usage(self) -> str:
        usage = super().format_usage().rstrip().removesuffix("...").rstrip()
        if usage.endswith(self.tail):  # argparse may return this usage line itself
            return f"{usage}\n"
        last_line = usage.rsplit("\n", 1)[-1]
        below = "\n" + " " * len(f"usage: {self.prog}")
        separator = below if len(last_line) + len(self.tail) > _WIDTH else ""
        return f"{usage}{separator}{self.tail}\n"

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
    """Returns the parser of a verb, with the common flags. A verb may redefine a common flag."""
    parser = Parser(
        prog=f"orch {name}",
        description=verb.help,
        epilog=epilog(name),
        formatter_class=_Formatter,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    if verb.overrides and not verb.rest:
        parser.tail += " [key=value ...]"
    if verb.rest:
        parser.tail += " [key=value ...] script [args]"
    if verb.command:
        parser.tail += " [-- program args]"
    parser.add_argument("--json", action="store_true", help="print JSON; errors too")
    parser.add_argument(
        "--debug",
        action="store_true",
        help="print the traceback of an internal error",
    )
    if verb.overrides:
        parser.add_argument(
            "--config-dir",
            metavar="DIR",
            help="search this folder of group files first",
        )
    return parser


def add_any(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--any` of the verbs that search layouts without running them."""
    help_line = (
        "for your own program: parallel=auto may also choose layouts that the bundled trainer does"
        " not run"
    )
    parser.add_argument("--any", action="store_true", help=help_line)
