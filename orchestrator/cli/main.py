"""`orch <verb> [flags] [key=value ...] [-- program args]`.

argparse reads verbs and flags; every other word is a Hydra override. This module imports nothing
heavy: `orch --help` and completion answer in about the time that Python needs to start.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterable, Sequence

from orchestrator.cli.streams import lost_output, open_standard_streams
from orchestrator.cli.verbs import GROUPS, VERBS, Verb
from orchestrator.errors import EXTRAS, Interrupted, OrchError, did_you_mean, nearest, not_installed
from orchestrator.plan.exits import MEANING, Exit

#: Exit codes that shells report for a process ended by Ctrl-C, and for one whose reader closed the
#: pipe.
INTERRUPTED = 130
PIPE_CLOSED = 141
#: New objects before Python's garbage collector runs. Commands create few reference cycles, and the
#: collector took a third of the time of a layout search.
GC_THRESHOLD = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit code of the process. Errors are one line on
    stderr, and JSON with `--json`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(GC_THRESHOLD)
    # The system frees the memory of the process at once: a last collection would only cost time.
    atexit.register(gc.freeze)
    open_standard_streams()
    acts = bool(argv) and argv[0] in VERBS and VERBS[argv[0]].acts
    code = PIPE_CLOSED
    try:
        code = _run_command(argv)
        lost = lost_output()  # flushes, so that a closed pipe raises BrokenPipeError here
    except BrokenPipeError:
        # Otherwise the interpreter reports the closed pipe when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code if acts else code or PIPE_CLOSED
    if lost and not code:
        return _report_error(lost, Exit.DONE if acts else Exit.CAPACITY, as_json=False)
    return code


def _run_command(argv: list[str]) -> int:
    """Runs the verb and reports whatever it raises; returns the exit code."""
    flags = argv[: argv.index("--")] if "--" in argv else argv
    as_json = "--json" in flags
    try:
        return _dispatch(argv)
    except OrchError as error:
        return _report_error(error.message, error.exit, as_json)
    except Interrupted as error:
        return 128 + error.signum
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in EXTRAS:
            refusal = not_installed(package, f"`orch {' '.join(argv[:1])}` with these arguments")
            return _report_error(refusal.message, refusal.exit, as_json)
        debug = "--debug" in flags or os.environ.get("ORCH_DEBUG") == "1"
        return _report_crash(error, as_json, debug)


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(help_text(), file=sys.stderr)
        return Exit.USAGE
    try:
        os.getcwd()
    except FileNotFoundError:
        raise OrchError(
            "the working folder has been deleted: change into another one", Exit.USAGE
        ) from None
    name, *arguments = argv
    if name in ("-h", "--help", "help"):
        if arguments and arguments[0] in VERBS:
            name = arguments[0]
            arguments = ["--help"]
        else:
            print(help_text())
            return Exit.DONE
    if name in ("-V", "--version"):
        name = "version"
    if name not in VERBS:
        raise OrchError(f"unknown verb {name!r}; {did_you_mean(name, VERBS)}", Exit.USAGE)
    return _run_verb(name, VERBS[name], arguments)


def _run_verb(name: str, verb: Verb, arguments: list[str]) -> int:
    from importlib import import_module

    from orchestrator.cli.parser import make_parser

    module = import_module(f"orchestrator.cli.verbs.{name}")
    command = None
    if verb.rest:
        parser = make_parser(name, verb)
        module.add_arguments(parser)
        args = parser.parse_args(arguments)
        overrides = []
        while args.script and module.is_override(args.script[0]):
            override, *following = args.script
            overrides.append(override)
            args = parser.parse_args(following, args)
        return int(module.run(args, overrides) or 0)
    if "--" in arguments:
        cut = arguments.index("--")
        command = arguments[cut + 1 :]
        arguments = arguments[:cut]
        if not verb.command:
            raise OrchError(f"`orch {name}` runs no program: nothing may follow `--`")
        if not command:
            raise OrchError(f"`orch {name} ... --` needs a program to run after `--`")
    parser = make_parser(name, verb)
    module.add_arguments(parser)
    args, extra = parser.parse_known_intermixed_args(arguments)
    args.command = command
    return int(module.run(args, _overrides(name, verb, extra, parser.flags())) or 0)


def _overrides(
    name: str,
    verb: Verb,
    unknown_arguments: list[str],
    flags: list[str],
) -> list[str]:
    """Returns the arguments that argparse did not recognise, which must be Hydra overrides.

    Raises OrchError (64) for any other argument, and for a verb without overrides."""
    for argument in unknown_arguments:
        if argument.startswith("-") and argument != "-":
            flag = argument.split("=", 1)[0]
            raise OrchError(f"`orch {name}` has no flag {flag}; {did_you_mean(flag, flags)}")
        if not verb.overrides:
            keeps = " keeps the configuration of its run and" if verb.keeps_configuration else ""
            raise OrchError(
                f"`orch {name}`{keeps} does not take {argument!r}; see `orch {name} --help`"
            )
        if "=" not in argument and not argument.startswith("~"):
            hint = nearest(argument, VERBS)
            raise OrchError(
                f"{argument!r} is not key=value"
                + (f"; did you mean the verb {hint!r}?" if hint else "")
                + "; overrides look like cluster=h100x64 or train.steps=100"
            )
    return unknown_arguments


def help_text() -> str:
    """Returns the page of `orch --help`."""
    width = max(map(len, VERBS))
    groups = []
    for title, verbs in GROUPS.items():
        rows = _table((f"{name:<{width}}", verb.help) for name, verb in verbs.items())
        groups.append(f"{title}:\n{rows}")
    verbs_by_group = "\n\n".join(groups)
    codes = _table((f"{int(code):>3}", meaning) for code, meaning in MEANING.items())
    return f"""usage: orch <verb> [flags] [key=value ...] [-- program args]

From "this model, this cluster" to a placed, running, observed training job.

{verbs_by_group}

configuration (Hydra overrides; `orch config --choices` lists groups and files):
  cluster=h100x64         a file of a group; Hydra users type +cluster=h100x64,
                          which is the same; without a cluster: local
  parallel=tp8_pp4_zero1  degrees as a word: tpN ppN dpN cpN epN zeroN vppN spN;
                          without dp: all remaining GPUs
  train.steps=100         one key
  --config-dir DIR        your own files of any group first; else ./conf if
                          conf/.orch exists

start here:
  orch run --nproc-per-node 8 train.py
  orch plan cluster=h100x64 parallel=tp8_pp4_zero1
  orch submit cluster=local parallel=tp2_pp2_zero1 --follow

exit codes:
{codes}
  {INTERRUPTED:>3}  interrupted (128 and the signal's number: 129 hangup, 143 terminated)

`orch <verb> --help` shows a verb's flags and two examples. Every verb takes
--json. ORCH_DEBUG=1 or --debug shows tracebacks."""


def _table(rows: Iterable[tuple[str, str]]) -> str:
    entries = []
    for name, description in rows:
        start = f"  {name}  "
        indent = "\n" + " " * len(start)
        entries.append(start + indent.join(_folded(description, 76 - len(name))))
    return "\n".join(entries)


def _folded(paragraph: str, width: int) -> list[str]:
    """Folds a paragraph into lines of at most `width` characters. (Importing `textwrap` would take
    a tenth of the time of `orch --help`.)"""
    first, *remaining = paragraph.split()
    lines = [first]
    for next_word in remaining:
        if len(lines[-1]) + 1 + len(next_word) > width:
            lines.append(next_word)
        else:
            lines[-1] += f" {next_word}"
    return lines


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _report_error(message: str, code: int, as_json: bool) -> int:
    """Prints one line on stderr, and with `--json` the same as an object on stdout; returns the
    exit code."""
    message = _one_line(message)
    print(f"orch: error: {message}", file=sys.stderr)
    if as_json:
        import json

        # `code` may be a plain integer: the keys of MEANING are IntEnum members, which equal it.
        meaning = MEANING[Exit(code)] if code in MEANING else ""
        print(
            json.dumps(
                {
                    "error": {
                        "message": message,
                        "exit": int(code),
                        "meaning": meaning,
                    }
                }
            )
        )
    return int(code)


def _report_crash(error: Exception, as_json: bool, debug: bool) -> int:
    """Reports a bug of orch in one line, which names the place of the traceback."""
    import traceback

    traceback_lines = "".join(traceback.format_exception(error))
    location = "above" if debug else _save_traceback(traceback_lines)
    if debug:
        print(traceback_lines, file=sys.stderr, end="")
    return _report_error(
        f"internal error: {type(error).__name__}: {error} (traceback: {location})",
        Exit.INTERNAL,
        as_json,
    )


def _save_traceback(report: str) -> str:
    """Writes a traceback to a file that only this user can read, and returns its path; without a
    writable folder, returns how to see the traceback."""
    import tempfile

    try:
        descriptor, path = tempfile.mkstemp(prefix="orch-crash-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(report)
        return path
    except OSError:
        return "ORCH_DEBUG=1 shows it"


if __name__ == "__main__":
    sys.exit(main())
