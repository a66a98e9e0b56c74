"""Bugs that no layout shows, since one process has them too, or that only speed or memory would:
each with a check of its own, which passes without the bug.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

import trainer.checkpoint.background as background
import trainer.data.order as order
import trainer.engine as engine
import trainer.model.dropout as dropout
import trainer.model.rope as rope
import trainer.model.stage as model_stage
import trainer.optim.sharded as sharded
import trainer.parallel.apply as apply
import trainer.parallel.context.allgather as allgather
import trainer.parallel.context.block as block
import trainer.parallel.context.ring as ring
import trainer.parallel.data.fsdp as fsdp
import trainer.parallel.vocab as vocab
import trainer.train as loop
from orchestrator.plan import seal
from orchestrator.plan.worker import WorkerEnv
from tests.beds.plans import make_plan, tiny_model
from tests.reference import adamw as naive
from tests.reference import single
from tests.reference.attention import attention
from tests.trainer import samples
from tests.trainer.operations import Order
from tests.trainer.states import Recorder, checkpoints, state
from trainer.checkpoint.format import rank_file, step_name
from trainer.comm import mesh
from trainer.comm.collectives import CommCounter
from trainer.comm.control import ControlPath
from trainer.comm.mesh import Mesh, members_of
from trainer.data.order import SampleOrder
from trainer.engine import Engine
from trainer.model.attention import SDPA
from trainer.model.dropout import seed_dropout
from trainer.model.stage import Stage
from trainer.parallel.context.order import positions
from trainer.precision import FP64, recipe
from trainer.verify.compare import with_eps
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import step_batches

from .base import Patch


class Piece(NamedTuple):
    name: str
    check: Callable[[Path], None]  # raises AssertionError where the bug is
    by: str  # in the statement of the check that notices it
    patch: Patch


PIECES: list[Piece] = []


def bug(name: str, check: Callable[[Path], None], by: str) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        PIECES.append(Piece(name, check, by, patch))
        return patch

    return add


# ------------------------------------------------------------------------------------------- the
#     model


def rope_turns_by_its_own_base(tmp_path: Path) -> None:
    """RoPE is right at positions of long contexts, to fp32's accuracy, also where the model is
    bf16."""
    token_positions = torch.tensor([[0, 1, 255, 4097, 8191]])
    for theta in (1e4, 5e5):
        cos, sin = rope.rope_tables(
            token_positions, samples.small(rope_theta=theta, head_dim=64), torch.bfloat16
        )
        assert cos.dtype == sin.dtype == torch.float32
        for at, position in enumerate(token_positions[0].tolist()):
            angles = [position * theta ** (-2 * pair / 64) for pair in range(32)]
            assert (cos[0, at, 0] - torch.tensor([math.cos(a) for a in angles])).abs().max() < 2e-3
            assert (sin[0, at, 0] - torch.tensor([math.sin(a) for a in angles])).abs().max() < 2e-3
    tables = []
    for theta in (1e4, 5e5):
        stage = Stage(samples.small(rope_theta=theta), range(1), first=True, last=False)
        for param in stage.parameters():
            torch.nn.init.constant_(param, 0.1)
            param.data.view(-1)[::3] = -0.2
        tables.append(stage(None, samples.batch(stage.model)))
    assert not torch.equal(*tables), "the model's own base reaches its attention"


@bug("RoPE's base is always 10000", rope_turns_by_its_own_base, by="(cos[0, at, 0]")
def _(patch):
    original = rope.rope_tables
    plain = {"rope_theta": 1e4}
    patch.setattr(
        rope,
        "rope_tables",
        lambda at, model, *rest: original(at, structs.replace(model, **plain), *rest),
    )


@bug("the model ignores its RoPE base", rope_turns_by_its_own_base, by="torch.equal(*tables)")
def _(patch):
    original = rope.rope_tables
    plain = {"rope_theta": 1e4}

    def tables(token_positions, model, *rest):
        return original(token_positions, structs.replace(model, **plain), *rest)

    patch.setattr(model_stage, "rope_tables", tables)


@bug("RoPE's angles are computed in bf16", rope_turns_by_its_own_base, by="torch.float32")
def _(patch):
    patch.setattr(rope.torch, "promote_types", lambda dtype, other_dtype: dtype)


def every_dropout_draws_its_own(tmp_path: Path) -> None:
    stage = Stage(tiny_model(dropout=0.5), range(3), first=True, last=True)
    seed_dropout(stage, 7)
    salts = [int(module.salt) for module in stage.modules() if isinstance(module, dropout.Seeded)]
    assert (
        len(salts) == len(set(salts)) == 1 + 3 * 3
    )  # embedding; attention and two residuals a layer
    x = torch.ones(1, 4, 32)
    serial = torch.arange(4)[None]
    first, second = (stage.blocks[at].drop_mlp(x, serial) for at in (0, 1))
    assert not torch.equal(first, second)


@bug("every layer draws the same dropout mask", every_dropout_draws_its_own, by="len(set(salts))")
def _(patch):
    original = dropout.hashlib.blake2b

    def digest(key, **options):
        seed, kind, name = key.decode().split("/")
        return original(f"{seed}/{kind}/{name.split('.')[-1]}".encode(), **options)

    patch.setattr(dropout, "hashlib", SimpleNamespace(blake2b=digest))


@bug("all dropout draws from one salt", every_dropout_draws_its_own, by="len(set(salts))")
def _(patch):
    original = dropout.hashlib.blake2b
    patch.setattr(
        dropout,
        "hashlib",
        SimpleNamespace(blake2b=lambda key, **options: original(b"", **options)),
    )


def a_loss_in_chunks_is_that_of_the_whole(tmp_path: Path) -> None:
    """The sharded loss, whose chunks are larger than any small model's logits."""
    logits = (
        (4 * torch.randn(3, 5, 17, generator=torch.Generator().manual_seed(1)))
        .double()
        .requires_grad_()
    )
    targets = torch.randint(0, 15, (3, 5), generator=torch.Generator().manual_seed(2))
    targets[0, 1:3] = -100
    plain = logits.detach().clone().requires_grad_()
    size = vocab.CHUNK
    vocab.CHUNK = 40
    try:
        loss = vocab.VocabParallelLoss(0, 15, None, CommCounter())(
            logits, targets
        )  # two columns of padding
        loss.backward()
    finally:
        vocab.CHUNK = size
    expected = torch.nn.functional.cross_entropy(
        plain[..., :15].flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-10, atol=1e-14)


@bug(
    "the chunked loss takes the first chunk's log-sums for all",
    a_loss_in_chunks_is_that_of_the_whole,
    by="assert_close(loss, expected",
)
def _(patch):
    original = torch.log_softmax
    first: list[torch.Tensor] = []

    def log_softmax(chunk, **options):
        log_probs = original(chunk, **options)
        first.append(log_probs)
        return first[0][: len(log_probs)] if len(first[0]) >= len(log_probs) else log_probs

    patch.setattr(vocab.torch, "log_softmax", log_softmax)


# -------------------------------------------------------------------------------------------
#     context parallelism


def blocks_are_joined_in_fp32(tmp_path: Path) -> None:
    """Attention in bf16 over eight blocks of keys is as near to float64 as over one."""
    make = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 64, 4, 16, generator=make, dtype=torch.float64) for _ in range(3))
    truth = attention(q, k, v, None)
    narrow = [tensor.bfloat16() for tensor in (q, k, v)]
    one_block = SDPA(causal=True)(*narrow, None, None)

    def far(output: torch.Tensor, columns: slice | list[int] = slice(None)) -> float:
        return float((output.double() - truth[:, columns]).square().mean().sqrt())

    def work(rank: int) -> dict[str, float]:
        group = torch.distributed.group.WORLD
        errors = {}
        for method in ("ring", "zigzag", "allgather"):
            own_positions = positions(method, 64, 4, rank)
            if method == "allgather":
                core = allgather.AllGatherAttention(group, 4, rank, CommCounter())
            else:
                core = ring.RingAttention(method, group, (0, 1, 2, 3), rank, CommCounter())
            out = core(
                *(tensor[:, own_positions] for tensor in narrow),
                torch.tensor(own_positions).expand(2, -1),
                None,
            )
            errors[method] = far(out, own_positions) ** 2
        return errors

    answers = run_ranks(work, 4)
    for method in ("ring", "zigzag", "allgather"):
        error = math.sqrt(sum(answer[method] for answer in answers) / 4)
        assert error < 1.1 * far(one_block), (method, error, far(one_block))


@bug(
    "context parallelism joins its blocks in bf16",
    blocks_are_joined_in_fp32,
    by="error < 1.1 * far(one_block)",
)
def _(patch):
    original = block.forward
    patch.setattr(block, "accumulation_dtype", lambda dtype: dtype)

    def forward(*args, **options):
        out, lse = original(*args, **options)
        return out, lse.to(out.dtype)

    patch.setattr(block, "forward", forward)


# -------------------------------------------------------------------------------------------
#     optimizer, precision


def fp16_weights_follow_the_unscaled_gradient(tmp_path: Path) -> None:
    """Two steps skipped, two applied: master weights are the naive optimizer's, whose count knows
    nothing of those."""
    plan = make_plan(precision="fp16", clip_grad_norm=0.1)
    plan = with_eps(plan, "fp16")  # a small one hides a gradient that is too large everywhere
    run = Engine(plan, Mesh.alone(plan), torch.device("cpu"), recipe(plan.job.train))
    assert run.scaler is not None
    optim = plan.job.optim
    twin = naive.AdamW(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
    expected = {
        name: weight.float() for name, weight in single.initial_weights(plan, torch.float16).items()
    }
    for step, scale in enumerate((2.0**40, 2.0**10, 2.0**40, 2.0**8)):
        run.scaler.scale = scale
        _, norm = run.gradients(*step_batches(plan, run.mesh.coord, 2 * step))
        grads = {name: grad.float() / scale for name, grad in run.buckets.full_grads().items()}
        applied = bool(run.update(norm, 1e-2))
        assert applied == (scale < 2.0**20), "only what overflows is skipped"
        if applied:
            assert float(norm) == pytest.approx(naive.norm(grads), rel=1e-5)
            expected = twin.step(
                expected, naive.clipped(grads, plan.job.train.clip_grad_norm), 1e-2
            )
    for piece in run.state_pieces(to_write=False):
        if piece.kind == "master":
            naive_weight = expected[piece.info.name].flatten()
            torch.testing.assert_close(piece.data, naive_weight, rtol=1e-5, atol=1e-6)
    assert run.scalars()["optimizer_steps"] == 2
    run.resumed(9, {"optimizer_steps": 5.0})
    assert run.optimizer.step_count == 5, "a resumed run corrects its bias by updates, not by steps"


@bug(
    "fp16: gradients are never unscaled",
    fp16_weights_follow_the_unscaled_gradient,
    by="assert_close(piece.data, naive_weight",
)
def _(patch):
    original = sharded.ShardedOptimizer.step
    patch.setattr(
        sharded.ShardedOptimizer,
        "step",
        lambda self, lr, scale, finite: original(self, lr, scale * 0 + 1, finite),
    )


@bug(
    "fp16: the norm is of the scaled gradient",
    fp16_weights_follow_the_unscaled_gradient,
    by="naive.norm(grads)",
)
def _(patch):
    original = engine.grad_norm
    patch.setattr(engine, "grad_norm", lambda buckets, device: original(buckets, device) * 1024.0)


@bug(
    "fp16: bias correction counts skipped steps",
    fp16_weights_follow_the_unscaled_gradient,
    by="assert_close(piece.data, naive_weight",
)
def _(patch):
    original = sharded.ShardedOptimizer.step

    def step(self, lr, scale, finite):
        self.step_count += int(not finite)
        original(self, lr, scale, finite)

    patch.setattr(sharded.ShardedOptimizer, "step", step)


@bug(
    "a resumed run corrects its bias by steps, skipped ones included",
    fp16_weights_follow_the_unscaled_gradient,
    by="step_count == 5",
)
def _(patch):
    original = Engine.resumed

    def resumed(self, step, scalars):
        original(
            self,
            step,
            {name: value for name, value in scalars.items() if name != "optimizer_steps"},
        )

    patch.setattr(Engine, "resumed", resumed)


# ------------------------------------------------------------------------------------------- the
#     loop


class Places:
    """A loader of the tokens that verify trains on."""

    def __init__(self, plan):
        self.plan = plan
        self.store = SimpleNamespace(index=SimpleNamespace(key="k"))

    def step(self, consumed: int):
        return step_batches(self.plan, self.plan.ranks[0].coord, consumed)[0]

    def samples_at(self, consumed: int) -> int:
        return self.plan.parallel.global_batch_samples


class Steps(Recorder):
    def __init__(self):
        super().__init__()
        self.steps: list[dict] = []

    def step(self, **fields: object) -> None:
        self.steps.append(fields)


def the_loop_trains_what_one_process_trains(tmp_path: Path) -> None:
    """Four steps of other learning rates, in the run's own loop: losses, norms and rates as the
    naive twin has them."""
    plan = make_plan(steps=4, micro_batches=3, clip_grad_norm=0.1)
    optim = structs.replace(plan.job.optim, warmup_steps=2)
    plan = seal(structs.replace(plan, job=structs.replace(plan.job, optim=optim)))
    env = WorkerEnv(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        run_id="run",
        master_addr="127.0.0.1",
        master_port=1,
        epoch=0,
        node="node0",
        plan="",
        plan_hash="",
        run_dir=str(tmp_path / f"{len(list(tmp_path.iterdir()))}"),
        report_fd=None,
    )
    Path(env.run_dir).mkdir()
    reporter = Steps()
    run = loop.Run(
        plan,
        env,
        Mesh.alone(plan),
        torch.device("cpu"),
        FP64,
        Places(plan),
        reporter,
        SimpleNamespace(received=None),
        ControlPath(),
    )
    run.resume()
    run.loop()
    twin = single.train(plan, 4, torch.float64)
    assert [step["step"] for step in reporter.steps] == [1, 2, 3, 4]
    assert [step["samples"] for step in reporter.steps] == [3, 6, 9, 12]
    peak = plan.job.optim.lr
    floor = plan.job.optim.lr * plan.job.optim.min_lr_ratio
    rates = [peak / 2, peak, (peak + floor) / 2, floor]
    assert [step["lr"] for step in reporter.steps] == pytest.approx(rates, rel=1e-12)
    for reported, expected in zip(reporter.steps, twin, strict=True):
        assert reported["loss"] == pytest.approx(expected.loss, rel=1e-11)
        assert reported["grad_norm"] == pytest.approx(expected.norm, rel=1e-9)
    for info, weight in run.engine.buckets.full_params():
        torch.testing.assert_close(weight, twin[-1].weights[info.name], rtol=0, atol=1e-10)


@bug(
    "the learning rate is that of the step before",
    the_loop_trains_what_one_process_trains,
    by='step["lr"]',
)
def _(patch):
    original = loop.learning_rate
    patch.setattr(loop, "learning_rate", lambda step, *rest: original(max(1, step - 1), *rest))


@bug(
    "the learning rate is applied one step late and reported in time",
    the_loop_trains_what_one_process_trains,
    by='reported["loss"]',
)
def _(patch):
    original = Engine.update
    before = []

    def update(self, norm, lr):
        before.append(lr)
        return original(self, norm, before[max(0, len(before) - 2)])

    patch.setattr(Engine, "update", update)


@bug(
    "every step reads the samples of the first",
    the_loop_trains_what_one_process_trains,
    by='reported["loss"]',
)
def _(patch):
    original = Places.step
    patch.setattr(Places, "step", lambda self, consumed: original(self, 0))


@bug(
    "the loop clips what is clipped already",
    the_loop_trains_what_one_process_trains,
    by='reported["loss"]',
)
def _(patch):
    original = engine.clip_coefficient
    patch.setattr(engine, "clip_coefficient", lambda norm, limit: original(norm, limit) ** 2)


def every_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    orders = SampleOrder(50, 3)
    epochs = [[orders(50 * epoch + at) for at in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != list(range(50))
    assert [orders(at) for at in range(50)] == epochs[0], "and it is found again"


@bug(
    "every epoch has the order of the first",
    every_epoch_has_an_order_of_its_own,
    by="epochs[0] != epochs[1]",
)
def _(patch):
    original = order.Permutation
    patch.setattr(order, "Permutation", lambda size, seed, epoch: original(size, seed, 0))


@bug(
    "samples come in the order of the corpus",
    every_epoch_has_an_order_of_its_own,
    by="epochs[0] != list(range(50))",
)
def _(patch):
    patch.setattr(order.Permutation, "__call__", lambda self, index: index)


def a_save_keeps_what_was_there_when_it_began(tmp_path: Path) -> None:
    """Training goes on while a thread writes."""
    folder = tmp_path / f"c{len(list(tmp_path.iterdir()))}"
    live = state(3)
    gate = threading.Event()
    manager = checkpoints(folder)
    manager.resume(lambda: [])
    original = background.write

    def late(*args):
        gate.wait(20)
        return original(*args)

    background.write = late
    try:
        manager.start(live, 3, 30, {})
        for piece in live:
            piece.data.add_(1.0)
        gate.set()
        manager.settle()
    finally:
        background.write = original
    tensors = load_file(folder / step_name(3) / rank_file(0))
    for piece in state(3):
        assert torch.equal(tensors[f"{piece.kind}/{piece.info.name}@0"], piece.data)


@bug(
    "a background save writes the live tensors",
    a_save_keeps_what_was_there_when_it_began,
    by="torch.equal(tensors[",
)
def _(patch):
    patch.setattr(background.Snapshot, "take", lambda self, pieces: list(pieces))


# -------------------------------------------------------------------------------------------
#     groups, overlap


def hybrid_shards_stay_near(tmp_path: Path) -> None:
    """Neighbours share one copy, since their link is fast: whole nodes of two, of four and of eight
    ranks."""
    for group in (2, 4):
        plan = make_plan(dp=8, zero=3, zero_group=group, nodes=8 // group)
        for rank in range(8):
            shard = members_of(plan, "shard", rank)
            replica = members_of(plan, "replica", rank)
            assert {plan.ranks[peer].node for peer in shard} == {plan.ranks[rank].node} and len(
                shard
            ) == group
            assert len({plan.ranks[peer].node for peer in replica}) == len(replica) == 8 // group


@bug(
    "hybrid sharding: far ranks shard, near ones replicate",
    hybrid_shards_stay_near,
    by="for peer in shard",
)
def _(patch):
    original = mesh._hybrid
    swapped = {"shard": "replica", "replica": "shard"}
    patch.setattr(
        mesh, "_hybrid", lambda ranks, size, name, rank: original(ranks, size, swapped[name], rank)
    )


def zero3_gathers_ahead(tmp_path: Path) -> None:
    """The weights of a block are on their way before the block before it has computed, in forward
    and in backward."""
    plan = make_plan(dp=2, zero=3, micro_batches=1)

    def work(rank: int) -> list[str]:
        run = samples.engine_of(plan, rank, FP64)
        batches, valid = step_batches(plan, run.mesh.coord, 0)
        run.gradients(batches, valid)
        with Order() as order:
            run.gradients(batches, valid)
        return order.seen

    for seen in run_ranks(work, 2):
        before = seen[: seen.index("mm")]
        assert before.count("c10d.broadcast") == 2 * 3, (
            "from two ranks: embedding, the first block and the second"
        )


@bug("ZeRO-3 gathers a block's weights when it needs them", zero3_gathers_ahead, by="before.count(")
def _(patch):
    patch.setattr(fsdp, "_prefetch", lambda stage, blocks: None)


def keys_travel_while_blocks_compute(tmp_path: Path) -> None:
    """The ring's next keys are sent before the block of this step is computed, and waited for after
    it."""

    def work(rank: int) -> list[str]:
        seen: list[str] = []
        core = ring.RingAttention(
            "ring", torch.distributed.group.WORLD, (0, 1), rank, CommCounter()
        )
        start_rotate = ring.start_rotate
        forward = block.forward

        def noting_rotate(*args, **options):
            seen.append("send")
            arrived = start_rotate(*args, **options)

            def wait():
                seen.append("wait")
                return arrived()

            return wait

        ring.start_rotate = noting_rotate
        block.forward = lambda *args, **options: seen.append("block") or forward(*args, **options)
        tensor = torch.randn(1, 8, 2, 8)
        core(tensor, tensor, tensor, torch.arange(8)[None], None)
        return seen

    for seen in run_ranks(work, 2):
        assert seen[:3] == ["send", "block", "wait"]


@bug(
    "the ring waits for keys before it computes",
    keys_travel_while_blocks_compute,
    by='["send", "block", "wait"]',
)
def _(patch):
    original = ring.RingAttention.rotate

    def now(self, tensors):
        arrived = original(self, tensors)()
        return lambda: arrived

    patch.setattr(ring.RingAttention, "rotate", now)


@bug(
    "the model begins as another one in every run",
    the_loop_trains_what_one_process_trains,
    by='reported["loss"]',
)
def _(patch):
    original = apply.init_stage
    patch.setattr(
        apply,
        "init_stage",
        lambda stage, model, seed, table: original(stage, model, seed + 1, table),
    )
