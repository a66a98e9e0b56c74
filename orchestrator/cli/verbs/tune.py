"""`orch tune`: the fastest legal layout that fits, and those that are nearly as fast and need less memory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from orchestrator.plan.interval import interval, plus_minus

if TYPE_CHECKING:
    from orchestrator.planner.search.search import CostedLayout, SearchResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from orchestrator.cli.parser import add_any

    parser.add_argument("--near", metavar="PERCENT", type=float, default=5.0, help="how much slower is near (5)")
    add_any(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.session import home
    from orchestrator.config.compose import load
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.search.auto import search
    from orchestrator.submit.cluster import ClusterResolver

    if not 0 <= args.near <= 1000:
        raise OrchError(f"--near {args.near}: a share of the fastest step, 0 to 1000 percent", Exit.USAGE)
    if not any(word.lstrip("+").startswith("parallel=") for word in overrides):
        overrides = ["parallel=auto", *overrides]
    config = load(overrides, args.config_dir)
    resolve = ClusterResolver(home())
    answer = search(config, resolve(config.cluster), args.near / 100, args.any, resolve.profile(config))
    if args.json:
        import json

        print(json.dumps({"legal": answer.counts.legal, "costed": answer.counts.costed, "front": rows(answer)}))
        return Exit.DONE
    print(page(answer, [word for word in overrides if not word.lstrip("+").startswith("parallel")]))
    return Exit.DONE


def rows(answer: SearchResult) -> list[dict[str, object]]:
    return [
        {
            "overrides": found.overrides,
            "step_s": found.step_s,
            **dict(zip(("step_low_s", "step_high_s"), interval(found.step_s, found.solution.time.sd), strict=True)),
            "tokens_per_s_per_gpu": _tokens(found),
            "memory_bytes": found.memory.total,
            "order": list(found.solution.parallel.order),
            "limited_by": found.solution.time.limited_by,
            "equal": found.equal,
            "spine_bytes": found.spine_bytes,
        }
        for found in answer.front
    ]


def _tokens(found: CostedLayout) -> float:
    par = found.solution.parallel
    return par.global_batch_tokens / found.step_s / par.world_size


def _ties(answer: SearchResult) -> list[str]:
    """What is as fast as the first, as far as the model can tell, and which of those to prefer."""
    from orchestrator.style import si

    equal = [found for found in answer.front if found.equal]
    if len(equal) < 2:
        return []
    least = min(equal, key=lambda found: found.spine_bytes)
    text = f"Those with = ({len(equal)}) are as fast as the first, as far as predictions can tell."
    if least.spine_bytes < equal[0].spine_bytes:
        text += f" Of them {' '.join(least.overrides)} sends least over the top of the network: "
        text += f"{si(least.spine_bytes, 'B')} a step, the first {si(equal[0].spine_bytes, 'B')}."
    return [text]


def page(answer: SearchResult, rest: list[str]) -> str:
    best = answer.front[0]
    lines = [f"{'step':>9} {'':<5}  {'slower':>6}  {'tokens/s/GPU':>12}  {'memory':>9}  layout"]
    for found in answer.front:
        told, near = " ".join(found.overrides), plus_minus(found.solution.time.sd)
        slower = f"{'=' if found.equal else ' '}{found.step_s / best.step_s - 1:>5.1%}"
        lines.append(
            f"{found.step_s:>7.4g} s{near:<6}  {slower}  {_tokens(found):>12,.0f}"
            f"  {found.memory.total / 2**30:>5.3g} GiB  {told}"
        )
    time = best.solution.time
    lines += [
        "",
        f"The first is the fastest of {answer.counts.legal:,} legal layouts (times every nesting order) that fits"
        f" {best.memory.capacity / 2**30:.1f} GiB: {answer.counts.costed:,} costed in full, the rest ruled out by"
        " bounds. The others are slower and need less memory.",
        *_ties(answer),
        f"It is limited by {time.limited_by}.",
        f"See it: orch plan {' '.join([*rest, *best.overrides])}",
    ]
    return "\n".join(lines)
