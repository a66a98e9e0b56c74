"""`orch run`: starts a program with torchrun's command line, placed, elastic and watched: `orch run
--nnodes 2:4 --nproc-per-node 8 train.py`.

Flags that tell torchrun's agents how to find each other are not needed and ignored with a message;
flags for missing features are refused by name.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys

from orchestrator.cli.session import add_request_arguments
from orchestrator.config.node_range import node_range
from orchestrator.config.words import typed_values
from orchestrator.errors import OrchError

#: Flags of torchrun that are ignored, with the reason.
_IGNORED = {
    "rdzv-backend": "the agents find each other by themselves",
    "rdzv-endpoint": "the agents find each other by themselves",
    "rdzv-id": "each run has its own id",
    "rdzv-conf": "the agents find each other by themselves",
    "master-addr": "orch finds the address of rank 0's node",
    "master-port": "orch takes a free port",
    "local-addr": "orch finds the addresses of the nodes",
    "monitor-interval": "orch reacts to an ended worker at once",
    "start-method": "orch starts workers by fork and exec",
    "redirects": "each rank has its own log (orch logs)",
    "tee": "the output of each rank is shown and logged (orch logs)",
    "event-log-handler": "events are in the folder of the run",
    "signals-to-handle": "SIGTERM, SIGHUP and a second SIGINT end the run",
}
#: Flags of torchrun that would change the run and are not supported, with the alternative.
_REFUSED = {
    "run-path": "give the script itself",
    "log-dir": "logs are in the folder of the run; run.dir=DIR moves it",
    "log-line-prefix-template": "lines begin with [rank N]",
    "local-ranks-filter": "use orch logs --rank N",
    "duplicate-stdout-filters": "use orch logs",
    "duplicate-stderr-filters": "use orch logs",
    "logs-specs": "use orch logs",
    "shutdown-timeout": "use backend.grace_s=SECONDS",
    "virtual-local-rank": "every worker sees its own LOCAL_RANK",
}
_REFUSED_SWITCHES = ("run-path", "virtual-local-rank")  # those without a value
_ELASTIC_RESTARTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, *short: str, **settings: object) -> None:
        """Adds a flag as torchrun does: also with underscores, and with a default from PET_<NAME>,
        a number for a switch."""
        default = os.environ.get(
            f"PET_{name.replace('-', '_').upper()}", settings.pop("default", None)
        )
        if settings.get("action") == "store_true":
            default = default not in (None, "", "0")
        spellings = dict.fromkeys((*short, f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*spellings, default=default, **settings)  # type: ignore[arg-type]

    add(
        "nnodes",
        metavar="N|MIN:MAX",
        help="nodes; with a range the run continues when nodes are lost",
    )
    add(
        "nproc-per-node",
        metavar="N",
        help="workers per node: a number, gpu, cpu or auto",
    )
    add(
        "max-restarts",
        metavar="N",
        help=f"restarts after failures (default: 0, or {_ELASTIC_RESTARTS} with a range of nodes)",
    )
    add("node-rank", default="0", help=argparse.SUPPRESS)
    add("role", default="default", help=argparse.SUPPRESS)
    for name in (*_IGNORED, *_REFUSED, "numa-binding"):
        if name not in _REFUSED_SWITCHES:
            add(name, help=argparse.SUPPRESS)
    for switch in (*_REFUSED_SWITCHES, "standalone"):
        add(switch, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-r", dest="redirects", help=argparse.SUPPRESS)
    parser.add_argument("-t", dest="tee", help=argparse.SUPPRESS)
    add("module", "-m", action="store_true", help="run the script as a module, like python -m")
    add("no-python", action="store_true", help="run the script without Python")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the plan and the request, start nothing",
    )
    parser.add_argument(
        "--detach",
        "-d",
        action="store_true",
        help="print the handle without watching the run",
    )
    add_request_arguments(parser)
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="[key=value ...] script [args]",
        help="keys of the configuration, the program, and its own arguments",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.verbs import submit

    script = list(args.script)
    if script[:1] == ["--"]:  # torchrun takes it as the end of its flags
        del script[0]
    if not script:
        raise OrchError("`orch run` needs a script: orch run --nproc-per-node 8 train.py")
    _check_torchrun_flags(args)
    args.command = _command(args, script)
    args.messages = []
    if _is_piped_in():
        args.messages = ["standard input is not passed on: the program reads nothing from it"]
    args.follow = args.owned = not args.detach
    args.multirun = False
    return submit.run(args, [*_overrides(args, overrides), *overrides])


def _is_piped_in() -> bool:
    """Whether standard input is a pipe or a file, which the workers would read under torchrun."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or (stat.S_ISREG(mode) and os.fstat(0).st_size > 0)


def is_override(argument: str) -> bool:
    """Whether an argument before the script is `key=value`, and not a script of this name."""
    name, equals, _ = argument.partition("=")
    return (
        bool(equals)
        and not argument.startswith("-")
        and "/" not in name
        and not os.path.exists(argument)
    )


def _command(args: argparse.Namespace, script: list[str]) -> list[str]:
    """Returns the command of a worker. `script`: the script and its arguments."""
    if args.no_python:
        if args.module:
            raise OrchError("--no-python and --module exclude each other")
        return script
    return ["python3", "-u", *(["-m"] if args.module else []), *script]


def _overrides(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """Translates torchrun's flags into overrides. `overrides`: those that the user has typed, which
    replace the defaults of the flags."""
    typed = typed_values(overrides)
    if args.nnodes is None and "nodes" in typed:
        first, last = node_range(typed["nodes"])
    else:
        first, last = node_range(args.nnodes or "1", "--nnodes ")
    shape = [f"cluster.nodes={last}"]
    shape += [f"nodes={first}..{last}"] if first < last else []
    if args.nproc_per_node or "nproc" not in typed:
        workers = _per_node(args.nproc_per_node or "1", overrides, args.config_dir)
        shape += [f"cluster.gpus_per_node={workers}"] if workers else []
    restarts = (
        args.max_restarts if args.max_restarts is not None else _ELASTIC_RESTARTS * (first < last)
    )
    return [*shape, f"backend.max_restarts={_number('--max-restarts', str(restarts), 0)}"]


def _per_node(count: str, overrides: list[str], config_dir: str | None) -> int | None:
    """Returns the workers of a node; None: as many as the cluster's nodes have GPUs."""
    if count not in ("gpu", "cpu", "auto"):
        return _number("--nproc-per-node", count, 1)
    from orchestrator.config.compose import load
    from orchestrator.submit.this_machine import workers_per_node

    config = load(overrides, config_dir, ranges=True)
    return workers_per_node(count, config, os.environ)


def _number(flag: str, digits: str, minimum: int) -> int:
    if not digits.isdecimal() or int(digits) < minimum:
        raise OrchError(f"{flag} {digits!r}: must be a whole number, at least {minimum}")
    return int(digits)


def _check_torchrun_flags(args: argparse.Namespace) -> None:
    """Raises OrchError (64) for a flag that is not supported, and prints a line for each ignored
    one."""
    flags = vars(args)
    for name, reason in _REFUSED.items():
        if flags[name.replace("-", "_")] not in (None, False):
            raise OrchError(f"orch run does not support torchrun's --{name}: {reason}")
    if args.numa_binding not in (None, "node"):
        raise OrchError(
            f"orch run does not support --numa-binding {args.numa_binding!r}; legal: node, the"
            " default (each worker on the cores of the NUMA domain of its GPU;"
            " backend.numa_binding=false: on all)"
        )
    if args.node_rank != "0":
        raise OrchError(
            "orch run does not support torchrun's --node-rank: one command starts all nodes"
        )
    if args.role != "default":
        raise OrchError(
            "orch run does not support torchrun's --role: all workers have the role default"
        )
    for name, reason in _IGNORED.items():
        if flags[name.replace("-", "_")] is not None:
            print(f"orch: --{name} is not needed: {reason}", file=sys.stderr)
