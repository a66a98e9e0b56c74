"""Parallelism specs: `tp8_pp4_zero1` and its like, in place of a file of the group `parallel`.

A spec is built from `tpN ppN dpN cpN epN etpN zeroN vppN spN`, joined by `_`, in any order, each at
most once. What is left out is 1 (zero: 0; dp: what the cluster leaves; sp: on when tp > 1). `sp0`
is off; `sp1` is on, and so is spN with the N of tp. With `etpN` the experts have a mesh of their
own in the ranks of a stage: etpN cuts each expert, epN counts ranks with different ones, those of
tp and cp among them, so that tp8_etp1_ep8 takes 8 ranks. Whether the degrees fit a model and a
cluster is the planner's question, not the grammar's.
"""

from __future__ import annotations

import re

from orchestrator.errors import OrchError, nearest
from orchestrator.plan.exits import Exit
from orchestrator.plan.expert_mesh import fold

#: In the order in which a spec is usually written.
NAMES = ("tp", "pp", "dp", "cp", "ep", "etp", "zero", "vpp", "sp")
RULE = (
    "a spec is built from "
    + " ".join(f"{name}N" for name in NAMES)
    + " joined by _, each at most once"
)
MAX_DEGREE = 2**20
_PART = re.compile(r"([a-z]+)(0|[1-9][0-9]*)")

Degrees = dict[str, int | bool]


def looks_like_spec(text: str) -> bool:
    """Whether someone who typed this meant degrees and not the name of a file."""
    return bool(re.fullmatch(r"[a-z]+\d+(_[a-z]+\d+)*", text)) or _repair(text) is not None


def parse(spec: str) -> Degrees:
    """The keys of `parallel` that a spec sets. Raises OrchError (64) naming the rule and the
    nearest legal spec."""
    found: dict[str, int] = {}
    for part in spec.split("_"):
        match = _PART.fullmatch(part)
        if not match:
            raise _refuse(
                spec, f"{part!r} is not a name with a number" if part else "there is an empty part"
            )
        name = match[1]
        number = int(match[2])
        if name not in NAMES:
            raise _refuse(spec, f"there is no degree {name!r}")
        if name in found:
            raise _refuse(spec, f"{name} is given twice")
        if name == "zero" and number > 3:
            raise _refuse(spec, f"zero is 0, 1, 2 or 3, not {number}")
        if name not in ("zero", "sp") and not 1 <= number <= MAX_DEGREE:
            raise _refuse(spec, f"{name} must be from 1 to {MAX_DEGREE:,}, not {number}")
        found[name] = number
    result: Degrees = dict(found)
    if "sp" in found:
        tp = found.get("tp", 1)
        if found["sp"] not in (0, 1, tp):
            raise _refuse(
                spec, f"sp shards over the tp group: sp0, sp1 or sp{tp}, not sp{found['sp']}"
            )
        result["sp"] = found["sp"] > 0
    if "etp" in found:
        tp = found.get("tp", 1)
        cp = found.get("cp", 1)

        def refuse(why: str, near: int) -> OrchError:
            etp = _divisor(tp, found["etp"])
            words = found | {"etp": etp, "ep": near if etp == found["etp"] else tp // etp}
            hint = f"did you mean {_joined(words)!r}, for a model with experts?"
            return OrchError(f"parallel={spec}: {why}; {hint} ({RULE})", Exit.USAGE)

        result["ep"], folds = fold(tp, cp, found["etp"], found.get("ep", 1), refuse)
        result |= {"fold_cp": True} if folds else {}
    return result


def canonical(degrees: Degrees) -> str:
    """The spec for some keys of `parallel`, in the usual order; `tp1` when there are none."""
    if (etp := degrees.get("etp")) is not None:
        inner = (
            degrees.get("tp", 1) // etp * (degrees.get("cp", 1) if degrees.get("fold_cp") else 1)
        )
        degrees = degrees | {"ep": degrees.get("ep", 1) * inner}
    return _joined(degrees)


def _divisor(number: int, most: int) -> int:
    """The largest of `number` that is at most `most`, which is 1 or more."""
    return next(one for one in range(min(number, most), 0, -1) if number % one == 0)


def _joined(words: Degrees) -> str:
    return (
        "_".join(f"{name}{int(words[name])}" for name in NAMES if words.get(name) is not None)
        or "tp1"
    )


def _refuse(spec: str, why: str) -> OrchError:
    hint = _repair(spec)
    near = f"; did you mean {hint!r}?" if hint and hint != spec else ""
    return OrchError(f"parallel={spec}: {why}{near} ({RULE})", Exit.USAGE)


def _repair(text: str) -> str | None:
    """The legal spec that `text` was probably meant to be, None when a part of it cannot be read as
    a degree."""
    pieces = [piece for piece in re.split(r"[^a-z0-9=]+", text.lower()) if piece]
    found = [re.fullmatch(r"([a-z]+)=?(\d+)", piece) for piece in pieces]
    if not pieces:
        return None
    fixed: dict[str, int] = {}
    for match in found:
        if (
            match is None
            or (name := match[1] if match[1] in NAMES else nearest(match[1], NAMES)) is None
        ):
            return None
        low, high = (0, 3) if name == "zero" else (0, 1) if name == "sp" else (1, MAX_DEGREE)
        fixed.setdefault(name, min(max(int(match[2]), low), high))
    if "etp" in fixed:  # beside what else is wrong: a mesh of the experts that is legal
        tp = fixed.get("tp", 1)
        fixed["etp"] = _divisor(tp, fixed["etp"])
        fixed["ep"] = tp // fixed["etp"]
    return _joined(fixed)
