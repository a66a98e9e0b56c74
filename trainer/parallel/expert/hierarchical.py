"""The hierarchical all-to-all: tokens go once to each NVLink domain that holds some of their
experts, and are distributed to the experts within the domain (node-limited routing, DeepSeek-V3,
arXiv 2412.19437, sections 2.1.2 and 3.2.2).

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
from trainer.model.permutation import (
    CopyPositions,
    copied,
    counted,
    inverse,
    permuted,
    read_counts,
    summed,
)
from trainer.model.router import Routing

from .dispatch import AXIS, ExpertDispatch, Move, all_to_all_move


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
        domains = _Domains.of(routing, domain_experts, self.across.size())
        counts = torch.stack([domains.rows_to, domains.copies_to], 1)
        arriving = all_to_all(counts, self.across, AXIS, self.counter)
        rows_moved, copies_moved = read_counts(torch.stack([counts.T, arriving.T], 1))
        by_rows = self._move(*rows_moved)
        by_copies = self._move(*copies_moved)
        sent = _Sent.of(domains, routing, sum(rows_moved[0]), sum(copies_moved[0]))
        del domains
        weights = by_copies(routing.weights.flatten()[sent.choice])
        label = by_copies.send(sent.label)()
        own_rows = copied(x, sent.token, sent.positions)
        (rows,), shared_out = by_rows.overlap(meanwhile, own_rows)
        del own_rows
        received = _Received.of(label, arriving, len(rows), domain_experts)
        copies = [copied(rows, received.row, received.positions)]
        del rows  # the received rows are not needed once they are copied
        out, _ = self.inside.exchange(
            copies,
            permuted(weights, received.by_expert, received.positions.of_copies),
            received.counts,
            experts,
            nothing,
        )
        out = summed(out, received.row, received.positions)
        out = by_rows.reverse(out)
        return summed(out, sent.token, sent.positions), shared_out

    def _move(self, sent: list[int], received: list[int]) -> Move:
        return all_to_all_move(sent, received, self.across, self.counter, self.levels)


class _Received(NamedTuple):
    """The copies that a rank makes of the rows that arrive, sorted by expert of its domain."""

    by_expert: Tensor  # int64 [copies]: the position of each copy's label
    row: Tensor  # int64 [copies]: the row of which it is a copy
    positions: CopyPositions  # those of each row's copies
    counts: Tensor  # int64 [experts of the domain]

    @classmethod
    def of(cls, label: Tensor, arriving: Tensor, rows: int, domain_experts: int) -> _Received:
        """`label` [copies] and `arriving` [senders, 2] as they were received with `rows` rows."""
        row = label // domain_experts + _first_rows(arriving, len(label))
        expert = label % domain_experts
        by_expert = expert.argsort(stable=True)
        return cls(
            by_expert=by_expert,
            row=row[by_expert],
            positions=CopyPositions.unequal(inverse(by_expert), counted(row, rows)),
            counts=counted(expert, domain_experts),
        )


def _first_rows(arriving: Tensor, copies: int) -> Tensor:
    """Returns, for each copy, the position of its sender's first row, since labels count the rows
    of one sender. `arriving` [senders, 2]: rows and copies; int64 [copies]."""
    rows = arriving[:, 0]
    starts = rows.cumsum(0) - rows
    return starts.repeat_interleave(arriving[:, 1], output_size=copies)


class _Domains(NamedTuple):
    """The domains that hold the experts of each token."""

    domain_experts: int  # the number of experts of a domain
    of_choices: Tensor  # int64 [n, k]; dropped choices go behind the last domain
    goes: Tensor  # bool [n, domains]: whether a token goes to a domain
    number: Tensor  # int64 [n, domains]: of a token's row among those to a domain
    rows_to: Tensor  # int64 [domains]
    copies_to: Tensor  # int64 [domains]

    @classmethod
    def of(cls, routing: Routing, domain_experts: int, domains: int) -> _Domains:
        """`domain_experts`: the number of experts of a domain."""
        domain = routing.experts // domain_experts
        if routing.accepted is not None:
            domain = domain.masked_fill(~routing.accepted, domains)
        goes = torch.zeros(
            len(domain),
            domains + 1,
            dtype=torch.bool,
            device=domain.device,
        )
        goes.scatter_(1, domain, True)
        goes = goes[:, :-1]
        return cls(
            domain_experts=domain_experts,
            of_choices=domain,
            goes=goes,
            number=goes.cumsum(0) - 1,
            rows_to=goes.sum(0),
            copies_to=counted(domain, domains + 1)[:-1],
        )


class _Sent(NamedTuple):
    """The rows and copies that a rank sends, sorted by domain."""

    token: Tensor  # int64 [rows]: each token once per domain to which it goes
    positions: CopyPositions  # those of each token's rows
    choice: Tensor  # int64 [copies]: the choice, of n * k, of each copy
    #: int32 [copies]: (number of its row among those to the domain) * (experts of the domain) +
    #: (expert in the domain).
    label: Tensor

    @classmethod
    def of(cls, domains: _Domains, routing: Routing, rows: int, copies: int) -> _Sent:
        """`rows`, `copies`: how many are sent in all. Since the host has read them, it does not
        wait for the device here."""
        goes = domains.goes
        first = domains.rows_to.cumsum(0) - domains.rows_to
        by_token = goes.flatten().nonzero_static(size=rows)[:, 0]
        row_positions = (domains.number + first).flatten()[by_token]
        choice = domains.of_choices.flatten().argsort(stable=True)[:copies]
        # Dropped choices have no row; what they gather is not sent.
        domain = domains.of_choices.clamp(max=goes.shape[1] - 1)
        number = domains.number.gather(1, domain)
        label = number * domains.domain_experts + routing.experts % domains.domain_experts
        return cls(
            token=goes.T.nonzero_static(size=rows)[:, 1],
            positions=CopyPositions.unequal(row_positions, goes.sum(1)),
            choice=choice,
            label=label.flatten()[choice].int(),
        )
