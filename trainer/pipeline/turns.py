"""A forward and a backward of other stages run as one, by taking turns at their transfers
(DualPipe's F&B: arXiv 2412.19437, section 3.2).

Each is a thread of the host, and one of them runs at a time. Where one would wait for other ranks,
the other goes on, and enqueues its computation up to its own next transfer: on the device the one's
communication then lies beside the other's kernels, on one stream for computation. Who goes on
follows from the transfers alone, so that all ranks of a group, which run the same stages, start
their collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter

import torch

FIRST = 0
SECOND = 1


class Abandoned(RuntimeError):
    """The other piece of work has failed; what it raised is what counts."""


class Turns:
    """`pass_on` is what transfers call before they wait; without two pieces of work it does
    nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self._changed = threading.Condition()
        self._at_work: set[int] = set()
        self._turn = FIRST
        self._thread = 0  # whose turn it is; the thread of the first
        self._error: BaseException | None = None
        self._seconds = [0.0, 0.0]
        self._since = 0.0

    def together(
        self, first: Callable[[], None], second: Callable[[], None]
    ) -> tuple[float, float]:
        """Run both to their ends; the seconds that each had the turn. Raises what either raises;
        the other then ends at its next transfer, which its peers would start in another order."""
        self._turn = FIRST
        self._thread = threading.get_ident()
        self._error = None
        self._seconds = [0.0, 0.0]
        self._since = perf_counter()
        self._at_work = {FIRST, SECOND}
        thread = threading.Thread(
            target=self._run_second, args=(second,), name="second of a pair", daemon=True
        )
        thread.start()
        try:
            first()
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._end(FIRST)
        thread.join()
        if self._error is not None:
            raise self._error
        return self._seconds[FIRST], self._seconds[SECOND]

    def pass_on(self) -> None:
        """Let the other go on until it passes on, or ends. Autograd's own threads belong to the
        second, a backward."""
        if not self._at_work:
            return
        me = FIRST if threading.get_ident() == self._thread else SECOND
        with self._changed:
            if (
                1 - me in self._at_work
            ):  # seen under the lock: an interrupted first may end at any time
                self._give_to(1 - me)
                self._changed.wait_for(lambda: self._turn == me)
        if self._error is not None:
            raise Abandoned("the other piece of work has failed")

    def _run_second(self, second: Callable[[], None]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first one
        with self._changed:
            self._changed.wait_for(lambda: self._turn == SECOND)
        try:
            if self._error is None:
                second()
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._end(SECOND)

    def _end(self, me: int) -> None:
        with self._changed:
            self._at_work.discard(me)
            if self._turn == me:
                self._give_to(1 - me)

    def _give_to(self, work: int) -> None:
        now = perf_counter()
        self._seconds[1 - work] += now - self._since
        self._turn = work
        self._since = now
        self._changed.notify_all()
