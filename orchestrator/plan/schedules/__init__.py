"""Pipeline schedules: pure data. Built by name, checked, simulated, lowered; drawn by the planner, run by the trainer.

One technique a file, each a function from (rank, pp, micro_batches, vpp) to that rank's order of compute actions.
"""

from orchestrator.plan.document import TABLE

from .actions import Action, Kind, ScheduleError, parse_action
from .lower import Program, lower, peer_of, receive_early, receive_of
from .of_plan import copies, copies_of, schedule_of
from .registry import SCHEDULES, build, illegal
from .schedule import Schedule
from .simulate import Costs, Span, Timeline, peak_in_flight, simulate
from .table import read_rows, read_table, write_table
from .validate import problem, program_problem

__all__ = [
    "SCHEDULES",
    "TABLE",
    "Action",
    "Costs",
    "Kind",
    "Program",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "build",
    "copies",
    "copies_of",
    "illegal",
    "lower",
    "parse_action",
    "peak_in_flight",
    "peer_of",
    "problem",
    "program_problem",
    "read_rows",
    "read_table",
    "receive_early",
    "receive_of",
    "schedule_of",
    "simulate",
    "write_table",
]
