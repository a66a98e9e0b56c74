"""Fault schedules: what is done to a run, to whom and when, made from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec

Deed = Literal["kill", "pause", "delete", "cancel", "force", "resize", "resume", "submit_signal"]
#: Processes of a run, by their part in it. A number stands for a node.
VICTIMS = (
    "supervisor",
    "coordinator",
    *(f"{kind}{node}" for kind in ("agent", "watcher", "worker") for node in range(3)),
)
#: Files that a run can do without, or whose loss it has to tell truthfully.
FILES = ("coordinator.json", "backend.json", "metrics.sd.json", "report.json")
_DEEDS: dict[Deed, int] = {
    "kill": 8,
    "pause": 6,
    "delete": 2,
    "cancel": 3,
    "force": 1,
    "resize": 4,
    "resume": 2,
    "submit_signal": 1,
}
_SIZES = (1, 2, 3)
#: Moments that an action may wait for: states of the run, and that a new request lies on disk.
MOMENTS = ("pending", "starting", "restarting", "stopping", "final", "asked")
_MOST_ACTIONS = 6


class Action(msgspec.Struct, frozen=True):
    """One deed. `after_s`: since the action before it was begun; verbs of people run beside what
    follows."""

    deed: Deed
    after_s: float
    moment: str = ""  # of MOMENTS, waited for first, for at most three seconds; "": none
    victim: str = ""  # of VICTIMS or FILES
    for_s: float = 0.0  # of a pause; 0: until the end
    nodes: int = 0  # of a resize


class Schedule(msgspec.Struct, frozen=True):
    seed: int
    actions: list[Action]
    back_s: float | None = None  # seconds after which lost nodes come back; None: never

    def __str__(self) -> str:
        back = "" if self.back_s is None else f", nodes come back after {self.back_s:g} s"
        action_texts = [
            f"{a.moment and a.moment + ' + '}{a.after_s:g} s: {_words(a)}" for a in self.actions
        ]
        return f"seed {self.seed}{back}: " + "; ".join(action_texts)


def _words(a: Action) -> str:
    extra = (
        f" for {a.for_s:g} s"
        if a.deed == "pause" and a.for_s
        else f" to {a.nodes}"
        if a.deed == "resize"
        else ""
    )
    return " ".join(filter(None, (a.deed, a.victim))) + extra


def make(seed: int) -> Schedule:
    """The schedule of a seed: one to six actions, often close together."""
    rng = random.Random(seed)
    actions = []
    for _ in range(rng.randint(1, _MOST_ACTIONS)):
        deed = rng.choices(list(_DEEDS), weights=list(_DEEDS.values()))[0]
        after = rng.choice(
            (0.0, 0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.6), rng.uniform(0, 2.0))
        )
        fields: dict[str, Any] = {
            "moment": rng.choice(MOMENTS) if actions and rng.random() < 0.35 else ""
        }
        if deed in ("kill", "pause"):
            fields["victim"] = rng.choice(VICTIMS)
        if deed == "pause":
            fields["for_s"] = rng.choice((0.0, round(rng.uniform(0.1, 3.0), 2)))
        if deed == "delete":
            fields["victim"] = rng.choice(FILES)
        if deed == "resize":
            fields["nodes"] = rng.choice(_SIZES)
        actions.append(Action(deed=deed, after_s=round(after, 3), **fields))
    return Schedule(seed, actions, rng.choice((None, None, 0.3)))


def shrunk(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """A schedule that still fails and of which no single action can be left out. `fails` is asked
    once a candidate."""
    index = 0
    while index < len(schedule.actions) > 1:
        rest = [*schedule.actions[:index], *schedule.actions[index + 1 :]]
        smaller = msgspec.structs.replace(schedule, actions=rest)
        if fails(smaller):
            schedule = smaller
        else:
            index += 1
    return schedule
