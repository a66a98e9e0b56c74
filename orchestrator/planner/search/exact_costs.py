"""The exact costs of layouts, as `build_plan` computes them."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UnsetType, structs

from orchestrator.config.schema import Config
from orchestrator.cost.memory import rank_memory as memory
from orchestrator.cost.memory.recipe import Recipe
from orchestrator.plan import document as doc
from orchestrator.plan.supported import Case, broken
from orchestrator.planner.degrees import make_case, make_parallel
from orchestrator.planner.placement.best_order import Nestings, Solution

from .costed_layout import CostedLayout
from .layout import Layout
from .space import Space

WORTH = 1e-6  # the share of the step that a less simple exchange must save


class PlacedLayout(NamedTuple):
    """A legal layout in all nesting orders, before one of them is chosen."""

    layout: Layout
    config: Config
    parallel: doc.Parallel
    train: doc.Train
    nestings: list[Nestings]  # one per open exchange of expert tokens
    fills: bool

    @property
    def least_s(self) -> float:
        """Lower bound of the step in seconds."""
        return min(orders.least_s for orders in self.nestings)

    def solve(self) -> Solution:
        """Returns the best nesting order with the best exchange of expert tokens."""
        best, *alternatives = (orders.solve() for orders in self.nestings)
        for alternative in alternatives:
            if alternative.time.step_s < best.time.step_s * (1 - WORTH):
                best = alternative
        return best


class ExactCosts:
    """Costs layouts of a search space exactly, in every nesting order that they may take."""

    def __init__(self, space: Space, recipe: Recipe):
        self.space = space
        self.context = space.context
        self.recipe = recipe
        #: The open exchanges of expert tokens; inside one NVLink domain there is no choice.
        self.all_to_alls: tuple[doc.AllToAll, ...] = ("direct",)
        if space.par.expert_all_to_all:
            self.all_to_alls = (space.par.expert_all_to_all,)
        elif len(self.context.cluster.nvlink_domains) > 1:
            self.all_to_alls = ("direct", "hierarchical")
        self.costed = 0  # layouts

    def case(self, config: Config) -> Case:
        """Returns the legality case of a configuration."""
        return make_case(config, self.context.cluster, self.context.model)

    def of_layout(self, layout: Layout) -> CostedLayout | None:
        """Returns the cost of a layout, or None if it breaks a rule or does not fit the memory."""
        placed = self.placed(layout)
        return None if placed is None else self.of_placed(placed)

    def placed(self, layout: Layout) -> PlacedLayout | None:
        """Returns the layout in all nesting orders, or None if it breaks a rule."""
        config = self.space.fixed(layout)
        case = self.case(config)
        if broken(case, self.space.rules) is not None:
            return None
        train = structs.replace(self.context.train, recompute=layout.recompute)
        parallel = self.context.completed(make_parallel(config, case))
        nestings = self._nestings(parallel, config, train)
        if not nestings:
            return None
        return PlacedLayout(
            layout=layout,
            config=config,
            parallel=parallel,
            train=train,
            nestings=nestings,
            fills=self.space.filled(case.tp, case.cp, case.ep, case.pp) == case.ranks,
        )

    def _nestings(
        self,
        parallel: doc.Parallel,
        config: Config,
        train: doc.Train,
    ) -> list[Nestings]:
        """Returns the nesting orders, once per open exchange of expert tokens.

        The list is empty if no order allows the exchange that is given.
        """
        legal_nestings: list[Nestings] = []
        for all_to_all in self.all_to_alls:
            if all_to_all == "hierarchical":
                if legal_nestings and not legal_nestings[0].outside_nvlink("ep"):
                    continue  # the exchange crosses no domain
                parallel = structs.replace(parallel, expert_all_to_all=all_to_all)
            nestings = Nestings(self.context, parallel, config.parallel.order, train)
            if nestings.legal:
                legal_nestings.append(nestings)
        return legal_nestings

    def of_placed(
        self,
        placed: PlacedLayout,
        byte_limit: float = float("inf"),
    ) -> CostedLayout | None:
        """Returns the cost of a placed layout, or None if it needs too much memory.

        That is more than the GPU has, or more than `byte_limit`.
        """
        self.costed += 1
        nestings = list[Nestings]()
        account_of_exchange: dict[doc.AllToAll | UnsetType, doc.Memory] = {}
        for orders in placed.nestings:
            account = self._account(orders.parallel, placed.train)
            if account.total <= min(account.capacity, byte_limit):
                nestings.append(orders)
                account_of_exchange[orders.parallel.expert_all_to_all] = account
        if not nestings:
            return None
        solution = placed._replace(nestings=nestings).solve()
        config = placed.config
        if solution.best.outside_nvlink("tp") and not config.parallel.allow_tp_across_nvlink:
            return None  # `parallel.order` puts tensor-parallel groups across nodes
        if solution.parallel.expert_all_to_all == "hierarchical":
            with_all_to_all = structs.replace(config.parallel, expert_all_to_all="hierarchical")
            config = structs.replace(config, parallel=with_all_to_all)
        account = account_of_exchange[solution.parallel.expert_all_to_all]
        return CostedLayout(placed.layout, solution, account, config, placed.fills)

    def _account(self, parallel: doc.Parallel, train: doc.Train) -> doc.Memory:
        """Returns the memory of the fullest rank of a layout."""
        accounts = memory.memory_by_pp_rank(
            self.context.workload(parallel, train),
            self.context.cluster,
            self.recipe,
            self.context.matmul,
        )
        return max(accounts, key=lambda account: account.total)
