"""The workspace: every path that clusterctl writes for one cluster, its lock, atomic writes.

The state folder is `$CLUSTERCTL_HOME`, else the XDG state directory of the user who calls. Folders are 0700,
files 0600. A user can walk away from clusterctl at any time: what stands here works with ordinary tools.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterctl.errors import LockedError, MachineError
from clusterctl.util.disk import REFUSALS, writing

_UNFIT = frozenset('"%\n')
ROOM = 1 << 20  # that the state of a cluster may take: better refused at the start than half-way
WAIT_S = 600.0
_PAUSE_S = 0.2


def state_home() -> Path:
    """The folder that holds one folder a cluster.

    Raises:
        MachineError: the caller has no home, or its path does not fit an ssh_config.
    """
    home = os.environ.get("CLUSTERCTL_HOME")
    folder = _expanded(home).absolute() if home else _xdg_folder("XDG_STATE_HOME", ".local/state")
    if unfit := _UNFIT & set(str(folder)):
        raise MachineError(
            "the state folder's path can't stand in an ssh_config",
            code="state-folder-path",
            where=str(folder),
            fix=f"set CLUSTERCTL_HOME to a path without {' '.join(map(repr, sorted(unfit)))}",
        )
    return folder


def clusters_up() -> list[str]:
    """Return the names of the clusters that were raised from this account, sorted."""
    return sorted(path.parent.name for path in state_home().glob("*/hosts.json"))


def cache_home() -> Path:
    """The folder that holds what was downloaded."""
    return _xdg_folder("XDG_CACHE_HOME", ".cache")


def _xdg_folder(variable: str, default: str) -> Path:
    """Our folder in one of the XDG base directories, whose specification has relative paths ignored."""
    named = Path(os.environ.get(variable, ""))
    return (named if named.is_absolute() else _expanded("~") / default) / "clusterctl"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:  # pathlib's word for a home that can't be found
        fix = "set CLUSTERCTL_HOME and XDG_CACHE_HOME to folders of yours"
        raise MachineError(
            "there is no folder for clusterctl's files", code="no-home-folder", why=str(exc), fix=fix
        ) from exc


def _private_folder(path: Path) -> None:
    """Make a folder for this user only. Those above that are missing, too: they show what lies below."""
    if not path.is_dir():
        _private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def write_atomic(path: Path, data: str | bytes, *, mode: int = 0o600, anew: bool = False) -> bool:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    A file that has this content stays the file that it is, unless ``anew``. Return whether it was written.

    Raises:
        MachineError: it can't be written; see ``disk.writing``.
    """
    raw = data.encode() if isinstance(data, str) else data
    with suppress(FileNotFoundError):  # it may be removed between the two looks
        if not anew and has_content(path, raw, mode) and path.stat().st_uid == os.geteuid():
            return False
    with writing(path):
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(raw)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    return True


def has_content(path: Path, raw: bytes, mode: int) -> bool:
    """Return whether the path is a regular file, not a link, with this content and mode."""
    with suppress(OSError):
        found = path.lstat()
        fits = (found.st_mode, found.st_size) == (stat.S_IFREG | mode, len(raw))
        return fits and path.read_bytes() == raw
    return False


class _Path:
    """A file or folder of a workspace, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, workspace: Workspace, _: type[Workspace]) -> Path:
        return workspace.root / self._name


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder of one cluster."""

    root: Path

    @classmethod
    def of(cls, name: str) -> Workspace:
        """The workspace of the cluster of that name; nothing is created."""
        return cls(state_home() / name)

    _id = _Path("id")
    spec = _Path("spec.yaml")
    ansible_inventory = _Path("inventory.yml")
    inventory = _Path("hosts.json")  # the Inventory value itself; ours to read back
    ssh_config = _Path("ssh_config")
    known_hosts = _Path("known_hosts")
    key = _Path("id_ed25519")
    public_key = _Path("id_ed25519.pub")
    host_key = _Path("ssh_host_ed25519_key")  # of this machine, where it is a host of the cluster
    access_config = _Path("access_config")  # of the first login to the user's own machines
    trusted_hosts = _Path("trusted_hosts")  # confirmed keys of these, and of machines on the way
    confirmed = _Path("confirmed")  # there once somebody has confirmed host keys
    joining = _Path("joining.json")  # the inventory that machines are being joined to; ours from then on
    munge_key = _Path("munge.key")
    rendered = _Path("rendered")  # what Ansible ships: Slurm's files, what nodes must have
    configured = _Path("configured.json")  # how configuring left each host; ours to read back
    terraform = _Path("terraform")  # module, variables and state; plain `terraform` works in it
    wheels = _Path("wheels")  # leads to the wheels of the job environment, for hosts that are not baked
    gpu_wheels = _Path("gpu-wheels")  # leads to those that nodes with GPUs have beside these
    bundle = _Path("bundle.json")  # the bundle that air-gapped hosts are installed from
    journal = _Path("journal.jsonl")
    jobs = _Path("jobs.jsonl")  # what was submitted and where its run was collected to
    connections = _Path("connections")  # sockets of the ssh that keep connections open between verbs
    releases = _Path("pending-releases")  # of machines that could not be given back yet
    removing = _Path("removing")  # there once `down` has begun to remove the cluster; when it had looked
    baking = _Path("baking")  # there while an image is made ahead of a cluster: none is up, or begun
    logs = _Path("logs")

    def known_id(self) -> str | None:
        return self._id.read_text().strip() if self._id.exists() else None

    def cluster_id(self) -> str:
        """Six hex digits that name this cluster, drawn once. The first is a letter, for Google's filters."""
        if not self._id.exists():
            write_atomic(self._id, secrets.choice("abcdef") + secrets.token_hex(3)[1:] + "\n")
        return self._id.read_text().strip()

    def create(self) -> None:
        with writing(self.root):
            for folder in (self.root, self.logs, self.rendered):
                _private_folder(folder)
                # A folder that is there already may lie on what has become read-only, or full.
                with tempfile.TemporaryFile(dir=folder) as probe:
                    probe.write(bytes(ROOM))

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Make the folder. If the body fails before it has written the spec, remove a new folder again.

        A folder with host keys that somebody has confirmed stays.
        """
        was_there = self.root.exists()
        try:
            self.create()
            yield
        except BaseException:
            if not (was_there or self.spec.exists() or self.confirmed.exists()) and self.root.exists():
                self.remove()
            raise

    def create_secrets(self) -> None:
        """The SSH key of the admin user and the munge key, drawn once."""
        _draw_key_pair(self.key, comment=b" clusterctl")
        if not self.munge_key.exists():
            write_atomic(self.munge_key, secrets.token_bytes(1024))

    def draw_host_key(self) -> str:
        """The public half of ``host_key``, as `ssh-ed25519 AAAA...`; drawn once."""
        return _draw_key_pair(self.host_key).read_text().strip()

    def remove(self) -> None:
        with writing(self.root):
            shutil.rmtree(self.root)

    @property
    def copies(self) -> Path:
        """Where copies of the cluster's files are; beside the folder, as kept storage outlives that."""
        return self.root.parent / f"{self.root.name}.copies.jsonl"

    @property
    def lock_file(self) -> Path:
        """Beside the folder, not in it: `down` removes the folder while it holds the lock."""
        return self.root.parent / f".{self.root.name}.lock"

    def lock(
        self, verb: str, *, wait_s: float, waiting: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """Hold this cluster against a second clusterctl; see ``hold``."""
        with writing(self.root):
            _private_folder(self.root.parent)
        what = f"cluster {self.root.name!r}"
        return hold(self.lock_file, verb, what=what, wait_s=wait_s, waiting=waiting)

    def worker(self) -> Holder | None:
        return holder(self.lock_file)


def _draw_key_pair(path: Path, *, comment: bytes = b"") -> Path:
    """The public half of a key pair, beside the private one; drawn once."""
    public_half = path.with_suffix(".pub")
    if public_half.exists():
        return public_half
    # Here, not above: most runs, and all of the helper's, find the key drawn.
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    key = Ed25519PrivateKey.generate()
    openssh = serialization.PrivateFormat.OpenSSH
    write_atomic(path, key.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_atomic(public_half, public + comment + b"\n")
    return public_half


# The lock is a file that names its holder. It stays when the lock is released: a disk that is full or
# read-only by then has the file already.


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds the lock, ``since`` Unix seconds; ``user`` is an account's name, if known."""

    verb: str
    pid: int
    since: float
    user: str = ""

    def __str__(self) -> str:
        of_user = f" of {self.user}" if self.user else ""
        since = time.strftime("%F %T", time.localtime(self.since))
        return f"`clusterctl {self.verb}`{of_user} (pid {self.pid}) has been running since {since}"


@contextmanager
def hold(
    path: Path, verb: str, *, what: str, wait_s: float = WAIT_S, waiting: Callable[[str], None]
) -> Iterator[None]:
    """Hold the lock while the body runs. ``waiting`` gets one message about the holder; ``wait_s`` bounds it.

    Raises:
        LockedError: another clusterctl holds it for all that time. Names it, and ``what`` is locked.
        MachineError: the file can't be made.
    """
    deadline = time.monotonic() + wait_s
    told = False
    fd = _open_lock(path)
    try:
        while not _acquire(fd, fcntl.LOCK_EX):
            who = str(holder(path) or "another clusterctl is running")
            if time.monotonic() >= deadline:
                fix = "wait until it is done, or stop that process"
                raise LockedError(f"{what} is locked", why=who, fix=fix)
            if not told:
                waiting(f"{who}; waiting until it is done, {wait_s / 60:g} minutes at most")
                told = True
            time.sleep(_PAUSE_S)
        try:
            _name_holder(fd, json.dumps(asdict(Holder(verb, os.getpid(), time.time(), _user()))))
            yield
        finally:
            _name_holder(fd, "")
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    with writing(path):
        try:
            return open_private(path)
        except OSError as exc:
            if exc.errno not in REFUSALS or not path.exists():
                raise
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _acquire(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _name_holder(fd: int, text: str) -> None:
    """Write the holder into the lock's file, unless its disk takes nothing more."""
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)


def holder(path: Path) -> Holder | None:
    """The holder of the lock; None if it is free."""
    try:
        who = Holder(**json.loads(path.read_bytes()))
        with suppress(PermissionError):  # it lives, as another account
            os.kill(who.pid, 0)  # what the dead wrote is no reason to touch the lock
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return None if _acquire(fd, fcntl.LOCK_SH) else who
        finally:
            os.close(fd)
    except (OSError, ValueError, TypeError):
        return None


def _user() -> str:
    """The account that runs this clusterctl; of root's helper, the one that started it through sudo."""
    if name := os.environ.get("SUDO_USER") if os.geteuid() == 0 else None:
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def open_private(path: str | Path, _flags: int = 0) -> int:
    """Open a file to be locked, also as an `opener` of `open`; no link is followed.

    It is closed to other accounts, also a file of an older version: an account that can read it can lock it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd
