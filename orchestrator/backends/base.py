"""The interface of a backend, which starts the agents of a run on its nodes and reports whether
they run.

`Backend` is what every backend must do. Each further capability is a class of its own (`Queueing`,
`Rendering`, ...): a backend inherits it, and callers ask with `isinstance`. No caller compares a
backend's name.

A backend of another package is found through an entry point of the group `orch.backends`, whose
name is the backend's:

    [project.entry-points."orch.backends"]
    mine = "my_package.backend:MyBackend"

and is chosen with `backend.name=mine`, its options with `backend.options.<name>=<value>`.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit
from orchestrator.run.bad_nodes import remembered
from orchestrator.run.folder import RunFolder, read_json, write_private
from orchestrator.run.request import LaunchRequest, SubmissionBundle
from orchestrator.run.state import RunState

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.cluster.model import Topology
    from orchestrator.config.schema import Config
    from orchestrator.observe.live import Live
    from orchestrator.plan import Plan

ENTRY_POINTS = "orch.backends"
#: Backends of this package: name -> "module:class".
BUILT_IN: dict[str, str] = {
    "local": "orchestrator.backends.local.backend:LocalBackend",
    "slurm": "orchestrator.backends.slurm.backend:SlurmBackend",
    "kubernetes": "orchestrator.backends.kubernetes.backend:KubernetesBackend",
    "ssh": "orchestrator.backends.ssh.backend:SshBackend",
}

#: The name in `backend.options` that every start fills in from the user's list of bad nodes (`orch
#: nodes`).
BAD_NODES = "bad_nodes"

Options = TypeVar("Options", bound=msgspec.Struct)
Record = TypeVar("Record", bound=msgspec.Struct)


class Backend(ABC):
    """A place where runs execute.

    A command makes one instance, without arguments. `environ` is the environment of the shell that
    submits or resumes.
    """

    name: ClassVar[str]
    #: Flags that this backend adds to every agent's command.
    agent_flags: ClassVar[tuple[str, ...]] = ()
    #: Runs are processes of this machine, which has no queue and nobody else's work: the runs of a
    #: sweep follow one another, and drills need no permission.
    on_this_machine: ClassVar[bool] = False
    #: All nodes see this machine's folders under the same paths.
    shares_folders: ClassVar[bool] = True
    #: The backend sends a program's folder as an archive of at most so many bytes; 0: it copies it.
    most_code_bytes: ClassVar[int] = 0
    #: The backend replaces a lost node by itself, which costs one restart of the run.
    replaces_lost_nodes: ClassVar[bool] = False

    def folder_of(self, request: LaunchRequest, home: Path) -> RunFolder:
        """The run's folder on this machine."""
        return RunFolder(Path(request.run_dir))

    def brings_python(self, options: Mapping[str, Any]) -> bool:
        """Whether a user's program runs with the Python of an image, not with one of this machine.

        `options`: the `backend.options`, unchecked.
        """
        return not self.shares_folders

    def on_nodes(self, request: LaunchRequest, plan: Plan) -> LaunchRequest:
        """The request as its nodes read it, with their paths. OrchError (65) for wrong options."""
        return request

    @abstractmethod
    def check(self, request: LaunchRequest) -> None:
        """Refuses a request that this backend can never run.

        OrchError: 76 says what the backend has instead, 65 is for its options.
        """

    def check_start(self, request: LaunchRequest, environ: Mapping[str, str]) -> None:
        """Refuses what can be seen before the start, as `check` and `submit` do. `environ`: the
        variables of the shell that submits."""
        self.check(request)

    @abstractmethod
    def submit(self, bundle: SubmissionBundle, environ: Mapping[str, str]) -> str:
        """Creates the run folder and starts the run; returns its handle at once.

        Exactly what the bundle holds is sent.
        """

    @abstractmethod
    def resume(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        environ: Mapping[str, str],
    ) -> str:
        """Starts the next attempt of a run that has ended, in its folder; returns the handle.

        OrchError (64) while the run is running.
        """

    @abstractmethod
    def cancel(self, folder: RunFolder, force: bool) -> None:
        """Asks the run to end, after saving unless `force`. Returns when it has been asked.

        OrchError (64) when it is not running.
        """

    @abstractmethod
    def is_alive(self, folder: RunFolder) -> bool:
        """Whether any process of the run may still act."""

    @abstractmethod
    def state(self, folder: RunFolder) -> RunState:
        """The run's true state, which may be newer than the one in the run folder.

        OrchError (65) when the folder's files cannot be read.
        """


# ------------------------------------------------------------------------------------------
#     capabilities


class After(NamedTuple):
    """A run that must have ended before another starts, and with which outcome: done, any, or not
    done."""

    outcome: Literal["ok", "any", "notok"]
    folder: RunFolder


class Choice(NamedTuple):
    """The size that a scheduler serves best, and one line about the start of each size."""

    chosen: int  # index into the sizes
    lines: list[str]


class Queueing(ABC):
    """Runs wait in a scheduler's queue."""

    @abstractmethod
    def choose(self, bundles: Sequence[SubmissionBundle], environ: Mapping[str, str]) -> Choice:
        """Chooses the size of an elastic job to submit now. `bundles`: one per size, largest first.

        OrchError when the scheduler refuses all of several sizes; a single size is never refused
        here.
        """

    @abstractmethod
    def starts(self, bundles: Iterable[SubmissionBundle], environ: Mapping[str, str]) -> list[str]:
        """A phrase per bundle that says when it would start.

        OrchError, within seconds and before a bundle is read, if no scheduler answers.
        """

    @abstractmethod
    def after(self, options: Mapping[str, Any], predecessors: Sequence[After]) -> dict[str, Any]:
        """`backend.options` extended by the runs to wait for.

        OrchError (64) for a run that this scheduler does not know.
        """


class NodeExclusion:
    """Runs can be kept off named nodes.

    `backend.options` has `exclude`, the user's own list, and `bad_nodes`, which orch fills in.
    """


def without_nodes(options: Mapping[str, Any], bad_nodes: Sequence[str]) -> dict[str, Any]:
    """`backend.options` of a NodeExclusion with its bad nodes replaced by these."""
    kept_options = {name: value for name, value in options.items() if name != BAD_NODES}
    return {**kept_options, BAD_NODES: list(bad_nodes)} if bad_nodes else kept_options


def off_bad_nodes(folder: RunFolder, request: LaunchRequest) -> LaunchRequest:
    """The request of a run's next attempt, kept off the nodes that `orch nodes` lists now."""
    bad_nodes = list(remembered(folder, time.time()))
    if bad_nodes:
        print(
            f"orch: without {', '.join(bad_nodes)}, found bad by earlier runs (orch nodes)",
            file=sys.stderr,
        )
    return msgspec.structs.replace(
        request, backend_options=without_nodes(request.backend_options, bad_nodes)
    )


class ArraySubmission(ABC):
    """The runs of a sweep are submitted together."""

    @abstractmethod
    def submit_all(
        self,
        bundles: Sequence[SubmissionBundle],
        environ: Mapping[str, str],
    ) -> list[str]:
        """Submits all of these runs or none; returns their handles."""


class Prefetching(ABC):
    """The cluster can be queried in the background while the job is planned."""

    @abstractmethod
    def look_ahead(self, config: Config) -> None:
        """Starts the queries that `submit` needs. Never raises OrchError: `submit` will."""


class FoundRun(NamedTuple):
    """A run that its scheduler knows, whoever submitted it."""

    state: RunState
    live: Live
    where: str  # e.g. the namespace


class RunDiscovery(ABC):
    """The scheduler keeps everything that `orch` needs to know of a run, so that runs of other
    users and other machines can be found."""

    @abstractmethod
    def everyone(self) -> list[FoundRun]:
        """Every run that this user may see. OrchError where no scheduler answers."""

    @abstractmethod
    def adopt(self, name: str, home: Path) -> RunFolder | None:
        """Creates a folder here for the run of that name, so that every verb accepts it.

        Returns None when no scheduler is set up or it does not know the run. OrchError when the
        scheduler does not answer.
        """


def adopted(name: str, home: Path) -> RunFolder | None:
    """Creates a folder here for a run of another machine, from the first backend that knows it."""
    for backend in map(get_backend, BUILT_IN):
        if isinstance(backend, RunDiscovery) and (folder := backend.adopt(name, home)) is not None:
            return folder
    return None


class Rendering(ABC):
    """A run is a document for a scheduler: a job script, or API objects."""

    @abstractmethod
    def script(self, request: LaunchRequest, plan: Plan) -> str:
        """The document of a run as `submit` sends it, without its secret."""

    @abstractmethod
    def render(self, bundle: SubmissionBundle) -> str:
        """Does everything that `submit` does except sending; returns the document.

        The run folder is ready then.
        """


class Resizing(ABC):
    """An elastic run can be moved to another size by hand."""

    @abstractmethod
    def resize(
        self, folder: RunFolder, request: LaunchRequest, nodes: int, environ: Mapping[str, str]
    ) -> str:
        """Continues the run under the plan submitted for `nodes` nodes; returns the handle.

        A live run saves and ends first.

        OrchError: 64 when it is done by then, 76 when it does not end.
        """


class LogMirroring(ABC):
    """The logs of a run reach its folder only when they are copied."""

    @abstractmethod
    def mirror(self, folder: RunFolder, follow: bool) -> AbstractContextManager[None]:
        """Copies the logs into the folder: once, or for as long as the context is open."""


class Elsewhere(ABC):
    """The run folders here are mirrors of those on another host."""

    @abstractmethod
    def remove_there(self, folder: RunFolder) -> None:
        """Removes the run's folder on its host. OrchError as `orchestrator.run.removal.remove`."""

    @abstractmethod
    def resume_there(
        self,
        folder: RunFolder,
        allow: Sequence[str],
        environ: Mapping[str, str],
    ) -> str:
        """Resumes the run on its host like `Backend.resume`.

        The start does not compare the settings in `allow`, as with `orch resume --allow`.
        """


class TopologySource(ABC):
    """The cluster can report its nodes and switches."""

    @abstractmethod
    def live_topology(self, which: str) -> Topology:
        """The cluster as it is now. `which`: a part or a view of it, "" for the usual one.

        OrchError: 65 for an unknown `which`, 76 when the cluster does not answer.
        """


class RemoteCommand(Protocol):
    """A command that runs on a node until it ends by itself or its standard input is closed."""

    def line(self, timeout_s: float) -> bytes:
        """The first line of the command's output, b"" when it ends without one.

        OrchError (76) when there is no line within `timeout_s`.
        """

    def failure(self) -> OrchError:
        """The error with which the command ended before it printed a line."""

    def close(self) -> None:
        """Closes the command's standard input and waits for its end. May be called twice."""


class NodeExec(ABC):
    """Commands can be run on a node of a run, next to its agent."""

    #: The agent is process 1 on its node, which no signal of another process can kill or stop.
    agent_is_init: ClassVar[bool] = False

    @abstractmethod
    def exec_on_node(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        node: str,
        argv: Callable[[str, int], list[str]],
    ) -> RemoteCommand:
        """Starts Python on the node.

        `argv` returns its arguments, given the run folder as the node sees it and the agent's pid.
        OrchError: 64 for a run without nodes, 76 for a node that has no agent now, 78 without the
        permission.
        """


class NodeRemoval(ABC):
    """The cluster can take a node from a run and replace it."""

    @abstractmethod
    def why_not_removed(self, request: LaunchRequest) -> str:
        """The reason why the run could not continue without the node, "" when it can."""

    @abstractmethod
    def remove_node(self, folder: RunFolder, node: str, grace_s: int | None) -> None:
        """Removes the node: at once, or `grace_s` seconds after a termination signal.

        OrchError: 64 and 76 as `exec_on_node`.
        """


# ------------------------------------------------------------------------------------------ records
#     and options


def read_record(folder: RunFolder, kind: type[Record]) -> Record | None:
    """Reads backend.json, a backend's own record of a run; returns None if there is none yet.

    OrchError (65) when the file is damaged.
    """
    return read_json(folder.backend, kind)


def write_record(folder: RunFolder, record: msgspec.Struct, durable: bool = False) -> None:
    """Replaces backend.json. If `durable`, the file survives a power cut."""
    write_private(folder.backend, msgspec.json.encode(record), durable=durable)


def decode_options(options: Mapping[str, Any], struct: type[Options], backend: str) -> Options:
    """Converts `backend.options` into a struct.

    OrchError (65) names an unknown option with the nearest legal one, or a wrong value with its
    path.
    """
    from orchestrator.config.structured import fields, is_text

    field_names = struct.__struct_fields__
    text_fields = {
        name: field.type for name, field in fields(struct).items() if is_text(field.type)
    }
    for name in options:
        if name not in field_names:
            hint = did_you_mean(name, field_names)
            raise OrchError(
                f"backend.options.{name} is not an option of {backend}; {hint}", Exit.CONFIG
            )
    # `gpu_type: 3090` is a name although YAML reads a number. `time: 4:00:00`, which YAML reads as
    # 14400, is not a name and stays a number.
    name_fields = {
        name for name, annotation in text_fields.items() if "pattern=" in str(annotation)
    }
    values = {
        name: str(value) if type(value) is int and name in name_fields else value
        for name, value in options.items()
    }
    try:
        return msgspec.convert(values, type=struct)
    except msgspec.ValidationError as error:  # Expected X - at `$.partition`
        problem, _, json_path = str(error).partition(" - at ")
        field_path = json_path.strip("`").removeprefix("$").lstrip(".")
        key = f"backend.options{'.' + field_path if field_path else ''}"
        quotes = (
            f"; in quotes it is text: '{key}=\"...\"'"
            if field_path in text_fields and ", got `" in problem
            else ""
        )
        raise OrchError(f"{key}: {problem}{quotes}", Exit.CONFIG) from None


# ------------------------------------------------------------------------------------------ lookup


def backend_names() -> list[str]:
    """The names that `get_backend` knows, those of other packages last."""
    from importlib.metadata import entry_points  # 20 ms, which no built-in backend pays

    return [
        *BUILT_IN,
        *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - BUILT_IN.keys()),
    ]


def get_backend(name: str) -> Backend:
    """A new backend of that name.

    OrchError: 64 lists the known names, 65 is for an entry point that is not a backend.
    """
    if name in BUILT_IN:
        module, _, class_name = BUILT_IN[name].partition(":")
        backend_class = vars(import_module(module))[class_name]
    else:
        backend_class = _other_package(name)
    backend: Backend = backend_class()
    return backend


def _other_package(name: str) -> type[Backend]:
    """The backend class that an entry point of another package names."""
    from importlib.metadata import entry_points

    points = list(entry_points(group=ENTRY_POINTS, name=name))
    if not points:
        raise OrchError(
            f"unknown backend {name!r}; {did_you_mean(name, backend_names())}", Exit.USAGE
        )
    label = f"backend {name}: entry point {points[0].value!r}"
    try:
        backend_class = points[0].load()
    except Exception as error:  # code of others
        raise OrchError(
            f"{label} cannot be loaded: {type(error).__name__}: {error}", Exit.CONFIG
        ) from None
    if not (isinstance(backend_class, type) and issubclass(backend_class, Backend)):
        raise OrchError(
            f"{label} is not a subclass of orchestrator.backends.base.Backend", Exit.CONFIG
        )
    if missing := sorted(backend_class.__abstractmethods__):
        raise OrchError(f"{label} lacks {', '.join(missing)}", Exit.CONFIG)
    return backend_class
