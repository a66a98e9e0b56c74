"""Pipeline schedules, which are pure data. This package builds them by name, checks, simulates and
lowers them; the planner draws them, and the trainer runs them.

Each technique has one file, with a function from (rank, pp, micro_batches, vpp) to that rank's
order of compute actions.
"""

from orchestrator.plan.document import TABLE

from .actions import RECEIVES, Action, Kind, ScheduleError, parse_action
from .device import DeviceTimes, run_on_device
from .lower import Batch, Program, lower, lower_to_batches, peer_of, receive_early, receive_of
from .of_plan import (
    WHOLE_BACKWARD,
    copies,
    copies_of,
    costs_of,
    runs_pairs,
    schedule_of,
    shards_layers,
    splits_backward,
)
from .registry import SCHEDULES, build, illegal
from .schedule import Schedule
from .simulate import Costs, Span, Timeline, peak_in_flight, peak_inputs, simulate
from .table import read_rows, read_table, write_table
from .validate import problem, program_problem

__all__ = [
    "RECEIVES",
    "SCHEDULES",
    "TABLE",
    "WHOLE_BACKWARD",
    "Action",
    "Batch",
    "Costs",
    "DeviceTimes",
    "Kind",
    "Program",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "build",
    "copies",
    "copies_of",
    "costs_of",
    "illegal",
    "lower",
    "lower_to_batches",
    "parse_action",
    "peak_in_flight",
    "peak_inputs",
    "peer_of",
    "problem",
    "program_problem",
    "read_rows",
    "read_table",
    "receive_early",
    "receive_of",
    "run_on_device",
    "runs_pairs",
    "schedule_of",
    "shards_layers",
    "simulate",
    "splits_backward",
    "write_table",
]
