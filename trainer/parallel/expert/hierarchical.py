"""The hierarchical all-to-all: tokens go once to each NVLink domain that holds some of their
experts,
and are distributed to the experts within the domain (node-limited routing, DeepSeek-V3, arXiv
2412.19437, sections 2.1.2 and 3.2.2).

Between domains a rank sends to the ranks with its own position in each domain (`plan.hierarchy`),
so every network card carries an equal share. It sends a row of hidden size for each token and
domain, and for each copy that the receiver makes of it the weight and a label of four bytes: the
copy's row and expert. Inside a domain copies go as in `dispatch`. The receiver of a token sums the
results of its copies, so that one row returns.
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
    """Replaces `model.experts.dispatch`. `across`: one rank per domain; the i-th domain holds the
    i-th run of experts. `inside`: the dispatch within a domain."""

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
        self,
        x: Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Meanwhile,
    ) -> tuple[Tensor, Tensor | None]:
        domain_experts = experts.count * self.inside.ranks
        sent = _Sent.of(routing, domain_experts, self.across.size())
        counts = torch.stack([sent.rows_to, sent.copies_to], 1)
        arriving = all_to_all(counts, self.across, AXIS, self.counter)
        by_rows, by_copies = (
            all_to_all_move(out, into, self.across, self.counter, self.levels)
            for out, into in torch.stack([counts.T, arriving.T], 1).tolist()  # the host waits once
        )
        weights = by_copies(routing.weights.flatten()[sent.choice])
        label = by_copies.send(sent.label)()
        own_rows = copied(x, sent.token, sent.positions)
        (rows,), shared_out = by_rows.overlap(meanwhile, own_rows)
        del own_rows
        row = label // domain_experts + _first_rows(arriving, len(label))
        expert = label % domain_experts
        by_expert = expert.argsort(stable=True)
        position = inverse(by_expert)
        row_copies = CopyPositions.unequal(position, counted(row, len(rows)))
        row = row[by_expert]
        copies = [copied(rows, row, row_copies)]
        del rows  # the received rows are not needed once they are copied
        out, _ = self.inside.exchange(
            copies,
            permuted(weights, by_expert, position),
            counted(expert, domain_experts),
            experts,
            nothing,
        )
        out = summed(out, row, row_copies)
        out = by_rows.reverse(out)
        return summed(out, sent.token, sent.positions), shared_out


def _first_rows(arriving: Tensor, copies: int) -> Tensor:
    """Returns, for each copy, the position of its sender's first row, since labels count the rows
    of one sender. `arriving` [senders, 2]: rows and copies; int64 [copies]."""
    rows = arriving[:, 0]
    starts = rows.cumsum(0) - rows
    return starts.repeat_interleave(arriving[:, 1], output_size=copies)


class _Sent(NamedTuple):
    """The rows and copies that a rank sends, sorted by domain."""

    token: Tensor  # int64 [rows]: each token once per domain to which it goes
    positions: CopyPositions  # those of each token's rows
    choice: Tensor  # int64 [copies]: the choice, of n * k, of each copy
    #: int32 [copies]: (number of its row among those to the domain) * (experts of the domain) +
    #: (expert in the domain).
    label: Tensor
    rows_to: Tensor  # int64 [domains]
    copies_to: Tensor  # int64 [domains]

    @classmethod
    def of(cls, routing: Routing, domain_experts: int, domains: int) -> _Sent:
        """`domain_experts`: the number of experts of a domain."""
        domain = routing.experts // domain_experts  # [n, k]
        if routing.accepted is not None:  # dropped choices go behind the last domain
            domain = domain.masked_fill(~routing.accepted, domains)
        goes = torch.zeros(
            len(domain),
            domains + 1,
            dtype=torch.bool,
            device=domain.device,
        )
        goes.scatter_(1, domain, True)
        number = goes.cumsum(0) - 1  # of a token's row among those to each domain
        choice = domain.flatten().argsort(stable=True)
        if routing.accepted is not None:
            choice = choice[: routing.accepted.sum()]
        label = number.gather(1, domain) * domain_experts + routing.experts % domain_experts
        goes = goes[:, :-1]
        number = number[:, :-1]
        rows_to = goes.sum(0)
        row_positions = (number + rows_to.cumsum(0) - rows_to)[goes]
        return cls(
            token=goes.T.nonzero()[:, 1],
            positions=CopyPositions.unequal(row_positions, goes.sum(1)),
            choice=choice,
            label=label.flatten()[choice].int(),
            rows_to=rows_to,
            copies_to=counted(domain, domains + 1)[:-1],
        )
