"""`orch submit --multirun parallel=a,b`: a run for every combination. All are checked before the first is sent.

A scheduler gets them together (Slurm: one array). This machine has no queue: its runs follow one another, watched.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from orchestrator.backends.base import ArraySubmission
from orchestrator.cli.verbs import submit
from orchestrator.config.sweep import Member, members
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder, home_folder, new_run_id
from orchestrator.run.registry import register

from .candidates import Offer, choose, preview

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.run.request import SubmissionBundle


class Entry(NamedTuple):
    """One run of the sweep: what to send, and what it is called among the others."""

    offer: Offer
    label: str

    @property
    def bundle(self) -> SubmissionBundle:
        return self.offer.bundle


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.follow:
        raise OrchError("--follow watches one run; see those of a sweep with orch list and orch status")
    home = home_folder(os.environ)
    backend, entries = _prepare(args, members(overrides), home)
    if args.dry_run:
        return _show(args, backend, entries)
    os.umask(0o077)
    if backend.on_this_machine:
        return _one_after_another(args, backend, entries, home)
    bundles = [entry.bundle for entry in entries]
    if isinstance(backend, ArraySubmission):
        handles = backend.submit_all(bundles, os.environ)
    else:
        handles = [backend.submit(bundle, os.environ) for bundle in bundles]
    for bundle in bundles:
        register(home, RunFolder(Path(bundle.request.run_dir)))
    if args.json:
        import json

        print(json.dumps([_about(entry) for entry in entries]))
        return Exit.DONE
    for handle, entry in zip(handles, entries, strict=True):
        print(f"{handle}  {entry.label}")
    return Exit.DONE


def _prepare(args: argparse.Namespace, found: list[Member], home: Path) -> tuple[Backend, list[Entry]]:
    """Every run planned and checked. OrchError names the combination that cannot be."""
    stem = args.run_id or new_run_id("sweep", time.time()).removeprefix("sweep")
    entries, backend = [], None
    for index, member in enumerate(found):
        label = " ".join(member.varied)
        try:
            one, offers = submit.prepare(args, member.words, home, f"{stem}-{index}")
            submit.check_memory(args, offers[0])
            if backend is not None and one.name != backend.name:
                raise OrchError(f"backend {one.name} beside {backend.name}: a sweep has one backend")
            backend = backend or one
            offer, _ = (preview if args.dry_run else choose)(offers, backend, os.environ)
            if not args.dry_run:
                backend.check(offer.bundle.request)
        except OrchError as error:
            raise OrchError(f"{label}: {error.message}; none of the {len(found)} runs was sent", error.exit) from None
        entries.append(Entry(_labelled(offer, label), label))
    assert backend is not None
    return backend, entries


def _labelled(offer: Offer, label: str) -> Offer:
    """With what tells it from the others in its summary, where lists and `orch status` find it."""
    request = offer.bundle.request
    request = structs.replace(request, summary={**request.summary, "sweep": label[:200]})
    return offer._replace(bundle=structs.replace(offer.bundle, request=request))


def _show(args: argparse.Namespace, backend: Backend, entries: list[Entry]) -> int:
    if args.json:
        from orchestrator.run.request import to_bytes

        print("[" + ",\n".join(to_bytes(entry.bundle.request).decode().rstrip() for entry in entries) + "]")
        return Exit.DONE
    for entry in entries:
        print(f"==> {entry.label}")
        submit.show(entry.bundle, entry.offer.plan, backend, as_json=False)
    return Exit.DONE


def _about(entry: Entry) -> dict[str, str]:
    request = entry.bundle.request
    return {"handle": request.handle, "run_id": request.run_id, "run_dir": request.run_dir, "sweep": entry.label}


def _one_after_another(args: argparse.Namespace, backend: Backend, entries: list[Entry], home: Path) -> int:
    """Each run watched to its end before the next starts; the exit code of the first that failed."""
    codes = []
    for index, entry in enumerate(entries):
        out = sys.stderr if args.json else sys.stdout
        print(f"run {index + 1} of {len(entries)}: {entry.label}", file=out, flush=True)
        handle = submit.send(entry.bundle, backend, home)
        codes.append(submit.follow_run(handle, entry.bundle, backend, args.json))
    return next(filter(None, codes), Exit.DONE)
