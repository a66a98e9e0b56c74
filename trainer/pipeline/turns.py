"""Runs a forward and a backward of different stages as one, by taking turns at their transfers
(DualPipe's F&B: arXiv 2412.19437, section 3.2).

Each is a thread of the host, and one of them runs at a time. When one would wait for other ranks,
the other continues, and enqueues its computation up to its own next transfer: on the device the
communication of one overlaps with the kernels of the other, on one stream for computation. The
transfers alone decide the turns, so all ranks of a group, which run the same stages, start their
collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter

import torch

FIRST = 0
SECOND = 1


class Abandoned(RuntimeError):
    """The other thread has failed; its error is the one to raise."""


class Turns:
    """Two threads that take turns. Transfers call `pass_on` before they wait; without a second
    thread it does nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self._changed = threading.Condition()
        self._at_work: set[int] = set()
        self._turn = FIRST
        self._thread = 0  # identity of the thread that runs the first
        self._error: BaseException | None = None
        self._seconds = [0.0, 0.0]
        self._since = 0.0

    def together(
        self,
        first: Callable[[], None],
        second: Callable[[], None],
    ) -> tuple[float, float]:
        """Runs both to their ends. Returns the seconds that each had the turn. Raises the error of
        either; the other then ends at its next transfer, which its peers would start in another
        order."""
        self._turn = FIRST
        self._thread = threading.get_ident()
        self._error = None
        self._seconds = [0.0, 0.0]
        self._since = perf_counter()
        self._at_work = {FIRST, SECOND}
        thread = threading.Thread(
            target=self._run_second,
            args=(second,),
            name="second of a pair",
            daemon=True,
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
        """Lets the other thread run until it passes on, or ends. Autograd's own threads count as
        the second, a backward."""
        if not self._at_work:
            return
        me = FIRST if threading.get_ident() == self._thread else SECOND
        with self._changed:
            # Checked under the lock, since an interrupted first thread may end at any time.
            if 1 - me in self._at_work:
                self._give_to(1 - me)
                self._changed.wait_for(lambda: self._turn == me)
        if self._error is not None:
            raise Abandoned("the other thread has failed")

    def _run_second(self, second: Callable[[], None]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts on the first device
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
