"""Output of the verbs: the style of the terminal, files named on the command line, progress, and a
run that is followed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.streams import announce
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.held_signals import HeldSignals
    from orchestrator.style import Style


def style() -> Style:
    """Returns the style of standard output: colour on a terminal unless NO_COLOR is set
    (no-color.org), 80 columns elsewhere, ASCII where the encoding demands it."""
    from orchestrator.style import Style

    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size((80, 24)).columns if terminal else 80
    return Style(
        colour=colour,
        width=max(60, min(width, 160)),
        unicode="utf" in (sys.stdout.encoding or "").lower(),
    )


def print_messages(lines: Iterable[str]) -> None:
    """Prints messages about a job on standard error, each once, folded to 80 columns."""
    from orchestrator.style import fold

    for line in dict.fromkeys(lines):
        print(*fold(f"orch: {line}", 80, 6), sep="\n", file=sys.stderr)


def print_json(value: object) -> None:
    """Prints a value, also structs and tuples, as one line of JSON."""
    import msgspec

    print(msgspec.json.encode(value).decode(), flush=True)


def write_file(path: Path, content: bytes | Iterable[bytes], flag: str) -> None:
    """Writes the file that the command line names with `flag`: whole, or not at all. Raises
    OrchError (64)."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        with scratch.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        scratch.replace(path)
    except OSError as error:
        raise OrchError(f"{flag} {path}: {error.strerror or error}", Exit.USAGE) from None
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def show_progress(done: int, total: int, label: str) -> None:
    """Overwrites one line on stderr with the progress of long work; prints nothing where stderr is
    not a terminal."""
    if sys.stderr.isatty():
        line = f"{done}/{total}  {label}" if done < total else ""
        print(
            f"\r\033[K{line}",
            end="",
            file=sys.stderr,
            flush=True,
        )


def follow_run(
    handle: str,
    folder: RunFolder,
    backend: Backend,
    *,
    as_json: bool,
    signals: HeldSignals,
    owned: bool = False,
) -> int:
    """Shows a run until it ends, and returns its exit code. With JSON, progress goes to stderr and
    the last state to stdout.

    A signal ends only this command, with a message that the run continues. The signals of an
    `owned` run end the run (`OwnedRun`), and the code is 128 and the number of the signal.
    """
    from orchestrator.backends.base import LogMirroring
    from orchestrator.cli.owned_run import OwnedRun
    from orchestrator.observe.follow import follow, follow_program
    from orchestrator.run.held_signals import interrupt
    from orchestrator.run.request import read_request

    out = sys.stderr if as_json else sys.stdout
    announce(handle, out)
    bundled = read_request(folder).worker.bundled
    lines = (
        backend.mirror(folder, follow=True)
        if isinstance(backend, LogMirroring) and not bundled
        else nullcontext()
    )
    run = OwnedRun(handle, folder, backend) if owned else None
    try:
        signals.deliver(run.record_signal if run else interrupt)
        with lines:
            read_state = run.state if run else backend.state
            watch = follow if bundled else follow_program
            state = watch(folder, read_state, out, style())
    except (KeyboardInterrupt, BrokenPipeError) as error:
        signals.deliver(None)
        out = sys.stderr if isinstance(error, BrokenPipeError) else out
        print(
            f"\nThe run continues. See it: orch status {handle}   End it: orch cancel {handle}",
            file=out,
            flush=True,
        )
        raise
    if as_json:
        print_json(state)
    if run and run.ended_by and state.state != "done":
        return 128 + run.ended_by
    return state.exit_code or 0
