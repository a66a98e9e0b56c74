"""The work of a step, wherever it runs: a model, its layout, its training keys and its software.

Every cost function takes one `Workload`, and the sizes that many of them need are its properties.
"""

from __future__ import annotations

from functools import cached_property

from msgspec import UNSET, structs

from orchestrator.cost.model.layers import DTYPE_BYTES
from orchestrator.cost.software import SOFTWARE, Software
from orchestrator.cost.time.recomputed import RecomputedShare, recomputed_share, shares_inputs
from orchestrator.plan.document import Model, Parallel, Plan, Train


class Workload:
    """One model in one layout. It is immutable.

    Most of its sizes are cheaper to compute than to remember, and most workloads of a search are
    asked for each of them once.
    """

    def __init__(
        self,
        model: Model,
        parallel: Parallel,
        train: Train,
        software: Software = SOFTWARE["orch"],
        isolated: bool = False,
    ):
        """`isolated`: packed documents do not see each other (`data.isolate_documents`)."""
        self.model = model
        self.parallel = parallel
        self.train = train
        self.software = software
        self.isolated = isolated

    @classmethod
    def of_plan(cls, plan: Plan) -> Workload:
        """Returns the work of a plan's step, as this project's trainer does it."""
        isolated = plan.job.data.isolate_documents
        return cls(plan.model, plan.parallel, plan.job.train, isolated=isolated)

    @property
    def with_whole_inputs(self) -> Workload:
        """The same work, in which every rank keeps whole inputs of recomputed layers."""
        train = structs.replace(self.train, partition_activations=UNSET)
        return Workload(self.model, self.parallel, train, self.software, self.isolated)

    @property
    def width(self) -> int:
        """Bytes of a weight and of an activation."""
        return DTYPE_BYTES[self.train.precision]

    @property
    def gradient_width(self) -> int:
        """Bytes of a gradient that ranks have summed, also on the wire."""
        return self.software.grad_bytes or DTYPE_BYTES[self.train.grad_dtype]

    @property
    def wire_width(self) -> int:
        """Bytes of a gradient on its way to the rank that sums it."""
        wire = self.train.grad_wire
        return DTYPE_BYTES[wire] if wire else self.gradient_width

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on the ranks of a tensor-parallel group together."""
        return self.parallel.micro_batch_size * self.train.seq_len / self.parallel.cp

    @property
    def sequence_shards(self) -> int:
        """Ranks that share the sequence between the regions of tensor parallelism."""
        return self.parallel.tp if self.parallel.sp else 1

    @property
    def hidden_bytes(self) -> float:
        """Bytes of one micro-batch's hidden states on a rank, not cut by sequence parallelism."""
        return self.tokens * self.model.hidden * self.width

    @property
    def boundary_bytes(self) -> float:
        """Bytes of one micro-batch's hidden states between two layers or stages, on one rank."""
        return self.hidden_bytes / self.sequence_shards

    @property
    def sent_tokens(self) -> float:
        """Tokens of one micro-batch that a rank sends to experts."""
        return self.tokens / self.sequence_shards

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the token table on a rank; the table is padded to a multiple of tp."""
        return -(-self.model.vocab // self.parallel.tp)

    @cached_property
    def recomputed(self) -> RecomputedShare:
        """Share of the layers that recompute each part of forward in backward."""
        return recomputed_share(self.parallel, self.train, self.software)

    @property
    def shares_inputs(self) -> bool:
        """Whether tensor-parallel ranks each keep a share of the inputs of recomputation."""
        return shares_inputs(self.parallel, self.train)
