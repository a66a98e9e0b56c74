"""The hierarchical all-to-all: tokens go once to each NVLink domain that holds some of their
experts, and from where they land on to these (node-limited routing, DeepSeek-V3, arXiv 2412.19437,
sections 2.1.2 and 3.2.2).

Between domains a rank sends to the ranks in its own place of each (`plan.hierarchy`), so every
network card carries its own share. It sends a row of hidden size for each token and domain, and for
each copy that it lets be made there its weight and four bytes that say of which row and for which
expert. Inside a domain copies go as in `dispatch`. On the way back the results of a token's copies
are summed where it landed, so that one row returns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_to_all
from trainer.model.experts import Experts, Meanwhile, nothing
from trainer.model.permutation import CopyPositions, copied, counted, inverse, permuted, summed
from trainer.model.router import Routing

from .dispatch import AXIS, ExpertDispatch, all_to_all_move


class HierarchicalDispatch:
    """Replaces `model.experts.dispatch`. `across`: one rank of each domain, of which the i-th holds
    the i-th run of experts; `inside`: sends within a domain."""

    def __init__(
        self,
        across: dist.ProcessGroup,
        inside: ExpertDispatch,
        counter: CommCounter,
        levels: list[str],
    ):
        self.across = across
        self.inside = inside
        self.counter = counter
        self.levels = levels

    def __call__(
        self, x: Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile
    ) -> tuple[Tensor, Tensor | None]:
        domain_experts = experts.count * self.inside.ranks  # experts of a domain
        sent = _Sent.of(routing, domain_experts, self.across.size())
        counts = torch.stack([sent.rows_to, sent.copies_to], 1)
        arriving = all_to_all(counts, self.across, AXIS, self.counter)
        by_rows, by_copies = (
            all_to_all_move(out, into, self.across, self.counter, self.levels)
            for out, into in torch.stack([counts.T, arriving.T], 1).tolist()  # the host waits once
        )
        weights = by_copies(routing.weights.flatten()[sent.choice])
        label = by_copies.there(sent.label)()
        (rows,), shared_out = by_rows.beside(meanwhile, copied(x, sent.token, sent.positions))
        # A label counts rows from its sender's first one for this domain, in the order of rows.
        start = (arriving[:, 0].cumsum(0) - arriving[:, 0]).repeat_interleave(
            arriving[:, 1], output_size=len(label)
        )
        row = label // domain_experts + start
        expert = label % domain_experts
        by_expert = expert.argsort(stable=True)
        position = inverse(by_expert)
        count = counted(expert, domain_experts)
        of_row = CopyPositions.unequal(position, counted(row, len(rows)))
        row = row[by_expert]
        copies = [copied(rows, row, of_row)]
        del rows  # nobody needs what has arrived once it is copied
        out, _ = self.inside.exchange(
            copies, permuted(weights, by_expert, position), count, experts, nothing
        )
        out = summed(out, row, of_row)
        out = by_rows.reverse(out)
        return summed(out, sent.token, sent.positions), shared_out


class _Sent(NamedTuple):
    """What a rank sends: rows and copies, sorted by domain."""

    token: Tensor  # int64 [rows]: each token once for each domain that it goes to
    positions: CopyPositions  # where the rows of each token are
    choice: Tensor  # int64 [copies]: which of the n * k choices each copy is
    # int32 [copies]: number of its row among those to the domain * experts there + expert in the
    # domain
    label: Tensor
    rows_to: Tensor  # int64 [domains]
    copies_to: Tensor  # int64 [domains]

    @classmethod
    def of(cls, routing: Routing, domain_experts: int, domains: int) -> _Sent:
        """`here`: experts of a domain."""
        domain = routing.experts // domain_experts  # [n, k]
        if routing.accepted is not None:
            domain = domain.masked_fill(
                ~routing.accepted, domains
            )  # dropped choices go behind the last one
        goes = torch.zeros(
            len(domain), domains + 1, dtype=torch.bool, device=domain.device
        ).scatter_(1, domain, True)
        number = goes.cumsum(0) - 1  # of a token's row among those to each domain
        choice = domain.flatten().argsort(stable=True)
        if routing.accepted is not None:
            choice = choice[: routing.accepted.sum()]
        label = number.gather(1, domain) * domain_experts + routing.experts % domain_experts
        goes = goes[:, :-1]
        number = number[:, :-1]
        rows_to = goes.sum(0)
        positions = CopyPositions.unequal((number + rows_to.cumsum(0) - rows_to)[goes], goes.sum(1))
        copies_to = counted(domain, domains + 1)[:-1]
        return cls(
            goes.T.nonzero()[:, 1],
            positions,
            choice,
            label.flatten()[choice].int(),
            rows_to,
            copies_to,
        )
