"""`doctor --bundle`: one archive of facts, logs and versions for a helper, without secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from clusterctl import __version__
from clusterctl.errors import UsageError
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import inventory_of
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.ssh import Connections
from clusterctl.util.process import on_each
from clusterctl.util.redact import HIDDEN, is_secret_name, redactor

_FACTS: Final = Path(__file__).with_name("data").joinpath("facts.sh").read_text()
_ANSWER_S: Final = 60.0
COMMAND_S: Final = 10  # of one that facts.sh runs
_HANGING: Final = re.compile(r"^@@ (.*)\n(?:(?!@@ ).*\n)*?@! (.*)$", re.MULTILINE)  # as facts.sh tells it
_MOST: Final = 1 << 20  # bytes of one file; of a longer one the end
_LOGS: Final = 12  # the newest ones
# Files of the workspace. Keys and Terraform's state, which has all attributes in the clear, end otherwise.
_SUFFIXES: Final = frozenset({".json", ".jsonl", ".yaml", ".yml", ".log", ".txt", ".conf", ".tf", ".hcl"})
_NAMES: Final = frozenset({"ssh_config", "known_hosts", "trusted_hosts", "access_config"})
_SECRET_FILES: Final = ("id_ed25519", "munge.key", "ssh_host_ed25519_key", "slurm.key", "jwks.json")
_ENVIRONMENT: Final = re.compile(
    r"CLUSTERCTL_|XDG_|ANSIBLE_|TF_|GOOGLE_|CLOUDSDK_|GCE_|LANG|LC_|PATH$|.*proxy$", re.I
)
README: Final = """\
What `clusterctl doctor --bundle` collected of the cluster {cluster!r}, {date} (UTC):

  doctor.json         what doctor finds now
  versions.json       versions of clusterctl, of Python and of its libraries
  environment.txt     environment variables that clusterctl and its tools read
  spec.yaml           your spec file
  spec.resolved.yaml  the spec with its defaults
  workspace/          records of the cluster: hosts, journal, Slurm's files, the newest logs
  hosts/              what each host that answers says: its system, units, logs of Slurm, packages, GPUs

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
    doctor: Mapping[str, Any],
    file: Path,
    *,
    source: Path | None = None,
) -> DoctorBundle:
    """Make the archive.

    doctor: the answer of `doctor -o json`; ``error`` in it says why there is none.
    source: the user's spec.

    Raises:
        MachineError: it can't be written.
    """
    missing = [f"doctor: {doctor['error']}"] if "error" in doctor else []
    texts = {
        "doctor.json": json.dumps(doctor, indent=2, default=str),
        "versions.json": json.dumps(_versions(), indent=2),
        "environment.txt": _environment(),
        "spec.resolved.yaml": dump_spec(spec),
    }
    paths = {f"workspace/{path.relative_to(workspace.root)}": path for path in _chosen(workspace)}
    for name, path in {**paths, **({"spec.yaml": source} if source else {})}.items():
        try:
            texts[name] = path.read_bytes().decode(errors="replace")
        except OSError as exc:
            missing.append(f"{name}: {exc.strerror}")
    if not workspace.root.is_dir():
        missing.append("the records of the cluster: it was never brought up from here")
    said, silent = _ask_hosts(workspace)
    missing += silent
    texts |= {f"hosts/{host}.txt": text for host, text in said.items()}
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    lacks = "".join(f"\nNot to be had: {one}" for one in missing)
    texts["README.txt"] = README.format(cluster=spec.name, date=date, missing=lacks, hidden=HIDDEN)
    redact = redactor(_secrets(workspace))
    shown = {redact(name): redact(text) for name, text in sorted(texts.items())}
    write_atomic(file, _archive(f"{spec.name}-doctor", shown))
    return DoctorBundle(file, tuple(shown), tuple(missing))


def _archive(folder: str, texts: Mapping[str, str]) -> bytes:
    """Return a tar archive of these files; of a long text, only the end."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, text in texts.items():
            raw = (text if len(text) <= _MOST else f"[...]\n{text[-_MOST:]}").encode(errors="replace")
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


def _versions() -> Mapping[str, Any]:
    return {
        "clusterctl": __version__,
        "python": sys.version,
        "machine": platform.platform(),
        "libraries": dict(sorted((one.name, one.version) for one in distributions())),
    }


def _environment() -> str:
    """Names and values of the variables that are read; those of secrets without their values."""
    chosen = {name: value for name, value in os.environ.items() if _ENVIRONMENT.match(name)}
    return "".join(
        f"{name}={HIDDEN if is_secret_name(name) else value}\n" for name, value in sorted(chosen.items())
    )


def _chosen(workspace: Workspace) -> Iterator[Path]:
    """The files of the workspace that help; of its logs, the newest ones."""
    logs = sorted(workspace.logs.glob("*"), key=lambda path: path.stat().st_mtime)[-_LOGS:]
    for path in sorted(workspace.root.rglob("*")):
        helps = path.suffix in _SUFFIXES or path.name in _NAMES
        old_log = path.parent == workspace.logs and path not in logs
        secret = path.name in _SECRET_FILES
        if helps and not (old_log or secret or path.is_symlink()) and path.is_file():
            yield path


def _ask_hosts(workspace: Workspace) -> tuple[Mapping[str, str], list[str]]:
    """Return what each host that answers says, and what could not be had of the hosts."""
    try:
        hosts: Sequence[str] = [host.name for host in inventory_of(workspace).hosts]
    except UsageError as exc:
        return {}, [f"hosts: {exc.what}"]
    argv = ("sudo", "-n", "sh", "-s", str(COMMAND_S))
    with Connections(workspace.ssh_config) as connections:
        answers, failed = on_each(
            hosts, lambda host: connections.to(host).run(argv, stdin=_FACTS.encode(), timeout_s=_ANSWER_S)
        )
    said = {host: answer.stdout for host, answer in answers.items()}
    hanging = [
        f"{host}: {what}: {why}" for host, text in said.items() for what, why in _HANGING.findall(text)
    ]
    return said, [*hanging, *(f"{host}: {exc.cause}" for host, exc in failed.items())]
