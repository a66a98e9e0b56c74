"""`orch demo`: trains a tiny model on this machine, scrapes its metrics and explains the output.
`make demo` runs it."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.run.folder import RunFolder
    from orchestrator.style import Style

OVERRIDES = ("cluster=local", "parallel=tp2_pp2_zero1")
#: Metrics that the demonstration shows.
SHOWN = (
    "orch_step_total",
    "orch_loss",
    "orch_tokens_total",
    "orch_mfu_ratio",
    "orch_memory_bytes",
    "orch_healthy_nodes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="train for N steps",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import json

    from orchestrator.cli.terminal import style
    from orchestrator.observe.follow import follow

    if args.steps is not None and args.steps < 2:
        raise OrchError(f"--steps {args.steps}: needs at least 2, to see the loss fall", Exit.USAGE)
    out = sys.stderr if args.json else sys.stdout
    look = style()
    backend, handle, folder = _submit(args, out, look)
    scraper = Scraper(folder)
    state = follow(folder, backend.state, out, look)
    metrics = scraper.stop()
    losses = read_losses(folder)
    fell = len(losses) > 1 and losses[-1][1] < losses[0][1]
    if args.json:
        document = {
            "handle": handle,
            "state": state.state,
            "exit": state.exit_code,
            "losses": losses,
            "loss_fell": fell,
            "run_dir": str(folder.path),
            "metrics": scraper.address,
            "metrics_page": metrics,
        }
        print(json.dumps(document))
    else:
        print(
            summary(
                folder,
                handle,
                losses,
                look,
                address=scraper.address,
                metrics=metrics,
            )
        )
    if state.exit_code == Exit.DONE:
        _check_shown(losses, fell, metrics)
    return state.exit_code or 0


def _submit(
    args: argparse.Namespace,
    out: TextIO,
    look: Style,
) -> tuple[Backend, str, RunFolder]:
    """Submits the job, and shows its command and its plan."""
    from orchestrator.cli.session import options_from_here
    from orchestrator.cli.streams import announce
    from orchestrator.config.compose import load
    from orchestrator.observe.pages.plan_page import render
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.held_signals import HeldSignals
    from orchestrator.submit.submission import check, prepare, send

    steps = [f"train.steps={args.steps}"] if args.steps else []
    overrides = [*OVERRIDES, *steps]
    options = options_from_here()
    submission = prepare(load(overrides, None), options)
    check(submission, options)
    backend, [(_, plan, bundle)] = submission
    command = f"$ orch submit {' '.join(overrides)} --follow\n"
    print(command, render(plan, look), "", sep="\n", file=out)

    with HeldSignals():
        handle = send(bundle, backend, options)
        announce(handle, out)
    return backend, handle, RunFolder(Path(bundle.request.run_dir))


def _check_shown(losses: list[tuple[int, float]], fell: bool, metrics: list[str]) -> None:
    """Raises OrchError (70) if a run that succeeded has not shown what a demonstration shows."""
    if not fell:
        raise OrchError(f"the run succeeded but the loss did not fall: {losses}", Exit.INTERNAL)
    if not metrics:
        raise OrchError("the run succeeded but its metrics could not be scraped", Exit.INTERNAL)


class Scraper:
    """Reads the Prometheus endpoint of the first node over HTTP during the run, as a Prometheus
    server would."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.address = None
        self._page = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stopped.wait(1.0):
            self.scrape()

    def scrape(self) -> None:
        import json
        from urllib.request import urlopen

        try:
            targets = json.loads(self.folder.discovery.read_text())
            address = targets[0]["targets"][0]
            with urlopen(f"http://{address}/metrics", timeout=5) as answer:
                page = answer.read().decode()
        except (OSError, ValueError, LookupError):  # not served yet, or not any more
            return
        if "orch_loss" in page:
            self.address = address
            self._page = page

    def stop(self) -> list[str]:
        """Stops reading, and returns the metrics of `SHOWN` from the last page."""
        self._stopped.set()
        self._thread.join(10)
        return [line for line in self._page.splitlines() if line.startswith(SHOWN)]


def read_losses(folder: RunFolder) -> list[tuple[int, float]]:
    """Returns (step, loss) of every step with a reported loss."""
    from orchestrator.observe.timeline import read_steps

    nodes = sorted(path.stem for path in folder.path.glob("metrics/*.jsonl"))
    return sorted(
        {
            line.step: line.loss for line in read_steps(folder, nodes) if line.loss is not None
        }.items()
    )


def summary(
    folder: RunFolder,
    handle: str,
    losses: list[tuple[int, float]],
    look: Style,
    *,
    address: str | None,
    metrics: list[str],
) -> str:
    """Returns the last page of the demonstration: the loss curve, the metrics and the next
    commands."""
    chosen = losses[:: max(1, len(losses) // 8)]
    if losses and chosen[-1] != losses[-1]:
        chosen.append(losses[-1])
    top = max((loss for _, loss in losses), default=1.0)
    curve = [
        f"  step {step:>5}  {loss:6.3f}  {'#' * round(40 * loss / top)}" for step, loss in chosen
    ]
    lines = [
        "",
        "Loss",
        *curve,
        "",
        f"Prometheus metrics, scraped from http://{address}/metrics during the run",
    ]
    lines += [f"  {line}" for line in metrics[:16]]
    lines += ["", "Where to look next"]
    lines += [f"  orch status {handle}        the same numbers, live during a run"]
    lines += [f"  orch logs {handle} --rank 0"]
    lines += [f"  {folder.path / 'report.json'}   planned against measured"]
    lines += ["  orch plan cluster=h100x64 parallel=tp8_pp4_zero1   a plan for 64 GPUs"]
    return "\n".join(lines)
