"""The contract of every backend (tests/backends), on real pods."""

from __future__ import annotations

import pytest

from tests.beds.contract import cancel_and_resume, refusals
from tests.beds.kubernetes.runs import SHORT, TINY

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]


def test_a_run_is_cancelled_resumed_and_done(orch):
    refusals(orch, [*orch.submission()[1:], *TINY])
    cancel_and_resume(orch, orch.submit(*TINY, *SHORT, "train.steps=150"))
