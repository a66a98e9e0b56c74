"""What a submission has to offer a backend: one launch request, or one for each size of an elastic job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.backends.base import After, Backend, Queueing
from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan
from orchestrator.planner.elastic.sizes import Resolve, plan_sizes
from orchestrator.run.registry import find_run
from orchestrator.run.request import SubmissionBundle


class Offer(NamedTuple):
    config: Config
    plan: Plan
    bundle: SubmissionBundle


def parse_after(words: Sequence[str], home: Path) -> list[After]:
    """`RUN` or `HOW:RUN` of --after. OrchError (64) for an unknown run or way."""
    found = []
    for word in words:
        how, colon, run = word.partition(":")
        if not colon or run.startswith("//"):  # slurm://<id> is a handle
            how, run = "ok", word
        if how not in ("ok", "any", "notok"):
            raise OrchError(f"--after {word}: {how!r} is not ok, any or notok", Exit.USAGE)
        found.append(After(how, find_run(home, run)))
    return found


def make_offers(
    config: Config,
    resolve: Resolve,
    any_memory: bool,
    make_bundle: Callable[[Config, Plan, Mapping[int, Plan]], SubmissionBundle],
) -> list[Offer]:
    """One offer, or one for each legal size, largest first; all of them carry the plans of all sizes."""
    found = plan_sizes(config, resolve, any_memory).legal
    plans = {size.nodes: size.plan for size in found} if config.nodes else {}
    return [Offer(size.config, size.plan, make_bundle(size.config, size.plan, plans)) for size in found]


def choose(offers: Sequence[Offer], backend: Backend, environ: Mapping[str, str]) -> tuple[Offer, list[str]]:
    """The offer to send, and what to tell the user. A backend without a queue takes the largest."""
    if not isinstance(backend, Queueing):
        return offers[0], []
    index, lines = backend.choose([offer.bundle for offer in offers], environ)
    return offers[index], lines


def preview(offers: Sequence[Offer], backend: Backend, environ: Mapping[str, str]) -> tuple[Offer, list[str]]:
    """As `choose`, where nothing will be sent: what the scheduler refuses, or its absence, is told, not raised."""
    try:
        return choose(offers, backend, environ)
    except OrchError as error:
        return offers[0], [f"the largest size is shown: {error.message}"] if len(offers) > 1 else []
