"""Wall time of a step by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class PhaseTimer:
    """Accumulates seconds by phase name; `take` returns and resets them.

    Phases may nest; each second is counted once, in the innermost phase, so the phases of a step
    never sum to more than its wall time. CUDA kernels run asynchronously:
    `synchronize=torch.cuda.synchronize` charges them to the phase that launched them, at the cost
    of a device synchronisation at each phase boundary.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
    ):
        self._clock = clock
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []  # seconds already charged to phases inside each open one
        self.now = ""  # the innermost phase that is open
        self.entered = 0  # phases since the start
        #: (phase, start, end) of each phase, recorded if this is a list.
        self.spans: list[tuple[str, float, float]] | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager around a phase."""
        start = self._now()
        self._inner.append(0.0)
        outer = self.now
        self.now = name
        self.entered += 1
        try:
            yield
        finally:
            self.now = outer
            end = self._now()
            spent = end - start
            if self.spans is not None:
                self.spans.append((name, start, end))
            self.add(name, spent - self._inner.pop())
            if self._inner:
                self._inner[-1] += spent

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Returns the seconds by phase since the last call, and resets them."""
        seconds = self._seconds
        self._seconds = {}
        return seconds

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()
