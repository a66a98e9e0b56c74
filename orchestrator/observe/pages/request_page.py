"""Renders a launch request as text."""

from __future__ import annotations

import shlex

from orchestrator.run.code.left_out import describe_copy
from orchestrator.run.request import Code, LaunchRequest
from orchestrator.style import Style, si

from .run_page import INDENT


def request_page(request: LaunchRequest, style: Style) -> str:
    """The page of a launch request. `--dry-run --json` prints the complete request."""
    env = request.environment
    policy = request.policy
    first = request.agents[0]
    agents = f"{request.nodes}, one per node, from {first.node}"
    if len(request.agents) > 1:
        agents += f" to {request.agents[-1].node}"
    agent_command = [("", shlex.join(first.argv))] if first.argv else []  # pods begin with theirs
    variables = env.defaults | env.values
    files = [f"{file.path} ({si(file.size, 'B')})" for file in request.files]
    rows = [
        ("handle", request.handle),
        ("run folder", f"{request.run_dir} (0700)"),
        ("plan", request.plan_hash[:16]),
        ("code", _source(request.code)),
        *[("", line) for line in describe_copy(request.code)],
        ("agents", agents),
        *agent_command,
        ("workers", f"{request.summary['world_size']}, one per rank"),
        ("", shlex.join(request.worker.argv)),
        ("", f"in {request.worker.cwd}"),
        ("variables", ", ".join(env.names) or "none of this shell's"),
        *[("", f"{name}={value}") for name, value in sorted(variables.items())],
        ("restarts", f"{policy.max_restarts} after failures; {policy.grace_s:g} s to save"),
        ("files", ", ".join(files)),
    ]
    return "\n".join([style.title("Request"), *style.rows(rows, INDENT)])


def _source(code: Code) -> str:
    if code.kind == "none":
        return "as installed, nothing is copied"
    if code.kind == "folder":
        return f"{code.root}, copied"
    commit = code.commit or "no commit"
    return f"{code.root} at {commit[:12]}, tracked and uncommitted, copied"
