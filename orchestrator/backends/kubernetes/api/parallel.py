"""Requests that go out while other work is done, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Soon(Generic[T]):
    """What a call will have given, or raised."""

    def __init__(self, call: Callable[[], T]):
        self._call, self._at, self._error = call, time.monotonic(), None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # told to whoever asks for the value
            self._error = error

    @property
    def age_s(self) -> float:
        """Since it was asked for."""
        return time.monotonic() - self._at

    def end(self) -> None:
        """Wait for it, whatever becomes of it."""
        self._thread.join()

    def value(self) -> T:
        self.end()
        if self._error is not None:
            raise self._error
        return self._value


def together(*calls: Callable[[], T]) -> list[T]:
    """All of them at once. When one fails, so does this, when the others have ended, too."""
    first, *others = calls
    started = [Soon(call) for call in others]
    try:
        return [first(), *(one.value() for one in started)]
    except BaseException:
        for one in started:
            one.end()  # nothing is under way any more when what was done is to be taken back
        raise
