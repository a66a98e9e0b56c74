"""Every error ends with its exit code, and messages of a lost peer are recognised."""

import errno
import os

import pytest
import torch

from orchestrator.plan import Exit, PlanError
from trainer import errors


def unread(number: int) -> PlanError:
    error = PlanError(f"cannot read plan: {os.strerror(number)}")
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.LayoutError("x"), Exit.CONFIG),
        (errors.PlanMismatch("x"), Exit.CONFIG),
        (errors.DataError("x"), Exit.CONFIG),
        (errors.CheckpointError("x"), Exit.CONFIG),
        (errors.DeviceError("x"), Exit.NODE),
        (errors.Fenced("x"), Exit.FENCED),
        (errors.Stopped("x"), Exit.RESTART),
        (errors.SaveError("x"), Exit.USER),
        (errors.NonFinite("x"), Exit.USER),
        (PlanError("x"), Exit.CONFIG),
        (OSError(28, "No space left on device"), Exit.USER),
        (MemoryError(), Exit.USER),
        *(
            (unread(number), Exit.USER)
            for number in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)
        ),
        *((unread(number), Exit.CONFIG) for number in (errno.EACCES, errno.ENOENT, errno.EISDIR)),
        (ImportError("libc10.so: cannot open shared object file: Too many open files"), Exit.USER),
        (ImportError("libc10.so: cannot read file data: Input/output error"), Exit.USER),
        (
            RuntimeError(
                "unable to open a shared memory object: Too many open files in system (23)"
            ),
            Exit.USER,
        ),
        (
            ImportError("libc10.so: cannot open shared object file: No such file or directory"),
            Exit.INTERNAL,
        ),
        (
            ImportError("libc10.so: cannot open shared object file: Permission denied"),
            Exit.INTERNAL,
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), Exit.USER),
        (torch.distributed.DistNetworkError("x"), Exit.RESTART),
        (torch.distributed.DistStoreError("x"), Exit.RESTART),
        (ConnectionResetError(), Exit.RESTART),
        (ValueError("x"), Exit.INTERNAL),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Exit.INTERNAL),
        (AssertionError(), Exit.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
def test_every_error_has_its_exit_code(error, code):
    assert errors.exit_code(error) == code


@pytest.mark.parametrize(
    "message",
    [
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41235",
        (
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation"
            " to complete"
        ),
        "Application timeout caused pair closure",
        "[/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:3: Connection reset by peer",
        "Gloo connectFullMesh failed with connect: Connection refused, remote=[127.0.0.1]",
        "NCCL communicator was aborted on rank 3.",
        (
            "NCCL error in: ProcessGroupNCCL.cpp:93, remote process exited or there was a network"
            " error"
        ),
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
    ],
)
def test_what_torch_says_of_a_lost_peer_is_recognised(message):
    assert errors.is_peer_loss(RuntimeError(message))
    assert not errors.is_peer_loss(ValueError(message)), (
        "torch raises RuntimeErrors; a ValueError is somebody's bug"
    )
