"""python -m benchmarks.expert_overlap [--rounds 15] [--gbit 0.05]

How many seconds a layer of a mixture waits for its exchange, with shared experts computed meanwhile and after it, in
turns in the same processes. Two ranks on two nodes of the bed of `cluster=local_shaped`: network namespaces whose links
pass `--gbit` Gbit/s (tbf), so that waiting takes no processor time. Root and iproute2 needed.

Prints and writes benchmarks/results/expert_overlap.json: medians over rounds of a step's seconds (forward and backward)
and of those that its exchange was waited for, by rank 0; ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.vs_torch.harness import ROOT, conditions
from orchestrator.backends.local.namespaces import INTERFACE, Network, Wiring
from orchestrator.plan.document import Moe
from tests.beds.plans import tiny_model
from trainer.comm.collectives import CommCounter
from trainer.model.experts import Experts, Meanwhile, MixtureOfExperts
from trainer.parallel.expert import dispatch
from trainer.parallel.expert.dispatch import ExpertDispatch, Move
from trainer.verify.ranks import run_ranks

RESULT = ROOT / "benchmarks" / "results" / "expert_overlap.json"
NODES, WARM_UP = ("a", "b"), 2
TOKENS, HIDDEN, FFN, SHARED_FFN, EXPERTS, TOP_K = 512, 256, 128, 4096, 16, 2
WAYS = {"beside": Move.beside}


def _after(self: Move, meanwhile: Meanwhile, *sent: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """`Move.beside` without overlap, forward or backward."""
    under_way = dispatch._UnderWay()
    arrived = dispatch._Arrived.apply(dispatch._Started.apply(self, under_way, *sent), self, under_way)
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
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7 + rank), requires_grad=True)
    found: dict[str, dict[str, list[float]]] = {way: {"step_s": [], "exposed_s": [], "gradient": []} for way in WAYS}
    for index in range(WARM_UP + rounds):
        for way in WAYS if index % 2 == 0 else reversed(WAYS):
            Move.beside = WAYS[way]  # type: ignore[method-assign]
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert_overlap", description=__doc__.partition("\n")[2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gbit", type=float, default=0.05)
    args = parser.parse_args()
    before = conditions(rounds=args.rounds, gbit_per_s=args.gbit, tokens=TOKENS, hidden=HIDDEN, ffn=FFN,
                        shared_ffn=SHARED_FFN, experts=EXPERTS, top_k=TOP_K)  # fmt: skip
    network = Network(Wiring(NODES, args.gbit * 1e9 / 8, (((0, 1),),), (1.0,)))
    try:
        found = run_ranks(on_rank, 2, network, args.rounds, timeout=300.0)[0]
    finally:
        network.close()
    assert found["beside"]["gradient"] == found["after"]["gradient"], "the same values either way"
    row = {"shared_experts_s": round(found["shared experts alone"]["step_s"][0], 4)}
    for what in ("step_s", "exposed_s"):
        beside, after = (found[way][what] for way in WAYS)
        ratios = [one / other for one, other in zip(beside, after, strict=True)]
        row |= {f"{what}_{way}": round(statistics.median(found[way][what]), 4) for way in WAYS}
        row |= {f"{what}_ratio": [round(of(ratios), 3) for of in (statistics.median, min, max)]}
    RESULT.write_text(json.dumps({"conditions": before, "result": row}, indent=2) + "\n")
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
