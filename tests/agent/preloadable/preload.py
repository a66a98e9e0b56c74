"""What is imported once, in the fork server."""

import os
import time

if os.path.exists(broken := os.environ.get("PRELOAD_BROKEN", "")):
    raise RuntimeError("cannot be imported")
while os.path.exists(os.environ.get("PRELOAD_WAITS", "")):
    time.sleep(0.01)

PRELOADED_BY = os.getpid()


def prepare(arguments: list[str], environment: dict[str, str]) -> None:
    if "PREPARED" in environment:
        environment["PREPARED"] = f"in {os.getpid()}"
    else:
        raise ValueError("a worker starts nevertheless")


def after_fork() -> None:
    os.environ["FORKED"] = "yes"
