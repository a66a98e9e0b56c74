"""What tests do in processes with fake GPUs (`tests.beds.fakegpu`)."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import convert, structs

from orchestrator.plan import Plan, seal
from orchestrator.plan.model import Mla, Moe, Mtp, Yarn
from tests.beds import fakegpu
from tests.trainer.test_loop import changed, finish, job
from tests.trainer.test_planned_memory import LLAMA, plan_of
from trainer import compat
from trainer.checkpoint.background import Snapshot
from trainer.comm.mesh import Mesh
from trainer.comm.settings import apply_settings
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.model import experts
from trainer.model.attention import SDPA
from trainer.model.documents import Documents
from trainer.model.experts import Experts, MixtureOfExperts
from trainer.model.permutation import read_counts
from trainer.parallel.context import block
from trainer.parallel.expert import dispatch, hierarchical
from trainer.parallel.expert.dispatch import ExpertDispatch
from trainer.precision import recipe
from trainer.train import Run
from trainer.verify.samples import micro_batch

LR = 1e-3
TOKENS = 64


#: Parts of a model that arrive as JSON.
PARTS = {"mla": Mla, "moe": Moe, "mtp": Mtp, "yarn": Yarn}


def gpu_plan(layout: dict[str, Any]) -> Plan:
    """A plan for GPUs, in bf16 unless it says otherwise."""
    model = dict(layout.get("model", LLAMA))
    for name in PARTS.keys() & model.keys():
        model[name] = convert(model[name], PARTS[name])
    plan = plan_of({"precision": "bf16"} | layout | {"model": model})
    return seal(structs.replace(plan, cluster=structs.replace(plan.cluster, device="cuda")))


def _choices(mixture: MixtureOfExperts, x: torch.Tensor, *_: object) -> int:
    """The number of experts that all tokens of `x` choose."""
    return x.shape[0] * x.shape[1] * mixture.router.moe.top_k


class EvenCounts:
    """Replaces counts of routers' choices that the host reads, since devices that compute nothing
    count nothing: each expert is chosen equally often. Use it in a process of its own."""

    def __init__(self) -> None:
        self.rows = 0  # those that are sent, or multiplied, at this moment
        self._note_rows(MixtureOfExperts, "forward", _choices)
        self._note_rows(Experts, "forward", lambda _, rows, *__: len(rows))
        self._note_rows(ExpertDispatch, "exchange", lambda _, sent, *__: len(sent[0]))
        experts.read_counts = self._of_receivers
        hierarchical.read_counts = self._of_receivers
        dispatch.read_counts = self._of_ranks

    def _note_rows(self, kind: type, name: str, rows_of: Callable[..., int]) -> None:
        method = getattr(kind, name)

        def noting(module: Any, *args: Any) -> Any:
            self.rows = rows_of(module, *args)
            return method(module, *args)

        setattr(kind, name, noting)

    def _of_receivers(self, counts: torch.Tensor) -> list[Any]:
        """The last dimension is of those that receive equal shares of the rows."""
        read_counts(counts)  # the host waits as elsewhere
        return torch.full(counts.shape, self.rows // counts.shape[-1]).tolist()

    def _of_ranks(self, counts: torch.Tensor) -> list[Any]:
        if counts.dim() > 1:
            return self._of_receivers(counts)
        read_counts(counts)
        return [self.rows] * len(counts)  # each slice of experts has as many


def steps(
    layouts: dict[str, dict[str, Any]], strict: list[str], count: int = 3
) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout does in the last of `count` steps of its engine. In this step
    torch raises an error where the host waits, in the layouts `strict`."""
    return {
        name: fakegpu.run_ranks(_steps, _world(layout), layout, count, name in strict)
        for name, layout in layouts.items()
    }


def _world(layout: dict[str, Any]) -> int:
    return gpu_plan(layout).parallel.world_size


def _steps(rank: int, layout: dict[str, Any], count: int, strict: bool) -> dict[str, Any]:
    plan = gpu_plan(layout)
    device = torch.device("cuda", rank)
    apply_settings(plan)
    EvenCounts()
    engine = Engine(plan, Mesh.from_plan(plan, rank), device, recipe(plan.job.train))
    many = samples_of_step(plan.parallel, engine.mesh.coord, 0)
    batches = [
        micro_batch(plan, indices, plan.job.data.isolate_documents).pinned() for indices in many
    ]

    def step() -> None:
        _, norm = engine.gradients([batch.to(device) for batch in batches], TOKENS)
        engine.update(norm, LR)

    for _ in range(count - 1):
        step()
    engine.counter.close()
    if strict:
        torch.cuda.set_sync_debug_mode("error")
    with fakegpu.recording() as recording:
        step()
    torch.cuda.set_sync_debug_mode("default")
    kernels = [note for note in recording.notes if note.kind == "K"]
    return {
        "waits": [" at ".join(wait) for wait in recording.waits],
        "kernels": len(kernels),
        "streams": len({note.stream for note in kernels}),
        "sent": sum(sent_bytes(note) for note in recording.notes if note.kind == "N"),
        "counted": sum(engine.counter.bytes.values()),
    }


def sent_bytes(note: fakegpu.Note) -> int:
    """What a rank sends in this call of NCCL, as `CommCounter` counts it: by rings, which send no
    tensor home."""
    ranks = note.a
    if note.name == "ncclAllReduce":
        return 2 * note.bytes * (ranks - 1) // ranks
    if note.name in (
        "ncclReduceScatter",
        "ncclAllGather",
        "ncclAlltoAll",
    ):  # the bytes are of one rank's part
        return note.bytes * (ranks - 1)
    return note.bytes if note.name == "ncclSend" else 0


def attention_blocks(dtype: str, sizes: list[list[int]]) -> list[list[Any]]:
    """[[q's shape, what went wrong]] of context parallelism's attention of one block to another."""
    wrong = []
    kind = getattr(torch, dtype)
    for batch, heads, kv_heads, queries, keys, head_dim in sizes:
        shapes = [(batch, heads, queries, head_dim), *2 * [(batch, kv_heads, keys, head_dim)]]
        q, k, v = (torch.zeros(shape, device="cuda", dtype=kind) for shape in shapes)
        causal = queries == keys
        try:
            assert compat.has_flash(q)
            out, lse = compat.flash_forward(q, k, v, causal, 0.125)
            assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
                q.shape,
                kind,
                q.shape[:3],
                torch.float32,
            )
            grads = compat.flash_backward(out, q, k, v, out, lse, causal, 0.125)
            assert [(grad.shape, grad.dtype) for grad in grads] == [
                (x.shape, kind) for x in (q, k, v)
            ]
        except (AssertionError, RuntimeError) as error:
            wrong.append([list(q.shape), str(error).splitlines()[0]])
    return wrong


FROM = 4
UNTIL = 8  # steps that are recorded: their numbers less one


def loops(folder: str, layouts: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What each worker of each layout does in steps 5 to 8 of a run, and what it has reported."""
    Run._agree = _recorded(Run._agree)
    return {
        name: _loop(Path(folder) / str(at), layout)
        for at, (name, layout) in enumerate(layouts.items())
    }


def _loop(folder: Path, layout: dict[str, Any]) -> list[dict[str, Any]]:
    plan = changed(
        job(str(folder / "tokens"), UNTIL + 2, **{"precision": "bf16"} | layout),
        "train",
        log_every_steps=2,
    )
    plan = changed(
        plan, "train", skip_non_finite_steps=100
    )  # the numbers of a device without arithmetic mean nothing
    plan = seal(structs.replace(plan, cluster=structs.replace(plan.cluster, device="cuda")))
    codes, workers = finish(plan, folder)
    assert set(codes) == {0}, workers.log(codes.index(max(codes)))
    answers = []
    for rank in range(plan.parallel.world_size):
        record = json.loads((folder / f"recorded-{rank}.json").read_text())
        record["steps"] = [structs.asdict(step) for step in workers.steps(rank)]
        answers.append(record)
    return answers


def _recorded(agree: Callable[..., Any]) -> Callable[..., Any]:
    """Records from the boundary before step 5 to that after step 8."""
    inside = contextlib.ExitStack()

    def wrapped(run: Run, batches: Any) -> Any:
        if run.step == FROM:
            run.recorded = inside.enter_context(fakegpu.recording())
        if run.step == UNTIL:
            inside.close()
            path = Path(run.env.run_dir) / f"recorded-{run.env.rank}.json"
            path.write_text(
                json.dumps({"waits": run.recorded.waits, "ahead": _ahead(run.recorded.notes)})
            )
        return agree(run, batches)

    return wrapped


def _ahead(notes: list[fakegpu.Note]) -> list[int]:
    """The kernels that were enqueued between each event that the host waits for and its wait."""
    enqueued = []
    kernels = 0
    at = dict[int, int]()
    for note in notes:
        kernels += note.kind == "K"
        if note.kind == "R":
            at[note.event] = kernels
        elif note.kind == "S":
            enqueued.append(kernels - at.get(note.event, kernels))
    return enqueued


def background_copy() -> dict[str, Any]:
    """What a save in the background does on the device, and what the next update then waits for."""
    plan = gpu_plan({})
    device = torch.device("cuda", 0)
    engine = Engine(plan, Mesh.alone(plan), device, recipe(plan.job.train))
    norm = torch.ones((), dtype=torch.float64, device=device)
    engine.update(norm, LR)
    snapshot = Snapshot()
    pieces = list(engine.state_pieces(to_write=True))
    snapshot.take(pieces)
    with fakegpu.recording() as recording:
        snapshot.take(pieces)
        engine.optimizer.copied = snapshot.copied
        engine.update(norm, LR)
    with fakegpu.recording() as read:
        snapshot.wait()
    notes = recording.notes
    copies = [note for note in notes if note.kind == "C"]
    (ends,) = {
        note.event for note in notes if note.kind == "R" and note.stream == copies[-1].stream
    }
    order = [
        note.kind for note in notes if note.kind in "CK" or (note.kind, note.event) == ("W", ends)
    ]
    return {
        "copies": sorted({note.name for note in copies}),
        "bytes": sum(note.bytes for note in copies) == sum(piece.data.nbytes for piece in pieces),
        "streams": [
            len({note.stream for note in copies}),
            len({note.stream for note in notes if note.kind == "K"}),
        ],
        "apart": {note.stream for note in copies}.isdisjoint(
            note.stream for note in notes if note.kind == "K"
        ),
        "order": [kind for kind, _ in itertools.groupby(order)],
        "waits": recording.waits,
        "reader": [name for name, _ in read.waits],
        "locked": all(note.b == 1 for note in copies),
    }


def batched_products() -> list[int]:
    """The work of a batch of three products of 4 x 8 x 16, as it is recorded in two types."""
    amounts = []
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.zeros(3, 4, 8, device="cuda", dtype=dtype)
        b = torch.zeros(3, 8, 16, device="cuda", dtype=dtype)
        with fakegpu.recording() as recording:
            torch.bmm(a, b)
        amounts += [note.bytes for note in recording.notes if note.name == "gemm batched"]
    return amounts


def packed_attention() -> dict[str, Any]:
    """Attention of packed documents on the device, in bf16: kernels, waits, and the largest
    allocation."""
    lengths = ((700, 900, 448), (2000, 48))
    numbers = torch.stack(
        [
            torch.repeat_interleave(torch.arange(len(row_lengths)), torch.tensor(row_lengths))
            for row_lengths in lengths
        ]
    )
    device = torch.device("cuda", 0)
    documents = Documents.of(numbers).each(lambda x: x.pin_memory().to(device, non_blocking=True))
    kernels = dict[str, list[str]]()
    waits = list[Any]()
    largest_bytes = 0
    q, k, v = (
        torch.zeros(2, 2048, heads, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    grad = torch.zeros_like(q)

    def alone() -> None:
        SDPA(causal=True)(q, k, v, None, documents).backward(grad)

    def blocks() -> None:
        rows = [x.detach()[:, 1024:].transpose(1, 2) for x in (grad, q, k, v)]
        sight = block.inside(documents, (range(1024, 2048),), (range(1024),))
        out, lse = block.forward(*rows[1:], 0.125, False, sight)
        assert (out.shape, lse.shape, lse.dtype) == (
            rows[1].shape,
            rows[1].shape[:3],
            torch.float32,
        )
        gradients = block.backward(*rows, out, lse, 0.125, False, sight)
        assert [gradient.shape for gradient in gradients] == [x.shape for x in rows[1:]]

    for name, run in {"alone": alone, "blocks": blocks}.items():
        with fakegpu.recording() as recording:
            run()
        kernels[name] = recording.names("K")
        waits += recording.waits
        largest_bytes = max(
            [largest_bytes, *(note.bytes for note in recording.notes if note.kind == "M")]
        )
    return {
        "kernels": kernels,
        "waits": waits,
        "most_bytes": largest_bytes,
        "mask_bytes": 2 * 2048 * 2048 * 8,
    }
