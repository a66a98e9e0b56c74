"""The search space of `parallel=auto`: every legal layout of a configuration.

A `Mesh` is the device mesh with the split of the batch: tp, cp, ep, pp, dp, the folding of experts
over tp and cp, and the micro-batch size. A `Layout` adds the choices that a mesh leaves open:
recomputation, ZeRO stage, pipeline schedule and virtual stages. Keys that the configuration gives
are kept. Meshes that differ only in `Fold` and `Variant` form a family. If expert tokens may be
exchanged by domain, `ExactCosts` tries both exchanges, as it tries every nesting order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

from msgspec import UNSET, structs

from orchestrator.config.schema import Config, ParallelSpec
from orchestrator.cost.context import CostContext
from orchestrator.cost.model.stages import balance_stages
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.batch import divisors
from orchestrator.plan.document import Model
from orchestrator.plan.domains import domains_of
from orchestrator.plan.expert_mesh import spread
from orchestrator.plan.schedules import SCHEDULES, copies, illegal
from orchestrator.plan.supported import FIXED_BATCH, LAYOUT, Case, broken, sharding, zero_group
from orchestrator.plan.trained import TRAINER, expert_sharding, wire_sharding
from orchestrator.planner.degrees import unit_case

from .layout import CP_METHODS, RECOMPUTE_MODES, Fold, Layout, Mesh, Variant

#: Rules that depend on the variant of a mesh.
VARIANT_RULES = ("sequence", "ulysses")
#: Rules that only a complete layout can break.
LAYOUT_RULES = (
    "virtual_stages",
    "zero_group",
    "schedule",
    "sharding",
    "grad_wire",
    "offload_weights",
    *VARIANT_RULES,
)
#: Rules about tp alone, checked once per tp.
TP_RULES = ("heads", "kv_heads", "ffn", "nvlink")


class Space:
    """The legal layouts of one configuration, whose `parallel` holds null for every open key.

    `any_layout` includes layouts that the bundled trainer does not run.
    """

    def __init__(self, config: Config, context: CostContext, any_layout: bool = False):
        _check_searchable(config, context.model)
        par = config.parallel
        self.config = config
        self.context = context
        self.par = par
        self.gpus = len(context.cluster.node_names) * context.cluster.gpus_per_node
        self.variants = cache(self._variants)
        self.schedules = cache(self._legal_schedules)
        self.folded = cache(self._folded)
        self._zeros: dict[tuple[str, int, int, int], int] = {}
        self._counts: dict[tuple[int, int, int, int], int] = {}
        domains = domains_of(context.cluster)
        across = par.allow_tp_across_nvlink
        #: GPUs in use: first all of them, then what remains if groups do not divide their NVLink
        #: domain.
        units = {
            domains.usable(nodes * domains.gpus_per_node) for nodes in range(1, domains.largest + 1)
        }
        self.worlds = sorted(units, reverse=True)
        self.parts = cache(partial(domains.parts, across=across))
        self.filled = cache(partial(domains.filled, across=across))
        given_recompute = config.train.recompute
        self.recompute = RECOMPUTE_MODES if given_recompute is None else (given_recompute,)
        self.base = unit_case(config, context.cluster, context.model)
        self.samples = self.base.global_batch_samples
        self.rules = LAYOUT if any_layout else {**LAYOUT, **TRAINER}
        # Degrees can only add to what is wrong with this case.
        if not any_layout and (breach := broken(_least(self.base, par), TRAINER)):
            raise OrchError(
                f"parallel=auto: {breach[1]}; --any searches layouts for another program",
                Exit.CONFIG,
            )

    # -------------------------------------------------------------------------------------- meshes

    def meshes(self) -> Iterator[Mesh]:
        """Yields every legal mesh, in a fixed order."""
        for first in self.families():
            for (etp, fold_cp), variants in self.folded(first.tp, first.cp, first.ep):
                for sp, method in variants:
                    yield first._replace(sp=sp, cp_method=method, etp=etp, fold_cp=fold_cp)

    def families(self) -> Iterator[Mesh]:
        """Yields the first mesh of each family."""
        model = self.context.model
        experts = model.moe.experts if model.moe else 1
        tensor = (
            (world, tp) for world in self.worlds for tp in self._degrees("tp", world, model.heads)
        )
        for world, tp in tensor:
            for cp in self._degrees("cp", world // tp, self.config.train.seq_len):
                for ep in self._degrees("ep", world // tp // cp, experts):
                    rest = world // (tp * cp * ep)
                    for pp in self._degrees("pp", rest, model.layers):
                        dp = rest // pp
                        if self.par.dp in (None, dp) and world in self.parts(tp, cp, ep, pp, dp):
                            yield from self._batches(tp, cp, ep, pp, dp)

    def _degrees(self, axis: str, gpus: int, largest: int) -> list[int]:
        """Returns the legal degrees of an axis that divide `gpus`, left by the axes before it."""
        given_degree = getattr(self.par, axis)
        if given_degree is None:
            dividing = [degree for degree in divisors(gpus) if degree <= largest]
        else:
            dividing = [given_degree] if gpus % given_degree == 0 else []
        return [degree for degree in dividing if axis == "pp" or self._keeps({axis: degree})]

    def _batches(self, tp: int, cp: int, ep: int, pp: int, dp: int) -> Iterator[Mesh]:
        """Yields the meshes of these degrees, one per legal micro-batch size."""
        share, rest = divmod(self.samples, dp * ep)
        if rest or not share:
            return
        folded = self.folded(tp, cp, ep)
        if not folded:
            return
        (etp, fold_cp), variants = folded[0]
        sp, cp_method = variants[0]
        sizes = (
            divisors(share) if self.par.micro_batch_size is None else [self.par.micro_batch_size]
        )
        case = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp}
        if share % sizes[0] or not self._keeps(case | {"micro_batch_size": sizes[0]}):
            return
        for size in sizes:
            if share % size == 0 and self._starts(case | {"micro_batch_size": size}):
                yield Mesh(
                    tp=tp,
                    cp=cp,
                    ep=ep,
                    pp=pp,
                    dp=dp,
                    micro_batch_size=size,
                    micro_batches=share // size,
                    sp=sp,
                    cp_method=cp_method,
                    etp=etp,
                    fold_cp=fold_cp,
                )

    def _starts(self, degrees: dict[str, int]) -> bool:
        """Reports whether the first step of a batch ramp has a micro-batch for every replica."""
        rule = self.rules.get("batch_ramp") if self.base.batch_ramp else None
        return rule is None or rule(structs.replace(self.base, **degrees)) is None

    def _variants(self, tp: int, cp: int) -> list[Variant]:
        """Returns the legal variants, simplest first."""
        along = [False]
        if tp > 1:
            along = [True, False] if self.par.sp is None else [self.par.sp]
        methods = (
            CP_METHODS
            if self.par.cp_method is None and cp > 1
            else [self.par.cp_method or "zigzag"]
        )
        return [
            (sp, method)
            for sp, method in product(along, methods)
            if not any(
                self.rules[rule](structs.replace(self.base, tp=tp, cp=cp, sp=sp, cp_method=method))
                for rule in VARIANT_RULES
                if rule in self.rules
            )
        ]

    def _folded(self, tp: int, cp: int, ep: int) -> list[tuple[Fold, list[Variant]]]:
        """Returns the legal folds of the experts with the variants of each, simplest first."""
        every = self.variants(tp, cp)
        legal_folds = list[tuple[Fold, list[Variant]]]()
        for fold in self._folds(tp, cp):
            mesh = structs.replace(self.base, tp=tp, cp=cp, ep=ep, etp=fold[0], fold_cp=fold[1])
            legal_sp = [
                sp
                for sp in (True, False)
                if LAYOUT["experts"](structs.replace(mesh, sp=sp)) is None
            ]
            variants = [variant for variant in every if variant[0] in legal_sp]
            if variants:
                legal_folds.append((fold, variants))
        return legal_folds

    def _folds(self, tp: int, cp: int) -> Iterator[Fold]:
        """Yields the folds of the experts.

        Without folding, `etp` stays unset unless it is given. A parallelism spec can express a fold
        over cp only together with etp.
        """
        par = self.par
        if self.context.model.moe is None:
            etp = UNSET if par.etp is None else par.etp
            yield etp, par.fold_cp or UNSET
            return
        over_cp = [False, True] if par.fold_cp is None and cp > 1 else [bool(par.fold_cp)]
        cuts = sorted(divisors(tp), reverse=True) if par.etp is None else [par.etp]
        for fold_cp, cut in product(over_cp, cuts):
            unset = par.etp is None and cut == tp and not fold_cp
            etp = UNSET if unset else cut
            yield etp, fold_cp or UNSET

    def _keeps(self, degrees: dict[str, int]) -> bool:
        """Reports whether the degrees keep every rule that applies to them.

        One axis alone need not fill the cluster.
        """
        case = structs.replace(self.base, **degrees)
        skip: tuple[str, ...] = (
            LAYOUT_RULES if degrees.keys() == {"tp"} else (*LAYOUT_RULES, *TP_RULES)
        )
        skip += ("gpus", "batch", "batch_ramp") if len(degrees) == 1 else ()
        return not any(rule(case) for name, rule in self.rules.items() if name not in skip)

    # -------------------------------------------------------------------------------------- layouts

    def _legal_schedules(self, pp: int, micro_batches: int | None = None) -> dict[str, list[int]]:
        """Maps each legal schedule to its legal numbers of virtual stages.

        With `micro_batches` None, a schedule must be legal for some number of micro-batches. A
        single stage has one schedule, 1f1b.
        """
        if pp == 1:
            is_open = self.par.schedule in (None, "1f1b") and self.par.vpp in (None, 1)
            return {"1f1b": [1]} if is_open and not self._other_stages(1) else {}
        names = list(SCHEDULES) if self.par.schedule is None else [self.par.schedule]
        if self.base.batch_ramp and "batch_ramp" in self.rules:
            names = [name for name in names if name not in FIXED_BATCH]
        vpps_by_schedule = {}
        for name in names:
            low, high = SCHEDULES[name].vpp if name in SCHEDULES else (1, 0)
            layers_per_rank = self.context.model.layers // pp
            highest = layers_per_rank if high is None else min(high, layers_per_rank)
            vpps = [
                vpp
                for vpp in range(low, highest + 1)
                if self.par.vpp in (None, vpp) and not self._other_stages(pp * vpp)
            ]
            # The legality of pp and micro-batches does not depend on the virtual stages; 2 * pp
            # micro-batches are legal for every schedule.
            micro_batch_count = 2 * pp if micro_batches is None else micro_batches
            if vpps and illegal(name, pp, micro_batch_count, vpps[0]) is None:
                vpps_by_schedule[name] = vpps
        return vpps_by_schedule

    def _other_stages(self, stages: int) -> bool:
        """Reports whether `parallel.stage_layers` is given for another number of stages."""
        return self.par.stage_layers is not None and len(self.par.stage_layers) != stages

    def stage_layers(self, stages: int) -> list[int]:
        """Returns the layers of each stage: the configured ones, or balanced ones."""
        if self.par.stage_layers is not None:
            return list(self.par.stage_layers)
        return balance_stages(self.context.model, stages, self.config.train.seq_len)

    def zeros(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the possible ZeRO stages; without replicas there is nothing to shard."""
        if self.par.zero is not None:
            return (self.par.zero,)
        return (0, 1, 2, 3) if mesh.dp * mesh.cp * mesh.ep > 1 else (0,)

    def layouts(self, mesh: Mesh) -> Iterator[Layout]:
        """Yields every legal layout of a mesh."""
        for recompute in self.recompute:
            for schedule, vpps in self.schedules(mesh.pp, mesh.micro_batches).items():
                for zero in filter(self.shards(mesh, schedule), self.zeros(mesh)):
                    yield from (Layout(mesh, recompute, zero, schedule, vpp) for vpp in vpps)

    def shards(self, mesh: Mesh, schedule: str) -> Callable[[int], bool]:
        """Returns a predicate that tells whether a ZeRO stage is legal with a schedule."""
        fewest = SCHEDULES[schedule].vpp[0] if schedule in SCHEDULES else 1
        replicas = mesh.dp * mesh.cp * mesh.ep
        model_copies = copies(schedule, mesh.pp, fewest)
        group = self.par.zero_group
        ep = spread(mesh) if "expert_parallel" in self.rules else 1
        wire = self.base.grad_wire if "grad_wire" in self.rules else UNSET
        return lambda zero: (
            not (
                zero_group(zero, group, replicas)
                or sharding(zero, schedule, model_copies)
                or expert_sharding(zero, ep, group)
                or wire_sharding(wire, zero, replicas * model_copies)
            )
        )

    def count(self, mesh: Mesh) -> int:
        """Returns the number of legal layouts of a mesh."""
        replicas = mesh.dp * mesh.cp * mesh.ep
        key = (
            mesh.pp,
            mesh.micro_batches,
            replicas if self.par.zero_group else min(replicas, 2),
            self._experts(mesh),
        )
        if key not in self._counts:
            self._counts[key] = len(self.recompute) * sum(
                len(vpps) * self._sharded(mesh, schedule, key[2])
                for schedule, vpps in self.schedules(*key[:2]).items()
            )
        return self._counts[key]

    def _experts(self, mesh: Mesh) -> int:
        """Returns the number that decides whether experts can be sharded."""
        return spread(mesh) if self.par.zero_group else 1

    def _sharded(self, mesh: Mesh, schedule: str, replicas: int) -> int:
        """Returns the number of ZeRO stages that are legal with a schedule."""
        key = schedule, mesh.pp, replicas, self._experts(mesh)
        if key not in self._zeros:
            self._zeros[key] = sum(map(self.shards(mesh, schedule), self.zeros(mesh)))
        return self._zeros[key]

    def fixed(self, layout: Layout) -> Config:
        """Returns the configuration with the keys of a layout filled in."""
        mesh = layout.mesh
        etp = None if mesh.etp is UNSET else mesh.etp
        fold_cp = None if mesh.fold_cp is UNSET else mesh.fold_cp
        parallel: ParallelSpec = structs.replace(
            self.par,
            auto=False,
            tp=mesh.tp,
            cp=mesh.cp,
            ep=mesh.ep,
            pp=mesh.pp,
            dp=mesh.dp,
            micro_batch_size=mesh.micro_batch_size,
            sp=mesh.sp,
            cp_method=mesh.cp_method,
            etp=etp,
            fold_cp=fold_cp,
            zero=layout.zero,
            schedule=layout.schedule,
            vpp=layout.vpp,
        )
        train = structs.replace(self.config.train, recompute=layout.recompute)
        return structs.replace(self.config, parallel=parallel, train=train)


def _least(base: Case, par: ParallelSpec) -> Case:
    """Returns the case of one GPU, or of two with ZeRO-3 if nothing smaller offloads weights to the
    host."""
    if base.offload_weights and base.offload == "host" and par.zero in (None, 3):
        return structs.replace(base, zero=3, dp=2)
    return base


def _check_searchable(config: Config, model: Model) -> None:
    """Raises OrchError (65) if a key or the model is one that the search does not cover."""
    if config.parallel.schedule_file is not None:
        raise OrchError(
            "parallel.schedule_file is for one pp, vpp and batch: not with parallel=auto",
            Exit.CONFIG,
        )
    if config.train.recompute not in (None, *RECOMPUTE_MODES):
        raise OrchError(
            f"train.recompute={config.train.recompute} is not searched; with parallel=auto"
            f" leave it out, or give one of {', '.join(RECOMPUTE_MODES)}",
            Exit.CONFIG,
        )
