"""The run folder: where everything of one run is stored, private to its user.

Folders are 0700, files 0600. Replacing a file is atomic (temporary file in the same folder, fsync,
rename): a reader sees the old or the new content, never a mixture, and a crash leaves one of the
two.
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
from collections.abc import Callable, Iterator, Mapping
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
_LONGEST_NAME = 120  # bytes of a file name made from a node's name

#: What reading or writing a record of a run raises. A disk that fails may be well again in a
#: moment, so who keeps a run tries again (`RECORD_S`) and ends nothing that works.
RECORD_ERRORS = (OSError, OrchError, PlanError)
RECORD_S = 60.0  # for a record without which the run cannot go on
RECORD_AGAIN_S = 0.5
#: errno values that mean a full disk or an exhausted quota.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def home_folder(environ: Mapping[str, str]) -> Path:
    """`$ORCH_HOME`, or `~/.orch`."""
    return Path(environ.get("ORCH_HOME") or Path.home() / ".orch").absolute()


def new_run_id(name: str, now: float) -> str:
    """`<name>-<UTC time>-<random>`: readable, sortable within a name, a DNS-1123 label (63
    characters at most)."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-") or "run"
    return f"{stem}-{time.strftime('%m%d-%H%M%S', time.gmtime(now))}-{os.urandom(2).hex()}"


def check_run_id(run_id: str) -> str:
    if not RUN_ID.fullmatch(run_id):
        rule = "1 to 63 of a-z 0-9 -, starting and ending with a letter or digit"
        raise OrchError(f"run id {run_id!r} is not usable: {rule}", Exit.USAGE)
    return run_id


def file_name(node: str) -> str:
    """A file name for any node name: distinct names give distinct files, none leaves its folder.

    Everything outside A-Z a-z 0-9 _ . - is percent-encoded, a leading dot too; a name too long for
    a file system is cut and gets its hash.
    """
    name = quote(node, safe="", errors="surrogatepass").replace("~", "%7E")
    name = "%2E" + name[1:] if name.startswith(".") else name
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(node.encode(errors="surrogatepass")).hexdigest()[:16]
        name = f"{name[:_LONGEST_NAME]}%{digest}"
    return name or "%"


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """What is written inside, also by processes that are started there, is its user's alone. The
    umask of the caller, which belongs to the whole process, is as before afterwards."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def make_private_folder(path: Path) -> None:
    """Create `path` and its missing parents as 0700. A parent that others may write to is
    refused."""
    missing = []
    try:
        while not path.exists():
            missing.append(path)
            path = path.parent
    except PermissionError:
        raise OrchError(f"no rights to look into {path.parent}", Exit.CONFIG) from None
    check_private_parent(path)
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # another run made it in this moment
            continue
        except OSError as error:
            raise OrchError(f"cannot make folder {folder}: {error.strerror}", Exit.CONFIG) from None


def check_private_parent(path: Path) -> None:
    """Refuse (78) a folder that another user may rename things in: owned by a stranger, or writable
    without sticky."""
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise OrchError(f"{path} is a file where a folder is needed", Exit.CONFIG)
    if found.st_uid not in (0, os.geteuid()):
        raise OrchError(
            f"folder {path} belongs to another user (uid {found.st_uid})", Exit.SECURITY
        )
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
        raise OrchError(
            f"folder {path} is writable by others ({mode}): chmod go-w, or set ORCH_HOME",
            Exit.SECURITY,
        )


def write_private(path: Path, content: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Create or replace `path` atomically. `durable` also survives a power cut (fsync of file and
    folder)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode
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
    """A JSON file of a run folder; None when there is none. OrchError (65), one line, for anything
    else there."""
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


def _unreadable(path: Path, why: str) -> OrchError:
    return OrchError(
        f"{path} is unreadable: {''.join(c if c.isprintable() else ' ' for c in why)}", Exit.CONFIG
    )


def reason_of(error: Exception) -> str:
    """Why something of a run folder cannot be read, in one printable line."""
    text = error.message if isinstance(error, OrchError) else f"{type(error).__name__}: {error}"
    return "".join(c if c.isprintable() else " " for c in text)[:500]


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_secret(path: Path) -> bytes:
    """The per-run key (32 bytes, kept as hex). Refused (78) when anyone else could have read or
    written it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise OrchError(f"cannot read {path}: {error.strerror}", Exit.SECURITY) from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            mode = f"mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}"
            raise OrchError(f"{path} must belong to you alone (0600), found {mode}", Exit.SECURITY)
        try:
            key = bytes.fromhex(file.read().decode("ascii").strip())
        except ValueError:
            key = b""
    if len(key) != 32:
        raise OrchError(f"{path} does not hold a 32-byte key in hex", Exit.SECURITY)
    return key


class Insistence:
    """Attempts at a record that the disk refuses, for at most RECORD_S in all. `tells`: the first
    refusal is logged."""

    def __init__(self, tells: bool = True):
        self._end = time.monotonic() + RECORD_S
        self._tells = tells

    def refused(self, error: Exception) -> None:
        """Raises the error once the time is over; else the caller waits RECORD_AGAIN_S and tries
        again."""
        if time.monotonic() > self._end:
            raise error
        if self._tells:
            import logging  # with what it imports two milliseconds, which every verb would pay

            log = logging.getLogger("orch.run")
            log.error("a record cannot be read or written: %s; trying for %g s", error, RECORD_S)
        self._tells = False


def insist(
    record: Callable[[], Result],
    tells: bool = True,
    hopes: Callable[[Exception], bool] = lambda error: True,
) -> Result:
    """What `record` returns, called until the disk lets it, in at most RECORD_S. Raises what it has
    raised last, and at once an error for which there is no hope."""
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
    """What `record` reads for a process that starts: tried again where the machine fails, and
    nothing else."""
    return insist(record, hopes=is_of_the_machine)


def ending(error: Exception) -> tuple[int, str]:
    """The exit code of a process of a run that this error ends, and the line that says why."""
    if is_of_the_machine(error):
        return int(Exit.NODE), reason_of(error)
    if isinstance(error, OrchError):
        return int(error.exit), error.message
    if isinstance(error, PlanError):
        return int(Exit.CONFIG), str(error)
    return int(Exit.INTERNAL), f"internal error: {type(error).__name__}: {error}"


class _Inside:
    """A path inside a run folder, by its name there."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path / self._name


class RunFolder(Struct, frozen=True):
    """Names of everything inside one run's folder."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    config = _Inside("config.yaml")
    request = _Inside("request.json")
    plan = _Inside("plan.json")
    code = _Inside("code")
    snapshot = _Inside("code.json")
    key = _Inside("secret.key")
    state = _Inside("state.json")
    backend = _Inside("backend.json")  # what the scheduler of this run knows: pids, job ids
    intents = _Inside("intents")  # what people have asked of the run
    coordinator = _Inside("coordinator.json")  # where the coordinator listens
    lock = _Inside("run.lock")  # held while any process of the run exists
    logs = _Inside("logs")
    discovery = _Inside("metrics.sd.json")  # Prometheus file_sd
    checkpoints = _Inside("checkpoints")
    report = _Inside("report.json")

    def sized_plan(self, nodes: int) -> Path:
        """The plan of one size of an elastic run, as it was submitted."""
        return self.path / f"plan.nodes{nodes}.json"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def stack(self, epoch: int, rank: int) -> Path:
        """Where a rank was when its run stood still."""
        return self.path / "stacks" / f"epoch-{epoch}-rank-{rank:05d}.txt"

    def agent_log(self, node: str) -> Path:
        return self.logs / f"agent-{file_name(node)}.log"

    def events(self, node: str) -> Path:
        return self.path / "events" / f"{file_name(node)}.jsonl"

    def metrics(self, node: str) -> Path:
        return self.path / "metrics" / f"{file_name(node)}.jsonl"

    def create(self) -> None:
        """Make the folder with its parts. OrchError (65) when it exists: one run, one folder."""
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
            for part in ("logs", "events", "metrics", "checkpoints"):
                (self.path / part).mkdir(mode=0o700)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def take_lock(self, wait_s: float = 0.5) -> int | None:
        """An inheritable descriptor of the lock, None while a process of the run exists. OrchError
        (65) when it is no file.

        flock(2) belongs to the open file, so every process that inherits the descriptor holds the
        lock too: it is free exactly when the supervisor and all agents are gone, however they went.
        """
        try:
            fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise OrchError(f"{self.lock}: {error.strerror}", Exit.CONFIG) from None
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError:  # `is_alive` of another process holds it for a moment
                if time.monotonic() > end:
                    os.close(fd)
                    return None
                time.sleep(0.02)

    def is_alive(self) -> bool:
        """Whether any process of the run exists on this machine."""
        fd = self.take_lock(wait_s=0.0)
        if fd is None:
            return True
        os.close(fd)
        return False
