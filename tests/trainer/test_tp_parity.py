"""Tensor and sequence parallelism equal one process: loss, every gradient, the norm before clipping, every slice."""

from itertools import product

import pytest
import torch

from tests.beds.plans import make_plan
from tests.trainer.samples import GPT, GQA, LLAMA, MHA, MQA, batch, small
from tests.trainer.together import run_together, told
from trainer.comm.collectives import CommCounter, all_reduce
from trainer.comm.mesh import Mesh
from trainer.parallel.apply import build
from trainer.verify.ranks import run_ranks

pytestmark = pytest.mark.process

B, S, MICRO = 3, 8, 2
KINDS = {"llama": LLAMA, "gpt": GPT}
HEADS = {"mha": MHA, "gqa": GQA, "mqa": MQA}
CASES = list(product(KINDS, HEADS, (2, 4), (False, True), (False, True)))
IDS = [f"{kind}-{heads}-tp{tp}{'-sp' * sp}{'-tied' * tied}" for kind, heads, tp, sp, tied in CASES]


def batches(model, documents=False):
    """Micro-batches with unequal numbers of valid tokens."""
    return [batch(model, B, S, seed, documents, ignored=0.2 + 0.4 * seed) for seed in range(MICRO)]


def shake(part):
    """Move norms and biases off one and zero, the same way on every layout, so that their gradients are told apart."""
    with torch.no_grad():
        for index, (name, param, info) in enumerate(sorted(part.parameters(), key=lambda item: item[0])):
            if len(info.global_shape) == 1:
                draw = torch.randn(info.global_shape, generator=torch.Generator().manual_seed(index), dtype=param.dtype)
                info.valid(param).add_(0.1 * info.valid(info.take(draw)))
            assert name in part.table


def train_step(plan, mesh, dtype, documents=False):
    """One accumulated step -> loss, gradients (partial ones summed), squared norm, weights, communication bytes."""
    counter = CommCounter()
    part = build(plan, mesh, counter, dtype=dtype)
    shake(part)
    data = batches(plan.model, documents)
    valid = sum(int((item.targets != -100).sum()) for item in data)
    total = 0.0
    for item in data:
        loss = part.loss(part.stages[0](None, item), item.targets) / valid
        loss.backward()
        total += loss.item()
    sent = dict(counter.bytes)
    grads, square = {}, torch.zeros((), dtype=dtype)
    for name, param, info in part.parameters():
        if info.grad_sum_group:
            all_reduce(param.grad, mesh.group(info.grad_sum_group), "tp", counter)
        grads[name] = param.grad
        if info.owner:
            square += info.valid(param.grad).square().sum()
    all_reduce(square, mesh.group("tp"), "tp", counter)
    weights = {name: param.detach() for name, param, _ in part.parameters()}
    return part, {"loss": total, "grads": grads, "square": square, "weights": weights, "sent": sent}


def one_process(model, dtype, documents=False):
    plan = make_plan(model=model, micro_batch_size=B, seq_len=S)
    return train_step(plan, Mesh.alone(plan), dtype, documents)[1]


def plan_of(model, tp, sp):
    return make_plan(model=model, tp=tp, sp=sp, micro_batch_size=B, seq_len=S)


def compare(model, tp, sp, dtype, tolerance, documents=False):
    plan = plan_of(model, tp, sp)
    found = run_ranks(lambda rank: train_step(plan, Mesh.from_plan(plan, rank), dtype, documents)[1], tp)
    check(found, plan, dtype, tolerance, documents)
    return found


def check(found, plan, dtype, tolerance, documents=False, expected=None):
    """Every rank's result against one process."""
    expected = expected or one_process(plan.model, dtype, documents)
    largest = max(grad.abs().max() for grad in expected["grads"].values())
    for rank, result in enumerate(found):
        table = build(plan, Mesh.alone(plan, rank), CommCounter(), device="meta").table
        assert result["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        torch.testing.assert_close(result["square"], expected["square"], rtol=tolerance, atol=0)
        assert result["grads"].keys() == expected["grads"].keys() == table.keys()
        for name, info in table.items():
            assert torch.equal(result["weights"][name], info.take(expected["weights"][name])), name
            want = info.take(expected["grads"][name])
            # A key bias without rotary positions shifts all scores of a query alike: its true gradient is zero and
            # what remains is rounding. Hence the floor under the scale.
            scale = max(expected["grads"][name].abs().max(), 1e-3 * largest)
            error = (result["grads"][name] - want).abs().max() / scale
            assert error <= tolerance, f"rank {rank} {name}: relative error {error:.1e}"


@pytest.mark.parametrize("tp", [2, 4])
def test_every_case_equals_one_process_in_float64(tp):
    plans = {
        name: plan_of(small(**KINDS[kind], **HEADS[heads], tied_embeddings=tied), tp, sp)
        for name, (kind, heads, degree, sp, tied) in zip(IDS, CASES, strict=True)
        if degree == tp
    }
    alone, meshes = {}, {}  # of the ranks; which of them share a key/value head is all that differs

    def work(rank, plan):
        key = plan.model.kv_heads
        if key not in meshes:
            meshes[key] = Mesh.from_plan(plan, rank)
        return train_step(plan, meshes[key], torch.float64)[1]

    for name, found in run_together(work, tp, {name: (plan,) for name, plan in plans.items()}).items():
        model = plans[name].model
        key = (model.norm, model.kv_heads, model.tied_embeddings)
        if key not in alone:
            alone[key] = one_process(model, torch.float64)
        with told(name):
            check(found, plans[name], torch.float64, 1e-10, expected=alone[key])


@pytest.mark.parametrize("sp", [False, True])
def test_equals_one_process_in_float32(sp):
    compare(small(**LLAMA, **GQA), 4, sp, torch.float32, 1e-5)


def test_bf16_runs_in_bf16_and_stays_near_one_process_in_float32():
    """No proof (rounding hides bugs), but every kernel and collective must take the dtype."""
    model = small(**LLAMA, **GQA)
    plan = make_plan(model=model, tp=2, micro_batch_size=B, seq_len=S)
    expected = one_process(model, torch.float32)
    found = run_ranks(lambda rank: train_step(plan, Mesh.from_plan(plan, rank), torch.bfloat16)[1], 2)
    assert all(grad.dtype == torch.bfloat16 for grad in found[0]["grads"].values())
    assert found[0]["loss"] == found[1]["loss"] == pytest.approx(expected["loss"], rel=5e-3)
    assert found[0]["square"].sqrt().item() == pytest.approx(expected["square"].sqrt().item(), rel=5e-2)


@pytest.mark.parametrize("sp", [False, True])
def test_packed_documents(sp):
    compare(small(**LLAMA), 2, sp, torch.float64, 1e-10, documents=True)


def test_a_rank_with_only_padding_of_the_vocabulary():
    """Vocabulary 5 over 4 ranks: shards of 2, the last one empty."""
    compare(small(**LLAMA, vocab=5), 4, True, torch.float64, 1e-10)
    compare(small(**LLAMA, vocab=5, tied_embeddings=True), 4, False, torch.float64, 1e-10)


@pytest.mark.parametrize("sp", [False, True])
def test_bytes_sent_are_those_of_the_formula(sp):
    """Per layer and micro-batch 4 all-reduces, or 4 all-gathers and 4 reduce-scatters: the same bytes (2205.05198).
    With SP 2 all-gathers more: inputs are gathered again in backward."""
    model, tp, item = small(**LLAMA), 4, 8
    sent = compare(model, tp, sp, torch.float64, 1e-10)[0]["sent"]["tp"]
    hidden = B * S * model.hidden * item
    pairs = 2 * model.layers + 1  # attention and MLP of every block, embedding out with head in
    loss = 2 * B * S * item * (tp - 1)  # one all-gather of two numbers a token and rank
    gathers = 2 * 2 * pairs + (pairs if sp else 0)
    assert sent == MICRO * (gathers * hidden * (tp - 1) // tp + loss)
