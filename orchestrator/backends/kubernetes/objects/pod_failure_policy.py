"""The exit-code contract as a Job's rules: which end of a pod ends the run, which brings it back. Pure."""

from __future__ import annotations

from typing import Any

from orchestrator.backends.kubernetes.names import CONTAINER
from orchestrator.plan.exits import FATAL, Exit

#: What an agent says when its run cannot be helped by starting it again. USER and INTERNAL are among them because the
#: agents have tried again themselves: `backend.max_restarts` is theirs to count.
FINAL = tuple(sorted({*map(int, FATAL), int(Exit.USER), int(Exit.INTERNAL)}))


def pod_failure_policy() -> dict[str, Any]:
    """Rules in order, the first match wins (batch/v1 PodFailurePolicy; needs restartPolicy Never).

    A disruption (preemption, drain, eviction, lost node) costs nothing. A pod that lost a peer carries no such mark, so
    it leaves with 75, which costs nothing either. All else is counted against backoffLimit: 74, 76, killed by a signal.
    """
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": _codes(*FINAL)},
            {"action": "Ignore", "onExitCodes": _codes(int(Exit.RESTART))},
        ]
    }


def _codes(*values: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": list(values)}


def pod_exit(code: int) -> int:
    """What a pod leaves with when its agent ended with `code`.

    On a cluster a lost peer or an overtaken life is the beginning of the next life, not the end of the run: 76 and 77
    become 75. The pod of a node that is sick (74) is counted, so that it does not come back there for ever.
    """
    return int(Exit.RESTART) if code in (Exit.CAPACITY, Exit.FENCED) else code
