"""`orch run`: torchrun's command line, placed, elastic, watched: `orch run --nnodes 2:4
--nproc-per-node 8 train.py`.

Flags that say how torchrun's agents find each other are not needed, which is said; those that ask
for what is not there are refused by name.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys

from orchestrator.cli.session import add_request_arguments
from orchestrator.errors import OrchError

#: torchrun's flags with a value that mean nothing here, and why.
_IGNORED = {
    "rdzv-backend": "the agents meet by themselves",
    "rdzv-endpoint": "the agents meet by themselves",
    "rdzv-id": "each run has an id of its own",
    "rdzv-conf": "the agents meet by themselves",
    "master-addr": "the address of rank 0's node is found",
    "master-port": "a free port is taken",
    "local-addr": "the addresses of nodes are found",
    "monitor-interval": "an ended worker is noticed at once",
    "start-method": "workers are started by fork and exec",
    "redirects": "each rank's output is in a log of its own (orch logs)",
    "tee": "each rank's output is shown and kept (orch logs)",
    "event-log-handler": "events are in the run's folder",
    "signals-to-handle": "SIGTERM, SIGHUP and a second SIGINT end the run",
}
#: Those that would change what runs, which nothing here does.
_REFUSED = {
    "run-path": "give the script itself",
    "log-dir": "logs are in the run's folder; run.dir=DIR moves those",
    "log-line-prefix-template": "lines begin with [rank N]",
    "local-ranks-filter": "use orch logs --rank N",
    "duplicate-stdout-filters": "use orch logs",
    "duplicate-stderr-filters": "use orch logs",
    "logs-specs": "use orch logs",
    "shutdown-timeout": "use backend.grace_s=SECONDS",
    "virtual-local-rank": "every worker sees its own LOCAL_RANK",
}
_ELASTIC_RESTARTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, **settings: object) -> None:
        """As torchrun: also with underscores, and with a default from PET_<NAME>."""
        default = os.environ.get(
            f"PET_{name.replace('-', '_').upper()}", settings.pop("default", None)
        )
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*spellings, default=default, **settings)  # type: ignore[arg-type]

    add(
        "nnodes",
        metavar="N|MIN:MAX",
        default="1",
        help="nodes; of a range the run goes on with those that are left",
    )
    add(
        "nproc-per-node",
        metavar="N",
        default="1",
        help="workers on a node: a number, gpu, cpu or auto",
    )
    add(
        "max-restarts",
        metavar="N",
        help=f"after failures (default 0; {_ELASTIC_RESTARTS} with a range of nodes)",
    )
    add("node-rank", default="0", help=argparse.SUPPRESS)
    add("role", default="default", help=argparse.SUPPRESS)
    for name in (*_IGNORED, *_REFUSED, "numa-binding"):
        flag_settings = (
            {"action": "store_const", "const": ""}
            if name in ("run-path", "virtual-local-rank")
            else {}
        )
        add(name, help=argparse.SUPPRESS, **flag_settings)
    parser.add_argument("-r", dest="redirects", help=argparse.SUPPRESS)
    parser.add_argument("-t", dest="tee", help=argparse.SUPPRESS)
    parser.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is a module, as of python -m"
    )
    parser.add_argument(
        "--no-python", "--no_python", action="store_true", help="the script is a program of its own"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show plan and request, start and write nothing"
    )
    parser.add_argument(
        "--detach", "-d", action="store_true", help="print the handle and do not watch the run"
    )
    add_request_arguments(parser)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="[key=value ...] script [args]")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.verbs import submit

    rest = list(args.script)
    if not rest:
        raise OrchError("`orch run` needs a script: orch run --nproc-per-node 8 train.py")
    _say_ignored(args)
    args.command = _command(args, rest)
    args.said = _differences(args)
    args.follow = args.owned = not args.detach
    args.multirun = False
    return submit.run(args, [*_words(args), *overrides])


def _differences(args: argparse.Namespace) -> list[str]:
    """What the program may miss here that it has under torchrun, or in this shell: a line each."""
    from orchestrator.submit.this_machine import other_python

    messages = (
        ["standard input is not passed on: the program reads nothing from it"]
        if _is_piped_in()
        else []
    )
    if args.no_python or "PYTHON_EXEC" in os.environ:
        return messages
    remedy = "PYTHON_EXEC=PATH takes another one"
    return [*messages, *other_python(sys.executable, os.environ.get("PATH", ""), remedy)]


def _is_piped_in() -> bool:
    """Whether somebody feeds standard input by a pipe or a file, which under torchrun the workers
    would read."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or (stat.S_ISREG(mode) and os.fstat(0).st_size > 0)


def is_override(argument: str) -> bool:
    """Whether a word before the script is `key=value`, and no script of such a name."""
    name, equals, _ = argument.partition("=")
    return (
        bool(equals)
        and not argument.startswith("-")
        and "/" not in name
        and not os.path.exists(argument)
    )


def _command(args: argparse.Namespace, rest: list[str]) -> list[str]:
    if args.no_python:
        if args.module:
            raise OrchError("--no-python and --module exclude each other")
        return rest
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return [python, "-u", *(["-m"] if args.module else []), *rest]


def _words(args: argparse.Namespace) -> list[str]:
    """The configuration that torchrun's flags mean."""
    first, last = _nodes(args.nnodes)
    overrides = [f"cluster.nodes={last}", f"cluster.gpus_per_node={_per_node(args.nproc_per_node)}"]
    overrides += [f"nodes={first}..{last}"] if first < last else []
    restarts = (
        args.max_restarts if args.max_restarts is not None else _ELASTIC_RESTARTS * (first < last)
    )
    return [*overrides, f"backend.max_restarts={_number('--max-restarts', str(restarts), 0)}"]


def _nodes(bounds: str) -> tuple[int, int]:
    first, _, last = bounds.partition(":")
    low = _number("--nnodes", first, 1)
    high = _number("--nnodes", last or first, 1)
    if low > high:
        raise OrchError(f"--nnodes {bounds}: the smaller number comes first")
    return low, high


def _per_node(count: str) -> int:
    from orchestrator.backends.local.gpus import visible_gpus

    gpus = len(visible_gpus(os.environ))
    cpus = len(os.sched_getaffinity(0))
    if count == "gpu" and not gpus:
        raise OrchError(
            "--nproc-per-node gpu: this machine has no GPU, or CUDA_VISIBLE_DEVICES hides all"
        )
    counts = {"gpu": gpus, "cpu": cpus, "auto": gpus or cpus}
    return counts[count] if count in counts else _number("--nproc-per-node", count, 1)


def _number(flag: str, digits: str, minimum: int) -> int:
    if not digits.isdecimal() or int(digits) < minimum:
        raise OrchError(f"{flag} {digits!r} is not a number of at least {minimum}")
    return int(digits)


def _say_ignored(args: argparse.Namespace) -> None:
    """OrchError (64) for flags that are refused; a line for each that is ignored."""
    flags = vars(args)
    for name, reason in _REFUSED.items():
        if flags[name.replace("-", "_")] is not None:
            raise OrchError(f"torchrun's --{name} is not for orch run: {reason}")
    if args.numa_binding not in (None, "node"):
        raise OrchError(
            f"--numa-binding {args.numa_binding!r} is not for orch run: it knows node alone, its"
            " default (the cores of the NUMA domain of a worker's GPU; backend.numa_binding=false:"
            " all)"
        )
    if args.node_rank != "0":
        raise OrchError(
            "torchrun's --node-rank is not for orch run: called once, it starts all nodes"
        )
    if args.role != "default":
        raise OrchError("torchrun's --role is not for orch run: all workers have the role default")
    for name, reason in _IGNORED.items():
        if flags[name.replace("-", "_")] is not None:
            print(f"orch: --{name} is not needed: {reason}", file=sys.stderr)
