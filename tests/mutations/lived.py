"""Mutants that live because they change nothing that a run could show: `Site.key` -> why."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "trainer/model/mla.py: sign in `return self.wo(self.core(q, k, wide, serial, documents)[..., : v.shape[-1]].flatten(-2))`": "Of four dimensions the second is the last but one.",
    "trainer/model/dropout.py: comparison GtE in `return rows * (columns | 1) >= int(rate * 2.0**64) - (1 << 63)`": "One mask bit in 2^64 is another.",
    "trainer/parallel/tensor.py: constant 1 in `if tp > 1 and name.endswith((*COLUMN, *VOCABULARY, *ROW, *EXPERT_COLUMN, *EXPERT_ROW)):`": "A matrix cut in one piece is whole.",
    "trainer/parallel/tensor.py: constant 1 in `if tp > 1 and name.endswith(KEY_VALUE):`": "A matrix cut in one piece is whole.",
    "trainer/parallel/context/block.py: sign in `dweights = (grad @ v.transpose(-1, -2)).to(weights.dtype)`": "Of four dimensions the third from the front is the last but one.",
}
