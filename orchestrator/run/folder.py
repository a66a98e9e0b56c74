"""The run folder: everything of one run is stored there, private to its user.

Folders are 0700, files 0600. Replacing a file is atomic (temporary file in the same folder,
fsync, rename): a reader sees the old or the new content, never a mixture, and a crash leaves one
of the two.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from orchestrator.errors import OrchError
from orchestrator.plan.codec import UNREADABLE, PlanError, read_file
from orchestrator.plan.exits import Exit, is_of_the_machine

RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
Document = TypeVar("Document", bound=Struct)
Result = TypeVar("Result")
#: For processes that a submission starts. The umask of this process is its user's, and belongs to
#: all its threads.
PRIVATE_UMASK = 0o077
_LONGEST_NAME = 120  # bytes of a file name made from a node's name

#: What reading or writing a record of a run raises. A failing disk may recover, so the processes
#: of a run retry for `RECORD_S` before they end anything that works.
RECORD_ERRORS = (OSError, OrchError, PlanError)
RECORD_S = 60.0  # retries for a record that the run needs to continue
RECORD_AGAIN_S = 0.5
#: errno values that mean a full disk or an exhausted quota.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def home_folder(environ: Mapping[str, str]) -> Path:
    """Returns `$ORCH_HOME`, or `~/.orch`."""
    return Path(environ.get("ORCH_HOME") or Path.home() / ".orch").absolute()


def new_run_id(name: str, now: float) -> str:
    """Returns `<name>-<UTC time>-<random>`: readable, sortable within a name, a DNS-1123 label
    (63 characters at most)."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-") or "run"
    return f"{stem}-{time.strftime('%m%d-%H%M%S', time.gmtime(now))}-{os.urandom(2).hex()}"


def check_run_id(run_id: str) -> str:
    if not RUN_ID.fullmatch(run_id):
        rule = "1 to 63 of a-z 0-9 -, starting and ending with a letter or digit"
        raise OrchError(f"run id {run_id!r} is not usable: {rule}", Exit.USAGE)
    return run_id


def file_name(node: str) -> str:
    """Returns a file name for any node name: distinct names give distinct files, none leaves its
    folder.

    Everything outside A-Z a-z 0-9 _ . - is percent-encoded, a leading dot too; a name too long
    for a file system is cut and gets its hash.
    """
    name = quote(node, safe="", errors="surrogatepass").replace("~", "%7E")
    name = "%2E" + name[1:] if name.startswith(".") else name
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(node.encode(errors="surrogatepass")).hexdigest()[:16]
        name = f"{name[:_LONGEST_NAME]}%{digest}"
    return name or "%"


def make_private_folder(path: Path) -> None:
    """Creates `path` and its missing parents with mode 0700. Refuses a parent that others may
    write to."""
    missing = []
    try:
        while not path.exists():
            missing.append(path)
            path = path.parent
    except PermissionError:
        raise OrchError(f"no permission to read {path.parent}", Exit.CONFIG) from None
    check_private_parent(path)
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # another run has just created it
            continue
        except OSError as error:
            raise OrchError(f"cannot make folder {folder}: {error.strerror}", Exit.CONFIG) from None


def check_private_parent(path: Path) -> None:
    """Refuses (78) a folder in which another user may rename files: one that a stranger owns, or
    one that is writable without the sticky bit."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise OrchError(f"{path} is a file where a folder is needed", Exit.CONFIG)
    if status.st_uid not in (0, os.geteuid()):
        raise OrchError(
            f"folder {path} belongs to another user (uid {status.st_uid})", Exit.SECURITY
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        raise OrchError(
            f"folder {path} is writable by others ({mode}): chmod go-w, or set ORCH_HOME",
            Exit.SECURITY,
        )


def write_private(
    path: Path,
    content: bytes,
    mode: int = 0o600,
    durable: bool = True,
) -> None:
    """Creates or replaces `path` atomically. `durable`: the file also survives a power cut
    (fsync of file and folder)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    fd = os.open(
        temporary,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        mode,
    )
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content)
            file.flush()
            if durable:
                os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(path.parent)


def read_json(path: Path, kind: type[Document]) -> Document | None:
    """Reads a JSON file of a run folder; None if there is none. OrchError (65) with one line for
    anything else."""
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        raise _unreadable(path, "a link to nothing") from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except UNREADABLE as error:
        raise _unreadable(path, str(error)) from None


def _unreadable(path: Path, reason: str) -> OrchError:
    return OrchError(
        f"{path} is unreadable: {''.join(c if c.isprintable() else ' ' for c in reason)}",
        Exit.CONFIG,
    )


def reason_of(error: Exception) -> str:
    """Describes in one printable line why a file of a run folder cannot be read."""
    message = error.message if isinstance(error, OrchError) else f"{type(error).__name__}: {error}"
    return "".join(c if c.isprintable() else " " for c in message)[:500]


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_secret(path: Path) -> bytes:
    """Reads the per-run key (32 bytes, stored as hex). Refuses it (78) if anyone else could have
    read or written it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise OrchError(f"cannot read {path}: {error.strerror}", Exit.SECURITY) from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}, uid {status.st_uid}"
            raise OrchError(f"{path} must belong to you alone (0600), found {mode}", Exit.SECURITY)
        try:
            key = bytes.fromhex(file.read().decode("ascii").strip())
        except ValueError:
            key = b""
    if len(key) != 32:
        raise OrchError(f"{path} does not hold a 32-byte key in hex", Exit.SECURITY)
    return key


class Insistence:
    """Counts the time for which a record that the disk refuses is retried, at most RECORD_S.
    `tells`: the first refusal is logged."""

    def __init__(self, tells: bool = True):
        self._end = time.monotonic() + RECORD_S
        self._tells = tells

    def refused(self, error: Exception) -> None:
        """Raises the error once the time is over; else the caller waits RECORD_AGAIN_S and
        retries."""
        if time.monotonic() > self._end:
            raise error
        if self._tells:
            import logging  # its import takes two milliseconds, which every verb would pay

            log = logging.getLogger("orch.run")
            log.error("a record cannot be read or written: %s; trying for %g s", error, RECORD_S)
        self._tells = False


def insist(
    record: Callable[[], Result],
    tells: bool = True,
    hopes: Callable[[Exception], bool] = lambda error: True,
) -> Result:
    """Calls `record` until the disk allows it, for at most RECORD_S, and returns what it
    returns. Raises its last error, and at once an error for which `hopes` is false."""
    insistence = Insistence(tells)
    while True:
        try:
            return record()
        except RECORD_ERRORS as error:
            if not hopes(error):
                raise
            insistence.refused(error)
        time.sleep(RECORD_AGAIN_S)


def first_read(record: Callable[[], Result]) -> Result:
    """Reads a record for a process that starts: retries only what a failing machine causes."""
    return insist(record, hopes=is_of_the_machine)


def ending(error: Exception) -> tuple[int, str]:
    """Returns the exit code of a process of a run that this error ends, and the line that
    explains it."""
    if is_of_the_machine(error):
        return int(Exit.NODE), reason_of(error)
    if isinstance(error, OrchError):
        return int(error.exit), error.message
    if isinstance(error, PlanError):
        return int(Exit.CONFIG), str(error)
    return int(Exit.INTERNAL), f"internal error: {type(error).__name__}: {error}"


class _Inside:
    """A path inside a run folder, by its name in the folder."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path / self._name


class RunFolder(Struct, frozen=True):
    """The names of everything inside one run's folder."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    config = _Inside("config.yaml")
    request = _Inside("request.json")
    plan = _Inside("plan.json")
    code = _Inside("code")
    snapshot = _Inside("code.json")
    packed_code = _Inside("code.tar.gz")  # in place of `code`, where nodes do not share folders
    key = _Inside("secret.key")
    state = _Inside("state.json")
    backend = _Inside("backend.json")  # the backend's record of this run: pids, job ids
    intents = _Inside("intents")  # what people have requested of the run
    coordinator = _Inside("coordinator.json")  # where the coordinator listens
    lock = _Inside("run.lock")  # held while any process of the run exists
    logs = _Inside("logs")
    discovery = _Inside("metrics.sd.json")  # Prometheus file_sd
    checkpoints = _Inside("checkpoints")
    report = _Inside("report.json")

    def sized_plan(self, nodes: int) -> Path:
        """Returns the path of the submitted plan for one size of an elastic run."""
        return self.path / f"plan.nodes{nodes}.json"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def stack(self, epoch: int, rank: int) -> Path:
        """Returns the path of a rank's stack, which is written when the run hangs."""
        return self.path / "stacks" / f"epoch-{epoch}-rank-{rank:05d}.txt"

    def agent_log(self, node: str) -> Path:
        return self.logs / f"agent-{file_name(node)}.log"

    def events(self, node: str) -> Path:
        return self.path / "events" / f"{file_name(node)}.jsonl"

    def metrics(self, node: str) -> Path:
        return self.path / "metrics" / f"{file_name(node)}.jsonl"

    def create(self) -> None:
        """Makes the folder with its subfolders. OrchError (65) if it exists: one run, one
        folder."""
        make_private_folder(self.path.parent)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            raise OrchError(
                f"run {self.run_id} exists already in {self.path.parent}", Exit.CONFIG
            ) from None
        except OSError as error:
            raise OrchError(
                f"cannot make folder {self.path}: {error.strerror}", Exit.CONFIG
            ) from None
        try:
            for name in ("logs", "events", "metrics", "checkpoints"):
                (self.path / name).mkdir(mode=0o700)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def take_lock(self, wait_s: float = 0.5) -> int | None:
        """Returns an inheritable descriptor of the lock, or None while a process of the run exists.
        OrchError (65) if the lock is not a file.

        flock(2) belongs to the open file, so every process that inherits the descriptor holds
        the lock too: it is free exactly when the supervisor and all agents are gone, however
        they ended.
        """
        try:
            fd = os.open(
                self.lock,
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
        except OSError as error:
            raise OrchError(f"{self.lock}: {error.strerror}", Exit.CONFIG) from None
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError:  # `is_alive` of another process holds the lock for a moment
                if time.monotonic() > deadline:
                    os.close(fd)
                    return None
                time.sleep(0.02)

    def is_alive(self) -> bool:
        """Tells whether any process of the run exists on this machine."""
        fd = self.take_lock(wait_s=0.0)
        if fd is None:
            return True
        os.close(fd)
        return False
