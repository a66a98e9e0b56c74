"""The table of verbs. Each name is a module here with `add_arguments(parser)` and `run(args,
overrides) -> int`.

A verb's module is imported only when it is called, and imports its heavy parts inside `run`.
"""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    help: str
    overrides: bool = False  # takes `key=value` words: a configuration
    command: bool = False  # takes `-- program args`
    acts: bool = False  # what it does counts, also where its output is lost
    rest: bool = False  # its last argument takes all words that follow, flags too


VERBS: dict[str, Verb] = {
    "plan": Verb(
        "place a model on a cluster: layout, memory, time, what limits it", overrides=True
    ),
    "verify": Verb(
        "train a layout and one process on the same tokens, and compare everything", overrides=True
    ),
    "twin": Verb(
        "run ranks at full size without GPUs, and hold them against the plan", overrides=True
    ),
    "tune": Verb(
        "search every legal layout: the fastest that fits, and smaller near-ties", overrides=True
    ),
    "whatif": Verb("plans side by side, with GPU-hours to a token target", overrides=True),
    "predict": Verb("predict every row of a table of training runs, and score it"),
    "reproduce": Verb(
        "the papers' headline results beside this planner's, as a page (docs/reproduce.md)"
    ),
    "calibrate": Verb(
        "fit the cost model to a table of runs, or to a run or orch bench of this site",
        overrides=True,
    ),
    "submit": Verb(
        "plan a job and start it; prints its handle", overrides=True, command=True, acts=True
    ),
    "run": Verb(
        "torchrun's command line, placed, elastic and watched", overrides=True, rest=True, acts=True
    ),
    "render": Verb("write a run's folder and print its job script", overrides=True, command=True),
    "list": Verb("runs of this machine"),
    "status": Verb("one run, live: state, step, loss, tokens/s, memory"),
    "report": Verb("a run's measurements against its plan; memory of its first steps"),
    "drill": Verb(
        "break parts of a run on purpose: how often, and how fast, does it recover", acts=True
    ),
    "nodes": Verb("nodes that were found bad and are left out for a while; --forget one"),
    "logs": Verb("what a run's workers and agents wrote"),
    "cancel": Verb("stop a run after it has saved", acts=True),
    "resume": Verb("continue a stopped run from its last checkpoint", acts=True),
    "resize": Verb("continue an elastic run on another number of nodes", acts=True),
    "rm": Verb("remove ended runs with all that is in their folders", acts=True),
    "gc": Verb("remove old ended runs, by age or until all take so much", acts=True),
    "paths": Verb("every folder and file that orch reads or writes"),
    "export": Verb("a run's weights as one safetensors file"),
    "init": Verb("write Slurm profiles or the Helm chart to start from", acts=True),
    "demo": Verb("train a tiny model on this machine, and show what there is to see"),
    "config": Verb("the resolved configuration, or the choices of every group", overrides=True),
    "bench": Verb(
        "measure a cluster's links and GPUs; later plans of it use what was found",
        overrides=True,
        acts=True,
    ),
    "topology": Verb(
        "the network of a cluster: show it, import it from what the site has, compare two"
    ),
    "completion": Verb("a completion script for bash, zsh or fish"),
    "version": Verb("versions of orch and of what it stands on"),
}
