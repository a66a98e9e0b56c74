"""`orch tune`: finds the fastest legal layout that fits, and layouts that are nearly as fast and
need less memory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from orchestrator.plan.interval import interval, plus_minus
from orchestrator.style import fold

if TYPE_CHECKING:
    from orchestrator.planner.search.costed_layout import CostedLayout
    from orchestrator.planner.search.search import SearchResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from orchestrator.cli.parser import add_any

    parser.add_argument(
        "--near",
        metavar="PERCENT",
        type=float,
        default=5.0,
        help="show smaller layouts up to this much slower (default: 5)",
    )
    add_any(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.session import home
    from orchestrator.config.compose import load
    from orchestrator.config.words import typed_values
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.search.auto import search
    from orchestrator.submit.cluster import ClusterResolver

    if not 0 <= args.near <= 1000:
        raise OrchError(
            f"--near {args.near}: must be 0 to 1000 percent of the fastest step", Exit.USAGE
        )
    if "parallel" not in typed_values(overrides):
        overrides = ["parallel=auto", *overrides]
    config = load(overrides, args.config_dir)
    resolve = ClusterResolver(home())
    answer = search(
        config,
        resolve(config.cluster),
        args.near / 100,
        args.any,
        resolve.profile(config),
    )
    if args.json:
        import json

        counts = {"legal": answer.counts.legal, "costed": answer.counts.costed}
        print(json.dumps({**counts, "front": rows(answer)}))
        return Exit.DONE
    from orchestrator.cli.terminal import style

    further_overrides = [
        override for override in overrides if not override.lstrip("+").startswith("parallel")
    ]
    print(page(answer, further_overrides, style().width))
    return Exit.DONE


def rows(answer: SearchResult) -> list[dict[str, object]]:
    """Returns the shown layouts as plain values: seconds, bytes, tokens."""
    documents = []
    for costed in shown(answer):
        low, high = interval(costed.step_s, costed.solution.time.sd)
        document = {
            "overrides": costed.overrides,
            "step_s": costed.step_s,
            "step_low_s": low,
            "step_high_s": high,
            "tokens_per_s_per_gpu": _tokens(costed),
            "memory_bytes": costed.memory.total,
            "order": list(costed.solution.parallel.order),
            "limited_by": costed.solution.time.limited_by,
            "equal": costed in answer.equal,
            "spine_bytes": costed.spine_bytes,
        }
        documents.append(document)
    return documents


def shown(answer: SearchResult) -> list[CostedLayout]:
    """Returns the layouts of equal speed, the recommended one first, and then slower ones that need
    less memory."""
    equal_layouts = [costed.layout for costed in answer.equal]
    return [
        *answer.equal,
        *(costed for costed in answer.front if costed.layout not in equal_layouts),
    ]


def _tokens(costed: CostedLayout) -> float:
    par = costed.solution.parallel
    return par.global_batch_tokens / costed.step_s / par.world_size


def page(answer: SearchResult, further_overrides: list[str], width: int = 80) -> str:
    best = answer.front[0]
    lines = [f"{'step':>9} {'':<5}  {'slower':>6}  {'tokens/s/GPU':>12}  {'memory':>9}  layout"]
    for costed in shown(answer):
        layout_words = " ".join(costed.overrides)
        deviation = plus_minus(costed.solution.time.sd)
        slower = "equal" if costed in answer.equal else f"{costed.step_s / best.step_s - 1:.1%}"
        figures = f"{costed.step_s:>7.4g} s{deviation:<6}  {slower:>6}  {_tokens(costed):>12,.0f}"
        figures += f"  {costed.memory.total / 2**30:>5.3g} GiB  "
        lines += fold(figures + layout_words, width, len(figures))
    recommended = answer.equal[0]
    counts = (
        f"{answer.counts.legal:,} legal layouts (times every nesting order) that fits"
        f" {best.memory.capacity / 2**30:.1f} GiB: {answer.counts.costed:,} costed in full, the"
        " rest excluded by bounds."
    )
    if len(answer.equal) == 1:
        verdict = (
            f"The first is the fastest of {counts} The others are slower and need less memory."
        )
    else:
        verdict = (
            f"The fastest of {counts} Layouts marked equal differ by less than the accuracy of the"
            " predictions (2%); the first of them moves the fewest bytes over the top of the"
            " network, or is proven by orch verify. The others are slower and need less memory."
        )
    lines += [
        "",
        *fold(verdict, width),
        *fold(f"It is limited by {recommended.solution.time.limited_by}.", width),
    ]
    lines += fold(
        f"See it: orch plan {' '.join([*further_overrides, *recommended.overrides])}",
        width,
        len("See it: "),
    )
    return "\n".join(lines)
