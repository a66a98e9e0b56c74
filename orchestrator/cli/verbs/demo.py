"""`orch demo`: the main job on this machine, watched, scraped and explained. What `make demo`
runs."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.run.folder import RunFolder
    from orchestrator.style import Style

LINE = ("+cluster=local", "parallel=tp2_pp2_zero1")
#: What the demonstration shows of the metrics page; the rest is one `curl` away.
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
        "--steps", type=int, metavar="N", help="train for N steps instead of the default"
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.session import from_here
    from orchestrator.cli.streams import announce
    from orchestrator.cli.terminal import style
    from orchestrator.config.compose import load
    from orchestrator.observe.follow import follow
    from orchestrator.observe.pages.plan_page import render
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.held_signals import HeldSignals
    from orchestrator.submit.submission import check, prepare, send

    if args.steps is not None and args.steps < 2:
        raise OrchError(f"--steps {args.steps}: at least 2, to see the loss fall", Exit.USAGE)
    overrides_shown = [*LINE, *([f"train.steps={args.steps}"] if args.steps else [])]
    out = sys.stderr if args.json else sys.stdout
    look = style()
    options = from_here()
    submission = prepare(load(overrides_shown, None), options)
    check(submission, options)
    backend, [(_, plan, bundle)] = submission
    print(
        f"$ orch submit {' '.join(overrides_shown)} --follow\n",
        render(plan, look),
        "",
        sep="\n",
        file=out,
    )

    with HeldSignals():
        handle = send(bundle, backend, options)
        announce(handle, out)
    folder = RunFolder(Path(bundle.request.run_dir))
    scraper = Scraper(folder)
    state = follow(folder, backend.state, out, look)
    pages = scraper.stop()
    losses = read_losses(folder)
    fell = len(losses) > 1 and losses[-1][1] < losses[0][1]
    if args.json:
        import json

        facts = {
            "handle": handle,
            "state": state.state,
            "exit": state.exit_code,
            "losses": losses,
            "loss_fell": fell,
        }
        print(
            json.dumps(
                {
                    **facts,
                    "run_dir": str(folder.path),
                    "metrics": scraper.address,
                    "metrics_page": pages,
                }
            )
        )
    else:
        print(summary(folder, handle, losses, scraper.address, pages, look))
    if state.exit_code == Exit.DONE and not (fell and pages):
        problem = (
            "its metrics were never there to scrape" if fell else f"the loss did not fall: {losses}"
        )
        raise OrchError(f"the run ended well but {problem}", Exit.INTERNAL)
    return state.exit_code or 0


class Scraper:
    """Reads the first node's Prometheus endpoint over HTTP during the run, as a Prometheus server
    would."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.address = None
        self._page = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.wait(1.0):
            self.scrape()

    def scrape(self) -> None:
        import json
        from urllib.request import urlopen

        try:
            targets = json.loads(self.folder.discovery.read_text())
            address = targets[0]["targets"][0]
            with urlopen(f"http://{address}/metrics", timeout=5) as answer:
                page = answer.read().decode()
        except (OSError, ValueError, LookupError):  # not there yet, or not there any more
            return
        if "orch_loss" in page:
            self.address = address
            self._page = page

    def stop(self) -> list[str]:
        """Lines of the last page that was read, those that `SHOWN` names."""
        self._over.set()
        self._thread.join(10)
        return [line for line in self._page.splitlines() if line.startswith(SHOWN)]


def read_losses(folder: RunFolder) -> list[tuple[int, float]]:
    """(step, loss) of every step that a rank reported a loss for."""
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
    address: str | None,
    page: list[str],
    look: Style,
) -> str:
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
        f"Prometheus, scraped from http://{address}/metrics while it ran",
    ]
    lines += [f"  {line}" for line in page[:16]]
    lines += ["", "Where to look next"]
    lines += [f"  orch status {handle}        the same numbers, live while a run lasts"]
    lines += [f"  orch logs {handle} --rank 0"]
    lines += [f"  {folder.path / 'report.json'}   planned against measured"]
    lines += ["  orch plan +cluster=h100x64 parallel=tp8_pp4_zero1   a plan for 64 GPUs"]
    return "\n".join(lines)
