"""A section of the page compares published figures with the planner's; `Plans` builds the plans
that the planner's figures are read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from orchestrator.cluster.build import build_cluster
from orchestrator.config.schema import Config, ModelSpec
from orchestrator.plan import Plan
from orchestrator.planner.build import build_plan

Load = Callable[[list[str]], Config]


class Row(Struct, frozen=True):
    """One published figure and the planner's figure for it."""

    what: str
    ours: float
    theirs: float | None = None
    unit: str = ""
    column: str = ""  # Rows with a column form a grid: `what` names its rows.
    within: float | None = None  # A test checks that |ours / theirs - 1| is at most this.
    bound: str = ""  # "more" or "less": the published figure is a bound.
    sd: float = 0.0  # Standard deviation of our relative error, if a step is predicted.

    @property
    def off(self) -> float | None:
        """Our figure over the published one, minus 1."""
        return self.ours / self.theirs - 1 if self.theirs and not self.bound else None

    @property
    def holds(self) -> bool:
        """True if our figure is as close to theirs as `within` asks, or on the right side of the
        bound."""
        if self.bound and self.theirs is not None:
            return self.ours > self.theirs if self.bound == "more" else self.ours < self.theirs
        return self.within is None or self.off is None or abs(self.off) <= self.within


class Section(Struct, frozen=True):
    title: str
    source: str
    rows: Sequence[Row]
    about: str = ""  # The way in which our figures were computed.
    why: str = ""  # The reason why ours and theirs differ.


class Plans:
    """Builds plans of jobs: overrides are composed once, then some keys are replaced. Clusters keep
    the numbers of their files."""

    def __init__(self, load: Load):
        self._load = load
        self._configs: dict[str, Config] = {}

    def config(
        self,
        overrides: str,
        parallel: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        model: ModelSpec | None = None,
        nodes: int | None = None,
    ) -> Config:
        """Returns the configuration of `overrides`. `nodes` sets the number of nodes, all of them
        below one switch."""
        if overrides not in self._configs:
            self._configs[overrides] = self._load(overrides.split())
        config = self._configs[overrides]
        cluster = config.cluster
        if nodes is not None:
            level = structs.replace(cluster.levels[0], nodes_per_switch=nodes)
            cluster = structs.replace(
                cluster,
                nodes=nodes,
                levels=[level],
                name=f"{cluster.name}x{nodes}",
            )
        return structs.replace(
            config,
            cluster=cluster,
            parallel=structs.replace(config.parallel, **(parallel or {})),
            train=structs.replace(config.train, **(train or {})),
            model=model or config.model,
        )

    def plan(self, overrides: str, **changes: Any) -> Plan:
        """Returns the plan of `config(overrides, **changes)`."""
        config = self.config(overrides, **changes)
        return build_plan(config, build_cluster(config.cluster), any_layout=True)

    def gpt(
        self,
        layers: int,
        hidden: int,
        heads: int,
        seq_len: int = 1024,
    ) -> ModelSpec:
        """Returns a GPT-like model with GPT-2's vocabulary."""
        gpt2 = self.config("model=gpt2").model
        return structs.replace(
            gpt2,
            name=f"gpt_{layers}x{hidden}",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            ffn_hidden=4 * hidden,
            max_seq_len=seq_len,
        )
