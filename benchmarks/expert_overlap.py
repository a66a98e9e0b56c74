"""python -m benchmarks.expert_overlap [--rounds 15] [--gbit 0.05] [--only shared pairs]

How many seconds experts' exchanges are waited for, with other work beside them and without, in
turns in the same processes, on two nodes of the bed of `cluster=local_shaped`: network namespaces
whose links pass `--gbit` Gbit/s (tbf), so that waiting takes no processor time. Root and iproute2
needed.

- shared: one layer on two ranks, whose shared experts are computed meanwhile and after it.
- pairs: a step of DualPipe on four ranks, ep across the nodes, pp inside each; a forward and the
  backward behind it run
  as one, each beside the other's exchanges (`trainer/pipeline/turns.py`), or one after the other.

Prints and writes benchmarks/results/expert_overlap.json: medians over rounds of a step's seconds
(forward and backward) and of those that exchanges were waited for, by rank 0; ratios of
neighbouring steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.vs_torch.harness import ROOT, conditions
from orchestrator.backends.local.namespaces import INTERFACE, Network, Wiring
from orchestrator.plan import Plan
from orchestrator.plan.document import Moe
from tests.beds.plans import make_plan, tiny_model
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.model.experts import Experts, Meanwhile, MixtureOfExperts
from trainer.parallel.expert import dispatch
from trainer.parallel.expert.dispatch import ExpertDispatch, Move
from trainer.precision import recipe
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

RESULT = ROOT / "benchmarks" / "results" / "expert_overlap.json"
NODES = ("a", "b")
WARM_UP = 2
TOKENS = 512
HIDDEN = 256
FFN = 128
SHARED_FFN = 4096
EXPERTS = 16
TOP_K = 2
PAIR_TOKENS = 128
PAIR_FFN = 512
PAIR_BATCHES = 8
SETTINGS = {
    "shared": {"tokens": TOKENS, "hidden": HIDDEN, "ffn": FFN, "shared_ffn": SHARED_FFN},
    "pairs": {
        "tokens": PAIR_TOKENS,
        "hidden": HIDDEN,
        "ffn": PAIR_FFN,
        "micro_batches": PAIR_BATCHES,
    },
}
SETTINGS = {what: one | {"experts": EXPERTS, "top_k": TOP_K} for what, one in SETTINGS.items()}
WAYS = {"beside": Move.overlap}
PAIRS = ("as one", "alone")


def _after(
    self: Move, meanwhile: Meanwhile, *sent: Tensor
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """`Move.overlap` without overlap, forward or backward."""
    under_way = dispatch._Transfers()
    arrived = dispatch._Arrived.apply(
        dispatch._Started.apply(self, under_way, *sent), self, under_way
    )
    return arrived, meanwhile()


WAYS["after"] = _after


def layer(rank: int, network: Network, counter: CommCounter) -> MixtureOfExperts:
    """With experts on both nodes. The group's connections go over the link of this rank's node."""
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    network.enter(NODES[rank])()
    group = dist.new_group([0, 1])
    moe = Moe(experts=EXPERTS, top_k=TOP_K, ffn_hidden=FFN, shared_ffn_hidden=SHARED_FFN)
    model = tiny_model(hidden=HIDDEN, moe=moe)
    mixture = MixtureOfExperts(model, moe)
    mixture.experts = Experts(model, Moe(experts=EXPERTS // 2, top_k=TOP_K, ffn_hidden=FFN))
    generator = torch.Generator().manual_seed(rank)
    for param in mixture.parameters():
        param.data.normal_(0.0, 0.02, generator=generator)
    mixture.dispatch = ExpertDispatch(group, None, counter, ["network"] * 2)
    return mixture


def on_rank(rank: int, network: Network, rounds: int) -> dict[str, dict[str, list[float]]]:
    counter = CommCounter()
    mixture = layer(rank, network, counter)
    x = torch.randn(
        1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7 + rank), requires_grad=True
    )
    found: dict[str, dict[str, list[float]]] = {
        way: {"step_s": [], "exposed_s": [], "gradient": []} for way in WAYS
    }
    for index in range(WARM_UP + rounds):
        for way in WAYS if index % 2 == 0 else reversed(WAYS):
            Move.overlap = WAYS[way]  # type: ignore[method-assign]
            mixture.zero_grad()
            x.grad = None
            dist.barrier()
            counter.take()
            begin = time.perf_counter()
            mixture(x).sum().backward()
            step = time.perf_counter() - begin
            if index >= WARM_UP:
                found[way]["step_s"].append(step)
                found[way]["exposed_s"].append(counter.take()[1]["ep"])
                found[way]["gradient"].append(float(x.grad.double().abs().sum()))
    begin = time.perf_counter()
    for _ in range(5):
        mixture.shared(x).sum().backward()
    found["shared experts alone"] = {"step_s": [(time.perf_counter() - begin) / 5]}
    return found


def pairs_plan() -> Plan:
    """Two layers a stage, of which each rank holds two stages."""
    moe = Moe(experts=EXPERTS, top_k=TOP_K, ffn_hidden=PAIR_FFN)
    model = tiny_model(layers=4, hidden=HIDDEN, vocab=256, max_seq_len=PAIR_TOKENS, moe=moe)
    layout: dict[str, Any] = {
        "pp": 2,
        "ep": 2,
        "schedule": "dualpipe",
        "micro_batches": PAIR_BATCHES,
    }
    return make_plan(**layout, seq_len=PAIR_TOKENS, precision="fp32", model=model)


def pairs_on_rank(
    rank: int, network: Network, plan: Plan, rounds: int
) -> dict[str, dict[str, list[float]]]:
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    network.enter(NODES[plan.ranks[rank].coord.ep])()
    engine = Engine(plan, Mesh.from_plan(plan, rank), torch.device("cpu"), recipe(plan.job.train))
    batches = [
        micro_batch(plan, each) for each in samples_of_step(plan.parallel, engine.mesh.coord, 0)
    ]
    found: dict[str, dict[str, list[float]]] = {
        way: {"step_s": [], "exposed_s": [], "gradient": []} for way in PAIRS
    }
    for index in range(WARM_UP + rounds):
        for way in PAIRS if index % 2 == 0 else reversed(PAIRS):
            engine.pipeline.one_by_one = way == "alone"
            dist.barrier()
            engine.counter.take()
            begin = time.perf_counter()
            _, norm = engine.gradients(batches, plan.parallel.global_batch_tokens)
            step = time.perf_counter() - begin
            if index >= WARM_UP:
                found[way]["step_s"].append(step)
                found[way]["exposed_s"].append(engine.counter.take()[1]["ep"])
                found[way]["gradient"].append(float(norm))
    return found


def compared(found: dict[str, dict[str, list[float]]], ways: Sequence[str]) -> dict[str, Any]:
    """Medians of both ways, and of the ratios of neighbouring steps with least and most."""
    one_way, other_way = (found[way] for way in ways)
    assert one_way["gradient"] == other_way["gradient"], "the same values either way"
    row: dict[str, Any] = {}
    for what in ("step_s", "exposed_s"):
        ratios = [one / other for one, other in zip(one_way[what], other_way[what], strict=True)]
        row |= {f"{what}_{way}": round(statistics.median(found[way][what]), 4) for way in ways}
        row |= {f"{what}_ratio": [round(of(ratios), 3) for of in (statistics.median, min, max)]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert_overlap", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gbit", type=float, default=0.05)
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    args = parser.parse_args()
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for what in args.only:
        before = conditions(rounds=args.rounds, gbit_per_s=args.gbit, **SETTINGS[what])
        network = Network(Wiring(NODES, args.gbit * 1e9 / 8, (((0, 1),),), (1.0,)))
        try:
            if what == "shared":
                found = run_ranks(on_rank, 2, network, args.rounds, timeout=300.0)[0]
                row = {"shared_experts_s": round(found["shared experts alone"]["step_s"][0], 4)}
                row |= compared(found, list(WAYS))
            else:
                found = run_ranks(
                    pairs_on_rank, 4, network, pairs_plan(), args.rounds, timeout=900.0
                )[0]
                row = compared(found, PAIRS)
        finally:
            network.close()
        record[what] = {"conditions": before, "result": row}
        RESULT.write_text(json.dumps(record, indent=2) + "\n")
        print(what, json.dumps(row, indent=2), flush=True)


if __name__ == "__main__":
    main()
