"""Joins the default process group of a run: one store, one key prefix per plan epoch."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.plan.worker import WorkerEnv
from trainer.errors import DeviceError

from .control import ControlPath, Group

#: A peer that is silent for this long is lost. The time is generous: a first step may compile, and
#: a node may read a slow disk.
TIMEOUT = timedelta(minutes=10)


def choose_device(plan: Plan, env: WorkerEnv) -> torch.device:
    """Returns the device of this worker. Raises DeviceError if the plan needs a GPU that this node
    does not have."""
    if plan.cluster.device == "cpu":
        return torch.device("cpu")
    usable_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if env.local_rank >= usable_gpus:
        raise DeviceError(
            f"rank {env.rank} wants GPU {env.local_rank} of {env.node},"
            f" which has {usable_gpus} usable"
            f" (cluster {plan.cluster.name!r} is a cuda cluster; `cluster=local` trains on the"
            " CPU)"
        )
    return torch.device("cuda", env.local_rank)


def connect(env: WorkerEnv, device: torch.device) -> ControlPath:
    """Creates the default group. Returns the path of control messages.

    The default group has gloo for CPU tensors (files of replicas) and NCCL for CUDA tensors, bound
    to the device, so that `Mesh` can split its groups from it. gloo connects two ranks when they
    first communicate: at the start a rank only publishes its address, one operation on the store
    per group, where eager connections would be world - 1 operations per group.

    Rank 0 hosts the store, on the socket that its agent has opened. Keys are prefixed by run and
    epoch, so that a worker left over from an earlier epoch cannot join this one. Raises torch's
    network errors (see `trainer.errors`).
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch reads it from the environment only
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if env.master_addr.startswith("127.") or env.master_addr == "localhost":
        _keep_gloo_on_loopback()
    server = dist.TCPStore(
        env.master_addr,
        env.master_port,
        env.world_size,
        env.rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=_listening(env) if env.rank == 0 else None,  # torch's to close
    )
    store = dist.PrefixStore(f"{env.run_id}/{env.epoch}", server)
    if device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_RANKS_PER_ROOT", str(ranks_per_root(env.world_size)))
    on_gpu = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    bound_device = device if on_gpu else None
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=TIMEOUT,
        device_id=bound_device,
    )
    return ControlPath.join(
        store,
        env.rank,
        env.world_size,
        env.local_world_size,
        TIMEOUT,
    )


def connect_thread(name: str, node: int) -> tuple[ControlPath, Group | None]:
    """Creates groups over all ranks for a thread that runs during training, since training's own
    groups take one caller at a time. Returns the path of the thread's control messages, and a group
    for its tensors (None if there is one rank). Collective.

    The groups close when they are dropped, and every rank that waits for this one in them then gets
    an error. `node`: the number of ranks per node.
    """
    if dist.group.WORLD is None:
        return ControlPath(), None
    rank = dist.get_rank()
    world = dist.get_world_size()
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())
    control = ControlPath.join(store, rank, world, node, TIMEOUT)
    tensor_group = dist.ProcessGroupGloo(
        dist.PrefixStore("all", store),
        rank,
        world,
        TIMEOUT,
    )
    return control, cast(Group, tensor_group)


def _listening(env: WorkerEnv) -> int:
    """Returns the agent's listening socket, or a new one without an agent. torch's own socket would
    listen on all interfaces."""
    if env.store_fd is not None:
        os.set_inheritable(env.store_fd, False)
        return env.store_fd
    address = env.master_addr, env.master_port
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(address, family=family).detach()


def ranks_per_root(world: int) -> int:
    """Returns the number of ranks per root of NCCL's start. Every rank reads the address of every
    root from the store, so there are at most 64 roots: with torch's 128 ranks per root the reads
    would grow with the square of the ranks."""
    return max(128, -(-world // 64))


def _keep_gloo_on_loopback() -> None:
    # gloo binds to whatever this machine's host name resolves to, such as a VPN or a stale address.
    # Its interface can be set in the environment only.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
