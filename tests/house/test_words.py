"""The field's words: no private ones in the names of files, classes, functions, parameters and
attributes."""

from __future__ import annotations

import ast
import re

from tests.house.rooms import MODULES, nodes

#: What the code once called things, and what the field calls them. docs/glossary.md has the terms.
PRIVATE = {
    "warden": "worker supervisor",
    "nursery": "fork server",
    "unborn": "forked process that waits",
    "keeper": "agent supervisor",
    "lookout": "detector",
    "condemn": "fail",
    "condemned": "failed",
    "blame": "attribution",
    "guilty": "at fault",
    "pace": "self-stall",
    "patience": "timeout ticks",
    "succession": "leader election",
    "deposed": "fenced",
    "buddies": "peer assignment",
    "buddy": "peer",
    "recall": "peer restore",
    "parcel": "submission bundle",
    "offer": "size candidate",
    "offers": "size candidates",
    "seat": "rank assignment",
    "seats": "rank assignment",
    "seated": "rank assignment",
    "seating": "node placement",
    "roads": "path cache",
    "ground": "cost context",
    "spot": "layout",
    "soon": "future",
    "complaints": "API errors",
    "remedies": "hints",
    "tiles": "interval partition",
    "tile": "interval partition",
    "notice": "termination signal",
    "notices": "termination signals",
    "claim": "lease",
    "claims": "leases",
    "claimed": "leased",
    "life": "attempt",
    "lives": "attempts",
    "told": "reported",
    "said": "reported",
    "wish": "intent",
    "wishes": "intents",
    "torn": "truncated",
    "beat": "heartbeat",
    "beats": "heartbeats",
}
#: Rooms where a word is the field's: Kubernetes has claims of volumes and of devices.
FIELDS_IN = {
    "claim": "orchestrator.backends.kubernetes",
    "claims": "orchestrator.backends.kubernetes",
    "claimed": "orchestrator.backends.kubernetes",
}
#: Names that users write: an option of the Slurm backend, and the method of a drill's fault.
WRITTEN_BY_USERS = {"notice_s", "_notice"}


def parts(name: str) -> set[str]:
    """`WorkerSupervisor`, `worker_supervisor` -> worker, supervisor."""
    return {name_part.lower() for name_part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names(module: str) -> set[str]:
    bound_names = {module.rpartition(".")[2]}
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound_names.add(node.name)
        elif isinstance(node, ast.arg):
            bound_names.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound_names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return bound_names


def test_names_are_the_fields():
    wrong = [
        f"{module}: {name}"
        for module in MODULES
        for name in names(module) - WRITTEN_BY_USERS
        for name_part in parts(name) & PRIVATE.keys()
        if not module.startswith(FIELDS_IN.get(name_part, "-"))
    ]
    assert sorted(wrong) == []
