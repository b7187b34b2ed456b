"""`doctor --bundle`: one archive of facts, logs and versions for whoever helps, without secrets.

It is made also where hosts do not answer, or the cluster never came up: what could not be had is named in it.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from clusterctl import __version__
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import inventory_of
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.connections import Connections
from clusterctl.util.process import on_each, run
from clusterctl.util.redact import HIDDEN, is_secret_name, redactor

_FACTS: Final = Path(__file__).with_name("data").joinpath("facts.sh").read_text()
_ANSWER_S: Final = 60.0
COMMAND_S: Final = 10  # of one that facts.sh runs
_HANGING: Final = re.compile(r"^@@ (.*)\n(?:(?!@@ ).*\n)*?@! (.*)$", re.MULTILINE)  # as facts.sh tells it
_VERSION_S: Final = 10.0
_MOST: Final = 1 << 20  # bytes of one file; of a longer one the end
_LOGS: Final = 12  # the newest ones
_SUFFIXES: Final = frozenset({".json", ".jsonl", ".yaml", ".yml", ".log", ".txt", ".conf", ".tf", ".hcl", ""})
# Never: keys, and Terraform's state, which has the attributes of all resources in the clear.
_SECRET_FILES: Final = ("id_ed25519", "munge.key", "ssh_host_ed25519_key", "slurm.key", "jwks.json")
_LEFT_OUT: Final = re.compile(
    r"\.tfstate|\.key$|\.pem$|\.p12$|(^|/)(id_\w+|ssh_host_\w+_key)$|\.terraform/|wheels/"
)
_TOOLS: Final = (("ssh", "-V"), ("systemctl", "--version"))
_TOOLS_OF_CLOUDS: Final = (("terraform", "version"), ("gcloud", "version"))
_ENVIRONMENT: Final = re.compile(
    r"CLUSTERCTL_|XDG_|ANSIBLE_|TF_|GOOGLE_|CLOUDSDK_|GCE_|LANG|LC_|PATH$|.*proxy$", re.I
)
README: Final = """\
What `clusterctl doctor --bundle` collected of the cluster {cluster!r}, {date} (UTC).

{contents}
Left out: private keys, the munge key, Terraform's state, job output, your data. Passwords, tokens, keys and
credentials in URLs were replaced by {hidden}. Names of hosts and users, addresses, paths and the names
of jobs are in it. Look through it before you send it: tar -xzf FILE, then any editor.

To send it: attach the file to your report, with the command that failed and what you expected.
{missing}
"""


@dataclass(frozen=True, slots=True)
class DoctorBundle:
    """The archive that was made; ``missing``: what could not be had, and why."""

    file: Path
    files: tuple[str, ...]
    missing: tuple[str, ...]


def create(
    spec: ClusterSpec,
    workspace: Workspace,
    doctor: Callable[[], Mapping[str, Any]],
    file: Path,
    *,
    source: Path | None = None,
) -> DoctorBundle:
    """Make the archive. ``doctor`` gives the answer of `doctor -o json`; ``source`` is the user's spec.

    Raises:
        UsageError: there is a file of that name.
        MachineError: it can't be written.
    """
    if file.exists():
        raise UsageError(f"{file} exists", code="file-exists", fix="name another file, or remove it")
    made = _Files(redactor(_secrets(workspace)))
    try:
        answer = doctor()
    except ClusterctlError as exc:
        made.missing.append(f"doctor: {exc.cause}")
        answer = {"ok": False, "error": str(exc)}
    made.add("doctor.json", json.dumps(answer, indent=2, default=str))
    made.add("versions.json", json.dumps(_versions(spec), indent=2))
    made.add("environment.txt", _environment())
    made.add("spec.resolved.yaml", dump_spec(spec))
    if source is not None:
        made.copy(source, "spec.yaml")
    _of_workspace(workspace, made)
    _of_hosts(workspace, made)
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    contents = "".join(f"  {name:32} {what}\n" for name, what in _CONTENTS.items() if made.has(name))
    missing = "".join(f"\nNot to be had: {one}" for one in made.missing)
    words = {"cluster": spec.name, "date": date, "contents": contents, "missing": missing, "hidden": HIDDEN}
    made.add("README.txt", README.format_map(words))
    write_atomic(file, made.archive(f"{spec.name}-doctor"))
    return DoctorBundle(file, tuple(sorted(made.texts)), tuple(made.missing))


_CONTENTS: Final = {
    "doctor.json": "what doctor finds now",
    "versions.json": "versions of clusterctl, of its libraries, and of the tools here",
    "environment.txt": "environment variables that clusterctl and its tools read",
    "spec.yaml": "your spec file",
    "spec.resolved.yaml": "the spec with its defaults",
    "workspace/": "records of the cluster: hosts, journal, inventory, Slurm's files, Terraform's variables",
    "workspace/logs/": "the newest logs of Ansible",
    "hosts/": "what each host that answers says: its system, units, logs of Slurm, packages, GPUs",
}


class _Files:
    """The files of the archive, redacted."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        self._redact = redact
        self.texts: dict[str, str] = {}
        self.missing: list[str] = []

    def add(self, name: str, text: str) -> None:
        text = self._redact(text)
        self.texts[self._redact(name)] = text if len(text) <= _MOST else f"[...]\n{text[-_MOST:]}"

    def copy(self, path: Path, name: str) -> None:
        """A file of ours as text, the end of a long one."""
        try:
            self.add(name, path.read_bytes().decode(errors="replace"))
        except OSError as exc:
            self.missing.append(f"{name}: {exc.strerror}")

    def has(self, name: str) -> bool:
        return any(one == name or (name.endswith("/") and one.startswith(name)) for one in self.texts)

    def archive(self, folder: str) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as tar:
            for name, text in sorted(self.texts.items()):
                raw = text.encode(errors="replace")
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode, entry.mtime = len(raw), 0o600, int(time.time())
                tar.addfile(entry, io.BytesIO(raw))
        return stream.getvalue()


def _secrets(workspace: Workspace) -> Iterator[str | bytes]:
    """What is secret for certain: our keys, what the environment says is, and the login to a cloud."""
    for name in _SECRET_FILES:
        with suppress(OSError):
            raw = (workspace.root / name).read_bytes()
            yield raw
            yield from (line for line in raw.splitlines() if not line.startswith(b"-----"))
    yield from (value for name, value in os.environ.items() if is_secret_name(name))
    # Files of application default credentials: gcloud's own, and the named one.
    folder = os.environ.get("CLOUDSDK_CONFIG", "~/.config/gcloud")
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    for path in (f"{folder}/application_default_credentials.json", named):
        with suppress(OSError, ValueError):
            login = json.loads(Path(os.path.expanduser(path)).read_bytes())  # noqa: PTH111 - it never raises
            yield from (v for name, v in login.items() if isinstance(v, str) and is_secret_name(name))


def _versions(spec: ClusterSpec) -> Mapping[str, Any]:
    tools = {}
    for argv in (*_TOOLS, *(_TOOLS_OF_CLOUDS if spec.provider.is_cloud else ())):
        with suppress(OSError, subprocess.TimeoutExpired):  # it is not here, or does not say
            done = run(argv, timeout_s=_VERSION_S)
            tools[argv[0]] = (done.stdout or done.stderr).strip()
    with suppress(OSError):
        tools["os-release"] = Path("/etc/os-release").read_text()
    libraries = {one.name: one.version for one in distributions()}
    return {
        "clusterctl": __version__,
        "python": sys.version,
        "machine": platform.platform(),
        "tools": tools,
        "libraries": dict(sorted(libraries.items())),
    }


def _environment() -> str:
    """Names and values of the variables that are read; those of secrets without their values."""
    chosen = {name: value for name, value in os.environ.items() if _ENVIRONMENT.match(name)}
    return "".join(
        f"{name}={HIDDEN if is_secret_name(name) else value}\n" for name, value in sorted(chosen.items())
    )


def _of_workspace(workspace: Workspace, made: _Files) -> None:
    if not workspace.root.is_dir():
        made.missing.append("the records of the cluster: it was never brought up from here")
        return
    logs = sorted(workspace.logs.glob("*"), key=lambda path: path.stat().st_mtime)[-_LOGS:]
    for path in sorted(workspace.root.rglob("*")):
        inner = path.relative_to(workspace.root).as_posix()
        old_log = path.parent == workspace.logs and path not in logs
        if path.is_symlink() or not path.is_file() or _LEFT_OUT.search(inner) or old_log:
            continue
        if path.name not in _SECRET_FILES and path.suffix in _SUFFIXES and not _is_binary(path):
            made.copy(path, f"workspace/{inner}")


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(4096)
    except OSError:
        return False


def _of_hosts(workspace: Workspace, made: _Files) -> None:
    try:
        hosts: Sequence[str] = [host.name for host in inventory_of(workspace).hosts]
    except UsageError as exc:
        made.missing.append(f"hosts: {exc.what}")
        return
    with Connections(workspace.ssh_config) as connections:

        def ask(name: str) -> str:
            argv = ("sudo", "-n", "sh", "-s", str(COMMAND_S))
            return connections.to(name).run(argv, stdin=_FACTS.encode(), timeout_s=_ANSWER_S).stdout

        found, failed = on_each(hosts, ask)
    for name, text in found.items():
        made.add(f"hosts/{name}.txt", text)
        made.missing += [f"{name}: {command}: {why}" for command, why in _HANGING.findall(text)]
    made.missing += [f"{name}: {exc.cause}" for name, exc in failed.items()]
