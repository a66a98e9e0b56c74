"""Three training steps on one card beside the same steps on the host, technique by technique.

    python -m benchmarks.gpu_parity [--minutes 8] [--only NAME ...] [--dry]

Each case trains the same small model three times from the same weights and samples: on the host in
float64, which is the truth; on the host in the case's own precision, whose distance from the truth
is what rounding costs; and on the card, compiled block by block as `orch submit` trains by default,
and not compiled. The card may be `MARGIN` times as far from the truth as the host is, and never
less than a floor that follows from the precision. Compared are the loss of each step, the norm of
each gradient, and the first moments and weights after the last step. torch's sync debug mode says
where the host waits within a step, which only some cases may. Weights, gradients, optimizer state
and activations of a fourth step are compared with the plan. The attention kernels that context
parallelism and packed documents call directly are compared by themselves.

Prints a line a case, keeps each in benchmarks/results/gpu_parity.json as soon as it is measured, and
ends with 1 if a case differs, waits or fails, or nothing is measured. `--only` replaces single cases
in that file. Without CUDA it says so and ends with 0; `--dry` runs the same on the host alone, not
compiled, and writes to --out alone.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import minutes
from benchmarks.card import device_name, device_to_measure, forget
from benchmarks.gpu_parity.attention import attention
from benchmarks.gpu_parity.cases import CASES
from benchmarks.gpu_parity.steps import judge, reference_of
from benchmarks.vs_torch.harness import conditions

RESULT = Path(__file__).parents[1] / "results" / "gpu_parity.json"
#: Relative error that attention in 16 bits may have.
ATTENTION_BOUND = 2e-2


#: What the name of a row ends with whose blocks are not compiled.
UNCOMPILED = ", not compiled"
#: Types in which attention is compared, by the kind of the device.
ATTENTION_DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.float32,)}


def rows(names: list[str], device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """The rows in their order, by name: all, or those of these names. The name of a case stands for
    its row that is not compiled, too."""
    reference = functools.lru_cache(maxsize=1)(reference_of)  # a case's rows follow each other
    measured: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in CASES:
        for compiled in (True, False) if device.type == "cuda" else (False,):
            title = name if compiled else f"{name}{UNCOMPILED}"
            measured[title] = functools.partial(
                lambda name, compiled: judge(name, compiled, device, reference(name)),
                name,
                compiled,
            )
    for dtype in ATTENTION_DTYPES[device.type]:
        measured[attention_title(dtype)] = functools.partial(attention_row, device, dtype)
    wanted = {*names, *(f"{name}{UNCOMPILED}" for name in names)}
    return {title: row for title, row in measured.items() if not names or title in wanted}


def choices() -> list[str]:
    """The names that `--only` takes."""
    attention_titles = [
        attention_title(dtype) for dtypes in ATTENTION_DTYPES.values() for dtype in dtypes
    ]
    return [*CASES, *(f"{name}{UNCOMPILED}" for name in CASES), *attention_titles]


def attention_title(dtype: torch.dtype) -> str:
    return f"attention, {str(dtype).removeprefix('torch.')}"


def attention_row(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    errors = attention(device, dtype)
    bounds = dict.fromkeys(errors, ATTENTION_BOUND)
    return {"equal": max(errors.values()) <= ATTENTION_BOUND, "errors": errors, "bounds": bounds}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_parity", description=__doc__.partition("\n")[2]
    )
    minutes.add_argument(parser)
    parser.add_argument("--only", nargs="*", default=[], choices=choices(), metavar="NAME")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    device = device_to_measure(args.dry)
    if device is None:
        return 0
    out = args.out if args.dry else args.out or RESULT
    machine = {"device": device_name(device), "dry": args.dry}
    record = minutes.earlier(out, machine) if args.only else {}
    record |= machine | {"conditions": conditions(minutes=args.minutes)}
    limit = minutes.Limit(args.minutes)
    series = minutes.Series(record, limit, out, show=line, free=lambda: forget(device))
    cases = rows(args.only, device)
    series.expect(cases)
    measured = {name: series.measure(name, measure) for name, measure in cases.items()}
    compared = {name: row for name, row in measured.items() if "failed" not in row}
    wrong = [name for name, row in compared.items() if problems(row)]
    print(f"{series.summary()}; not as they must be: {', '.join(wrong) or 'none'}")
    has_failed = any(name in series.failed for name in measured)
    return 1 if wrong or has_failed or not compared else 0


def problems(row: dict[str, Any]) -> list[str]:
    """What is not as it must be, in words."""
    wrong = [] if row["equal"] else ["DIFFERENT"]
    wrong += [f"WAITS at {place}" for place in row.get("unexpected_waits", [])]
    return wrong + [f"NOT AS PLANNED: {name}" for name in row.get("not_as_planned", [])]


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    parts = [
        f"{name} {error:.1e} (<= {row['bounds'][name]:.1e})"
        for name, error in row["errors"].items()
    ]
    for name, size in row.get("bytes", {}).items():
        if size["planned"]:
            parts.append(f"{name} {size['measured'] / size['planned']:.3f} of the plan")
    parts += (
        [f"the host waits at {', '.join(row['waits_in_last_step'])}"]
        if row.get("waits_in_last_step")
        else []
    )
    return f"{', '.join(problems(row)) or 'equal'}: {'; '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
