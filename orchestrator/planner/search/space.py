"""What `parallel=auto` may choose: every legal layout of a configuration, in two parts.

A `Spot` is how the ranks are cut up: tp, cp, ep, pp, dp and the micro-batch. A `Choice` adds what each spot leaves
open: recomputation, ZeRO, pipeline schedule and virtual stages. What the configuration gives is kept. Spots that differ
only in form (sequence parallelism, the way of context parallelism) are a family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from msgspec import structs

from orchestrator.config.schema import Config, ParallelSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import CpMethod
from orchestrator.plan.schedules import SCHEDULES, copies, illegal
from orchestrator.plan.supported import FIXED_BATCH, LAYOUT, MODELS, TRAINER, Case, broken, sharding, zero_group
from orchestrator.planner.degrees import global_batch
from orchestrator.planner.job import make_ramp
from orchestrator.planner.model.stages import balance_stages
from orchestrator.planner.placement.axis_order import Ground

RECOMPUTE = ("none", "selective", "full")
#: The plainer the earlier, where nothing else decides.
METHODS: tuple[CpMethod, ...] = ("zigzag", "ring", "allgather", "ulysses")
#: Rules about the form of a spot.
_FORM = ("sequence", "ulysses")
#: Rules that only a whole choice can break.
_LATER = ("virtual_stages", "zero_group", "schedule", "sharding", *_FORM)
#: Rules about tp alone: asked once for each.
_TENSOR = ("heads", "kv_heads", "ffn", "nvlink")


Form = tuple[bool, CpMethod]  # sequence parallelism, way of context parallelism


class Spot(NamedTuple):
    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    micro_batch_size: int
    micro_batches: int
    sp: bool
    cp_method: CpMethod


class Choice(NamedTuple):
    spot: Spot
    recompute: str
    zero: int
    schedule: str
    vpp: int


class Space:
    """The legal layouts of one configuration. `config.parallel` holds null for what is open.

    `any_layout`: also those that the bundled trainer does not run.
    """

    def __init__(self, config: Config, ground: Ground, any_layout: bool = False):
        par, ramp = config.parallel, config.train.batch_ramp
        if par.schedule_file is not None:
            raise OrchError("parallel.schedule_file is for one pp, vpp and batch: not with parallel=auto", Exit.CONFIG)
        if config.train.recompute not in (None, *RECOMPUTE):
            raise OrchError(
                f"train.recompute={config.train.recompute} is not searched; with parallel=auto leave it out, or give"
                f" one of {', '.join(RECOMPUTE)}",
                Exit.CONFIG,
            )
        self.config, self.ground, self.par = config, ground, par
        self.samples = global_batch(config)
        self.gpus = len(ground.cluster.node_names) * ground.cluster.gpus_per_node
        self._known_forms: dict[tuple[int, int], list[Form]] = {}
        self._zeros: dict[tuple[str, int, int], int] = {}
        self._counts: dict[tuple[int, int, int], int] = {}
        self._schedules: dict[tuple[int, int | None], dict[str, list[int]]] = {}
        given = config.train.recompute
        self.recompute = RECOMPUTE if given is None else (given,)
        self.base = Case(
            **{"tp": 1, "cp": 1, "ep": 1, "pp": 1, "dp": 1, "vpp": 1, "zero": 0, "sp": False, "schedule": None},
            zero_group=par.zero_group,
            allow_tp_across_nvlink=par.allow_tp_across_nvlink,
            micro_batch_size=1,
            global_batch_samples=self.samples,
            batch_ramp=ramp and make_ramp(ramp, config.train.seq_len),
            seq_len=config.train.seq_len,
            model=ground.model,
            cluster=ground.cluster,
        )
        self.rules = LAYOUT if any_layout else {**LAYOUT, **TRAINER}
        if not any_layout and (found := broken(self.base, MODELS)):
            raise OrchError(f"parallel=auto: {found[1]}; --any searches layouts for another program", Exit.CONFIG)

    # -------------------------------------------------------------------------------------- spots

    def spots(self) -> Iterator[Spot]:
        """Every way to cut up the ranks and the batch that keeps the rules, in a fixed order."""
        for first in self.families():
            yield from (first._replace(sp=sp, cp_method=way) for sp, way in self.forms(first.tp, first.cp))

    def families(self) -> Iterator[Spot]:
        """The first of each family."""
        moe, layers = self.ground.model.moe, self.ground.model.layers
        for tp in self._degrees("tp", self.gpus, self.ground.model.heads):
            for cp in self._degrees("cp", self.gpus // tp, self.config.train.seq_len):
                for ep in self._degrees("ep", self.gpus // tp // cp, moe.experts if moe else 1):
                    rest = self.gpus // (tp * cp * ep)
                    for pp in self._degrees("pp", rest, layers):
                        dp = rest // pp
                        if self.par.dp in (None, dp):
                            yield from self._batches(tp, cp, ep, pp, dp)

    def _degrees(self, axis: str, gpus: int, most: int) -> list[int]:
        """Degrees of an axis that divide the GPUs which the axes before it leave, and that keep its rules."""
        given = getattr(self.par, axis)
        if given is not None:
            return [given] if gpus % given == 0 and (axis == "pp" or self._keeps({axis: given})) else []
        found = [degree for degree in _divisors(gpus) if degree <= most]
        return [degree for degree in found if axis == "pp" or self._keeps({axis: degree})]

    def _batches(self, tp: int, cp: int, ep: int, pp: int, dp: int) -> Iterator[Spot]:
        share, rest = divmod(self.samples, dp * ep)
        if rest or not share:
            return
        forms = self.forms(tp, cp)
        if not forms:
            return
        sizes = _divisors(share) if self.par.micro_batch_size is None else [self.par.micro_batch_size]
        case = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp}
        if share % sizes[0] or not self._keeps(case | {"micro_batch_size": sizes[0]}):
            return
        for size in sizes:
            if share % size == 0 and self._starts(case | {"micro_batch_size": size}):
                yield Spot(tp, cp, ep, pp, dp, size, share // size, *forms[0])

    def _starts(self, degrees: dict[str, int]) -> bool:
        """Whether the first step of a ramp has a micro-batch for every replica."""
        rule = self.rules.get("batch_ramp") if self.base.batch_ramp else None
        return rule is None or rule(structs.replace(self.base, **degrees)) is None

    def forms(self, tp: int, cp: int) -> list[Form]:
        """Those that are open and keep their rules, plainest first."""
        key = tp, cp
        if key not in self._known_forms:
            along = [False] if tp == 1 else [True, False] if self.par.sp is None else [self.par.sp]
            ways = METHODS if self.par.cp_method is None and cp > 1 else [self.par.cp_method or "zigzag"]
            self._known_forms[key] = [
                (sp, method)
                for sp, method in product(along, ways)
                if not any(
                    LAYOUT[rule](structs.replace(self.base, tp=tp, cp=cp, sp=sp, cp_method=method)) for rule in _FORM
                )
            ]
        return self._known_forms[key]

    def _keeps(self, degrees: dict[str, int]) -> bool:
        """Whether the degrees keep every rule that they can be judged by (alone, an axis cannot fill the cluster)."""
        case = structs.replace(self.base, **degrees)
        skip = _LATER if "tp" in degrees and len(degrees) == 1 else (*_LATER, *_TENSOR)
        skip += ("gpus", "batch", "batch_ramp") if len(degrees) == 1 else ()
        return not any(rule(case) for name, rule in self.rules.items() if name not in skip)

    # -------------------------------------------------------------------------------------- choices

    def schedules(self, pp: int, micro_batches: int | None = None) -> dict[str, list[int]]:
        """Schedule -> virtual stages that a pipeline can run; None: with some number of micro-batches. One stage
        knows one schedule, 1f1b."""
        key = pp, micro_batches
        if key not in self._schedules:
            self._schedules[key] = self._runnable(*key)
        return self._schedules[key]

    def _runnable(self, pp: int, micro_batches: int | None) -> dict[str, list[int]]:
        if pp == 1:
            given = self.par.schedule in (None, "1f1b") and self.par.vpp in (None, 1)
            return {"1f1b": [1]} if given and not self._other_stages(1) else {}
        names = list(SCHEDULES) if self.par.schedule is None else [self.par.schedule]
        if self.base.batch_ramp and "batch_ramp" in self.rules:
            names = [name for name in names if name not in FIXED_BATCH]
        found = {}
        for name in names:
            low, high = SCHEDULES[name].vpp if name in SCHEDULES else (1, 0)
            most = self.ground.model.layers // pp
            vpps = range(low, (most if high is None else min(high, most)) + 1)
            vpps = [vpp for vpp in vpps if self.par.vpp in (None, vpp) and not self._other_stages(pp * vpp)]
            # whether a schedule takes pp and the micro-batches does not depend on the virtual stages; even takes all
            many = 2 * pp if micro_batches is None else micro_batches
            if vpps and illegal(name, pp, many, vpps[0]) is None:
                found[name] = vpps
        return found

    def _other_stages(self, stages: int) -> bool:
        return self.par.stage_layers is not None and len(self.par.stage_layers) != stages

    def stage_layers(self, stages: int) -> list[int]:
        if self.par.stage_layers is not None:
            return list(self.par.stage_layers)
        return balance_stages(self.ground.model, stages, self.config.train.seq_len)

    def zeros(self, spot: Spot) -> tuple[int, ...]:
        """ZeRO stages. Without replicas there is nothing to shard."""
        if self.par.zero is not None:
            return (self.par.zero,)
        return (0, 1, 2, 3) if spot.dp * spot.cp * spot.ep > 1 else (0,)

    def choices(self, spot: Spot) -> Iterator[Choice]:
        for recompute in self.recompute:
            for schedule, vpps in self.schedules(spot.pp, spot.micro_batches).items():
                for zero in filter(self.shards(spot, schedule), self.zeros(spot)):
                    yield from (Choice(spot, recompute, zero, schedule, vpp) for vpp in vpps)

    def shards(self, spot: Spot, schedule: str) -> Callable[[int], bool]:
        """Whether a ZeRO stage goes with a schedule."""
        fewest = SCHEDULES[schedule].vpp[0] if schedule in SCHEDULES else 1
        replicas, many = spot.dp * spot.cp * spot.ep, copies(schedule, spot.pp, fewest)
        group = self.par.zero_group
        return lambda zero: not (zero_group(zero, group, replicas) or sharding(zero, spot.pp, schedule, many))

    def count(self, spot: Spot) -> int:
        replicas = spot.dp * spot.cp * spot.ep
        key = spot.pp, spot.micro_batches, replicas if self.par.zero_group else min(replicas, 2)
        if key not in self._counts:
            self._counts[key] = len(self.recompute) * sum(
                len(vpps) * self._sharded(spot, schedule, key[2]) for schedule, vpps in self.schedules(*key[:2]).items()
            )
        return self._counts[key]

    def _sharded(self, spot: Spot, schedule: str, replicas: int) -> int:
        """ZeRO stages that go with a schedule."""
        key = schedule, spot.pp, replicas
        if key not in self._zeros:
            self._zeros[key] = sum(map(self.shards(spot, schedule), self.zeros(spot)))
        return self._zeros[key]

    def fixed(self, choice: Choice) -> Config:
        """The configuration with everything open filled in by a choice."""
        spot = choice.spot
        parallel: ParallelSpec = structs.replace(
            self.par,
            auto=False,
            **{name: getattr(spot, name) for name in Spot._fields if name != "micro_batches"},
            **{name: getattr(choice, name) for name in ("zero", "schedule", "vpp")},
        )
        train = structs.replace(self.config.train, recompute=choice.recompute)
        return structs.replace(self.config, parallel=parallel, train=train)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
