"""`python -m tests.mutations.run`: how many small changes of the trainer's source do tests and verify notice?

Each mutant is a forked process that imports the changed module from its tree, compares a few layouts with one process
and then runs the fast tests that are about the file. A mutant lives if all is equal and green. No file is written but
the page.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from .lived import REASONS
from .sites import Site, mutated, sites

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("model", "parallel", "pipeline", "optim", "data", "comm")
FILES = ("engine.py", "train.py", "precision.py")
LIMIT_S = 400.0  # on idle cores; a mutant that takes longer is listed, and not counted
CELL_S = 20.0  # of it for a layout's start, and for its steps
HANGS = "it hangs"
ODD = "it ends oddly"
#: Ends that say nothing of what notices a mutant.
UNCOUNTED = (HANGS, ODD)
#: Tests by file, of all patterns that match; all of them are fast, the fastest first.
TESTS = {
    "model/*": "test_model test_dropout test_experts",
    "model/rope*": "test_mutations",
    "parallel/context/*": "test_context",
    "parallel/data/*": "test_buckets_layout test_buckets_sums test_zero_formulas test_overlap",
    "parallel/*": "test_tp_pieces test_column_parallel test_linear_ops test_recompute test_loss_terms",
    "pipeline/*": "test_pipeline_runtime test_pipeline_split",
    "pipeline/[rt]*": "test_turns",
    "model/documents*": "test_documents",
    "comm/settings*": "test_settings",
    "optim/*": "test_optim_lr test_optim_calls test_fp16",
    "engine.py": "test_fp16 test_loss_terms test_batch_ramp test_mutations test_module_state test_expert_bias",
    "train.py": "test_mutations test_loop_errors test_batch_ramp",
    "precision.py": "test_fp16 test_mutations",
    "data/*": "test_data_batch test_data_build test_data_corpus test_data_loader test_data_order test_data_tokenizer",
    "comm/*": "test_comm_check test_comm_control test_comm_gloo test_comm_timers test_tp_ranks test_overlap",
    "model/m*": "test_third_oracle",
    "model/[be]*": "test_third_oracle test_transformers_experts",
    "comm/c*": "test_comm_groups",
    "comm/mesh*": "test_comm_groups test_grad_classes",
    "optim/s*": "test_checkpoint_geometry test_whole_matrices",
    "optim/d*": "test_offload",
    "optim/de*": "test_offload_delayed",
    "optim/[nr]*": "test_narrow_state",
    "optim/m*": "test_optim_kinds",
    "optim/sh*": "test_offload",
    "parallel/apply*": "test_grad_classes test_kept_inputs",
    "parallel/recompute*": "test_kept_inputs",
    "parallel/expert/*": "test_experts",
    "data/order*": "test_batch_ramp",
    "[cp][oa][mr]*/*": "test_trace",
    "parallel/[cde]*/*": "test_twin",
    "comm/collectives*": "test_twin",
    "train.p*": "test_loop",
}
#: Of test_mutations only the checks of single pieces: the rest is about verify.
SELECTED = {"test_mutations": "check_catches"}
HOST = {"optimizer": "host"}
#: What verify compares in float64, many techniques in few cells.
LAYOUTS: tuple[dict, ...] = (
    {"tp": 2, "pp": 2, "dp": 1, "micro_batches": 3, "clip_grad_norm": 0.1, "kind": "gpt", "recompute": "selective"},
    {"dp": 2, "zero": 1, "tp": 2, "sp": False, "micro_batches": 2, "bucket_bytes": 4096, "clip_grad_norm": 0.1},
    {"cp": 2, "packed": True, "dp": 2, "zero": 2, "micro_batch_size": 2, "kind": "uneven"},
    {"pp": 2, "schedule": "zb_h1", "dp": 2, "zero": 1, "micro_batches": 3, "kind": "tied", "offload": HOST},
    {"dp": 4, "zero": 3, "zero_group": 2, "recompute": "full", "empty": True},
    {"cp": 2, "cp_method": "ulysses", "tp": 2, "kind": "dropout"},
    {"dp": 4, "zero": 1, "zero_group": 2, "micro_batches": 2, "bucket_bytes": 4096},
    {"pp": 2, "vpp": 2, "schedule": "interleaved", "dp": 2, "micro_batches": 4},
    {"ep": 2, "tp": 2, "zero": 1, "micro_batches": 2, "kind": "mixture", "recompute": "selective"},
    {"ep": 2, "pp": 2, "cp": 2, "cp_method": "allgather", "micro_batches": 2, "kind": "deepseek"},
)


class Result(NamedTuple):
    site: Site
    killed: str  # "" where it lives, else by what
    seconds: float


def files() -> list[Path]:
    inside = [file for room in ROOMS for file in (ROOT / "trainer" / room).rglob("*.py")]
    return sorted([*inside, *(ROOT / "trainer" / name for name in FILES)])


def every_site() -> list[Site]:
    return [site for file in files() for site in sites(str(file.relative_to(ROOT)), file.read_text())]


class _Mutant(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from a changed tree."""

    def __init__(self, site: Site):
        self.path, self.name = ROOT / site.path, site.path.removesuffix(".py").replace("/", ".")
        self.name = self.name.removesuffix(".__init__")
        self.tree: ast.Module = mutated(self.path.read_text(), site.number)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_filename(self, name: str) -> str:
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        return self.path.read_bytes()

    def source_to_code(self, data: object, path: object = "", **options: object):  # type: ignore[override]
        return compile(self.tree, str(self.path), "exec")

    def cache_from_source(self, *args: object) -> None:
        raise NotImplementedError

    def path_stats(self, path: str) -> dict:
        raise OSError("never from a cache")


def files_of_tests(site: Site) -> list[str]:
    """Files of tests about a mutant's file, each once."""
    local = site.path.removeprefix("trainer/")
    names = [name for pattern, words in TESTS.items() if fnmatch(local, pattern) for name in words.split()]
    found = (ROOT / "tests" / "trainer" / f"{name}.py" for name in dict.fromkeys(names))
    return [str(file) for file in found if file.exists()]


def _load() -> float:
    """By how much a busy machine makes everything slower: never below 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _differs(layouts: Sequence[dict]) -> bool:
    """Whether verify judges one of the layouts to be different. A layout that fails, or does not end, proves nothing:
    the tests about the file are asked next."""
    from orchestrator.plan.parity import Cell
    from orchestrator.verify.techniques import DEEPSEEK, MIXTURE
    from tests.beds.plans import make_plan, tiny_model
    from trainer.verify import judge as judging

    judging.START_S = judging.CELL_S = CELL_S * _load()
    gpt = {"kv_heads": 4, "norm": "layer", "position": "learned", "mlp": "plain", "activation": "gelu", "bias": True}
    kinds = {
        "gpt": tiny_model(**gpt, tied_embeddings=True),
        "uneven": tiny_model(layers=5, kv_heads=1),
        "tied": tiny_model(tied_embeddings=True),
        "dropout": tiny_model(dropout=0.1),
        "mixture": tiny_model(**MIXTURE),
        "deepseek": tiny_model(**DEEPSEEK),
    }
    for number, layout in enumerate(layouts):
        rest = dict(layout)
        model = kinds.get(rest.pop("kind", ""))
        words = {key: rest.pop(key) for key in ("packed", "empty") if key in rest}
        cell = Cell(name=str(number), plan=make_plan(model=model, **rest), **words)
        (verdict,) = judging.judge([cell], ["fp64"])
        if verdict.word == "DIFFERENT":
            return True
    return False


LIVES, BY_VERIFY, BY_TEST, BY_IMPORT = range(4)
CAUSES = {LIVES: "", BY_VERIFY: "verify", BY_TEST: "a test", BY_IMPORT: "its import", -signal.SIGKILL: HANGS}
#: pytest's exit codes.
PASSED, FAILED, NO_TESTS = 0, 1, 5
NO_VERIFY = ("trainer/data/", "trainer/train")


def _judge(site: Site) -> int:
    """In the child: what notices the mutant, or a code that CAUSES does not have."""
    import pytest

    mutant = _Mutant(site)
    sys.meta_path.insert(0, mutant)
    try:
        importlib.import_module(mutant.name)
    except Exception:
        return BY_IMPORT
    with contextlib.suppress(Exception):
        if not site.path.startswith(NO_VERIFY) and _differs(LAYOUTS):
            return BY_VERIFY
    for file in files_of_tests(site):
        code = tested(file, pytest.main)
        if code == FAILED:
            return BY_TEST
        if code not in (PASSED, NO_TESTS):
            return int(code)
    return LIVES


def tested(file: str, run: Callable[[list[str]], int]) -> int:
    """pytest's exit code for the fast tests of a file."""
    only = SELECTED.get(Path(file).stem)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    marks = ["-m", "not slow and not full and not slurm and not kubernetes"]
    return run([file, *options, *marks, *(["-k", only] if only else [])])


def control(chosen: Sequence[Site]) -> list[str]:
    """What is not green without any mutant: layouts that differ, files of tests that fail. Else nothing is proven."""
    words = [sys.executable, "-m", "pytest"]
    files = list(dict.fromkeys(file for site in chosen for file in files_of_tests(site)))
    red = [
        file
        for file in files
        if tested(file, lambda argv: subprocess.call([*words, *argv], cwd=ROOT, stdout=subprocess.DEVNULL))
        not in (PASSED, NO_TESTS)
    ]
    return red + (["orch verify"] if _differs(LAYOUTS) else [])


def judged(site: Site, limit_s: float = LIMIT_S) -> Result:
    """Run one mutant in a forked session of its own."""
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setsid()
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            code = _judge(site)
        finally:
            os._exit(code)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() - start > limit_s * _load():
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            code = -signal.SIGKILL
            break
        time.sleep(0.05)
    return Result(site, CAUSES.get(code, ODD), time.monotonic() - start)


def sample(count: int, seed: int, only: str = "*") -> list[Site]:
    """`count` sites of the files that `only` matches, the same for the same seed; all of them for 0."""
    found = [site for site in every_site() if fnmatch(site.path, only)]
    return random.Random(seed).sample(found, min(count, len(found))) if count else found


def run(chosen: Sequence[Site]) -> Iterator[Result]:
    # Once for all forks, and nothing of the trainer.
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed.fsdp

    torch.compiler.reset()  # imports the compiler, a second or ten
    for site in chosen:
        yield judged(site)


# ------------------------------------------------------------------------------------------- docs/mutations.md


def page(results: Sequence[Result], whole: int, seed: int) -> str:
    """The published page."""
    uncounted = [r for r in results if r.killed in UNCOUNTED]
    results = [r for r in results if r.killed not in UNCOUNTED]
    equivalent = [r for r in results if not r.killed and r.site.key in REASONS]
    lived = [r for r in results if not r.killed and r.site.key not in REASONS]
    counted = len(results) - len(equivalent)
    rooms = Counter(_room(r.site) for r in results)
    killed = Counter(_room(r.site) for r in results if r.killed)
    by = Counter(r.killed for r in results if r.killed)
    lines = [
        "# Mutations: which small changes of the trainer are noticed\n",
        f"{len(results)} of the {whole:,} sites of `tests/mutations/sites.py`, drawn with seed {seed}: operators,"
        " constants, names of groups, orders, removed statements and negated conditions. Each was made in memory and"
        " judged by the comparison of `orch verify` on ten layouts, then by the fast tests about the file"
        " (`tests/mutations/run.py`).\n",
        f"**{sum(killed.values())} of {counted} noticed ({100 * sum(killed.values()) / max(counted, 1):.1f} %)**, by "
        + ", ".join(f"{name} {count}" for name, count in by.most_common())
        + f". Of all sites: at least {100 * at_least(sum(killed.values()), counted):.0f} %, at 95 % confidence."
        + f" {len(equivalent)} more change nothing that a run could show, {len(uncounted)} took longer than"
        f" {LIMIT_S:.0f} s or ended oddly; neither are counted. Without a mutant, all that judges here is green.\n",
        "Written by `make mutations`; do not edit.\n",
        "| room | mutants | noticed |\n|---|--:|--:|",
        *(f"| {room} | {count} | {killed[room]} |" for room, count in sorted(rooms.items())),
        "\n## Lived\n",
        *(f"- {r.site.path}:{r.site.line}: {r.site.what}" for r in lived),
        "\n## Change nothing\n",
        *(f"- {r.site.path}:{r.site.line}: {r.site.what}. {REASONS[r.site.key]}" for r in equivalent),
        "\n## Not counted\n",
        *(f"- {r.site.path}:{r.site.line}: {r.site.what}: {r.killed}" for r in uncounted),
    ]
    return "\n".join(lines) + "\n"


def at_least(hits: int, of: int) -> float:
    """The share of all that a drawn sample speaks for, with 95 % confidence: Wilson's lower bound (JASA 22, 1927)."""
    if not of:
        return 0.0
    share, z = hits / of, 1.645
    spread = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (share + z * z / (2 * of) - spread) / (1 + z * z / of)


def _room(site: Site) -> str:
    parts = site.path.split("/")
    return parts[1].removesuffix(".py")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutations.run")
    parser.add_argument("--count", type=int, default=0, help="mutants, drawn by --seed; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="*", help="files, as trainer/optim/*")
    parser.add_argument("--minutes", type=float, default=1e9, help="no new mutant after these")
    parser.add_argument("--out", type=Path, help="write the page")
    parser.add_argument("--no-control", dest="control", action="store_false", help="tests have just been green")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen, results, start = sample(args.count, args.seed, args.only), [], time.monotonic()
    if args.control and (red := control(chosen)):
        print(f"not green without a mutant: {', '.join(red)}", file=sys.stderr)
        return 1
    for result in run(chosen):
        results.append(result)
        word, site = f"by {result.killed}" if result.killed else "LIVES", result.site
        print(f"{len(results):4} {result.seconds:6.1f} s  {word:<14} {site.path}:{site.line} {site.what}", flush=True)
        if time.monotonic() - start > 60 * args.minutes:
            break
    if args.out:
        args.out.write_text(page(results, len(every_site()), args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
