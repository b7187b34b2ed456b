"""Playbooks that hosts run themselves, each by an Ansible of its own: what `ansible-pull` does, without git.

Where Ansible runs here, each task of each host costs this machine's processor; on the hosts, they share the
work. A host gets in one connection: Ansible and the pure Python packages under it, out of the environment
that clusterctl runs in, our playbooks, the variables of all hosts and the files that compute nodes are
given. Nothing is installed there, and nothing stays (remote_playbook.py). Its events come back as those of a
run here do.

Compute nodes of one's own do so where the spec says `ansible: nodes`; they can, since what a playbook does
on one of them needs nothing of another but the controller. A host without a Python that Ansible runs in is
configured from here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import tarfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.configure import events, inventory_file
from clusterctl.errors import CommandError, Failure, TransportError
from clusterctl.packages.bundle import PAYLOAD
from clusterctl.state.inventory import COMPUTE, Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import LONGEST_LINE, Connect, Conversation, lines, remote_program
from clusterctl.util.assets import asset, gpu_lock, job_lock, tree_files
from clusterctl.util.process import on_each
from clusterctl.util.progress import Limit

FOLDER = "/var/lib/clusterctl-ansible"  # on a host, while it runs a playbook
_MAX_PARALLEL: Final = 128
_ALIVE_S = 20.0  # how often a host says that it is still there: a task says nothing before its end
_SILENCE_S: Final = 300.0
_PATIENCE_S: Final = 5.0  # for hosts that are told to end
_PROGRAM: Final = remote_program("clusterctl.configure.remote_playbook")

# Distributions of Python that Ansible needs, all of them usable without compiled parts.
_PACKAGES: Final = (
    *("ansible-core", "ansible-runner", "mitogen", "jinja2", "markupsafe", "pyyaml", "packaging"),
    *("pexpect", "ptyprocess"),
)
_COLLECTED: Final = re.compile(r"^\s*(ansible\.posix|community\.\w+)\.(\w+):", re.MULTILINE)
_RENDERED: Final = (
    PAYLOAD,
    inventory_file.HEALTH_FILE,
    inventory_file.GPUS_FILE,
    inventory_file.SLURMD_FILE,
)

# site.yml in two parts. The second needs the shared folder, and all else that the controller has by then.
_STEPS: Final = {"site.yml": (("install_first.yml",), ("configure.yml", "seal.yml"))}

# The first Python that Ansible runs in, and which of the marks are there. The account's shell may say more.
_ANSWER: Final = "clusterctl: "
_ASK: Final = f"""\
echo
can='import asyncio, ctypes, multiprocessing, ssl, sys; sys.exit(sys.version_info < (3, 11))'
for python in python3 python3.13 python3.12 python3.11 /opt/clusterctl/env/bin/python; do
    "$python" -I -c "$can" 2>/dev/null && echo "{_ANSWER}$(command -v "$python")" && break
done
for mark; do [ ! -e "$mark" ] || echo "{_ANSWER}$mark"; done
"""

Take = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Puller:
    """A host that can run playbooks itself: in which Python, and the folders of wheels that it lacks."""

    host: str
    python: str
    wheels: tuple[Path, ...] = ()


def pullers(inventory: Inventory, chosen: Collection[str], workspace: Workspace, to: Connect) -> list[Puller]:
    """Those of the hosts that run their playbooks themselves, as the spec asks for; no ``chosen``: of all."""
    variables = workspace.ansible_inventory.read_text()
    # Apptainer's package is fetched here, for all hosts.
    fetches = "apptainer_fetched" in variables and not workspace.bundle.exists()
    if inventory.ansible != "nodes" or inventory.scheduler != "slurm" or fetches:
        return []
    hosts = [h for h in inventory.hosts if h.roles == (COMPUTE,) and (not chosen or h.name in chosen)]
    gpus = _read_json(workspace.rendered / inventory_file.GPUS_FILE)
    by_name = {host.name: host for host in hosts}
    marks = {lock: _mark(lock) for lock in (job_lock(), gpu_lock())}

    def ask(name: str) -> Puller | None:
        return _ask(by_name[name], gpus, marks, workspace, to)

    answers, _ = on_each(by_name, ask, most=_MAX_PARALLEL)  # one that does not answer is seen to from here
    return [one for one in answers.values() if one is not None]


def _ask(
    host: Host, gpus: Mapping[str, Any], marks: Mapping[Path, str], workspace: Workspace, to: Connect
) -> Puller | None:
    answer = to(host.name).run(["sh", "-c", _ASK, "sh", *marks.values()]).stdout
    said = [line.removeprefix(_ANSWER) for line in answer.splitlines() if line.startswith(_ANSWER)]
    python = next((path for path in said if path not in marks.values()), None)
    if python is None:
        return None
    wants = [(job_lock(), workspace.wheels)]
    if gpus.get(host.name, {}).get("cupy"):
        wants.append((gpu_lock(), workspace.gpu_wheels))
    lacks = [folder for lock, folder in wants if marks[lock] not in said and folder.is_dir()]
    return Puller(host.name, python, tuple(lacks))


def _mark(lock: Path) -> str:
    """The file by which a host tells that these wheels are installed: see the role job_env."""
    name = hashlib.sha1(lock.read_text().rstrip().encode()).hexdigest()  # noqa: S324 - a name
    return f"/opt/clusterctl/env/installed-{name}"


def _read_json(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return found


class Pull:
    """A playbook on the hosts that run it themselves. They begin, and wait before what needs the others."""

    def __init__(
        self,
        playbook: str,
        hosts: Sequence[Puller],
        workspace: Workspace,
        to: Connect,
        take: Take,
        *,
        check: bool,
    ) -> None:
        self._hosts = {one.host: one for one in hosts}
        self._steps = ((playbook,),) if check else _STEPS.get(playbook, ((playbook,),))
        self._check, self._to, self._take = check, to, take
        self._bundle = bundle(workspace)
        self._others = threading.Event()
        self._goes_on = self._abandoned = False
        self._talks: dict[str, Conversation] = {}
        self._failures: tuple[Failure, ...] = ()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="pull", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Have all hosts end what they run, and wait a moment for that; what is left ends by itself."""
        self._abandoned = True
        self._others.set()
        talks = dict(self._talks)

        def end(name: str) -> None:
            with suppress(OSError, ValueError):  # its own thread has closed it
                talks[name].finish()

        on_each(talks, end, most=_MAX_PARALLEL, limit=Limit.within(_PATIENCE_S))

    def finish(self, *, ready: bool) -> tuple[Failure, ...]:
        """Have hosts go on, if the controller is ready, and wait for their ends; what failed by itself."""
        self._goes_on = ready
        self._others.set()
        while self._thread.is_alive():
            self._thread.join(0.2)
        if self._error is not None:
            raise self._error
        return self._failures

    def _work(self) -> None:
        try:
            _, failed = on_each(self._hosts, self._play, most=_MAX_PARALLEL)
            self._failures = tuple(exc.on(host, "configure") for host, exc in failed.items())
        except BaseException as exc:  # raised again where it is waited for
            self._error = exc

    def _play(self, name: str) -> None:
        host, failed, stopped = self._hosts[name], False, False
        argv = ["sudo", "-n", "python3", "-I", "-c", _PROGRAM, json.dumps(self._request(host))]
        try:
            if self._abandoned:
                return
            with self._to(name).converse(argv, bulk=bool(host.wheels), silence_s=_SILENCE_S) as talk:
                self._talks[name] = talk
                with tarfile.open(fileobj=_Sink(talk.send), mode="w|", dereference=True) as tar:  # type: ignore[call-overload]
                    _add(tar, "common.tgz", self._bundle)
                    for folder in host.wheels:
                        tar.add(folder.resolve(), f"workspace/{folder.name}", filter=_of_root)
                long = TransportError(f"{name} says too much", host=name)
                for line in lines(iter(talk.receive, b""), long):
                    event = _event(name, line)
                    if "event" in event:
                        progress = events.progress_of(event)
                        failed |= progress is not None and progress.failed
                        if not self._abandoned:
                            self._take(event)
                    elif "waits" in event:
                        self._others.wait()
                        if stopped := not self._goes_on:
                            break
                        talk.send(b"go\n")
                talk.finish()  # at the end of its stdin, a host that waits ends, too
        except CommandError:
            if not (failed or stopped):  # else it has ended for what is known
                raise

    def _request(self, host: Puller) -> Mapping[str, Any]:
        local = json.dumps({"ansible_connection": "local", "ansible_become": False})
        return {
            "folder": FOLDER,
            "python": host.python,
            "host": host.host,
            "steps": self._steps,
            "options": f"{'--check --diff ' if self._check else ''}-e '{local}'",
            "longest": LONGEST_LINE // 2,
            "alive_s": _ALIVE_S,
            "environment": {
                "LC_ALL": "C.UTF-8",
                "PYTHONUNBUFFERED": "1",
                "ANSIBLE_CONFIG": f"{FOLDER}/ansible/ansible.cfg",
                "ANSIBLE_HOME": f"{FOLDER}/home",
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_STDOUT_CALLBACK": "default",
                "ANSIBLE_STRATEGY": "clusterctl_linear",
                "ANSIBLE_STRATEGY_PLUGINS": f"{FOLDER}/ansible/strategy_plugins",
                "ANSIBLE_DEPRECATION_WARNINGS": "False",
            },
        }


class _Sink:
    """A file that is written to a conversation; not after an error, when tarfile still ends its archive."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._broken = False

    def write(self, data: bytes) -> None:
        if not self._broken:
            self._broken = True
            self._send(data)
            self._broken = False


def bundle(workspace: Workspace) -> bytes:
    """What all hosts get, as a compressed tar: no secret but what each of them is given to keep."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=3) as tar:
        for name, path in _runtime():
            tar.add(path, f"site/{name}", filter=_of_root)
        root = asset("ansible")
        for path in tree_files(root):
            tar.add(path, f"ansible/{path.relative_to(root)}", filter=_of_root)
        for lock in (job_lock(), gpu_lock()):
            tar.add(lock, f"payload/{lock.name}", filter=_of_root)
        files = (workspace.munge_key, *(workspace.rendered / name for name in _RENDERED))
        for path in files:
            if path.exists():
                _add(tar, f"workspace/{path.relative_to(workspace.root)}", path.read_bytes())
        _add(tar, "inventory.yml", _moved(workspace).encode())
    return made.getvalue()


def _moved(workspace: Workspace) -> str:
    """The Ansible inventory, with the paths that these files have on a host."""
    text = workspace.ansible_inventory.read_text()
    places = {workspace.root: "workspace", job_lock().parent: "payload"}
    for place, there in places.items():
        text = re.sub(rf"(?<![\w/.-]){re.escape(str(place))}(?=/)", f"{FOLDER}/{there}", text)
    return text


def _runtime() -> Iterator[tuple[str, Path]]:
    """The files of Ansible and of what it needs, by their names where Python finds them."""
    for package in _PACKAGES:
        for file in importlib.metadata.files(package) or ():
            if file.parts[0] != ".." and "__pycache__" not in file.parts:
                yield str(file), Path(str(file.locate()))
    root = Path(str(importlib.metadata.distribution("ansible").locate_file("ansible_collections")))
    texts = "".join(p.read_text() for p in tree_files(asset("ansible")) if p.suffix == ".yml")
    modules: dict[str, set[str]] = {}
    for collection, module in _COLLECTED.findall(texts):
        modules.setdefault(collection.replace(".", "/"), set()).add(f"plugins/modules/{module}.py")
    for folder, names in modules.items():
        shared = (p.relative_to(root / folder) for p in tree_files(root / folder / "plugins/module_utils"))
        for name in (*sorted(names), "MANIFEST.json", "meta/runtime.yml", *map(str, shared)):
            yield f"ansible_collections/{folder}/{name}", root / folder / name


def _event(host: str, line: bytes) -> Mapping[str, Any]:
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    said = line[:200].decode(errors="replace").strip()
    raise TransportError(f"{host} says what is no event of Ansible's", why=said, host=host)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Else files are on the host those of whoever has our uid there."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o600
    tar.addfile(entry, io.BytesIO(data))
