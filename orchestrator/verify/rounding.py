"""Measures which linears of a model should stay wide, by `python -m trainer.rounding`, and what
that costs in the plan's time and memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET, structs

from orchestrator import start
from orchestrator.cost.context import CostContext
from orchestrator.cost.dual import value_of
from orchestrator.cost.memory.rank_memory import memory_by_pp_rank
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.of_plan import context_of, cost_of
from orchestrator.cost.workload import Workload
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan
from orchestrator.plan.document import Matmul
from orchestrator.plan.exits import MEANING
from orchestrator.plan.rounding.measurement import Answer, Measurement, Request
from orchestrator.plan.trained import FP8, refusal

from .run_cells import last_line, running

#: The recipe that is measured if neither a run nor the command line names one.
DEFAULT: Matmul = "fp8_tensor"


def with_matmul(plan: Plan, matmul: Matmul | None = None) -> Plan:
    """Returns the plan with products in 8 bits: by `matmul`, by its own recipe, or by the default.
    Raises OrchError (65) for a recipe that the trainer does not run, and for a user's program."""
    if plan.program:
        raise OrchError(
            "orch precision measures the bundled trainer's linears; this is the plan of a user's"
            " program, without a model",
            Exit.CONFIG,
        )
    recipe = matmul or plan.job.matmul or DEFAULT
    if recipe not in FP8:
        raise OrchError(
            f"train.matmul={recipe}: the trainer does not run it; legal: {', '.join(FP8)}",
            Exit.CONFIG,
        )
    return structs.replace(plan, job=structs.replace(plan.job, matmul=recipe))


def measure(
    request: Request,
    on_progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Measurement:
    """Runs a measurement in a process of its own. Raises OrchError with the trainer's message and
    exit code."""
    with tempfile.TemporaryDirectory(prefix="orch-precision-") as folder:
        path = Path(folder) / "request.json"
        errors = Path(folder) / "stderr"
        path.write_bytes(msgspec.json.encode(request))
        command = [*start.command("trainer.rounding"), str(path)]
        measurement = None
        with running(command, errors, os.environ) as (lines, wait):
            for line in lines:
                answer = msgspec.json.decode(line, type=Answer)
                on_progress(answer.done, answer.total, answer.label)
                measurement = answer.measurement
            code = wait()
        if measurement is None or code:
            message = last_line(errors).removeprefix("trainer.rounding: ")
            if code < 0:
                message = f"the measurement was ended by signal {-code}"
            raise OrchError(message, Exit(code) if code in MEANING else Exit.INTERNAL)
        return measurement


class Price(NamedTuple):
    """What the plan says of a step with some linears wide."""

    step_s: float
    memory_bytes: int  # of the fullest rank


def price(plan: Plan, wide: Sequence[str], context: CostContext | None = None) -> Price:
    """Returns the price of a step of the plan with these linears wide. Raises OrchError (65) if the
    cluster's GPU has no rate for fp8."""
    train = structs.replace(plan.job.train, matmul_wide=list(wide) or UNSET)
    priced = structs.replace(plan, job=structs.replace(plan.job, train=train))
    workload = Workload.of_plan(priced)
    recipe = recipe_of(plan.time.software or "orch", plan.job.optim)
    accounts = memory_by_pp_rank(workload, plan.cluster, recipe, plan.job.matmul)
    return Price(
        step_s=value_of(cost_of(priced, context or context_of(priced)).step_s),
        memory_bytes=max(account.total for account in accounts),
    )


class Prices(NamedTuple):
    """The prices of a step with all linears in 8 bits, with those of the proposal wide, and without
    8 bits."""

    narrow: Price
    proposed: Price
    wide: Price


def prices(plan: Plan, measurement: Measurement) -> Prices | str:
    """Returns the prices of a measurement's proposal, or why the plan has none."""
    patterns = [proposal.pattern for proposal in measurement.proposals]
    unrounded = structs.replace(plan, job=structs.replace(plan.job, matmul=""))
    try:
        return Prices(price(plan, []), price(plan, patterns), price(unrounded, []))
    except OrchError as error:
        return error.message


def document(plan: Plan, measurement: Measurement) -> dict[str, object]:
    """Returns what `orch precision --json` prints."""
    costs = prices(plan, measurement)
    patterns = [proposal.pattern for proposal in measurement.proposals]
    return {
        "matmul": plan.job.matmul,
        "model": plan.model.name,
        **msgspec.to_builtins(measurement),
        "matmul_wide": patterns,
        "refusal": refusal(plan) or "",  # why the trainer does not run this plan
        "prices": (
            {"problem": costs}
            if isinstance(costs, str)
            else {name: cost._asdict() for name, cost in costs._asdict().items()}
        ),
    }
