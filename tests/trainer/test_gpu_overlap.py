"""Communication beside computation on GPUs, by the order in which the host enqueues both."""

from __future__ import annotations

import pytest

from tests.beds import fakegpu
from tests.trainer import gpu_overlap

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(fakegpu.missing()), reason=fakegpu.missing() or "there are fake GPUs"),
]

#: A piece is multiplied when it has arrived and the next one has been started, and no other.
AHEAD = ["send 0", "send 1", "wait 0", "multiply", "send 2", "wait 1", "multiply", "send 3"]
AHEAD += ["wait 2", "multiply", "wait 3", "multiply"]
#: A sum leaves behind its product; what comes next waits for all.
BEHIND = [step for index in range(4) for step in ("multiply", f"send {index}")]
BEHIND += [f"wait {index}" for index in range(4)]
#: The input's gradient and the weight's, each beside a collective.
WHOLE = ["send 0", "multiply", "send 1", "wait 0", "multiply", "wait 1"]


def test_pieces_of_a_sequence_travel_beside_products():
    """Forward copies nothing: products read and write pieces where they lie."""
    for orders in fakegpu.call(gpu_overlap.of_linears, 4, 1):
        assert orders["column"] == AHEAD
        assert orders["column, backward"] == WHOLE
        assert orders["row"] == BEHIND
        assert orders["row, backward"] == [*AHEAD, "copy", "multiply"], "the weight's gradient last"
