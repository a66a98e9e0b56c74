"""The table of verbs. Each verb is a module of this folder with `add_arguments(parser)` and
`run(args, overrides) -> int`.

The module of a verb is imported only when the verb is called, and imports heavy modules inside
`run`.
"""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    help: str
    overrides: bool = False  # takes `key=value` arguments: a configuration
    command: bool = False  # takes `-- program args`
    acts: bool = False  # has succeeded when its action has, even if its output is lost
    rest: bool = False  # its last argument takes everything that follows, also flags
    keeps_configuration: bool = False  # starts a run again, as it was submitted


#: Verbs by what one does with them, in the order of `orch --help`.
GROUPS: dict[str, dict[str, Verb]] = {
    "run": {
        "run": Verb(
            "start a program with torchrun's command line: placed, elastic and watched",
            overrides=True,
            rest=True,
            acts=True,
        ),
        "submit": Verb(
            "plan a job, start it and print its handle",
            overrides=True,
            command=True,
            acts=True,
        ),
        "demo": Verb("train a tiny model on this machine, and show its loss, metrics and logs"),
        "render": Verb(
            "write the folder of a run and print its job script",
            overrides=True,
            command=True,
        ),
        "resume": Verb(
            "continue a stopped run from its last checkpoint",
            acts=True,
            keeps_configuration=True,
        ),
        "resize": Verb(
            "continue an elastic run on another number of nodes",
            acts=True,
            keeps_configuration=True,
        ),
        "cancel": Verb("stop a run after it has saved", acts=True),
    },
    "look": {
        "list": Verb("list the runs of this machine"),
        "status": Verb("show a run: state, step, loss, tokens/s, memory"),
        "logs": Verb("print the output of the workers or agents of a run"),
        "report": Verb(
            "compare the measurements of a run with its plan; show its memory over time"
        ),
        "nodes": Verb("list the bad nodes, which failed and which later runs avoid; --forget one"),
    },
    "plan": {
        "plan": Verb(
            "place a model on a cluster: show layout, memory, step time and bottleneck",
            overrides=True,
        ),
        "tune": Verb(
            "search every legal layout: the fastest that fits, and smaller near-ties",
            overrides=True,
        ),
        "whatif": Verb("compare plans, with GPU-hours to a token target", overrides=True),
        "config": Verb(
            "show the resolved configuration, or the choices of each group", overrides=True
        ),
        "predict": Verb("predict every row of a table of training runs, and score the predictions"),
        "calibrate": Verb(
            "fit the cost model to a table of runs, or to a run or orch bench of this site",
            overrides=True,
        ),
    },
    "prove": {
        "verify": Verb(
            "train a layout and one process on the same tokens, and compare everything",
            overrides=True,
        ),
        "precision": Verb(
            "measure each linear's error in 8 bits, and propose which stay wide", overrides=True
        ),
        "twin": Verb(
            "run ranks at full size without GPUs, and compare them with the plan", overrides=True
        ),
        "drill": Verb(
            "break parts of a run on purpose, and measure how often and how fast it recovers",
            acts=True,
        ),
        "reproduce": Verb(
            "compare the headline results of the papers with this planner (docs/reproduce.md)"
        ),
    },
    "clusters": {
        "init": Verb("write Slurm profiles, the Helm chart or orch_report.py", acts=True),
        "bench": Verb(
            "measure links and GPUs of a cluster, for later plans of it",
            overrides=True,
            acts=True,
        ),
        "topology": Verb("show, import or compare descriptions of a cluster's network"),
    },
    "other": {
        "export": Verb("write the weights of a run as one safetensors file"),
        "paths": Verb("list every folder and file that orch reads or writes"),
        "rm": Verb("remove ended runs with everything in their folders", acts=True),
        "gc": Verb("remove old ended runs, by age or down to a total size", acts=True),
        "completion": Verb("print a completion script for bash, zsh or fish"),
        "version": Verb("print the versions of orch, its dependencies and its file formats"),
    },
}

VERBS: dict[str, Verb] = {
    name: verb for verbs_of_group in GROUPS.values() for name, verb in verbs_of_group.items()
}
