"""`orch tune`: the fastest legal layout that fits, and those that are nearly as fast and need less
memory."""

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
        "--near", metavar="PERCENT", type=float, default=5.0, help="how much slower is near (5)"
    )
    add_any(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.session import home
    from orchestrator.config.compose import load
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.search.auto import search
    from orchestrator.submit.cluster import ClusterResolver

    if not 0 <= args.near <= 1000:
        raise OrchError(
            f"--near {args.near}: a share of the fastest step, 0 to 1000 percent", Exit.USAGE
        )
    if not any(word.lstrip("+").startswith("parallel=") for word in overrides):
        overrides = ["parallel=auto", *overrides]
    config = load(overrides, args.config_dir)
    resolve = ClusterResolver(home())
    answer = search(
        config, resolve(config.cluster), args.near / 100, args.any, resolve.profile(config)
    )
    if args.json:
        import json

        print(
            json.dumps(
                {
                    "legal": answer.counts.legal,
                    "costed": answer.counts.costed,
                    "front": rows(answer),
                }
            )
        )
        return Exit.DONE
    from orchestrator.cli.terminal import style

    rest = [word for word in overrides if not word.lstrip("+").startswith("parallel")]
    print(page(answer, rest, style().width))
    return Exit.DONE


def rows(answer: SearchResult) -> list[dict[str, object]]:
    return [
        {
            "overrides": found.overrides,
            "step_s": found.step_s,
            **dict(
                zip(
                    ("step_low_s", "step_high_s"),
                    interval(found.step_s, found.solution.time.sd),
                    strict=True,
                )
            ),
            "tokens_per_s_per_gpu": _tokens(found),
            "memory_bytes": found.memory.total,
            "order": list(found.solution.parallel.order),
            "limited_by": found.solution.time.limited_by,
            "equal": found in answer.equal,
            "spine_bytes": found.spine_bytes,
        }
        for found in shown(answer)
    ]


def shown(answer: SearchResult) -> list[CostedLayout]:
    """The layouts that are equal, the one to take first, then slower ones that need less memory."""
    known = [found.layout for found in answer.equal]
    return [*answer.equal, *(found for found in answer.front if found.layout not in known)]


def _tokens(found: CostedLayout) -> float:
    par = found.solution.parallel
    return par.global_batch_tokens / found.step_s / par.world_size


def page(answer: SearchResult, rest: list[str], width: int = 80) -> str:
    best = answer.front[0]
    lines = [f"{'step':>9} {'':<5}  {'slower':>6}  {'tokens/s/GPU':>12}  {'memory':>9}  layout"]
    for found in shown(answer):
        told = " ".join(found.overrides)
        near = plus_minus(found.solution.time.sd)
        slower = "equal" if found in answer.equal else f"{found.step_s / best.step_s - 1:.1%}"
        figures = f"{found.step_s:>7.4g} s{near:<6}  {slower:>6}  {_tokens(found):>12,.0f}"
        figures += f"  {found.memory.total / 2**30:>5.3g} GiB  "
        lines += fold(figures + told, width, len(figures))
    taken = answer.equal[0]
    counts = (
        f"{answer.counts.legal:,} legal layouts (times every nesting order) that fits"
        f" {best.memory.capacity / 2**30:.1f} GiB: {answer.counts.costed:,} costed in full, the"
        " rest ruled out by bounds."
    )
    if len(answer.equal) == 1:
        said = f"The first is the fastest of {counts} The others are slower and need less memory."
    else:
        said = (
            f"The fastest of {counts} Those marked equal differ by less than predictions can tell"
            " (2%); of them the first moves fewest bytes over the top of the network, or is proven"
            " by orch verify. The others are slower and need less memory."
        )
    lines += [
        "",
        *fold(said, width),
        *fold(f"It is limited by {taken.solution.time.limited_by}.", width),
    ]
    lines += fold(
        f"See it: orch plan {' '.join([*rest, *taken.overrides])}", width, len("See it: ")
    )
    return "\n".join(lines)
