"""What the help of a verb ends with: for some a paragraph or a table, for all of them two
examples. Only the parser of a verb imports this, not `orch --help`."""

from __future__ import annotations

_RUN_OR_SUBMIT = """\
              orch run                        orch submit
program       torchrun's command line         after --; without one, the
                                              bundled trainer
shape         --nnodes and --nproc-per-node;  cluster=, nodes=, parallel=;
              default: one process            default: cluster=local
restarts      --max-restarts; default: 0,     backend.max_restarts; default:
              with a range of nodes 3         3
to watch it   always, unless --detach; a      with --follow; Ctrl-C ends only
              second Ctrl-C ends the run      the watching
Both start on any backend, and both take key=value for everything else."""

#: Verb -> what is to be known before its flags are read.
NOTES = {
    "run": _RUN_OR_SUBMIT,
    "submit": _RUN_OR_SUBMIT,
    "nodes": """\
A node is on this list after a run has given it up. The nodes of a cluster, good
and bad, are listed by its scheduler, and drawn by `orch topology show`.""",
    "rm": "`orch gc` removes by age and size, `orch rm` the runs that you name.",
    "gc": "`orch gc` removes by age and size, `orch rm` the runs that you name.",
}

#: Verb -> two command lines.
EXAMPLES = {
    "run": [
        "orch run --nproc-per-node 8 train.py --lr 0.1",
        "orch run --nproc-per-node 2 --max-restarts 3 -m package.train",
    ],
    "demo": [
        "orch demo",
        "orch demo --steps 20",
    ],
    "submit": [
        "orch submit cluster=local parallel=tp2_pp2_zero1 --follow",
        "orch submit backend=slurm cluster=h100x64 parallel=tp8 -- python train.py",
    ],
    "render": [
        "orch render backend=slurm cluster=h100x64 parallel=tp8_pp4_zero1",
        "orch render backend=slurm cluster=h100x64 parallel=tp8 -- python train.py",
    ],
    "resume": [
        "orch resume tiny-tp2-1129 --follow",
        "orch resume tiny-tp2-1129 --allow changed-data",
    ],
    "resize": [
        "orch resize llama3_8b-1129 6",
        "orch resize llama3_8b-1129 4 --json",
    ],
    "cancel": [
        "orch cancel tiny-tp2-1129",
        "orch cancel tiny-tp2-1129 --force",
    ],
    "export": [
        "orch export --out weights",
        "orch export tiny-tp2-1129 --step 100 --dtype bf16 --out weights",
    ],
    "list": [
        "orch list --active",
        "orch list --state failed,stopped --newer-than 12h",
    ],
    "status": [
        "orch status",
        "orch status tiny-tp2-1129 --watch",
    ],
    "logs": [
        "orch logs --rank 0 --tail 20",
        "orch logs tiny-tp2-1129 --follow",
    ],
    "report": [
        "orch report",
        "orch report tiny-tp2-1129 --plot memory.png",
    ],
    "nodes": [
        "orch nodes --cluster h100x64",
        "orch nodes --forget node17",
    ],
    "paths": [
        "orch paths",
        "orch paths tiny-tp2-1129",
    ],
    "rm": [
        "orch rm tiny-tp2-1129 --dry-run",
        "orch rm tiny-tp2-1129 llama3_8b-1129",
    ],
    "gc": [
        "orch gc --older-than 30d --dry-run",
        "orch gc --size 20G --keep 5",
    ],
    "plan": [
        "orch plan cluster=h100x64 parallel=tp8_pp4_zero1",
        "orch plan cluster=h100x8 model=llama3_8b parallel=auto --explain",
    ],
    "tune": [
        "orch tune cluster=h100x8 model=llama3_8b",
        "orch tune cluster=h100x64 model=llama3_8b --near 20",
    ],
    "whatif": [
        "orch whatif cluster=h100x64 --case cluster=a100x64 --tokens 15e12",
        "orch whatif cluster=h100x8 model=llama3_8b --case train.recompute=full",
    ],
    "config": [
        "orch config cluster=h100x64 parallel=tp8_pp4_zero1",
        "orch config --choices model",
    ],
    "predict": [
        "orch predict --table runs.csv --score",
        "orch predict --table runs.csv --out predicted.csv",
    ],
    "calibrate": [
        "orch calibrate --from tiny-tp2-1129",
        "orch calibrate --from bench cluster=h100x8",
    ],
    "verify": [
        "orch verify parallel=tp2_pp2_zero1",
        "orch verify --matrix quick",
    ],
    "precision": [
        "orch precision tiny-tp2-1129 --out precision.html",
        "orch precision model=tiny train.matmul=fp8_tensor",
    ],
    "twin": [
        "orch twin cluster=h100x64 model=llama3_8b parallel=tp8_zero1",
        "orch twin cluster=h100x8 model=gpt2 parallel=ddp --all",
    ],
    "drill": [
        "orch drill --faults kill_worker,stop_agent --trials 3",
        "orch drill tiny-tp2-1129 --random --seed 7",
    ],
    "reproduce": [
        "orch reproduce",
        "orch reproduce --out page.md",
    ],
    "init": [
        "orch init slurm",
        "orch init kubernetes chart",
    ],
    "bench": [
        "orch bench cluster=h100x8",
        "orch bench backend=slurm cluster=h100x64 --no-keep",
    ],
    "topology": [
        "orch topology show topology.conf",
        "orch topology diff topology.conf other.conf",
    ],
    "completion": [
        "orch completion bash",
        "orch completion zsh",
    ],
    "version": [
        "orch version",
        "orch version --json",
    ],
}


def epilog(verb: str) -> str:
    """Returns the end of a verb's help."""
    examples = "\n".join(["examples:", *(f"  {line}" for line in EXAMPLES[verb])])
    return f"{NOTES[verb]}\n\n{examples}" if verb in NOTES else examples
