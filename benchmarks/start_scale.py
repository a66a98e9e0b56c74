"""What a start costs at up to 16,384 ranks: operations on the store, connections, communicators and
their memory, time.

Counted: the trainer's own code (`ControlPath.join`, `Mesh.from_plan`) runs as chosen ranks of a
large plan, on a store that records and with splits that record; gloo's groups are real ones, which
until they are used need no peer. What gloo does when a pair of ranks connects, and what it did when
every pair connected at the start, is counted on real groups of 2 to 16 ranks. NCCL cannot run here:
its operations on the store and its memory are from its source.

Real: 64 and 128 processes of this machine call `connect` and the control path, beside the same
number in one gloo group of all, connected at the start as before. Seconds of a larger start on one
store follow from its measured rate.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.beds.plans import make_plan, tiny_model
from trainer.comm import mesh
from trainer.comm.connect import ranks_per_root
from trainer.comm.control import ControlPath, levels_of

ROOT = Path(__file__).resolve().parents[1]
WORLDS = (64, 1024, 4096, 16384)
NODE = 8
WAIT = timedelta(seconds=60)
#: NCCL 2.x on NVLink and InfiniBand: bytes of one connection's buffers (NCCL_BUFFSIZE 4 MiB for the
#: simple protocol, half a MiB for the other two) by channels by ring neighbours, once a
#: communicator is used; nothing before.
NCCL_CONNECTION = 4 << 20 | 1 << 19
NCCL_CHANNELS = 16
NCCL_NEIGHBOURS = 2
NCCL_ID = 128  # bytes of a root's address


class RecordingStore(dist.Store):
    """Counts the operations of one process on a store in memory."""

    def __init__(self, inner: dist.Store | None = None):
        super().__init__()
        self.inner = inner or dist.HashStore()
        self.operations = 0
        self._lock = threading.Lock()

    def _count(self) -> None:
        with self._lock:
            self.operations += 1

    def set(self, key, value):
        self._count()
        return self.inner.set(key, value)

    def get(self, key):
        self._count()
        return self.inner.get(key)

    def wait(self, *arguments):
        self._count()
        return self.inner.wait(*arguments)

    def add(self, key, value):
        self._count()
        return self.inner.add(key, value)

    def check(self, *arguments):
        self._count()
        return self.inner.check(*arguments)

    def multi_get(self, keys):
        self._count()
        return self.inner.multi_get(keys)

    def multi_set(self, keys, values):
        self._count()
        return self.inner.multi_set(keys, values)

    def has_extended_api(self):
        return True

    def set_timeout(self, timeout):
        pass

    @property
    def timeout(self):
        return WAIT


# ----------------------------------------------------------------------------------------------------
#     counted


@functools.cache
def of_gloo(ranks: int, lazily: bool, use: bool) -> int:
    """Operations on the store of making, and perhaps using as the control path does, a real group
    of `ranks`; all ranks together."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazily))
    store = RecordingStore()

    def one(rank: int) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, ranks, WAIT)
        if use:
            group.reduce([torch.ones(1)], dist.ReduceOptions()).wait()
            group.broadcast([torch.ones(1)], dist.BroadcastOptions()).wait()
        made.append(group)

    made: list[object] = []
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store.operations


def counted(world: int) -> dict[str, object]:
    """Of a plan tp8 pp8 dp(world/64) with ZeRO-1 on nodes of eight."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    model = tiny_model(layers=8, heads=8, kv_heads=8, hidden=64, vocab=256, tied_embeddings=True)
    plan = make_plan(
        tp=8, pp=8, dp=world // 64, zero=1, nodes=world // NODE, micro_batches=8, model=model
    )
    chosen = {
        "rank 0": 0,
        "a leader of nodes": min(128, world - NODE),
        "a node's first": 8,
        "another": 9,
    }
    rows = {}
    for name, rank in chosen.items():
        store = RecordingStore()
        began = time.perf_counter()
        default = dist.ProcessGroupGloo(dist.PrefixStore("default", store), rank, world, WAIT)
        control = ControlPath.join(store, rank, world, NODE, WAIT)
        splits: list[tuple[str, int]] = []

        def split_group(parent, ranks, group_name, timeout, urgent, splits=splits, rank=rank):
            splits.append((group_name, len(ranks)))
            return SimpleNamespace(ranks=ranks) if rank in ranks else None

        mesh.split_group, real = split_group, mesh.split_group
        made = mesh.Mesh.from_plan(plan, rank, split=True)
        mesh.split_group = real
        seconds = time.perf_counter() - began
        levels = levels_of(rank, world, NODE)
        communicators = {
            id(group): name for name, group in made.groups.items() if group is not None
        }
        rows[name] = {
            "store_operations": (
                store.operations + 2
            ),  # NCCL: its roots' addresses, and one root's own
            "control_connections": sum(at.size - 1 for at in levels),
            "control_levels": len(levels),
            "nccl_splits": len(splits),
            "nccl_communicators": len(communicators) + 1,
            "nccl_bytes": len(communicators) * NCCL_CHANNELS * NCCL_NEIGHBOURS * NCCL_CONNECTION,
            "seconds_of_own_code": round(seconds, 3),
        }
        del default, control
    levels = [at for rank in range(world) for at in levels_of(rank, world, NODE)]
    roots = -(-world // ranks_per_root(world))
    control_total = sum(of_gloo(at.size, lazily=True, use=True) for at in levels if at.index == 0)
    store_total = (
        2 * world + control_total + roots
    )  # the default group's addresses, reads of NCCL's roots
    return {
        "ranks": rows,
        "at_the_store": {
            "operations": store_total,
            "connections": world,
            "nccl_bytes": world * roots * NCCL_ID,
        },
        "before": {
            "operations": (
                world * (2 * world + 1)
            ),  # of one group of all, connected at the start: as at 2 to 16
            "connections_a_rank": world - 1,
            "nccl_bytes": world * -(-world // 128) * NCCL_ID,
        },
    }


# ----------------------------------------------------------------------------------------------------
#     real processes


def sockets() -> int:
    links = (os.path.join("/proc/self/fd", one) for one in os.listdir("/proc/self/fd"))
    return sum(1 for link in links if os.path.islink(link) and "socket" in os.readlink(link))


def real(world: int, port: int, tree: bool, repeats: int = 20) -> dict[str, float]:
    """Forked ranks connect and then sum three integers `repeats` times; what the slowest took."""
    read, write = os.pipe()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _rank(rank, world, port, tree, repeats, write)
        pids.append(pid)
    os.close(write)
    lines = os.fdopen(read).read().splitlines()
    for pid in pids:
        os.waitpid(pid, 0)
    found = [json.loads(line) for line in lines]
    if len(found) != world:
        raise RuntimeError(f"{world - len(found)} of {world} ranks failed")
    return {name: max(one[name] for one in found) for name in found[0]}


def _rank(rank: int, world: int, port: int, tree: bool, repeats: int, pipe: int) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(tree))
        before = sockets()
        began = time.perf_counter()
        server = dist.TCPStore(
            "127.0.0.1", port, world, rank == 0, timeout=WAIT, wait_for_workers=False
        )
        store = dist.PrefixStore("run/0", server)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=WAIT)
        control = ControlPath.join(store, rank, world, NODE, WAIT) if tree else ControlPath()
        started = time.perf_counter() - began
        control.sum_ints([0, 0, 0])
        began = time.perf_counter()
        for _ in range(repeats):
            total = control.sum_ints([rank, 1, 0])
        spent = (time.perf_counter() - began) / repeats
        assert total == [world * (world - 1) // 2, world, 0]
        line = {
            "start_s": round(started, 3),
            "sum_ms": round(1e3 * spent, 3),
            "connections": sockets() - before,
            "keys": server.num_keys() if rank == 0 else 0,
        }
        began = time.perf_counter()
        for _ in range(500 if rank == 1 else 0):
            server.add("rate", 1)
        line["store_operation_us"] = (
            round(1e6 * (time.perf_counter() - began) / 500, 1) if rank == 1 else 0
        )
        os.write(pipe, (json.dumps(line) + "\n").encode())
        control.barrier()
        time.sleep(0.5 if rank == 0 else 0)  # the store serves until the others have left
    finally:
        os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--worlds", type=int, nargs="*", default=WORLDS, help="ranks of the counted starts"
    )
    parser.add_argument(
        "--real", type=int, nargs="*", default=(64, 128), help="ranks of the real starts"
    )
    parser.add_argument("--port", type=int, default=29871)
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if anything at one node grows faster than the ranks",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "start_scale.json"
    )
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    found: dict[str, object] = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()}
    }
    found["real"] = {}
    for at, world in enumerate(args.real):  # first: they fork, and threads would not survive that
        tree, flat = (real(world, args.port + 2 * at + int(one), one) for one in (True, False))
        found["real"][str(world)] = {"tree": tree, "one group of all": flat}
        print(world, "real", found["real"][str(world)], flush=True)
    found["gloo"] = {
        str(ranks): {
            "made at once": of_gloo(ranks, lazily=False, use=False),
            "made lazily": of_gloo(ranks, lazily=True, use=False),
            "made lazily, used": of_gloo(ranks, lazily=True, use=True),
        }
        for ranks in (2, 4, 8, 16)
    }
    print("gloo", found["gloo"], flush=True)
    counts = {world: counted(world) for world in args.worlds}
    for world, one in counts.items():
        print(world, "counted", json.dumps(one), flush=True)
    found["counted"] = {str(world): one for world, one in counts.items()}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return _check(counts) if args.check else 0


def _check(counts: dict[int, dict]) -> int:
    first = min(counts)
    last = max(counts)
    grown = last / first
    bad = []
    for name in ("operations", "connections"):
        a, b = (counts[world]["at_the_store"][name] for world in (first, last))
        if b > 1.1 * grown * a:
            bad.append(f"{name} at the store: {a} to {b}")
    if (each := counts[last]["at_the_store"]["nccl_bytes"] / last) > 64 * NCCL_ID:
        bad.append(f"addresses of NCCL's roots: {each} bytes a rank")
    for rank in counts[last]["ranks"]:
        a, b = (counts[world]["ranks"][rank]["store_operations"] for world in (first, last))
        if b > a + 8:
            bad.append(f"store operations of {rank}: {a} to {b}")
    print("\n".join(bad) or "linear")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
