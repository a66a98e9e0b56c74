"""Sends hidden states and their gradients between neighbouring pipeline ranks, asynchronously, in
fixed shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.plan.schedules import RECEIVES, Action, Batch, Kind, Schedule, peer_of
from trainer.comm.collectives import CommCounter, Handle, Message, start_messages
from trainer.comm.mesh import Mesh
from trainer.errors import LayoutError

AXIS = "pp"

#: Maximum number of sends in progress where completion cannot be polled (gloo reports it only to a
#: waiter). Waiting for an older send is safe: a lowered program ends even if every send blocks
#: until it is received.
MOST_SENDS = 4


class Transfers:
    """The sends and receives of one rank. Received tensors are stored by RECV action, including
    those from a stage on this rank."""

    def __init__(
        self,
        schedule: Schedule,
        mesh: Mesh,
        counter: CommCounter,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.schedule = schedule
        self.counter = counter
        self.mesh = mesh
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._inbox: dict[Action, Handle | Tensor] = {}
        self._outbox: dict[Action, Tensor] = {}
        self._sending: list[Handle] = []

    def put(self, kind: Kind, stage: int, micro_batch: int, tensor: Tensor) -> None:
        """Hands over a stage's output (SEND_F) or its input's gradient (SEND_B): to a stage on this
        rank at once and without a copy, to another rank when the program runs the SEND action.

        Raises LayoutError for another shape or dtype, since gloo accepts a short message into a
        long buffer.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise LayoutError(
                f"stage {stage} wants to send {list(tensor.shape)} {tensor.dtype},"
                f" the plan says {list(self.shape)} {self.dtype}"
            )
        forward = kind is Kind.SEND_F
        target = stage + (1 if forward else -1)
        if self.schedule.stage_rank[target] == self.schedule.stage_rank[stage]:
            kind = Kind.RECV_F if forward else Kind.RECV_B
            self._inbox[Action(kind, target, micro_batch)] = tensor
        else:
            self._outbox[Action(kind, stage, micro_batch)] = tensor.contiguous()

    def start(self, batch: Batch) -> None:
        """Starts SENDs and RECVs together, with new buffers for receives. A tensor is freed when it
        has been sent."""
        self._free_sent()
        messages = [self._message(action) for action in batch]
        handles = start_messages(
            messages,
            self.mesh.required_group(AXIS),
            AXIS,
            self.counter,
        )
        for action, handle in zip(batch, handles, strict=True):
            if action.kind in RECEIVES:
                self._inbox[action] = handle
            else:
                self._sending.append(handle)

    def _message(self, action: Action) -> Message:
        receives = action.kind in RECEIVES
        if receives:
            tensor = torch.empty(
                self.shape,
                dtype=self.dtype,
                device=self.device,
            )
        else:
            tensor = self._outbox.pop(action)
        return Message(tensor, self._peer(action), receives, self._tag(action))

    def take(self, action: Action) -> Tensor:
        """Waits for the tensor of a RECV."""
        received = self._inbox.pop(action)
        tensor = received.wait() if isinstance(received, Handle) else received
        self._free_sent()
        return tensor

    def finish(self) -> None:
        """Waits for all sends."""
        for handle in self._sending:
            handle.wait()
        self._sending.clear()

    def _free_sent(self) -> None:
        """Frees sent tensors: nothing else holds them, since the graph keeps inputs and not
        outputs."""
        if not self.counter.gloo:
            self._sending = [handle for handle in self._sending if not handle.done()]
        else:
            while len(self._sending) > MOST_SENDS:
                self._sending.pop(0).wait()

    def _peer(self, action: Action) -> int:
        return self.mesh.ranks(AXIS)[peer_of(self.schedule, action)]

    def _tag(self, action: Action) -> int:
        """Returns the tag of a message: equal on both ends, different for every message of a
        step."""
        kind, stage, micro_batch = action
        if kind in (Kind.SEND_F, Kind.SEND_B):
            stage += 1 if kind is Kind.SEND_F else -1
        backward = kind in (Kind.SEND_B, Kind.RECV_B)
        return 2 * (micro_batch * len(self.schedule.stage_rank) + stage) + backward
