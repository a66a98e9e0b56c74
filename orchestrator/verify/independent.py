"""`orch verify --against independent`: trains small jobs by `python -m trainer` itself, each begun in one layout and
resumed in another, and has `python -m trainer.independent` judge what they leave.

A case is a pair of layouts in one precision. Over the cases everything varies that the loop does: micro-batches of 1 to
3 samples, documents apart or not, masks, a growing batch, all learning-rate schedules, both networks, the initial state
and one of a run under way. The corpus is so small that a run reads it several times.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from math import ceil, lcm, prod
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, structs

from orchestrator import start
from orchestrator.cluster.build import build_cluster
from orchestrator.config.schema import BatchRampSpec, Config
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, to_json
from orchestrator.plan.document import Precision
from orchestrator.plan.trained import problems
from orchestrator.plan.worker import WorkerEnv
from orchestrator.run.store_socket import StoreSocket

from .cells import few_nodes

PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "bf16", "fp16")
#: Words that a user may give; everything else of a job is the cases' own.
OPEN = ("parallel", "model", "cluster")
MOST_RANKS, MOST_PARAMETERS = 16, 5_000_000
STEPS, RESUME_AT = 6, 3
SEQ_LEN = 128
#: Samples of the corpus: a prime, so that no batch divides an epoch.
SAMPLES = 17

_SHAPE: dict[str, Any] = {"layers": 4, "hidden": 64, "heads": 8, "ffn_hidden": 96, "vocab": 257, "max_seq_len": 512}
LLAMA = {**_SHAPE, "name": "llama", "kv_heads": 2, "head_dim": 16, "norm": "rms", "position": "rope", "mlp": "gated"}
LLAMA |= {"activation": "silu", "bias": False, "tied_embeddings": False, "norm_eps": 1e-5, "rope_theta": 700.0}
GPT2 = {**_SHAPE, "name": "gpt2", "kv_heads": 8, "head_dim": 8, "norm": "layer", "position": "learned", "mlp": "plain"}
GPT2 |= {"activation": "gelu", "bias": True, "tied_embeddings": True, "norm_eps": 1e-5}

_OPTIM: tuple[dict[str, Any], ...] = (
    {"schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.2},
    {"schedule": "wsd", "warmup_steps": 1, "decay_steps": 3},
    {"schedule": "constant", "warmup_steps": 4},
    {"schedule": "cosine", "warmup_steps": 0, "decay_steps": 4},
)


class Case(NamedTuple):
    """Two runs: the first from its start to its end, the second from the first one's checkpoint of `RESUME_AT`."""

    name: str
    precision: Precision
    start: str  # "initial", or "harsh": a state that hides less
    plans: tuple[Plan, Plan]
    scale: tuple[float, int] = (2.0**20, 0)  # loss scale of fp16 at the start, and steps since it changed


class Bound(Struct, frozen=True):
    """The worst of one quantity, relative to its size."""

    error: float
    bound: float
    where: str


class Verdict(Struct, kw_only=True):
    name: str
    precision: str
    refused: str = ""  # why the layout is not run
    failed: str = ""  # a rank ended with another code than 0: one line
    problems: list[str] = []  # what is wrong whatever the size
    worst: dict[str, Bound] = {}
    steps: int = 0
    skipped: int = 0  # of those, because fp16 overflowed
    seconds: float = 0.0  # of the judge

    @property
    def equal(self) -> bool:
        inside = all(one.error <= one.bound for one in self.worst.values())
        return bool(self.worst) and inside and not (self.problems or self.failed or self.refused)

    @property
    def word(self) -> str:
        if self.refused:
            return "refused"
        return "failed" if self.failed else "equal" if self.equal else "DIFFERENT"


def check_installed() -> None:
    """Raises OrchError where what the oracle stands on is missing."""
    if find_spec("transformers") is None:
        raise OrchError("--against independent needs transformers: pip install 'orch-train[dev]'", Exit.USAGE)


# --------------------------------------------------------------------------------------------------- cases


def cases(
    overrides: Sequence[str], precisions: Sequence[Precision], config_dir: str | Path | None, home: Path
) -> Iterator[Case | Verdict]:
    """Of `parallel=word,word,...`: each word begins a case and the next goes on with it; one word alone is gone on with
    by one process. `home`: a folder that lasts as long as the runs. Raises OrchError."""
    rest = [word for word in overrides if not word.lstrip("+").startswith("parallel=")]
    lists = [word.split("=", 1)[1] for word in overrides if word.lstrip("+").startswith("parallel=")]
    if not lists:
        raise OrchError("--against independent needs layouts: parallel=tp2_pp2_zero1,dp4", Exit.USAGE)
    for word in rest:
        key = word.lstrip("+").split("=", 1)[0]
        if key.split(".")[0] not in OPEN:
            raise OrchError(f"--against independent sets {key} itself; yours: {', '.join(OPEN)}", Exit.USAGE)
    own_model = any(word.lstrip("+").startswith("model") for word in rest)
    words = [name.strip() for name in lists[-1].strip("[]").split(",")]
    write_corpus(home / "text")
    for number, first in enumerate(words):
        second = words[(number + 1) % len(words)] if len(words) > 1 else "dp1"
        for precision in precisions:
            name = f"{first} -> {second}"
            try:
                yield make(name, (first, second), precision, number, rest, config_dir, home, own_model)
            except _Refused as error:
                yield Verdict(name=name, precision=precision, refused=str(error))


class _Refused(Exception):
    """A layout that is not run, and why."""


def make(
    name: str,
    layouts: tuple[str, str],
    precision: Precision,
    number: int,
    rest: Sequence[str],
    config_dir: str | Path | None,
    home: Path,
    own_model: bool = False,
) -> Case:
    from orchestrator.config.compose import load

    turn = number + PRECISIONS.index(precision)
    base = [] if own_model else ["model=tiny"]
    configs = [load(["cluster=local", *base, *rest, f"parallel={word}"], config_dir) for word in layouts]
    if any(config.parallel.auto for config in configs):
        raise OrchError("--against independent needs degrees, not a search", Exit.USAGE)
    if not own_model:
        shape = LLAMA if number % 2 == 0 else GPT2
        layers = max(shape["layers"], *((one.parallel.pp or 1) * (one.parallel.vpp or 1) for one in configs))
        model = structs.replace(configs[0].model, **shape | {"layers": layers})
        configs = [structs.replace(config, model=model) for config in configs]
    sizes = [config.parallel.micro_batch_size or 1 + (turn + at) % 3 for at, config in enumerate(configs)]
    batch, apart = _batch(configs, sizes), (number % 2 == 0) == (precision in ("fp64", "fp16"))
    plans = [
        _plan(config, precision, turn, apart, size, batch, home) for config, size in zip(configs, sizes, strict=True)
    ]
    start = "initial" if precision == "fp64" and number % 2 == 0 else "harsh"
    return Case(name, precision, start, (plans[0], plans[1]), (2.0**20, 0) if number % 2 == 0 else (2.0**12, 1998))


def _dp(config: Config) -> int:
    return config.parallel.dp or 1


def _batch(configs: Sequence[Config], sizes: Sequence[int]) -> int:
    """Samples of a step that both layouts cut into whole micro-batches, two at least and enough for their pipelines."""
    units = [size * _dp(config) * (config.parallel.ep or 1) for config, size in zip(configs, sizes, strict=True)]
    both = lcm(*units)
    for times in count(1):
        enough = True
        for config, unit in zip(configs, units, strict=True):
            each, pp = times * both // unit, config.parallel.pp or 1
            twice = (config.parallel.schedule or "").startswith("dualpipe")
            enough &= each >= max(2, 2 * pp if twice else pp) and each % (2 if twice else 1) == 0
            enough &= config.parallel.vpp in (None, 1) or each % pp == 0
        if enough:
            return times * both
    raise AssertionError


def _plan(config: Config, precision: Precision, turn: int, apart: bool, size: int, batch: int, home: Path) -> Plan:
    """The layout's plan of the case's job. Raises _Refused, OrchError."""
    from orchestrator.planner.build import build_plan

    par, dp = config.parallel, _dp(config)
    degrees = [par.tp or 1, par.cp or 1, par.ep or 1, par.pp or 1, dp]
    ranks = prod(degrees)
    if ranks > MOST_RANKS:
        raise _Refused(f"{ranks} ranks are too many to run on one machine (at most {MOST_RANKS})")
    cluster = few_nodes(config.cluster, ranks)
    gpu = structs.replace(cluster.gpu, peak_tflops=dict.fromkeys(PRECISIONS, 0.02))  # what is verified is arithmetic
    piece = 2 * degrees[1] * degrees[0]
    train = structs.replace(
        config.train,
        **{"steps": STEPS, "seq_len": piece * ceil(SEQ_LEN / piece), "global_batch_samples": batch},
        **{"global_batch_tokens": None, "seed": 1234 + turn, "precision": precision, "log_every_steps": 1},
        **{"grad_dtype": "fp64" if precision == "fp64" else "fp32", "clip_grad_norm": 0.0 if turn % 4 == 3 else 0.7},
        batch_ramp=BatchRampSpec(start_samples=batch // 2, over_samples=2 * batch) if turn % 4 == 1 else None,
    )
    data = structs.replace(
        config.data,
        **{"name": "independent", "paths": [str(home / "text")], "extensions": [".txt", ".jsonl"], "seed": 99 + turn},
        **{"cache_dir": str(home / "tokens"), "isolate_documents": apart, "demo": False},
    )
    changed = structs.replace(
        config,
        cluster=structs.replace(cluster, gpu=gpu),
        parallel=structs.replace(par, dp=dp, micro_batch_size=size, bucket_mib=(25.0, 2.0**-8)[turn % 2]),
        train=train,
        data=data,
        optim=structs.replace(config.optim, lr=1e-2, weight_decay=0.3, eps=1e-8, **_OPTIM[turn % 4]),
        checkpoint=structs.replace(config.checkpoint, every_steps=1, keep_last=STEPS + 2, dir=None),
        metrics=structs.replace(config.metrics, trace_steps=0),
    )
    try:
        plan = build_plan(changed, build_cluster(changed.cluster))
    except OrchError as error:
        raise _Refused(error.message) from None
    if refusal := next(problems(plan), ""):
        raise _Refused(refusal)
    if plan.model.parameters > MOST_PARAMETERS:
        millions = plan.model.parameters / 1e6
        raise OrchError(
            f"model {plan.model.name} has {millions:,.0f} million parameters, --against independent takes 5"
        )
    return plan


def write_corpus(folder: Path) -> None:
    """Documents of many lengths, in files whose order by name and by folder differs; short documents leave a sample
    half as many targets as long ones."""
    draw, letters = random.Random(7), "etaoin shrdlu\n"

    def text(length: int) -> str:
        return "".join(draw.choice(letters) for _ in range(length))

    (folder / "b").mkdir(parents=True)
    (folder / "b" / "first.txt").write_text(text(150))
    (folder / "b.txt").write_text(text(90))
    lengths = [1, 2, 1, 1, 3, 1, 2, 1, 1, 1, 2, 70, 5, 1, 1, 2, 1, 40, 130, 1, 1, 1, 1, 2, 9]
    lines = "".join(json.dumps({"text": text(length)}) + "\n" for length in lengths)
    (folder / "c.jsonl").write_text(lines + '{"text": ""}\n\n')
    written = 150 + 90 + sum(lengths) + 2 + len(lengths)
    (folder / "d.txt").write_text(text(SAMPLES * SEQ_LEN + 6 - written))


# ---------------------------------------------------------------------------------------------- running and judging


@contextmanager
def _program(module: str, errors: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python program that answers a line with a line; it ends with the block."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            start.command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str], errors: Path) -> Any:
    from .run_cells import last_line

    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise OrchError(f"{errors.stem} stopped: {last_line(errors)}", Exit.INTERNAL)
    return json.loads(line)


def judged(found: Sequence[Case | Verdict], home: Path) -> Iterator[Verdict]:
    """Run every case and have it judged; a verdict each. The judge works on a case while the next one runs."""
    waiting: list[Case] = []
    ranks_errors, judge_errors = home / "ranks.stderr", home / "judge.stderr"
    with (
        _program("orchestrator.verify.start_ranks", ranks_errors) as ranks,
        _program("trainer.independent", judge_errors) as judge,
    ):
        for number, case in enumerate(found):
            if isinstance(case, Verdict):
                yield case
                continue
            folder = home / f"case-{number}"
            folders = write_runs(case, folder)
            if case.start == "harsh":
                scale, good = case.scale
                _send(judge, {"verb": "prepare", "run": str(folders[0]), "loss_scale": scale, "good": good})
                if waiting:
                    yield read_answer(waiting.pop(0), _answer(judge, judge_errors))
                _answer(judge, judge_errors)
            failed = _run(case, folders, ranks, ranks_errors)
            if failed:
                yield Verdict(name=case.name, precision=case.precision, failed=failed)
                continue
            _send(judge, {"verb": "judge", "start": case.start, "runs": [str(one) for one in folders]})
            if waiting:
                yield read_answer(waiting.pop(0), _answer(judge, judge_errors))
            waiting.append(case)
        while waiting:
            yield read_answer(waiting.pop(0), _answer(judge, judge_errors))


def read_answer(case: Case, answer: dict[str, Any]) -> Verdict:
    """The verdict in what the judge has answered."""
    worst = {what: Bound(**one) for what, one in answer.pop("worst").items()}
    return Verdict(name=case.name, precision=case.precision, worst=worst, **answer)


def write_runs(case: Case, folder: Path) -> tuple[Path, Path]:
    """The folders of both runs, each with its plan."""
    folders = folder / "begun", folder / "resumed"
    for run, plan in zip(folders, case.plans, strict=True):
        run.mkdir(parents=True)
        (run / "plan.json").write_bytes(to_json(plan))
    return folders


def hand_over(begun: Path, resumed: Path) -> str:
    """Leave the second run what the first had after step `RESUME_AT`: its checkpoint. Empty, or why there is none."""
    name = f"checkpoints/step-{RESUME_AT:08d}"
    if not (begun / name).is_dir():
        return f"{begun.name}: step {RESUME_AT} was not saved"
    shutil.copytree(begun / name, resumed / name)
    return ""


def _run(case: Case, folders: tuple[Path, Path], ranks: subprocess.Popen[str], errors: Path) -> str:
    """Empty, or why the case has failed."""
    for number, (run, plan) in enumerate(zip(folders, case.plans, strict=True)):
        if number and (missing := hand_over(*folders)):
            return missing
        with StoreSocket("127.0.0.1", listens=False) as store:
            _send(ranks, job_of(plan, run, store.port))
            codes = _answer(ranks, errors)
        bad = next((rank for rank, code in enumerate(codes) if code), None)
        if bad is not None:
            said = (run / f"rank-{bad:05d}.log").read_text(errors="replace").strip().splitlines()
            return f"{run.name}: rank {bad} ended with {codes[bad]}: {said[-1] if said else 'it said nothing'}"
    return ""


def job_of(plan: Plan, run: Path, port: int) -> dict[str, Any]:
    """What `start_ranks` reads. `port`: of rank 0's store."""
    ranks = []
    for place in plan.ranks:
        env = WorkerEnv(
            rank=place.rank,
            local_rank=place.gpu,
            world_size=plan.parallel.world_size,
            local_world_size=plan.cluster.gpus_per_node,
            node_rank=plan.cluster.node_names.index(place.node),
            master_addr="127.0.0.1",
            master_port=port,
            run_id="independent",
            epoch=0,
            node=place.node,
            plan=str(run / "plan.json"),
            plan_hash=plan.hash,
            run_dir=str(run),
            report_fd=None,
        )
        name = f"rank-{place.rank:05d}"
        files = {"log": str(run / f"{name}.log"), "reports": str(run / f"{name}.jsonl")}
        ranks.append({"environment": env.variables(), **files})
    return {"plan": str(run / "plan.json"), "ranks": ranks}
