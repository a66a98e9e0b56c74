"""Products in 8 bits on every layout: the modules that use them, and the ranks over which the
largest value of a tensor is taken.

The linears and the experts of blocks use 8 bits, without those that `train.matmul_wide` names.
Embedding, head, routers, norms, attention's own products and all sums stay wide, as in DeepSeek-V3
(arXiv 2412.19437, section 3.3.1).

    tp   cuts a weight, the gradient of a column-parallel linear, and the input of a row-parallel
        one; with sequence parallelism it cuts the tokens of a linear that is whole on every rank
    cp   cuts the sequence of inputs and gradients
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.plan import Plan
from trainer.comm.collectives import CommCounter, all_reduce
from trainer.comm.mesh import Mesh
from trainer.model.fp8.delayed import DelayedOp
from trainer.model.fp8.experts import ExpertOp, expert_by_expert
from trainer.model.fp8.linears import BlockOp, Shared, SharedHeadsOp, TensorOp
from trainer.model.fp8.narrow import narrow_experts, narrow_linears
from trainer.model.fp8.rounding import UNCUT, Blocks, Dimension, Largest
from trainer.model.linear import Linear, LinearOp
from trainer.model.stage import Stage

from .context.order import chunks
from .delayed_scaling import DelayedScales
from .params import ParamInfo, ParamTable

#: The mesh axis under which the messages of a group are counted.
AXES = {"tp": "tp", "etp": "tp", "cp": "cp"}


class _Over:
    """Takes the largest values over the ranks of mesh groups."""

    def __init__(self, mesh: Mesh, counter: CommCounter, *names: str):
        self.groups = [(AXES[name], mesh.group(name)) for name in names]
        self.counter = counter

    def __call__(self, largest: Tensor) -> Tensor:
        for axis, group in self.groups:
            largest = all_reduce(largest, group, axis, self.counter, dist.ReduceOp.MAX)
        return largest


class _Features(Dimension):
    """Features [start, stop) of `length`, of which each rank of a group holds equally many."""

    def __init__(
        self,
        start: int,
        stop: int,
        length: int,
        over: Largest,
    ):
        self.start = start
        self.stop = stop
        self.length = length
        self.over = over

    def blocks(self, elements: int, size: int) -> Blocks:
        return Blocks.at(torch.arange(self.start, self.stop), size, self.length)

    def largest(self, size: int) -> Largest | None:
        return self.over if (self.stop - self.start) % size else None


class _Tokens(Dimension):
    """This rank's tokens of every sequence of a micro-batch: those at `positions`, in runs whose
    lengths are multiples of `run`."""

    def __init__(
        self,
        positions: list[int],
        run: int,
        seq_len: int,
        over: Largest,
    ):
        self.positions = torch.tensor(positions)
        self.run = run
        self.seq_len = seq_len
        self.over = over

    def blocks(self, elements: int, size: int) -> Blocks:
        samples = elements // len(self.positions)
        starts = torch.arange(samples)[:, None] * self.seq_len
        positions = (starts + self.positions).flatten()
        return Blocks.at(positions, size, samples * self.seq_len)

    def largest(self, size: int) -> Largest | None:
        return self.over if self.run % size else None


class _Rounding:
    """Makes the ops of one rank."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        counter: CommCounter,
        scales: DelayedScales,
    ):
        self.plan = plan
        self.mesh = mesh
        self.counter = counter
        self.scales = scales
        self.shared = Shared()
        # Linears that share an input share these, so that they round it once.
        self._overs: dict[tuple[str, ...], Largest] = {}
        self._token_dimensions: dict[bool, Dimension] = {}

    def linear_op(self, linear: Linear, info: ParamInfo) -> LinearOp:
        """Returns the op of a linear with this weight, [outputs, inputs]."""
        cut = {shard.dim for shard in info.shards}
        by_tp = self.mesh.size("tp") > 1
        shards_tokens = by_tp and not cut and self.plan.parallel.sp
        if self.plan.job.matmul == "fp8_block":
            return self._with_shared_heads(self._block_op(info, shards_tokens), info)
        over_tokens = ("cp", "tp") if shards_tokens else ("cp",)
        over_weight = ("tp",) if cut else ()
        over_inputs = self._over(*over_tokens, *(over_weight if 1 in cut else ()))
        over_outputs = self._over(*over_tokens, *(over_weight if 0 in cut else ()))
        make_op: Callable[..., TensorOp] = TensorOp
        if self.plan.job.matmul == "fp8_delayed":
            make_op = partial(DelayedOp, terms=self.scales.terms)
        op = make_op(
            self.shared,
            largest_input=over_inputs,
            largest_weight=self._over(*over_weight),
            largest_grad=over_outputs,
            fp8_unit=self.plan.cluster.device == "cuda",
        )
        if isinstance(op, DelayedOp):
            self.scales.add(info.name, linear, op)
        return self._with_shared_heads(op, info)

    def _block_op(self, info: ParamInfo, shards_tokens: bool) -> BlockOp:
        return BlockOp(
            self.shared,
            tokens=self._tokens(shards_tokens),
            inputs=self._features(info, 1, "tp"),
            outputs=self._features(info, 0, "tp"),
        )

    def expert_op(self, info: ParamInfo) -> ExpertOp:
        """Returns the op of experts with these weights, [experts, outputs, inputs]."""
        group = "etp" if self.mesh.group("experts") is not None else "tp"
        _, outputs, inputs = info.global_shape
        return ExpertOp(
            self.shared,
            self.plan.job.matmul,
            info.local_shape[0],
            (inputs, outputs),
            inputs=self._features(info, 2, group),
            outputs=self._features(info, 1, group),
        )

    def _over(self, *names: str) -> Largest:
        if names not in self._overs:
            self._overs[names] = _Over(self.mesh, self.counter, *names)
        return self._overs[names]

    def _features(self, info: ParamInfo, dim: int, group: str) -> Dimension:
        for shard in info.shards:
            if shard.dim == dim:
                return _Features(
                    shard.start,
                    shard.stop,
                    info.global_shape[dim],
                    self._over(group),
                )
        return UNCUT

    def _tokens(self, by_tp: bool) -> Dimension:
        """The dimension of tokens, which cp cuts, and tp if `by_tp`."""
        if by_tp not in self._token_dimensions:
            self._token_dimensions[by_tp] = self._cut_tokens(by_tp)
        return self._token_dimensions[by_tp]

    def _cut_tokens(self, by_tp: bool) -> Dimension:
        par = self.plan.parallel
        if par.cp == 1 and not by_tp:
            return UNCUT
        seq_len = self.plan.job.train.seq_len
        ranges = chunks(par.cp_method, seq_len, par.cp, self.mesh.index("cp"))
        positions = [position for positions in ranges for position in positions]
        run = len(ranges[0])
        over = ("cp", "tp") if by_tp else ("cp",)
        if by_tp:
            count = len(positions) // par.tp
            first = self.mesh.index("tp") * count
            positions = positions[first : first + count]
            run = math.gcd(run, count)
        return _Tokens(positions, run, seq_len, self._over(*over))

    def _with_shared_heads(self, op: LinearOp, info: ParamInfo) -> LinearOp:
        if "kv" not in info.sums:
            return op
        group = self.mesh.group("kv")

        def total(grad: Tensor) -> Tensor:
            return all_reduce(grad.clone(), group, "tp", self.counter)

        return SharedHeadsOp(op, total, self.mesh.size("kv"))


def apply_fp8(
    stage: Stage,
    plan: Plan,
    mesh: Mesh,
    counter: CommCounter,
    infos: ParamTable,
    scales: DelayedScales,
) -> None:
    """Makes the linears and the experts of a stage's blocks use the plan's `matmul`. `scales`
    receives the linears whose scales come from earlier steps."""
    rounding = _Rounding(plan, mesh, counter, scales)
    train = plan.job.train
    for name, linear in narrow_linears(stage, train):
        linear.op = rounding.linear_op(linear, infos[f"{name}.weight"])
    for name, experts, is_narrow in narrow_experts(stage, train):
        info = infos[f"{name}.weight"]
        experts.op = rounding.expert_op(info) if is_narrow else expert_by_expert
