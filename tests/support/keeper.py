"""The part of a lab that runs as root: `python -m tests.support.keeper` creates machines and prints
their addresses.

It removes them when stdin ends or anything fails. A killed keeper leaves a record with a free lock,
and the next keeper removes its machines; `--remove-dead` does only that.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import TypeAdapter

from clusterctl.providers.local import image, machine, system
from clusterctl.providers.local.helper import state_lock
from clusterctl.providers.local.layout import (
    CACHE,
    BakeRequest,
    address,
    bridge_name,
    machine_name,
    make_private,
    netns_name,
)
from clusterctl.providers.local.provider import image_keys
from clusterctl.providers.local.system import run
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.util.assets import digest
from tests.support import furnish
from tests.support.el import build as el
from tests.support.foreign import layer as foreign
from tests.support.lab import GATE, STATE, Box, LabHost, Request, power_switch
from tests.support.lab_web import inside, serving_apt, serving_files
from tests.support.processes import eventually

_BOOT_TIMEOUT_S = 60
_TRIES = 50
_SERVICES = 254  # the bridges' own address in their subnets: what serves the machines listens there
# 133: the machine wants to be booted again. $0: a file that exists while the machine has no power.
# $0.cut exists when the machine has ended.
_AGAIN = (
    'while "$@"; [ $? -eq 133 ] || [ -e "$0" ]; do '
    ': >"$0.cut"; while [ -e "$0" ]; do sleep 0.1; done; rm "$0.cut"; done'
)


def mount_disk(folder: Path, size_mib: int) -> None:
    """Mount a new file system of this size, in a sparse file, at a machine's folder."""
    file = folder.with_name(f"{folder.name}.img")
    run(["mkfs.ext4", "-q", "-m", "0", str(file), f"{size_mib}M"], action="making a small disk")
    run(["mount", "-o", "loop,discard", str(file), str(folder)], action="mounting a small disk")


class Keeper:
    """One lab, as far as it is made."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._folder = STATE / request.id
        self._netns = system.NETNS_DIR / netns_name(request.id)
        self._boxes = (*((Box(GATE),) if request.gate else ()), *request.boxes)
        self._front = IPv4Network(0)
        self._back = IPv4Network(0)
        self._tree = Tree((), frozenset())

    @contextmanager
    def kept(self) -> Iterator[dict[str, Any]]:
        """Everything that was asked for; yields what the caller is told."""
        request = self._request
        with ExitStack() as stack:
            self._tree = stack.enter_context(tree(request.kind, Path(request.cache)))
            stack.callback(remove, request.id)
            self._make_network()
            if request.internet:
                cache = Path(request.cache) / "test-debs"
                stack.enter_context(serving_apt(self._netns, cache, self._tree.apt_hosts))
            if self._tree.web:
                stack.enter_context(serving_files(self._netns, self._tree.web))
            lower = self._tree.layers
            lower = (furnish.layer(lower, self._folder / "furnished", request), *lower)
            for number, box in enumerate(self._boxes, start=1):
                self._start(number, box, lower)
            made = [
                asdict(self._await(number, box)) for number, box in enumerate(self._boxes, start=1)
            ]
            yield {"network": str(self._subnet(self._boxes[-1])), "hosts": made}

    def _make_network(self) -> None:
        """The bridge with its cable to this machine; one more without a cable for what lies behind
        a gate.
        """
        own = self._request.id
        with state_lock("up"):
            used = (*system.used_networks(), *(state.subnet for state in image.states()))
            self._front = system.choose_subnet(own, used)
            system.create_network(own, self._front)
        self._back = system.choose_subnet(own, (*used, self._front))
        ip = ["ip", "-n", netns_name(own)]
        bridges = {bridge_name(own): self._front}
        if self._request.gate:
            run(
                [*ip, *"link add back type bridge forward_delay 0".split()],
                action="making the second bridge",
            )
            run([*ip, *"link set back up".split()], action="starting the second bridge")
            bridges["back"] = self._back
        for bridge, subnet in bridges.items():
            add = ["addr", "add", f"{subnet[_SERVICES]}/{subnet.prefixlen}", "dev", bridge]
            run([*ip, *add], action="addressing a bridge")

    def _is_behind(self, box: Box) -> bool:
        return self._request.gate and box.name != GATE

    def _subnet(self, box: Box) -> IPv4Network:
        return self._back if self._is_behind(box) else self._front

    def _start(self, number: int, box: Box, lower: tuple[Path, ...]) -> None:
        request = self._request
        folder = self._folder / "nodes" / box.name
        folder.mkdir(parents=True)
        if box.disk_mib:
            mount_disk(folder, box.disk_mib)
        root = system.mount_overlay(lower, folder)
        addresses = {"host0": address(self._subnet(box), number)}
        if box.name == GATE:
            addresses["host1"] = address(self._back, number)
        services = str(self._subnet(box)[_SERVICES])
        furnish.machine(
            root, box, addresses, furnish.Services(services, self._tree.web_hosts), request
        )
        name = machine_name(request.id, number)
        bridge = "back" if self._is_behind(box) else bridge_name(request.id)
        argv = ["systemd-nspawn", "--quiet", "--boot", "--keep-unit", f"--directory={root}"]
        argv += [
            f"--machine={name}",
            f"--hostname={box.name}",
            "--resolv-conf=off",
            "--timezone=off",
        ]
        argv += ["--link-journal=no", f"--network-bridge={bridge}", *request.options]
        if box.name == GATE:
            argv.append("--network-veth-extra=gate-back:host1")
        if request.shared:
            shared = self._folder / "shared"
            shared.mkdir(exist_ok=True)
            if request.shared_options and not shared.is_mount():
                mount = [
                    "mount",
                    "-t",
                    "tmpfs",
                    "-o",
                    request.shared_options,
                    "shared",
                    str(shared),
                ]
                run(mount, action="mounting the shared folder")
            argv.append(f"--bind={shared}:{request.shared}")
        environment = image.boot_environment(None)
        switch = power_switch(request.id, box.name)
        through = ["nsenter", f"--net={self._netns}", *environment, "sh", "-c", _AGAIN, str(switch)]
        machine.launch(name, through, argv, folder / "console.log")

    def _await(self, number: int, box: Box) -> LabHost:
        """The machine, once its sshd answers."""
        if box.name == GATE:
            self._plug_gate()
        name = machine_name(self._request.id, number)
        own = address(self._subnet(box), number)
        folder = self._folder / "nodes" / box.name
        deadline = time.monotonic() + _BOOT_TIMEOUT_S
        while not self._answers(own):
            if time.monotonic() > deadline or name not in machine.running():
                console = (folder / "console.log").read_text(errors="replace")[-5000:]
                raise RuntimeError(f"{box.name} did not come up:\n{console}")
            time.sleep(0.1)
        public = (folder / "root/etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2]
        return LabHost(box.name, own, " ".join(public), name)

    def _plug_gate(self) -> None:
        """The gate's second cable is there once its systemd-nspawn runs."""
        ip = ["ip", "-n", netns_name(self._request.id)]
        eventually(
            lambda: "gate-back" in run([*ip, "link", "show"], action="reading links"),
            _BOOT_TIMEOUT_S,
        )
        run(
            [*ip, *"link set gate-back master back up".split()],
            action="plugging the gate's second cable",
        )

    def _answers(self, own: str) -> bool:
        """Asked from the bridges, to which also the machines behind a gate are near."""
        with inside(self._netns):
            probe = socket.socket()
        with probe, suppress(OSError):
            probe.settimeout(1)
            probe.connect((own, 22))
            return probe.recv(4) == b"SSH-"
        return False


def remove(lab_id: str) -> None:
    """Everything of a lab; done twice it does nothing the second time."""
    machine.stop([name for name in machine.alive() if name.startswith(f"c{lab_id}-")])
    machine.end_rooted(STATE / lab_id)
    machine.remove_cgroups(f"c{lab_id}-")
    with state_lock("down"):
        system.remove_network(lab_id)
        for _ in range(_TRIES):  # who looks into it just now keeps it
            system.remove_netns_folder()
            if not system.NETNS_DIR.is_dir() or any(system.NETNS_DIR.iterdir()):
                break
            time.sleep(0.1)
    system.erase(STATE / lab_id)


def remove_dead() -> None:
    for path in STATE.glob("*.lab"):
        with path.open() as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path.stem)
            path.unlink(missing_ok=True)
            print(f"removed lab {path.stem}", file=sys.stderr)  # noqa: T201


@contextmanager
def recorded(lab_id: str) -> Iterator[TextIO]:
    """The lab's record, locked as long as its keeper lives."""
    make_private(STATE)
    remove_dead()
    path = STATE / f"{lab_id}.lab"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
        finally:
            path.unlink()
            with suppress(OSError):
                STATE.rmdir()


_KEPT_S = 24 * 3600


@dataclass(frozen=True)
class Tree:
    """``layers``: an overlay's lower ones, topmost first. ``web`` has what its machines find on the
    web, and ``web_hosts`` are the names by which they look.
    """

    layers: tuple[Path, ...]
    apt_hosts: frozenset[str]
    web: Path | None = None
    web_hosts: tuple[str, ...] = ()


def debian(distribution: Literal["debian-12", "debian-13"] = "debian-12") -> Path:
    """The bare Debian of the local image, made if it is not in the cache."""
    settings = LocalSettings(distribution=distribution)
    base, key = image_keys(settings)
    root = CACHE / f"base-{base}" / "root"
    if root.is_dir():
        return root
    nobody = "ssh-ed25519 AAAA"  # an image that is baked has a key; its base has none
    request = BakeRequest(
        key=key,
        base_key=base,
        distribution=settings.release,
        mirror=settings.mirror,
        admin_key=nobody,
    )
    return image.build_base(request)


@contextmanager
def kept_tree(cache: Path, name: str, key: str, build: Callable[[Path], None]) -> Iterator[Path]:
    """The folder ``test-NAME-KEY``, which ``build`` fills if it is missing. It stays while the body
    runs.
    """
    folder = cache / f"test-{name}-{key}"
    lock = cache / f"test-{name}-{key}.lock"
    with (cache / f"test-{name}.lock").open("w") as builders, lock.open("w") as used:
        fcntl.flock(builders, fcntl.LOCK_EX)
        fcntl.flock(used, fcntl.LOCK_SH)
        _forget_older(cache, name)
        if not folder.is_dir():
            building = folder.with_suffix(".building")
            system.erase(building)
            building.mkdir()
            try:
                build(building)
                building.rename(folder)
            finally:
                system.erase(building)
        fcntl.flock(builders, fcntl.LOCK_UN)
        yield folder


def _forget_older(cache: Path, name: str) -> None:
    """Remove the trees that nobody uses just now and that were not used for a day."""
    for lock in cache.glob(f"test-{name}-*.lock"):
        with lock.open() as file, suppress(BlockingIOError):
            if time.time() - lock.stat().st_mtime > _KEPT_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                system.erase(lock.with_suffix(""))
                lock.unlink()


@contextmanager
def tree(kind: str, cache: Path) -> Iterator[Tree]:
    """What machines of that kind are made from; it stays while the body runs."""
    site = foreign.SITES.get(kind)
    base = debian("debian-13" if site and site.is_newer else "debian-12")
    if site:
        key = digest(str(base), *foreign.inputs())
        build = partial(foreign.build, site, base)
        with kept_tree(cache, kind, key, build) as folder:
            yield Tree((folder / "upper", base), frozenset())
    elif kind.startswith("el"):
        key = digest(str(base), *el.inputs())
        with kept_tree(cache, "el", key, partial(el.build, base)) as folder:
            yield Tree((folder / "upper", base), frozenset(), folder, el.hosts())
    else:
        sources = (base / "etc/apt/sources.list").read_text()
        yield Tree((base,), frozenset(re.findall(r"http://([^/\s]+)", sources)))


def main() -> None:
    # Ctrl-C and the like are the caller's; we notice that it is gone when stdin closes.
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(name, signal.SIG_IGN)
    os.umask(0o022)
    if sys.argv[1:] == ["--remove-dead"]:
        remove_dead()
        return
    request = TypeAdapter(Request).validate_json(sys.stdin.readline())
    with recorded(request.id), Keeper(request).kept() as answer:
        print(json.dumps(answer), flush=True)  # noqa: T201  (the protocol)
        sys.stdin.read()


if __name__ == "__main__":
    main()
