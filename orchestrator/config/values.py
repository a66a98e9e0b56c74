"""The kinds of values that configuration keys have: their types, legal ranges and words."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .node_range import RANGE, RULE

#: What a name may be: it becomes a label, a file name and a part of metrics.
NAME_RULE = "1 to 63 of A-Z a-z 0-9 . _ -, starting and ending with a letter or digit"
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z", description=NAME_RULE)
]
#: A run's name is the stem of Kubernetes objects, whose names (DNS-1123 labels) hold 63 characters
#: with our suffixes.
RUN_NAME_RULE = (
    "1 to 40 of a-z 0-9 -, starting and ending with a letter or digit (a DNS-1123 label with room"
    " for suffixes)"
)
RunName = Annotated[
    str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?\Z", description=RUN_NAME_RULE)
]
Source = Annotated[
    str, Meta(min_length=1, max_length=1000, description="where the numbers beside it come from")
]
Path = Annotated[
    str, Meta(min_length=1, max_length=4096, description="a path of 1 to 4096 printable characters")
]
Text = Annotated[str, Meta(max_length=1000, description="at most 1000 printable characters")]

Extension = Annotated[
    str, Meta(pattern=r"^\.[A-Za-z0-9]{1,16}\Z", description="a dot and 1 to 16 letters or digits")
]

#: Elastic: the job may run on any legal number of nodes in the range.
NodeRange = Annotated[
    str,
    Meta(
        pattern=rf"^{RANGE.pattern}\Z",
        description=RULE,
    ),
]

EnvName = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z", description="a name of A-Z a-z 0-9 _")
]

EnvPattern = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_*][A-Za-z0-9_*]{0,127}\Z",
        description="a name of A-Z a-z 0-9 _, * for any of these",
    ),
]

#: Faults of workers, as `orchestrator.run.state` tells them.
WorkerCause = Literal[
    "worker_exit",
    "worker_frozen",
    "worker_spinning",
    "worker_stuck",
    "collective_hung",
    "non_finite",
    "disk_full",
    "straggler",
]

_MANY = 2**53  # every integer up to here is exact in JSON and in a float
Count = Annotated[int, Meta(ge=1, le=_MANY)]
Natural = Annotated[int, Meta(ge=0, le=_MANY)]
Degree = Annotated[int, Meta(ge=1, le=2**20)]
Positive = Annotated[float, Meta(gt=0)]
Quantity = Annotated[float, Meta(ge=1e-6, le=1e9)]  # In GiB, MiB, GB/s, Gbit/s or TFLOP/s.
NonNegative = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
