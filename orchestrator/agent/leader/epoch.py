"""What a coordinator knows of the epoch that lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from orchestrator.agent.faults import policy
from orchestrator.agent.faults.diagnosis import Diagnosis
from orchestrator.agent.protocol.messages import Assign, RankAssignment
from orchestrator.plan import Plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import Cause

from .membership import Member


@dataclass
class Epoch:
    started: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    ends: list[policy.WorkerEnd] = field(default_factory=list)
    lost: list[policy.NodeLoss] = field(default_factory=list)
    stopping: bool = False
    resize: str = ""  # why all were asked to save and stop, where the run goes on with other nodes
    slow: Cause | None = None  # of that: the node that they go on without
    fault: Cause | None = None  # seen from outside: what the workers are ended for
    deadline: float | None = None  # loop time at which even killed workers must be gone

    def fail(self, found: Diagnosis, folder: RunFolder, number: int) -> None:
        """What was found is why this epoch ends."""
        files = {}
        if found.rank is not None:
            paths = {"log": folder.rank_log(found.rank), "stack": folder.stack(number, found.rank)}
            files = {name: str(path.relative_to(folder.path)) for name, path in paths.items()}
        place = {"node": found.node, "rank": found.rank, "step": found.step}
        self.fault = Cause(kind=found.kind, text=found.text, epoch=number, **place, **files)

    def told_fault(self) -> Cause | None:
        """The fault, with what its worker had said last."""
        end = next((end for end in self.ends if self.fault and end.rank == self.fault.rank), None)
        return structs.replace(self.fault, code=end.code, tail=list(end.tail)) if end else self.fault


def assignment(plan: Plan, node: str, index: int, first: Member) -> Assign:
    """A node's slice of the rank map, and where rank 0 will listen. `first`: the member of rank 0's node."""
    return Assign(
        plan_hash=plan.hash,
        seats=[RankAssignment(rank.rank, rank.gpu) for rank in plan.ranks if rank.node == node],
        node_rank=index,
        world_size=len(plan.ranks),
        master_address=first.join.address,
        master_port=first.ready.port,
    )


def some(nodes: list[str]) -> str:
    shown = ", ".join(nodes[:8])
    return shown + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
