"""Python environments on hosts, installed from wheels that are sent to the hosts."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from clusterctl.errors import CommandError, TransportError
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.wheelhouse import Wheel, WheelLock, cache_of_downloads
from clusterctl.transport.base import Conversation, Transport, split_lines
from clusterctl.transport.put import Upload
from clusterctl.transport.remote_open import HELD
from clusterctl.transport.tree import Progress
from clusterctl.util.assets import file_sha256
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import LineReporter

# Longest silence of pip during a build, and longest wait for a build by another clusterctl.
BUILD_S: Final = 3600.0
WAIT_S: Final = 1800.0
_BUILD: Final = Path(__file__).with_name("remote_build.sh").read_text(encoding="utf-8")
# Files of an installed package that are not in its wheel.
_NOT_IN_WHEEL: Final = frozenset({"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"})


def build_environment(
    transport: Transport,
    lock: WheelLock,
    wheels: Sequence[Path],
    *,
    folder: str,
    store: str,
    report: LineReporter,
    base: str = "",
    python: str = "",
    wait_s: float = WAIT_S,
    progress: Progress = lambda *_: None,
) -> bool:
    """Send ``wheels`` to a host, and install them as ``lock.key``. Return whether the host lacked
    it.

    folder, store: folders of environments and of files on the host. A relative path starts at the
        home.
    base: an environment on the host that the new one extends. "": the wheels include pip, and
        ``python`` is the Python of the new environment.

    Raises:
        TransportError: the environment can't be installed, or the connection was lost.
        TransferError, UsageError, MachineError: the wheels can't be sent; see ``Upload``.
    """
    with temporary_folder() as local_folder:
        text = local_folder / "requirements.lock"
        text.write_text(lock.text)
        remote_paths = Upload(transport, progress).to_store([*wheels, text], store=store)
    sent = "".join(
        [*(f"{path.name} {target}\n" for path, target in remote_paths.items()), "\n"]
    ).encode()
    python = python or f"{base}/bin/python"
    argv = ["sh", "-c", _BUILD, "build", lock.key, base, f"{wait_s:g}", str(HELD), folder, python]
    built = False
    try:
        with transport.converse(argv, silence_s=BUILD_S) as talk:
            talk.send(sent)
            for line in lines_of(talk):
                if line == b"waiting":
                    report("waiting for another clusterctl that is building an environment")
                elif line == b"building":
                    report("building the environment")
                    built = True
            talk.finish()
    except CommandError as exc:
        raise (
            _held(transport.host, folder, wait_s) if exc.rc == HELD else _not_built(transport, exc)
        ) from exc
    return built


def lines_of(talk: Conversation) -> Iterator[bytes]:
    """Yield the lines that a build prints."""
    error = TransportError(
        "the environment's build printed a line that is too long",
        code="internal",
        about="line-length",
    )
    return split_lines(iter(talk.receive, b""), error)


def _held(host: str, folder: str, wait_s: float) -> TransportError:
    return TransportError(
        "the Python environment can't be built on the cluster: builds are locked",
        code="in-use",
        about="environment",
        where=host,
        why=f"{folder if folder.startswith('/') else f'~/{folder}'}/.lock is still locked after "
        f"{wait_s:g} s",
        fix="wait for the other build; if no build is running, end the process that holds the lock: "
        f"`clusterctl ssh {host} -- lslocks` shows it. If homes are shared, try each node",
        host=host,
    )


def _not_built(transport: Transport, cause: CommandError) -> TransportError:
    return TransportError(
        "the Python environment can't be built on the cluster",
        code="packages-unmet",
        about="installation",
        where=transport.host,
        why=cause.why,
        fix="check that the job user's home folder exists and has free space (`clusterctl ssh`)",
        host=transport.host,
    )


def pip_wheel() -> Path:
    """Return a wheel of this machine's pip, for hosts that have no pip, made from the installed
    files.
    """
    pip = distribution("pip")
    name = f"pip-{pip.version}-py3-none-any.whl"
    info = f"pip-{pip.version}.dist-info"
    with cache_of_downloads(f"pip-{pip.version}") as home:
        if not (wheel := home / name).is_file():
            home.mkdir(parents=True, exist_ok=True)
            files = {
                str(file): Path(str(pip.locate_file(file))).read_bytes()
                for file in pip.files or ()
                if file.parts[0] in {"pip", info}
                and file.name not in _NOT_IN_WHEEL
                and file.suffix != ".pyc"
            }
            files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
            with temporary_folder(home) as folder:
                with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
                    for path, content in sorted(files.items()):
                        # The same files give the same archive.
                        archive.writestr(zipfile.ZipInfo(path), content, zipfile.ZIP_DEFLATED)
                (folder / name).replace(wheel)
    return wheel


def _record(files: Mapping[str, bytes], own_name: str) -> bytes:
    """Return the text of a wheel's RECORD (packaging.python.org, "Binary distribution format")."""
    lines = []
    for path, content in files.items():
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{path},sha256={sha256},{len(content)}\n")
    return "".join([*lines, f"{own_name},,\n"]).encode()


def lock_of(wheels: Sequence[Path], node: NodePlatform, python: str) -> WheelLock:
    """Return the lock of these wheels as an environment of its own, which extends no other.

    python: path of its Python on the host.
    """
    return WheelLock(
        tuple(Wheel.of(path.name, file_sha256(path)) for path in wheels), {}, node, python
    )
