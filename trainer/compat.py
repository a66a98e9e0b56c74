"""The one place for torch API that torch does not promise to keep. Each name says why it is needed.

Checked with torch 2.11 to 2.15. When one of these breaks, this file is where to mend it.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator: the memory tracker on CPU
from torch.utils._pytree import tree_leaves  # tensors inside an operator's arguments and results

__all__ = ["TorchDispatchMode", "storage_key", "tree_leaves"]


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of a storage while it lives. `data_ptr` will not do: empty storages all have pointer 0."""
    return storage._cdata
