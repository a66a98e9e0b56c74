"""`orch calibrate`: fits the parameters of the cost model to a table of runs, to a run of this
site, to `orch bench`, or to the rows of a benchmark."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.accuracy.calibrate.measured_steps import StepFacts
    from orchestrator.accuracy.calibrate.update import Update
    from orchestrator.config.schema import ClusterSpec
    from orchestrator.cost.profile import Profile
    from orchestrator.observe.timeline import StepLine
    from orchestrator.plan import Plan
    from orchestrator.plan.document import Cluster
    from orchestrator.run.folder import RunFolder

BENCH = "bench"
ROWS = ".json"  # the end of the name of a file with measured rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table",
        metavar="FILE.csv",
        type=Path,
        help="fit a new profile to these runs; needs --out",
    )
    source_help = (
        "update the site's profile with the measured steps of a run, or, for the given cluster,"
        " with its orch bench or with the rows of a benchmark (gpu_single.json)"
    )
    parser.add_argument(
        "--from",
        metavar="RUN|bench|FILE.json",
        dest="source",
        help=source_help,
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        type=Path,
        help="update this profile, not the site's own",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the profile here, not over the site's own",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    if (args.table is None) == (args.source is None):
        raise OrchError(
            "orch calibrate needs either --table FILE.csv or --from RUN|bench|FILE.json", Exit.USAGE
        )
    is_bench = args.source == BENCH
    has_rows = args.source is not None and args.source.endswith(ROWS)
    if overrides and not is_bench and not has_rows:
        _check_source(args.source)
        raise OrchError(
            f"{overrides[0]!r}: only --from bench and --from FILE.json take overrides (the"
            " cluster)",
            Exit.USAGE,
        )
    if args.table is not None:
        return _table(args)
    if is_bench:
        return _bench(args, overrides)
    return _rows(args, overrides) if has_rows else _run(args)


def _check_source(source: str | None) -> None:
    """Raises OrchError (64) if --from names neither a run nor anything else that is there."""
    from orchestrator.cli.session import home
    from orchestrator.errors import nearest
    from orchestrator.run.registry import all_runs, find_run

    if source is None:
        return
    if Path(source).is_file():
        raise OrchError(
            f"--from {source}: a file of rows has a name that ends in {ROWS}", Exit.USAGE
        )
    try:
        find_run(home(), source)
    except OrchError:
        files = map(str, Path(source).parent.glob(f"*{ROWS}"))
        runs = [run.run_id for run in all_runs(home())]
        best = nearest(source, [BENCH, *files, *runs])
        hint = f"; did you mean {best!r}?" if best else ""
        raise OrchError(f"--from {source}: no such file or run{hint}", Exit.USAGE) from None


# ------------------------------------------------------------------------------- a table of runs


def _table(args: argparse.Namespace) -> int:
    from orchestrator.accuracy.calibrate.table import fit_table
    from orchestrator.cli.terminal import print_json, show_progress
    from orchestrator.cli.verbs.predict import digest, read_table

    if args.out is None or args.profile is not None:
        raise OrchError(
            "orch calibrate --table needs --out FILE and takes no --profile", Exit.USAGE
        )
    try:
        profile, refused = fit_table(
            read_table(args.table),
            args.out.stem,
            digest(args.table),
            _today(),
            show_progress,
        )
    except OrchError as error:
        raise OrchError(f"--table {args.table}: {error.message}", error.exit) from None
    _write(profile, args.out)
    if args.json:
        print_json(
            {
                "file": str(args.out),
                "profile": profile.label,
                "left_out": profile.left_out,
                "refused": refused,
            }
        )
        return Exit.DONE
    print(f"{'source':<26}{'rows':>6}{'prior':>9}{'fitted':>9}{'left out':>9}")
    for source in profile.left_out:
        unseen = f"{source.left_out:.1%}" if source.left_out >= 0 else "-"
        errors = f"{source.prior:>9.1%}{source.fitted:>9.1%}{unseen:>9}"
        print(f"{source.source:<26}{source.rows:>6}{errors}")
    sources = profile.left_out
    if len(sources) > 1:
        means = [
            sum(getattr(source, name) for source in sources) / len(sources)
            for name in ("prior", "fitted", "left_out")
        ]
        print(
            f"{'mean of sources':<26}{len(sources):>6}" + "".join(f"{mean:>9.1%}" for mean in means)
        )
    for line in refused:
        print(f"left out: {line}")
    print(f"{profile.label}: {args.out}; orch predict --profile and cost.profile can use it")
    return Exit.DONE


# ------------------------------------------------------------------------------------- this site


def _run(args: argparse.Namespace) -> int:
    from orchestrator.accuracy.calibrate.measured_steps import StepFacts
    from orchestrator.accuracy.calibrate.update import site_profile, then, update_with_step
    from orchestrator.cli.session import open_run, plan_of_run
    from orchestrator.cost.of_plan import context_of, step_of
    from orchestrator.observe.report import make_report
    from orchestrator.observe.timeline import nodes_of, read_steps

    folder, backend = open_run(args.source)
    plan = plan_of_run(folder)
    state = backend.state(folder)
    lines = read_steps(folder, nodes_of(plan, state))
    measured = make_report(plan, state, lines)["step_s"]["measured"]
    if measured is None:
        raise OrchError(f"run {folder.run_id} has no measured step", Exit.CONFIG)
    spec = _cluster_of(folder)
    base = _base(args, spec)
    _check_new(base, folder.run_id, f"run {folder.run_id}")
    predict_step = step_of(plan, context_of(plan, base, _measured_cluster(spec, plan)))
    load_update = _loads(base, plan, lines)
    if load_update is None:
        update, _ = update_with_step(base, predict_step, measured)
    else:
        prior = site_profile(
            base,
            load_update,
            "run",
            [folder.run_id],
            date="",
            name=base.name,
        )
        step_update, _ = update_with_step(prior, predict_step, measured)
        update = then(load_update, step_update)
    step_after = float(predict_step(update.values(base)))  # type: ignore[arg-type]
    step_before = float(predict_step(base.values))  # type: ignore[arg-type]
    facts = StepFacts(measured, step_before, step_after)
    return _save(
        args,
        spec,
        base,
        update,
        sources=("run", [folder.run_id]),
        steps={folder.run_id: facts},
    )


def _measured_cluster(spec: ClusterSpec, plan: Plan) -> Cluster:
    """Returns the cluster with the rates that later plans use, so that the update corrects the
    predictions of those plans."""
    from orchestrator.cli.session import home
    from orchestrator.cluster.measured import read, with_measured

    record = read(spec, home()) if spec.measured else None
    return with_measured(plan.cluster, record) if record is not None else plan.cluster


def _cluster_of(folder: RunFolder) -> ClusterSpec:
    """Returns the cluster entry of a run's configuration. Raises OrchError (65)."""
    import msgspec

    from orchestrator.config.schema import ClusterSpec

    try:
        tree = msgspec.yaml.decode(folder.config.read_bytes())
        return msgspec.convert(tree["cluster"], ClusterSpec)
    except (OSError, LookupError, TypeError, msgspec.MsgspecError) as error:
        raise OrchError(f"run {folder.run_id}: config.yaml: {error}", Exit.CONFIG) from None


def _loads(base: Profile, plan: Plan, lines: Sequence[StepLine]) -> Update | None:
    """Updates the profile with the measured loads of a run's experts. Returns None if the run has
    none."""
    from orchestrator.accuracy.calibrate.update import update_with_loads
    from orchestrator.observe.expert_loads import load_spread, loads_of, rank_load
    from orchestrator.plan.expert_mesh import expert_mesh

    loads = loads_of(lines)
    if not loads or plan.model.moe is None:
        return None
    fullest = rank_load(plan, loads).get("measured") or 1.0
    return update_with_loads(
        base,
        plan.model,
        expert_mesh(plan.parallel).ep,
        fullest,
        load_spread(loads),
    )


def _bench(args: argparse.Namespace, overrides: list[str]) -> int:
    from msgspec import structs

    from orchestrator.accuracy.calibrate.update import update_with_bench
    from orchestrator.cli.session import home
    from orchestrator.cluster.measured import read
    from orchestrator.config.compose import load
    from orchestrator.submit.cluster import ClusterResolver

    spec = load(overrides, args.config_dir).cluster
    record = read(spec, home())
    if record is None:
        raise OrchError(
            f"cluster {spec.name} has no measurements: run orch bench first", Exit.USAGE
        )
    base = _base(args, spec)
    source = f"bench {record.at}"
    _check_new(base, source, source)
    described = ClusterResolver(home())(structs.replace(spec, measured=False))
    update = update_with_bench(base, described, record)
    return _save(
        args,
        spec,
        base,
        update,
        sources=("bench", [source]),
        steps={},
    )


def _rows(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.accuracy.calibrate.measured_steps import (
        read_measured_steps,
        update_with_steps,
    )
    from orchestrator.config.compose import load

    path = Path(args.source)
    steps = read_measured_steps(path)
    spec = load(overrides, args.config_dir).cluster
    for step in steps:
        _check_gpu(spec, step.plan, step.label)
    base = _base(args, spec)
    new_steps = [step for step in steps if step.source not in base.fitted_on.runs]
    if not new_steps:
        raise OrchError(f"{path} is part of profile {base.label} already", Exit.USAGE)
    skipped = [step.name for step in steps if step not in new_steps]
    update, facts = update_with_steps(base, new_steps, lambda plan: _measured_cluster(spec, plan))
    return _save(
        args,
        spec,
        base,
        update,
        sources=("rows", [step.source for step in new_steps]),
        steps=facts,
        skipped=skipped,
    )


def _check_gpu(spec: ClusterSpec, plan: Plan, label: str) -> None:
    """Raises OrchError (65) if a plan's GPUs are of another generation than the cluster's."""
    from orchestrator.cost.parameters import generation_of

    measured = generation_of(plan.cluster.gpu.name, plan.cluster.device)
    described = generation_of(spec.gpu.name, spec.device)
    if measured != described:
        raise OrchError(
            f"{label} was measured on {plan.cluster.gpu.name} ({measured}), but cluster {spec.name}"
            f" has {spec.gpu.name} ({described})",
            Exit.CONFIG,
        )


def _check_new(base: Profile, source: str, label: str) -> None:
    """Raises OrchError (64) if the profile already includes this source."""
    if source in base.fitted_on.runs:
        raise OrchError(f"{label} is part of profile {base.label} already", Exit.USAGE)


def _base(args: argparse.Namespace, spec: ClusterSpec) -> Profile:
    """Returns the profile to update: that of --profile, else the site's own, else the shipped
    one."""
    from orchestrator.cli.session import home
    from orchestrator.cluster.measured import site_profile_path
    from orchestrator.cost.profile import read_profile, shipped

    path = args.profile or site_profile_path(spec, home())
    return read_profile(path) if args.profile or path.exists() else shipped()


def _save(
    args: argparse.Namespace,
    spec: ClusterSpec,
    base: Profile,
    update: Update,
    *,
    sources: tuple[str, list[str]],
    steps: dict[str, StepFacts],
    skipped: Sequence[str] = (),
) -> int:
    """Writes the updated profile, and prints what has changed. `sources`: the kind of measurement
    and its names; `steps`: the measured steps by name, a run's own alone; `skipped`: the rows that
    the profile includes already."""
    from orchestrator.accuracy.calibrate.drift import changed
    from orchestrator.accuracy.calibrate.update import site_profile
    from orchestrator.cli.session import home
    from orchestrator.cli.terminal import print_json
    from orchestrator.cluster.measured import site_profile_path

    profile = site_profile(
        base,
        update,
        *sources,
        date=_today(),
        name=f"{spec.name}-site",
    )
    path = args.out or site_profile_path(spec, home())
    _write(profile, path, private=args.out is None)
    moved = changed(base, profile)
    if args.json:
        parameters = {
            parameter.parameter: {
                "before": parameter.assumed,
                "after": parameter.found,
                "unit": parameter.unit,
            }
            for parameter in moved
        }
        print_json(
            {
                "file": str(path),
                "profile": profile.label,
                "base": base.label,
                **_facts(steps, sources[1][0]),
                **({"skipped": list(skipped)} if skipped else {}),
                "parameters": parameters,
            }
        )
        return Exit.DONE
    for name in skipped:
        print(f"row {name!r} is part of profile {base.label} already: skipped")
    for name, facts in steps.items():
        from orchestrator.style import seconds

        measured, before, after = map(seconds, facts)
        print(
            f"step of {name}: {before} predicted, {measured} measured, {after} predicted from now"
            " on"
        )
    for parameter in moved[:8]:
        print(f"  {parameter.text}")
    print(f"{profile.label}, from {base.label}: {path}")
    if args.out is None:
        print(
            f"plans of cluster {spec.name} use it; cost.profile=FILE selects another, and deleting"
            " the file restores the shipped profile"
        )
    return Exit.DONE


def _facts(steps: dict[str, StepFacts], run: str) -> dict[str, Any]:
    """Returns the JSON fields of the measured steps: those of a run itself, or `steps` by name."""
    if run in steps:
        return steps[run]._asdict()
    return {"steps": {name: facts._asdict() for name, facts in steps.items()}} if steps else {}


def _write(profile: Profile, path: Path, private: bool = False) -> None:
    import msgspec

    from orchestrator.cost.profile import decode_profile

    content = msgspec.json.format(msgspec.json.encode(profile), indent=0) + b"\n"
    try:
        decode_profile(content, path)
    except OrchError as error:
        raise OrchError(
            f"these measurements make no valid profile, and none is written: {error.message}",
            error.exit,
        ) from None
    if private:
        from orchestrator.run.folder import make_private_folder, write_private

        make_private_folder(path.parent)
        write_private(path, content)
        return
    from orchestrator.cli.terminal import write_file

    write_file(path, content, "--out")


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
