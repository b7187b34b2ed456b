"""The workspace of a cluster (its folder on the user's machine): its paths and lock, and atomic
writes.

All workspaces are in `$CLUSTERCTL_HOME`, by default in the caller's XDG state folder. Folders have
mode 0700, files 0600. The files also work without clusterctl, with ssh, ansible and terraform.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import platform
import pwd
import re
import secrets
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterctl.errors import LockedError, MachineError
from clusterctl.util import formatting
from clusterctl.util.assets import digest
from clusterctl.util.disk import REFUSALS, read_text, translating_write_errors
from clusterctl.util.process import SHORT

_ID = re.compile(r"[a-z][0-9a-z]{5}")
_KEY_BEGINS, _KEY_ENDS = (f"-----{word} OPENSSH PRIVATE KEY-----" for word in ("BEGIN", "END"))
MUNGE_KEY_BYTES = 1024
_UNFIT = frozenset('"%\n')
# Bytes that the state of a cluster may need. Checked at the start, so `up` does not fail half-way.
ROOM = 1 << 20
WAIT_S = 600.0
_PAUSE_S = 0.2


def state_home() -> Path:
    """Return the folder that holds the workspaces of all clusters.

    Raise MachineError if there is no home folder, or the path can't be written in an ssh_config.
    """
    home = os.environ.get("CLUSTERCTL_HOME")
    folder = (
        _expand_home(home).absolute() if home else _xdg_folder("XDG_STATE_HOME", ".local/state")
    )
    if invalid := _UNFIT & set(str(folder)):
        raise MachineError(
            "the path of the state folder can't be used in an ssh_config",
            code="unsupported",
            about="state-folder",
            where=str(folder),
            fix=f"set CLUSTERCTL_HOME to a path without {' '.join(map(repr, sorted(invalid)))}",
        )
    return folder


def clusters_up() -> list[str]:
    """Return the sorted names of this account's clusters that are up (have a hosts.json)."""
    return sorted(path.parent.name for path in state_home().glob("[!.]*/hosts.json"))


def cache_home() -> Path:
    """Return clusterctl's cache folder, for downloads (wheels, terraform) and hashes of local
    files.
    """
    return _xdg_folder("XDG_CACHE_HOME", ".cache")


def config_file() -> Path:
    """Return the path of the user's configuration. The file need not exist."""
    return _xdg_folder("XDG_CONFIG_HOME", ".config") / "config.yaml"


def _xdg_folder(variable: str, default: str) -> Path:
    """Return clusterctl's folder in an XDG base directory. A relative path in the variable is
    ignored.
    """
    named = Path(os.environ.get(variable, ""))
    return (named if named.is_absolute() else _expand_home("~") / default) / "clusterctl"


def _expand_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        # pathlib raises this if the home folder is unknown.
        fix = "set CLUSTERCTL_HOME and XDG_CACHE_HOME to folders of your own"
        raise MachineError(
            "the home folder of this account is unknown",
            code="unsupported",
            about="home",
            why=str(exc),
            fix=fix,
        ) from exc


def _private_folder(path: Path) -> None:
    """Create a folder, and missing parents, with access only for this user."""
    if not path.is_dir():
        _private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def write_atomic(path: Path, data: str | bytes, *, mode: int = 0o600, anew: bool = False) -> bool:
    """Write a file so that a reader, even after a crash, sees all of the old or all of the new
    content.

    A file that already has this content is replaced only if ``anew``. Return whether the file was
    written. Raise MachineError if the file can't be written; see ``translating_write_errors``.
    """
    raw = data.encode() if isinstance(data, str) else data
    if not anew and has_content(path, raw, mode, owner=os.geteuid()):
        return False
    with translating_write_errors(path):
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


def has_content(path: Path, raw: bytes, mode: int, *, owner: int | None = None) -> bool:
    """Return whether the path is a regular file, not a link, with this content, mode and owner.

    owner: its uid. None: any.
    """
    with suppress(OSError):
        status = path.lstat()
        fits = (status.st_mode, status.st_size) == (stat.S_IFREG | mode, len(raw))
        return fits and owner in {None, status.st_uid} and path.read_bytes() == raw
    return False


# The fix if a cluster itself is broken. The key: whether other people operate the cluster.


class _Path:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, workspace: Workspace, _: type[Workspace]) -> Path:
        return workspace.root / self._name


def new_id() -> str:
    """Return a random id of a cluster: a letter, as Google's filters need, and five hex digits."""
    return secrets.choice("abcdef") + secrets.token_hex(3)[1:]


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder on the user's machine with all records and files of a cluster."""

    root: Path

    @classmethod
    def of(cls, name: str) -> Workspace:
        """Return the workspace of the cluster with this name. The folder need not exist."""
        return cls(state_home() / name)

    _id = _Path("id")
    spec = _Path("spec.yaml")
    ansible_inventory = _Path("inventory.yml")
    inventory = _Path("hosts.json")
    ssh_config = _Path("ssh_config")
    # An attached cluster has these: the destination for ssh, and the ssh_config for commands that
    # must not ask the user.
    login = _Path("login")
    background_config = _Path("background_ssh_config")
    # The times of the commands that ran on an attached cluster.
    calls = _Path("calls")
    known_hosts = _Path("known_hosts")
    key = _Path("id_ed25519")
    public_key = _Path("id_ed25519.pub")
    # The sshd of this machine as a host of its own cluster.
    host_key = _Path("ssh_host_ed25519_key")
    sshd_config = _Path("sshd_config")
    # The ssh_config for the first login to machines that the user owns.
    access_config = _Path("access_config")
    # The host keys of these machines and of jump hosts that the user trusts.
    trusted_hosts = _Path("trusted_hosts")
    # The inventory that machines of the user are being added to.
    joining = _Path("joining.json")
    munge_key = _Path("munge.key")
    rendered = _Path("rendered")
    configured = _Path("configured")
    terraform = _Path("terraform")
    # Links to the wheels that hosts install, and to additional wheels for nodes with GPUs.
    wheels = _Path("wheels")
    gpu_wheels = _Path("gpu-wheels")
    journal = _Path("journal.jsonl")
    jobs = _Path("jobs.jsonl")
    # Slurm's answers to `where`.
    where = _Path("where.json")
    # Machines of the user that could not be released yet.
    releases = _Path("pending-releases")
    # Exists once `down` has started to remove hosts, with the time of its search for only copies,
    # or `detach` to remove the folder.
    removing = _Path("removing")
    # Exists while an image is built without a cluster.
    baking = _Path("baking")
    logs = _Path("logs")

    @property
    def connections(self) -> Path:
        """The private folder for sockets of ssh processes that keep connections open between
        commands.

        Its path is short, because a socket's path is limited to 107 bytes. It may be missing.
        """
        return SHORT / f"clusterctl-{os.geteuid()}-{digest(str(self.root.absolute()))[:8]}"

    def known_id(self) -> str | None:
        """Return the cluster's id; None if the cluster has no id yet.

        If the file is missing or damaged, it is the id in hosts.json. Raise MachineError if that is
        damaged too.
        """
        text = read_text(self._id).strip()
        if _ID.fullmatch(text):
            return text
        with suppress(OSError, ValueError, LookupError, TypeError):
            recorded = json.loads(self.inventory.read_bytes())["cluster_id"]
            if _ID.fullmatch(recorded):
                return str(recorded)
        if not self._id.exists():
            return None
        name = self.root.name
        raise MachineError(
            f"the id of cluster {name!r} is damaged",
            code="record-damaged",
            about="id",
            where=str(self._id),
            why="it is not six letters and digits, and hosts.json does not have it either",
            fix=f"write the id that `clusterctl orphans list {name}` shows into the file; "
            f"`clusterctl orphans remove {name}` removes the cluster",
        )

    def cluster_id(self) -> str:
        """Return the cluster's id. A new cluster gets a random id."""
        cluster_id = self.known_id() or new_id()
        if read_text(self._id).strip() != cluster_id:
            self.adopt_id(cluster_id)
        return cluster_id

    @property
    def has_id(self) -> bool:
        return self._id.exists()

    def adopt_id(self, cluster_id: str) -> None:
        """Replace the cluster's id by that of the same cluster in another workspace."""
        write_atomic(self._id, f"{cluster_id}\n")

    def create(self) -> None:
        with translating_write_errors(self.root):
            for folder in (self.root, self.logs, self.rendered):
                _private_folder(folder)
                # An existing folder may be on a disk that is now full or read-only.
                with tempfile.TemporaryFile(dir=folder) as probe:
                    probe.write(bytes(ROOM))

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Create the workspace. If it is new and the `with` block fails, remove it again.

        It is not removed if the block has written the spec.
        """
        existed = self.root.exists()
        try:
            self.create()
            yield
        except BaseException:
            if not (existed or self.spec.exists()) and self.root.exists():
                self.remove()
            raise

    def create_secrets(self) -> None:
        """Create the SSH key of the admin user and the munge key, unless they exist.

        Raise MachineError if a key is damaged: the hosts have the intact key.
        """
        draw_key_pair(self.key, comment=b" clusterctl")
        if self.has_munge_key:
            return
        if self.munge_key.exists():
            raise MachineError(
                f"the munge key of cluster {self.root.name!r} is damaged",
                code="record-damaged",
                about="munge-key",
                where=str(self.munge_key),
                why=f"it has {self.munge_key.stat().st_size:,} bytes instead of "
                f"{MUNGE_KEY_BYTES:,}, and no host has answered with the intact key",
                fix="run the command again when the hosts are up; or remove the file: "
                "`clusterctl up` then gives all hosts a new key",
            )
        write_atomic(self.munge_key, secrets.token_bytes(MUNGE_KEY_BYTES))

    def read_admin_key(self) -> str:
        """Return the public key of the admin user, as a line of authorized_keys.

        Raise MachineError if the private key is damaged, or missing with the public one.
        """
        public = read_text(self.public_key).strip()
        # `plan` works in a copy without the private key.
        if not self.key.exists() and public.startswith("ssh-ed25519 "):
            return public
        return f"{_public_half(self.key)} clusterctl"

    @property
    def has_munge_key(self) -> bool:
        """Whether the munge key exists, with its full length."""
        return self.munge_key.is_file() and self.munge_key.stat().st_size == MUNGE_KEY_BYTES

    def draw_host_key(self) -> str:
        """Return the public key of ``host_key``: `ssh-ed25519 AAAA...`. Create the pair if it is
        missing.
        """
        return draw_key_pair(self.host_key).read_text().strip()

    def remove(self) -> None:
        """Remove the folder. If this is killed, no part of it keeps the cluster's name."""
        removed = self.root.with_name(f".{self.root.name}.removed")
        with translating_write_errors(self.root):
            # A killed removal may have left it.
            shutil.rmtree(removed, ignore_errors=True)
            shutil.rmtree(self.root.rename(removed))

    @property
    def adopts_hosts(self) -> bool:
        """Whether the hosts existed before the cluster, and `down` restores them."""
        return self.access_config.exists()

    @property
    def is_configured(self) -> bool:
        """Whether an `up` has configured the hosts, or other people did: the cluster is attached.

        See ``note_configuration``.
        """
        try:
            return self.configured.stat().st_size > 0
        except FileNotFoundError:
            return self.login.exists()

    def configured_inputs(self) -> str:
        """Return the inputs with which the last `up` from this folder configured the hosts. "": none
        has.
        """
        return self.configured.read_text() if self.configured.exists() else ""

    def note_configuration(self, inputs: str = "") -> None:
        """Write the file ``configured``: empty when the first `up` begins to configure the hosts, so
        that people may have files there. inputs: those with which an `up` has configured them.
        """
        if inputs or not self.configured.exists():
            write_atomic(self.configured, inputs)

    @property
    def update(self) -> str:
        """The command that writes the cluster's records on this machine."""
        return "`clusterctl attach`" if self.login.exists() else "`clusterctl up`"

    @property
    def copies(self) -> Path:
        """Path of the list of the cluster's files that also exist on this machine. `down` keeps
        this list.
        """
        return self.root.parent / f"{self.root.name}.copies.jsonl"

    @property
    def lock_file(self) -> Path:
        """Path of the lock file. It is outside the workspace, which `down` removes before it
        unlocks.
        """
        return self.root.parent / f".{self.root.name}.lock"

    def lock(
        self, verb: str, *, wait_s: float, waiting: Callable[[str], None]
    ) -> AbstractContextManager[None]:
        """Return a context that locks the cluster against other clusterctl processes (see
        ``hold``).
        """
        with translating_write_errors(self.root):
            _private_folder(self.root.parent)
        locked = f"cluster {self.root.name!r}"
        return hold(self.lock_file, verb, what=locked, wait_s=wait_s, waiting=waiting)

    def lock_holder(self) -> LockHolder | None:
        return holder(self.lock_file)


def draw_key_pair(path: Path, *, comment: bytes = b"") -> Path:
    """Create an SSH key pair, unless it exists. Return the path of the public key.

    A missing or damaged public key is derived from the private key. Raise MachineError if that is
    damaged.
    """
    public_half = path.with_suffix(".pub")
    if path.exists() or public_half.exists():
        derived = _public_half(path)
        if derived.split()[1] not in read_text(public_half).split():
            write_atomic(public_half, derived.encode() + comment + b"\n")
        return public_half
    # Imported here, because in most runs the key exists.
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    openssh = serialization.PrivateFormat.OpenSSH
    write_atomic(
        path, key.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption())
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_atomic(public_half, public + comment + b"\n")
    return public_half


def _public_half(path: Path) -> str:
    """Return the public key, as `ssh-ed25519 AAAA...`, in an OpenSSH private key without a
    password.
    """
    lines = read_text(path).split("\n")
    with suppress(ValueError, IndexError, struct.error):
        if lines[0] != _KEY_BEGINS or lines[-2:] != [_KEY_ENDS, ""]:
            raise ValueError(path)
        rest = base64.b64decode("".join(lines[1:-2]), validate=True).removeprefix(
            b"openssh-key-v1\0"
        )
        # The cipher, the key derivation and its options, the number of keys, then the public key.
        for _ in range(3):
            (length,) = struct.unpack(">I", rest[:4])
            rest = rest[4 + length :]
        (length,) = struct.unpack(">I", rest[4:8])
        public = rest[8 : 8 + length]
        if public.startswith(b"\0\0\0\x0bssh-ed25519") and rest.count(public[-32:]) > 1:
            return f"ssh-ed25519 {base64.b64encode(public).decode()}"
    raise MachineError(
        "an SSH key of clusterctl is damaged",
        code="record-damaged",
        about="ssh-key",
        where=str(path),
        why="the file is missing or empty"
        if not read_text(path).strip()
        else "it is not a complete private key",
        fix="restore the file from a backup; without it, `clusterctl down --discard` removes "
        "the cluster (or `clusterctl detach --forget`), and the next `clusterctl up` "
        "creates a new key",
    )


# The lock file contains its holder. It is not removed on release, so locking works even if the disk
# becomes full or read-only.


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds the lock: its clusterctl command, start (Unix seconds) and account, if
    known.
    """

    verb: str
    pid: int
    since: float
    user: str = ""

    def __str__(self) -> str:
        of_user = f" of {self.user}" if self.user else ""
        since = formatting.moment(self.since)
        return f"'clusterctl {self.verb}'{of_user} (pid {self.pid}) has been running since {since}"


@contextmanager
def hold(
    path: Path, verb: str, *, what: str, wait_s: float = WAIT_S, waiting: Callable[[str], None]
) -> Iterator[None]:
    """Hold a lock during the `with` block.

    verb: this clusterctl command, named to other processes. ``what``: the locked resource, for
        messages.
    waiting: called if the lock is not free, with a message about the process that holds the lock,
        and when the lock has become free.

    Raise LockedError if another clusterctl process holds the lock for ``wait_s`` seconds,
    MachineError if the lock file can't be created.
    """
    deadline = time.monotonic() + wait_s
    is_reported = False
    fd = _open_lock(path)
    try:
        while not _acquire(fd, fcntl.LOCK_EX):
            owner = str(holder(path) or "another clusterctl is running")
            if time.monotonic() >= deadline:
                fix = "wait until that command is done, or stop its process"
                raise LockedError(f"another command has locked {what}", why=owner, fix=fix)
            if not is_reported:
                minutes = f"{wait_s / 60:g} minutes"
                waiting(f"{owner}, and has locked {what}; waiting for at most {minutes}")
                is_reported = True
            time.sleep(_PAUSE_S)
        if is_reported:
            waiting(f"{what} is no longer locked")
        try:
            _name_holder(
                fd, json.dumps(asdict(LockHolder(verb, os.getpid(), time.time(), _user())))
            )
            yield
        finally:
            _name_holder(fd, "")
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    with translating_write_errors(path):
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
    """Replace the content of the lock file, which names the holder. Ignore a full or read-only
    disk.
    """
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)


def holder(path: Path) -> LockHolder | None:
    """Return the process that holds the lock; None if the lock is free or the process is
    unknown.
    """
    try:
        owner = LockHolder(**json.loads(path.read_bytes()))
        # A dead process holds no lock. PermissionError: the process lives under another account.
        with suppress(PermissionError):
            os.kill(owner.pid, 0)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return None if _acquire(fd, fcntl.LOCK_SH) else owner
        finally:
            os.close(fd)
    except (OSError, ValueError, TypeError):
        return None


def this_person() -> str:
    """Return who runs this process, for other administrators of a cluster: account@machine."""
    return f"{_user()}@{platform.node()}"


def _user() -> str:
    """Return the account that runs this process. Under sudo, it is the account that called sudo."""
    if name := os.environ.get("SUDO_USER") if os.geteuid() == 0 else None:
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def open_private(path: str | Path, _flags: int = 0) -> int:
    """Open a lock file, without following links. Can be passed as the `opener` of `open`.

    The mode is set to 0600, also of an existing file, because an account that can read the file can
    lock it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd
