"""The engine on GPUs that compute nothing: torch's own CUDA code and NCCL groups run, every call is
noted."""

from __future__ import annotations

import pytest

from tests.beds import fakegpu
from tests.trainer import gpu_steps, test_twin

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(fakegpu.missing()), reason=fakegpu.missing() or "there are fake GPUs"),
]

QUICK = test_twin.QUICK | {
    "cp2 gqa bf16": {"cp": 2, "precision": "bf16"},
    "cp4 ring": {"cp": 4, "cp_method": "ring"},
}
#: Kernels that give the same bits every time: torch refuses the others by itself.
QUICK["deterministic"] = {"deterministic": True, "isolate_documents": True}
#: A card showed that the host waited here, for a copy of frequencies, in every stage and
#: micro-batch.
STRETCHED = {"factor": 4.0, "original_seq_len": 32, "mscale_all_dim": 0.0}
QUICK["YaRN"] = {"model": test_twin.planned.LLAMA | {"yarn": STRETCHED}}
#: Products in 8 bits are emulated, on CPUs alone.
MORE = {
    "deterministic fp32": {"deterministic": True, "precision": "fp32"},
    "deterministic, dropout": {"deterministic": True, "model": test_twin.GPT | {"dropout": 0.1}},
    "deterministic tp2 zero1": {"deterministic": True, "tp": 2, "dp": 2, "zero": 1},
    "deterministic cp2": {"deterministic": True, "cp": 2, "cp_method": "allgather"},
}
#: Experts and latents, whose models no JSON holds, have their twins on CPUs.
DENSE = {
    name: case
    for name, case in test_twin.MORE.items()
    if not {"moe", "mla"} & case.get("model", {}).keys()
}
MORE |= {name: case for name, case in DENSE.items() if name not in QUICK and "matmul" not in case}
#: Of MORE, those whose twin is compared too; the others with `make verify`.
FULL = {
    name: layout
    for name, layout in MORE.items()
    if name in test_twin.MORE and name not in test_twin.KINDS
}
MORE = {name: layout for name, layout in MORE.items() if name not in FULL}


@pytest.fixture(scope="module")
def quick():
    return fakegpu.call(gpu_steps.steps, QUICK)


@pytest.fixture(scope="module")
def more_records():
    return fakegpu.call(gpu_steps.steps, MORE)


@pytest.fixture(scope="module")
def full():
    return fakegpu.call(gpu_steps.steps, FULL)


@pytest.mark.parametrize("name", QUICK)
def test_a_layout_runs_on_gpus(quick, name):
    runs(quick[name], "offload" in QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_layouts_run_on_gpus(more_records, name):
    runs(more_records[name], "offload" in MORE[name])


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_all_layouts_run_on_gpus(full, name):
    runs(full[name], "offload" in FULL[name])


#: Where an optimizer on the host waits for the device.
OF_OFFLOAD = ("sharded.py:decide", "zero2.py:expect", "zero2.py:_arrive", "clip.py:grad_norm")


def runs(ranks: list[dict], on_the_host: bool) -> None:
    """`on_the_host`: the optimizer is; it waits for gradients, and nothing else does."""
    for rank in ranks:
        assert rank["kernels"] > 100, "it computes on the device"
        waits = [
            wait
            for wait in map(str, rank["waits"])
            if not on_the_host or not any(at in wait for at in OF_OFFLOAD)
        ]
        assert waits == [], "the host enqueues a step without waiting for the device"
        assert rank["counted"] == rank["sent"], (
            "what the counter counts is what NCCL is given, to the byte"
        )


LOOPS = {
    "alone fp16": {"precision": "fp16"},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "cp2": {"cp": 2},
    "pp2 zero3": {"pp": 2, "dp": 2, "zero": 3},
}


def test_the_training_loop_waits_for_a_step_when_the_next_one_is_enqueued(tmp_path):
    """A steady step reads the device once, and late: the numbers of the step before. Measured every
    other step."""
    for ranks in fakegpu.call(gpu_steps.loops, str(tmp_path), LOOPS).values():
        for rank in ranks:
            assert (
                rank["waits"]
                == [["cudaEventSynchronize", "train.py:_finish > metrics/step_result.py:wait"]] * 4
            )
            assert min(rank["ahead"][1:]) > 100, (
                "kernels of the next step, enqueued before the host waits"
            )
            steps = rank["steps"]
            assert [step["step"] for step in steps] == list(range(1, 11))
            measured = [step["step"] for step in steps if step["own_s"] is not None]
            assert measured == [2, 4, 6, 8, 10]
            for step in steps:
                assert ("forward" in step["phase_s"]) == (step["step"] in measured)


def test_a_background_save_copies_on_a_stream_of_its_own():
    """The copy goes into page-locked memory; the host waits nowhere, the next
    update's stream does, the writer's thread too."""
    record = fakegpu.call(gpu_steps.background_copy)
    assert record["copies"] == ["DtoH"] and record["bytes"] and record["locked"]
    assert record["streams"][0] == 1 and record["apart"]
    assert record["waits"] == [] and record["reader"] == ["cudaEventSynchronize"]
    at = record["order"].index("W")
    assert record["order"][:at].count("C") == 1 and "K" in record["order"][at:], (
        "no kernel of the update before the wait"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_of_one_block_to_another_passes_torchs_checks(dtype):
    blocks = ((32, 32), (32, 64), (48, 16))
    dims = (8, 64, 72, 128, 256)
    sizes = [[2, 4, heads, *block, dim] for heads in (4, 2, 1) for block in blocks for dim in dims]
    assert fakegpu.call(gpu_steps.attention_blocks, dtype, sizes) == []
