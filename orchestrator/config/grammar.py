"""Parallelism specs: words like `tp8_pp4_zero1`, in place of a file of the group `parallel`.

A spec is built from `tpN ppN dpN cpN epN etpN zeroN vppN spN`, joined by `_`, in any order, each
at most once. What is left out is 1 (zero: 0; dp: what the cluster leaves; sp: on if tp > 1).
`sp0` is off; `sp1` is on, and so is spN with the N of tp. With `etpN` the experts have their own
mesh in the ranks of a stage: etpN cuts each expert, epN counts the ranks with different experts,
those of tp and cp among them, so that tp8_etp1_ep8 takes 8 ranks. The planner, not the grammar,
checks whether the degrees fit a model and a cluster.
"""

from __future__ import annotations

import re

from orchestrator.errors import OrchError, nearest
from orchestrator.plan.exits import Exit
from orchestrator.plan.expert_mesh import fold

#: Names of degrees, in the order in which a spec is usually written.
NAMES = ("tp", "pp", "dp", "cp", "ep", "etp", "zero", "vpp", "sp")
RULE = (
    "a spec is built from "
    + " ".join(f"{name}N" for name in NAMES)
    + " joined by _, each at most once"
)
MAX_DEGREE = 2**20
_LIMITS = {"zero": (0, 3), "sp": (0, 1)}
_PART = re.compile(r"([a-z]+)(0|[1-9][0-9]*)")

Degrees = dict[str, int | bool]


def looks_like_spec(typed: str) -> bool:
    """Tells whether the user meant degrees and not the name of a file."""
    return bool(re.fullmatch(r"[a-z]+\d+(_[a-z]+\d+)*", typed)) or _repair(typed) is not None


def parse(spec: str) -> Degrees:
    """Returns the keys of `parallel` that a spec sets. Raises OrchError (64) with the rule and
    the nearest legal spec."""
    degrees: dict[str, int] = {}
    for element in spec.split("_"):
        match = _PART.fullmatch(element)
        if not match:
            problem = f"{element!r} is not a name with a number" if element else "a part is empty"
            raise _refuse(spec, problem)
        name = match[1]
        number = int(match[2])
        if name not in NAMES:
            raise _refuse(spec, f"there is no degree {name!r}")
        if name in degrees:
            raise _refuse(spec, f"{name} is given twice")
        if name == "zero" and number > 3:
            raise _refuse(spec, f"zero is 0, 1, 2 or 3, not {number}")
        if name not in ("zero", "sp") and not 1 <= number <= MAX_DEGREE:
            raise _refuse(spec, f"{name} must be from 1 to {MAX_DEGREE:,}, not {number}")
        degrees[name] = number
    result: Degrees = dict(degrees)
    if "sp" in degrees:
        tp = degrees.get("tp", 1)
        if degrees["sp"] not in (0, 1, tp):
            raise _refuse(
                spec, f"sp shards over the tp group: sp0, sp1 or sp{tp}, not sp{degrees['sp']}"
            )
        result["sp"] = degrees["sp"] > 0
    if "etp" in degrees:
        tp = degrees.get("tp", 1)
        cp = degrees.get("cp", 1)

        def refuse(reason: str, nearest_ep: int) -> OrchError:
            etp = _divisor(tp, degrees["etp"])
            ep = nearest_ep if etp == degrees["etp"] else tp // etp
            suggestion = degrees | {"etp": etp, "ep": ep}
            hint = f"did you mean {_joined(suggestion)!r}, for a model with experts?"
            return OrchError(f"parallel={spec}: {reason}; {hint} ({RULE})", Exit.USAGE)

        result["ep"], folds = fold(tp, cp, degrees["etp"], degrees.get("ep", 1), refuse)
        result |= {"fold_cp": True} if folds else {}
    return result


def canonical(degrees: Degrees) -> str:
    """Returns the spec for some keys of `parallel`, in the usual order; `tp1` if there are none."""
    if (etp := degrees.get("etp")) is not None:
        folded_cp = degrees.get("cp", 1) if degrees.get("fold_cp") else 1
        ranks_of_tp_and_cp = degrees.get("tp", 1) // etp * folded_cp
        degrees = degrees | {"ep": degrees.get("ep", 1) * ranks_of_tp_and_cp}
    return _joined(degrees)


def _divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of `number` that is at most `limit`, which is 1 or more."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def _joined(degrees: Degrees) -> str:
    elements = [f"{name}{int(degrees[name])}" for name in NAMES if degrees.get(name) is not None]
    return "_".join(elements) or "tp1"


def _refuse(spec: str, reason: str) -> OrchError:
    hint = _repair(spec)
    near = f"; did you mean {hint!r}?" if hint and hint != spec else ""
    return OrchError(f"parallel={spec}: {reason}{near} ({RULE})", Exit.USAGE)


def _repair(typed: str) -> str | None:
    """Returns the legal spec that `typed` was probably meant to be, None if a part of it cannot
    be read as a degree."""
    elements = [element for element in re.split(r"[^a-z0-9=]+", typed.lower()) if element]
    if not elements:
        return None
    fixed: dict[str, int] = {}
    for element in elements:
        match = re.fullmatch(r"([a-z]+)=?(\d+)", element)
        if match is None:
            return None
        name = match[1] if match[1] in NAMES else nearest(match[1], NAMES)
        if name is None:
            return None
        low, high = _LIMITS.get(name, (1, MAX_DEGREE))
        fixed.setdefault(name, min(max(int(match[2]), low), high))
    if "etp" in fixed:  # suggest a legal mesh of the experts as well
        tp = fixed.get("tp", 1)
        fixed["etp"] = _divisor(tp, fixed["etp"])
        fixed["ep"] = tp // fixed["etp"]
    return _joined(fixed)
