"""`python -m tests.beds.fakegpu MODULE FUNCTION ARGUMENTS`: calls a function (`call`); the last
line is its result. `python -m tests.beds.fakegpu COMMAND ...`: runs any command with fake GPUs."""

import importlib
import json
import os
import sys

from tests.beds.fakegpu import environment

if "FAKEGPU_DEVICES" not in os.environ:
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
module, function, arguments = sys.argv[1:]
print(
    json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments))),
    flush=True,
)
os._exit(0)  # triton's bindings say much at their end
