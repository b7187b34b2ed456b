"""The archive of `doctor --bundle`: facts, logs and versions for a bug report, without secrets."""

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
from clusterctl.util.process import call_on_hosts
from clusterctl.util.redact import HIDDEN, is_secret_name, redactor

_FACTS: Final = Path(__file__).with_name("data").joinpath("facts.sh").read_text()
_ANSWER_S: Final = 60.0
# Time limit of each command in facts.sh.
COMMAND_S: Final = 10
# A command that did not finish, in the output of facts.sh.
_HANGING: Final = re.compile(r"^@@ (.*)\n(?:(?!@@ ).*\n)*?@! (.*)$", re.MULTILINE)
# Of a longer file, only the end is stored.
_MAX_SIZE: Final = 1 << 20
_MAX_LOGS: Final = 12
# Files of the workspace to include. Keys have other suffixes, as has Terraform's state, which holds
# secrets.
_SUFFIXES: Final = frozenset(
    {".json", ".jsonl", ".yaml", ".yml", ".log", ".txt", ".conf", ".tf", ".hcl"}
)
_NAMES: Final = frozenset({"ssh_config", "known_hosts", "trusted_hosts", "access_config"})
_SECRET_FILES: Final = ("id_ed25519", "munge.key", "ssh_host_ed25519_key", "slurm.key", "jwks.json")
_ENVIRONMENT: Final = re.compile(
    r"CLUSTERCTL_|XDG_|ANSIBLE_|TF_|GOOGLE_|CLOUDSDK_|GCE_|LANG|LC_|PATH$|.*proxy$", re.IGNORECASE
)
README: Final = """\
Collected by `clusterctl doctor --bundle` from the cluster {cluster!r}, {date} (UTC):

  doctor.json         the current findings of doctor
  versions.json       versions of clusterctl, of Python and of its libraries
  environment.txt     environment variables that clusterctl and its tools read
  spec.yaml           your spec file
  spec.resolved.yaml  the spec with its defaults
  workspace/          records of the cluster: hosts, journal, Slurm's files, the newest logs
  hosts/              output of each host that answered: system, units, Slurm's logs, packages, GPUs

Left out: private keys, the munge key, Terraform's state, job output, your data. Passwords, tokens, keys and
credentials in URLs were replaced by {hidden}. The archive does contain the names of hosts, users and jobs,
addresses and paths. Check it before you send it: unpack it with tar -xzf FILE and use any editor.

To send it: attach the file to your report, with the command that failed and what you expected.
{missing}
"""


@dataclass(frozen=True, slots=True)
class DoctorBundle:
    """A written archive: its path, the names of its members (``files``), and missing parts with
    reasons.
    """

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
    """Collect logs, settings and the output of hosts, and write the archive to ``file``.

    doctor: the JSON output of `doctor`. If `doctor` failed, the key ``error`` holds the reason.
    source: the user's spec file. Default: the archive contains no spec file.
    Raise MachineError if the archive can't be written.
    """
    missing = [f"doctor: {doctor['error']}"] if "error" in doctor else []
    texts = {
        "doctor.json": json.dumps(doctor, indent=2, default=str),
        "versions.json": json.dumps(_versions(), indent=2),
        "environment.txt": _environment(),
        "spec.resolved.yaml": dump_spec(spec),
    }
    paths = {
        f"workspace/{path.relative_to(workspace.root)}": path for path in _useful_files(workspace)
    }
    for name, path in {**paths, **({"spec.yaml": source} if source else {})}.items():
        try:
            texts[name] = path.read_bytes().decode(errors="replace")
        except OSError as exc:
            missing.append(f"{name}: {exc.strerror}")
    if not workspace.root.is_dir():
        missing.append("the records of the cluster: `up` was never run on this machine")
    host_texts, host_failures = _ask_hosts(workspace)
    missing += host_failures
    texts |= {f"hosts/{host}.txt": text for host, text in host_texts.items()}
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    remarks = "".join(f"\nNot collected: {reason}" for reason in missing)
    texts["README.txt"] = README.format(
        cluster=spec.name, date=date, missing=remarks, hidden=HIDDEN
    )
    redact = redactor(_secrets(workspace))
    shown = {redact(name): redact(text) for name, text in sorted(texts.items())}
    write_atomic(file, _archive(f"{spec.name}-doctor", shown))
    return DoctorBundle(file, tuple(shown), tuple(missing))


def _archive(folder: str, texts: Mapping[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, text in texts.items():
            raw = (text if len(text) <= _MAX_SIZE else f"[...]\n{text[-_MAX_SIZE:]}").encode(
                errors="replace"
            )
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(raw)
            entry.mode = 0o600
            entry.mtime = int(time.time())
            tar.addfile(entry, io.BytesIO(raw))
    return stream.getvalue()


def _secrets(workspace: Workspace) -> Iterator[str | bytes]:
    """Yield all known secrets: the cluster's keys, environment variables, Google credentials."""
    for name in _SECRET_FILES:
        with suppress(OSError):
            raw = (workspace.root / name).read_bytes()
            yield raw
            yield from (line for line in raw.splitlines() if not line.startswith(b"-----"))
    yield from (value for name, value in os.environ.items() if is_secret_name(name))
    # Google's application default credentials are in one of these two files.
    folder = os.environ.get("CLOUDSDK_CONFIG", "~/.config/gcloud")
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    for path in (f"{folder}/application_default_credentials.json", named):
        with suppress(OSError, ValueError):
            # Unlike Path.expanduser, this never raises.
            login = json.loads(Path(os.path.expanduser(path)).read_bytes())
            yield from (
                v for name, v in login.items() if isinstance(v, str) and is_secret_name(name)
            )


def _versions() -> Mapping[str, Any]:
    return {
        "clusterctl": __version__,
        "python": sys.version,
        "machine": platform.platform(),
        "libraries": dict(sorted((d.name, d.version) for d in distributions())),
    }


def _environment() -> str:
    """Return the variables that clusterctl and its tools read. Values of secrets are hidden."""
    variables = {name: value for name, value in os.environ.items() if _ENVIRONMENT.match(name)}
    return "".join(
        f"{name}={HIDDEN if is_secret_name(name) else value}\n"
        for name, value in sorted(variables.items())
    )


def _useful_files(workspace: Workspace) -> Iterator[Path]:
    logs = sorted(workspace.logs.glob("*"), key=lambda path: path.stat().st_mtime)[-_MAX_LOGS:]
    for path in sorted(workspace.root.rglob("*")):
        helps = path.suffix in _SUFFIXES or path.name in _NAMES
        old_log = path.parent == workspace.logs and path not in logs
        secret = path.name in _SECRET_FILES
        if helps and not (old_log or secret or path.is_symlink()) and path.is_file():
            yield path


def _ask_hosts(workspace: Workspace) -> tuple[Mapping[str, str], list[str]]:
    """Return the output of facts.sh for each host that answers, and a line for each failure."""
    try:
        hosts: Sequence[str] = [host.name for host in inventory_of(workspace).hosts]
    except UsageError as exc:
        return {}, [f"hosts: {exc.what}"]
    argv = ("sudo", "-n", "sh", "-s", str(COMMAND_S))
    with Connections(workspace.ssh_config) as connections:
        answers, failed = call_on_hosts(
            hosts,
            lambda host: connections.to(host).run(argv, stdin=_FACTS.encode(), timeout_s=_ANSWER_S),
        )
    texts = {host: answer.stdout for host, answer in answers.items()}
    hanging = [
        f"{host}: {command}: {reason}"
        for host, text in texts.items()
        for command, reason in _HANGING.findall(text)
    ]
    return texts, [*hanging, *(f"{host}: {exc.cause}" for host, exc in failed.items())]
