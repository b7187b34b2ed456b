"""Machines for `provider: onprem`, as users have them: an ordinary account, a key, sshd.

    with lab("debian", 3) as one:
        one.ssh("node1", "id")
        spec.write_text(one.spec("mine", controller="node1", partitions={"train": "node[2-3]"}))

They are systemd-nspawn machines on a bridge and subnet for each lab, without a route out. The
process tests/support/keeper.py, which runs as root, creates and removes them.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML

from clusterctl.state.inventory import KEEPALIVE
from clusterctl.state.workspace import cache_home
from tests.support.nested import Host, leader
from tests.support.processes import ROOT, as_root, eventually, run_as_root
from tests.support.verbs import CommandResult

USER = "rocky"
PASSWORD = "correct horse"  # noqa: S105  (of the user, where sudo asks for one)
GATE = "gate"
ROUTE_OUT = "ip route show default"  # prints nothing on these machines
STATE = Path("/var/lib/clusterctl-labs")
_BUILD_TIMEOUT_S = 600

# See tests/support/furnish.py, and tests/support/foreign for the last two.
Kind = Literal["debian", "ubuntu-24.04", "el", "el-10", "campus", "national"]


@dataclass(frozen=True)
class Box:
    """What is asked for of one machine.

    ``sudo``: `free` asks for no password, `password` for PASSWORD, `none` lets the user do nothing.
    ``disk_mib`` is the size of the file system that takes its changes; None: this machine's own.
    """

    name: str
    sudo: Literal["free", "password", "none"] = "free"
    disk_mib: int | None = None


@dataclass(frozen=True)
class LabHost:
    """A machine that runs."""

    name: str
    address: str
    host_key: str  # public, as `ssh-ed25519 AAAA...`
    machine: str  # what systemd-nspawn calls it

    @property
    def leader(self) -> int:
        """The pid here of its PID 1; another one after a reboot."""
        pid = leader(self.machine)
        assert pid is not None, f"{self.name} is down"
        return pid

    @property
    def inside(self) -> Host:
        """Its root's hands: `host.inside.sh(SCRIPT)`."""
        return Host(self.machine, self.leader)


@dataclass(frozen=True)
class Lab:
    """Machines that are up.

    ``folder`` has the user's key, known_hosts and ssh_config, and is the caller's. ``gate`` is the
    one machine that is reached from here, if the others lie behind one. ``network`` is the hosts'
    own.
    """

    id: str
    folder: Path
    user: str
    network: str
    hosts: tuple[LabHost, ...]
    gate: LabHost | None = None
    shared: str | None = None

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """Host keys by address, the gate's too."""
        return self.folder / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: the hosts by name, through the gate if there is one."""
        return self.folder / "ssh_config"

    def host(self, name: str) -> LabHost:
        """The machine of that name, the gate too."""
        return {one.name: one for one in (*self.hosts, self.gate) if one}[name]

    def ssh(
        self,
        host: str,
        command: str,
        *,
        rc: int | None = 0,
        stdin: str = "",
        timeout_s: float = 120,
    ) -> CommandResult:
        """Run a shell command as the user; `rc=None` takes any exit code."""
        argv = ("ssh", "-F", str(self.ssh_config), host, command)
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        result = CommandResult(argv, done.returncode, done.stdout, done.stderr)
        assert rc is None or result.rc == rc, f"no exit {rc}\n{result}"
        return result

    def enter(
        self, host: str, argv: Sequence[str | Path], *, timeout_s: float = 120
    ) -> CommandResult:
        """Run a command as root in a machine's namespaces, without sshd; any exit code."""
        return self.host(host).inside.enter(*argv, timeout_s=timeout_s)

    def cut_power(self, *hosts: str) -> None:
        """End machines at once and without warning, until `restore_power`."""
        switches = [power_switch(self.id, host) for host in hosts]
        run_as_root("touch", *switches)
        run_as_root("kill", "-KILL", *(str(self.host(host).leader) for host in hosts))
        eventually(lambda: all(Path(f"{switch}.cut").exists() for switch in switches))

    def restore_power(self, *hosts: str) -> None:
        run_as_root("rm", *(power_switch(self.id, host) for host in hosts))

    def spec(
        self,
        name: str,
        *,
        controller: str | None = None,
        partitions: Mapping[str, str] | None = None,
        provider: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> str:
        """The text of a spec for these machines.

        By default the first one leads, and the others are partition `train`. ``partitions`` gives
        hosts by name; ``provider`` and ``more`` go over what is written by default.
        """
        lead = controller or self.hosts[0].name
        others = [host.name for host in self.hosts if host.name != lead] or [lead]
        asked = partitions or {"train": ",".join(others)}
        access: dict[str, Any] = {"user": self.user, "key": str(self.key)}
        written: dict[str, Any] = {
            "version": 1,
            "name": name,
            "provider": {
                "type": "onprem",
                "controller": lead,
                "access": access,
                "hosts": {
                    h.name: {"address": h.address, "host_key": h.host_key} for h in self.hosts
                },
                "shared": {"kind": "existing", "path": self.shared}
                if self.shared
                else {"kind": "none"},
                **(provider or {}),
            },
            "partitions": [{"name": each, "hosts": hosts} for each, hosts in asked.items()],
            **more,
        }
        text = StringIO()
        YAML(typ="safe", pure=True).dump(written, text)
        return text.getvalue()


def copy_folder(folder: Path, one: Lab, host: str, place: str) -> None:
    """Copy a folder to a machine, as root there."""
    unpack = f"sudo mkdir -p {place} && sudo tar -x -C {place} --no-same-owner"
    ssh = ["ssh", "-F", str(one.ssh_config), host, unpack]
    with subprocess.Popen(["tar", "-c", "-C", folder, "."], stdout=subprocess.PIPE) as packed:
        subprocess.run(ssh, stdin=packed.stdout, check=True, timeout=120)


def power_switch(lab_id: str, host: str) -> Path:
    """The file that exists while the power of a machine is cut."""
    return STATE / lab_id / "nodes" / host / "off"


@dataclass(frozen=True)
class Request:
    """What the keeper is asked for, as one JSON line.

    gate: all but one more machine, `gate`, are out of this machine's reach.
    internet: their apt may fetch packages from Debian, through a proxy on the bridge.
    shared: where all see one folder.
    shared_options: that folder is a tmpfs with these mount options. Default: a folder of this
        machine.
    options: more of systemd-nspawn's own.
    """

    id: str
    kind: Kind
    boxes: tuple[Box, ...]
    public_key: str
    cache: str
    user: str = USER
    password: str = PASSWORD
    gate: bool = False
    internet: bool = False
    shared: str | None = None
    shared_options: str = ""
    options: tuple[str, ...] = ()


@contextmanager
def lab(kind: Kind = "debian", boxes: int | Sequence[Box] = 3, **more: Any) -> Iterator[Lab]:
    """Boot machines, `node1`, `node2`, ... unless they are named; they are gone afterwards.

    ``more``: fields of ``Request``.

    Raises:
        AssertionError: they did not come up; says why.
    """
    asked = (
        tuple(Box(f"node{n + 1}") for n in range(boxes)) if isinstance(boxes, int) else tuple(boxes)
    )
    with tempfile.TemporaryDirectory(prefix="lab-") as name:
        folder = Path(name)
        key = folder / "id_ed25519"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        public = key.with_suffix(".pub").read_text().strip()
        cache_home().mkdir(parents=True, exist_ok=True)
        request = Request(secrets.token_hex(3), kind, asked, public, str(cache_home()), **more)
        with _kept(request) as answer:
            hosts = tuple(LabHost(**one) for one in answer["hosts"])
            front = next((host for host in hosts if request.gate and host.name == GATE), None)
            behind = tuple(host for host in hosts if host is not front)
            one = Lab(
                request.id, folder, request.user, answer["network"], behind, front, request.shared
            )
            _write_ssh_files(one)
            yield one


def answer_in(lines: Iterable[str]) -> Any:
    """Return the keeper's answer, which follows its reports of a new base image. None: it sent no
    answer.
    """
    return next((answer for answer in map(json.loads, lines) if "hosts" in answer), None)


@contextmanager
def _kept(request: Request) -> Iterator[Any]:
    """The keeper's answer, while it keeps the machines."""
    argv = [*as_root(), sys.executable, "-m", "tests.support.keeper"]
    with tempfile.TemporaryFile("w+") as error_file:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error_file,
            text=True,
            start_new_session=True,  # Ctrl-C is ours; the keeper hears of it when we close its stdin
        )
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(json.dumps(asdict(request)) + "\n")
            process.stdin.flush()
            answer = answer_in(process.stdout)
            error_file.seek(0)
            assert answer, f"no lab:\n{error_file.read()}"
            yield answer
        finally:
            process.stdin.close()
            code = process.wait(timeout=_BUILD_TIMEOUT_S)
            process.stdout.close()
        error_file.seek(0)
        assert code == 0, f"lab left:\n{error_file.read()}"


def _write_ssh_files(one: Lab) -> None:
    every = (*one.hosts, *((one.gate,) if one.gate else ()))
    one.known_hosts.write_text("".join(f"{host.address} {host.host_key}\n" for host in every))
    blocks = []
    for host in every:
        jump = f"    ProxyJump {GATE}\n" if one.gate and host is not one.gate else ""
        blocks.append(f"Host {host.name}\n    HostName {host.address}\n    User {one.user}\n{jump}")
    common = f"""Host *
    IdentityFile "{one.key}"
    IdentitiesOnly yes
    UserKnownHostsFile "{one.known_hosts}"
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    PasswordAuthentication no
    KexAlgorithms -sntrup761x25519*
    ConnectTimeout 10
    ServerAliveInterval {KEEPALIVE["interval"]}
    ServerAliveCountMax {KEEPALIVE["count"]}
    LogLevel ERROR
"""
    one.ssh_config.write_text("\n".join([*blocks, common]))
