"""`orch completion bash|zsh|fish`: completes verbs, flags, groups, file names, keys and run ids,
from directory listings and without Hydra."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from orchestrator.cli.verbs import VERBS
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

BASH = """\
_orch() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##* }"
    COMPREPLY=($(orch completion --line "$line" 2>/dev/null))
    if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#*=}"); fi
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.] ]]; then compopt -o nospace; fi
}
complete -o default -o bashdefault -F _orch orch
"""
ZSH = """\
#compdef orch
_orch() {
    local -a found ends
    found=("${(@f)$(orch completion --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    ends=("${(@M)found:#*[=.]}")
    found=("${(@)found:|ends}")
    (( ${#ends} )) && compadd -S '' -- "${ends[@]}"
    (( ${#found} )) && [[ -n "${found[1]}" ]] && compadd -- "${found[@]}" || _files
}
compdef _orch orch
"""
FISH = """\
complete -c orch -a '(orch completion --line (commandline -cp | string collect) 2>/dev/null)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
HINTS = {
    "bash": '# eval "$(orch completion bash)" in ~/.bashrc',
    "zsh": '# eval "$(orch completion zsh)" in ~/.zshrc, after compinit',
    "fish": "# orch completion fish > ~/.config/fish/completions/orch.fish",
}
#: Verbs whose argument is a run.
RUN_VERBS = ("status", "logs", "cancel", "resume", "resize", "rm", "paths")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        nargs="?",
        choices=sorted(SCRIPTS),
        help="print the script of this shell",
    )
    parser.add_argument("--line", help="complete this command line, which ends at the cursor")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.line is not None:
        print("\n".join(complete(args.line)))
    elif args.shell:
        print(f"{HINTS[args.shell]}\n{SCRIPTS[args.shell]}", end="")
    else:
        raise OrchError(f"orch completion: name a shell: {', '.join(sorted(SCRIPTS))}", Exit.USAGE)
    return Exit.DONE


def complete(line: str) -> list[str]:
    """Returns the words that may replace the last word of a command line (empty after a space), in
    an order for people."""
    *arguments, last_word = line.split(" ")
    arguments = [argument for argument in arguments if argument]
    if len(arguments) <= 1:
        return _starting(VERBS, last_word)
    verb = arguments[1]
    if verb not in VERBS or "--" in arguments:
        return []
    if last_word.startswith("-"):
        return _starting(_flags(verb), last_word)
    if verb == "completion":
        return _starting(SCRIPTS, last_word)
    if verb in RUN_VERBS:
        return _starting(_runs(), last_word.removeprefix("local://"))
    if arguments[-1] == "--choices":
        return _starting(_library(arguments).groups(), last_word)
    if arguments[-1].startswith("--") or not VERBS[verb].overrides:
        return []  # the value may be a file name, which the shell completes
    prefix = last_word[: len(last_word) - len(last_word.lstrip("+"))]
    return [prefix + override for override in _overrides(last_word.removeprefix(prefix), arguments)]


def _starting(choices: object, prefix: str) -> list[str]:
    return [choice for choice in choices if choice.startswith(prefix)]  # type: ignore[attr-defined]


def _flags(verb: str) -> list[str]:
    from importlib import import_module

    from orchestrator.cli.parser import make_parser

    parser = make_parser(verb, VERBS[verb])
    import_module(f"orchestrator.cli.verbs.{verb}").add_arguments(parser)
    return parser.flags()


def _runs() -> list[str]:
    home = Path(os.environ.get("ORCH_HOME") or Path.home() / ".orch")
    try:
        return sorted(
            (path.name for path in (home / "runs").iterdir() if path.is_dir()),
            reverse=True,
        )
    except OSError:
        return []


def _library(arguments: list[str]):
    from orchestrator.config.groups import Library, folders

    config_dirs = (
        arguments[arguments.index("--config-dir") + 1 :][:1] if "--config-dir" in arguments else []
    )
    try:
        return Library(folders(config_dirs[0] if config_dirs else None))
    except OrchError:
        return Library(folders())


def _overrides(override: str, arguments: list[str]) -> list[str]:
    key, equals, value = override.partition("=")
    library = _library(arguments)
    groups = library.groups()
    if equals and key in groups:
        return [f"{key}={name}" for name in library.files(key) if name.startswith(value)]
    if equals:
        return [f"{key}={choice}" for choice in _values(key) if choice.startswith(value)]
    if "." in key:
        return _starting(_keys(key), key)
    return _starting(
        [*(f"{group}=" for group in groups), *(f"{section}." for section in _parts())],
        key,
    )


def _parts() -> list[str]:
    from orchestrator.config.schema import Config
    from orchestrator.config.structured import fields

    return [name for name in fields(Config) if name != "choices"]


def _keys(key: str) -> list[str]:
    """Returns the keys beside a dotted key, ready to continue typing: `train.steps=`,
    `cluster.gpu.`."""
    from orchestrator.config.config_errors import annotation_at
    from orchestrator.config.structured import fields, struct_of

    parent = key.rpartition(".")[0]
    struct = struct_of(annotation_at(parent.split(".")))
    if struct is None:
        return []
    return [
        f"{parent}.{name}{'.' if struct_of(field.type) else '='}"
        for name, field in fields(struct).items()
    ]


def _values(key: str) -> list[str]:
    from typing import Literal, get_args, get_origin

    from orchestrator.config.config_errors import annotation_at
    from orchestrator.config.structured import bare

    kind = bare(annotation_at(key.split(".")))
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return ["true", "false"] if kind is bool else []
