"""Opens the token store of a run, and checks that all ranks and all attempts of the run read the
same text."""

from __future__ import annotations

from orchestrator.plan import Plan
from orchestrator.plan.worker import PINS, WorkerEnv, pin_file
from trainer.comm.control import ControlPath
from trainer.data.build import open_tokens, rate_limited
from trainer.data.store import TokenStore
from trainer.errors import DataError, Stopped
from trainer.worker.reporter import Reporter
from trainer.worker.termination import TerminationSignal

from .pins import DataPin, pin_data

#: Minimum seconds between progress reports of tokenising.
PROGRESS_EVERY_S = 1.0


def open_data(
    plan: Plan,
    env: WorkerEnv,
    reporter: Reporter,
    termination: TerminationSignal,
    control: ControlPath,
) -> TokenStore:
    """Opens the tokens of the corpus, the same on all ranks and at each start of the run. Raises
    DataError."""

    def progress(phase: str, done: int, total: int) -> None:
        reporter.event(
            "data_progress",
            phase=phase,
            done=done,
            total=total,
        )
        if termination.received:
            raise Stopped(f"{termination.received} while preparing data: nothing to save yet")

    store = open_tokens(plan.job.data, rate_limited(progress, PROGRESS_EVERY_S))

    def find_problem(keys: list[bytes]) -> str:
        odd_rank = next((rank for rank, key in enumerate(keys) if key != keys[0]), None)
        if odd_rank is None:
            return _pin_problem(plan, env, store, reporter)
        node = plan.ranks[odd_rank].node
        first_node = plan.ranks[0].node
        return (
            f"rank {odd_rank} on {node} reads other text than rank 0 on {first_node} (data.paths)"
        )

    own_key = f"{store.index.key} {store.identity}".encode()
    if problem := control.judge(own_key, find_problem):
        raise DataError(problem)
    reporter.event(
        "data_ready",
        tokens=store.index.tokens,
        documents=store.index.documents,
        key=store.index.key,
    )
    return store


def _pin_problem(
    plan: Plan,
    env: WorkerEnv,
    store: TokenStore,
    reporter: Reporter,
) -> str:
    """Pins the corpus of the run. Returns the problem with an earlier pin, or ""."""
    pin = pin_file(env.run_dir, PINS["changed-data"])
    paths = ", ".join(plan.job.data.paths)
    try:
        return pin_data(pin, DataPin(store.index.key, store.identity), paths)
    except DataError as error:
        return str(error)
    except OSError as error:
        reporter.event("pin_failed", error=f"{pin}: {error.strerror or error}")
        return ""


def odd_samples(plan: Plan, fingerprints: list[bytes]) -> str:
    """Names a rank whose samples have another fingerprint than those of the first rank with the
    same replica."""
    first_rank = dict[tuple[int, int], int]()
    for rank, planned in enumerate(plan.ranks):
        coord = planned.coord
        lead = first_rank.setdefault((coord.dp, coord.ep), rank)
        if fingerprints[rank] != fingerprints[lead]:
            return (
                f"rank {rank} on {planned.node} has read other tokens than rank {lead} on"
                f" {plan.ranks[lead].node}"
            )
    return "the ranks' fingerprints do not add up"
