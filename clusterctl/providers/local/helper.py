"""The local provider's root helper: ``python -I -B -m clusterctl.providers.local.helper serve``,
run as root.

A request is a JSON line on stdin, ``{"verb": …, "request": …}``. Answers are JSON lines on stdout:
any number of ``{"progress": …}``, ``{"waiting": …}`` and ``{"ready": …}``, then ``{"result": …,
"goes_on": …}``, where ``goes_on`` tells whether another request is accepted, or ``{"error": …}``,
after which the helper ends. If stdin closes while an image is being built, the caller has ended, so
the helper deletes the unfinished image.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from clusterctl.errors import ClusterctlError, MachineError, ProvisionError
from clusterctl.providers.local import image, layout, machine, processes, system
from clusterctl.providers.local.machine import Machine
from clusterctl.providers.local.system import TOOL_ENV, end_children, has_dnf
from clusterctl.spec import distributions
from clusterctl.state.workspace import WAIT_S, hold, write_atomic
from clusterctl.util.disk import REFUSALS, disk_error
from clusterctl.util.process import parallel_map

TOOLS = {
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "taskset": "util-linux",
    "mount": "mount",
    "ssh-keygen": "openssh-client",
}
# Names of dnf packages that differ from apt's.
DNF_NAMES = {"ip": "iproute", "mount": "util-linux", "ssh-keygen": "openssh"}
DONE = json.dumps("done")
# Nodes that are prepared at the same time. More than the cores, because most of the time is
# waiting.
_PARALLEL = 8


def _check_tools() -> None:
    maker = "dnf" if distributions.redhat_release() else "mmdebstrap"
    tools = {**TOOLS, maker: maker, **(DNF_NAMES if has_dnf() else {})}
    missing = {
        tool: pkg for tool, pkg in tools.items() if not shutil.which(tool, path=TOOL_ENV["PATH"])
    }
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        summary = f"these tools are missing on this machine: {', '.join(missing)}"
        reason = (
            "the local provider boots its nodes with systemd-nspawn from an image built with "
            + maker
        )
        fix = f"{'dnf' if has_dnf() else 'apt-get'} install {packages}"
        raise MachineError(summary, code="tool-missing", where="this machine", why=reason, fix=fix)


def bake(message: dict[str, Any]) -> dict[str, Any]:
    """Create the nodes' image, unless it is cached or the cluster's nodes already have an image.

    The helper sends `ready` and waits for a reply, while the caller runs Ansible on the image over
    SSH.
    """
    request = layout.BakeRequest.model_validate(message)
    if request.id and layout.state_file(request.id).exists():
        return {}
    _check_tools()
    with state_lock("up"):
        for place in (layout.STATE, layout.CACHE):
            system.check_overlay(place)
        # Building an image takes minutes, and no cluster could use it.
        image.free_subnet(request.id or "", request.subnet)
    _bake_missing(
        {"image": (lambda: image.cached(request.key) or None, lambda: image.baking(request))}
    )
    return {}


def bake_class(message: dict[str, Any]) -> dict[str, Any]:
    """Create the node templates that are not cached. Return group of nodes -> cache key of its
    template.

    The helper sends `ready` and waits for a reply, while the caller runs Ansible on the templates
    over SSH.
    """
    request = layout.ClassRequest.model_validate(message)
    image_key = request.image
    with suppress(FileNotFoundError):
        image_key = layout.ClusterState.model_validate_json(
            layout.state_file(request.id).read_bytes()
        ).image
    keys = {group: image.class_key(image_key, inputs) for group, inputs in request.inputs.items()}
    missing: dict[str, _Cached] = {}
    for group, key in keys.items():
        try:
            os.utime(layout.class_folder(key))
        except FileNotFoundError:
            making = partial(image.class_baking, key, image_key, request.admin_key)
            missing[group] = layout.class_folder(key).is_dir, making
    if missing:
        _bake_missing(missing)
        with image.cache_lock("up"), state_lock("up"):
            image.erase_old_classes()
    return keys


# A function that returns whether an image is cached, and a context manager that creates the image
# and yields its SSH port and host key.
_Cached = tuple[Callable[[], object], Callable[[], AbstractContextManager[tuple[int, str]]]]


def _bake_missing(items: Mapping[str, _Cached]) -> None:
    missing = {name: baking for name, (is_cached, baking) in items.items() if not is_cached()}
    if not missing:
        return
    caller = _Caller.reading or _Caller()
    with ExitStack() as stack:
        caller.check()
        answering = {name: stack.enter_context(baking()) for name, baking in missing.items()}
        ready = {name: {"port": port, "host_key": key} for name, (port, key) in answering.items()}
        system.answer({"ready": ready})
        caller.wait()


class _Caller:
    """Reads stdin while an image is being created, to notice that the calling clusterctl has
    ended.
    """

    # The instance whose thread reads stdin now; it takes the next line as the caller's reply.
    reading: _Caller | None = None

    def __init__(self) -> None:
        self._done = threading.Event()
        self._word = ""
        _Caller.reading = self
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self._word = sys.stdin.readline().strip()
        _Caller.reading = None
        if self._word != DONE:
            end_children()
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        self.check()

    def check(self) -> None:
        if self._done.is_set() and self._word != DONE:
            raise ProvisionError(
                "the node image was not finished",
                code="internal",
                about="image",
                why="clusterctl ended or failed",
            )


def _check_caller() -> None:
    readable, _, _ = select.select([0], [], [], 0)
    if readable and not os.read(0, 1):
        raise ProvisionError(
            "the root helper stopped early",
            code="internal",
            about="caller",
            why="clusterctl has ended",
        )


@contextmanager
def state_lock(verb: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock on the local clusters of all accounts. ``verb``: the command's name, for
    messages.
    """
    for folder in (layout.RUN, layout.STATE):
        layout.make_private(folder)
    with hold(
        layout.RUN / "lock", verb, what="this machine", wait_s=wait_s, waiting=system.waiting
    ):
        yield


def up(message: dict[str, Any]) -> dict[str, Any]:
    """Create the missing parts of a cluster, and remove nodes that the request does not contain."""
    request = layout.ClusterRequest.model_validate(message)
    _check_tools()
    with state_lock("up"):
        system.erase_doomed(layout.STATE)
        state = _load_state(request)
        lower = image.layers(state.image)
        notes = _prepare_this_machine(request, state)
        requested = request.image if request.packages == state.packages else state.image
        notes += tuple(
            state.notes_on_kept_settings(request.subnet, requested, request.distribution)
        )
        recreated, removed = _remove_nodes(request, state)
        if recreated:
            notes += (f"recreated: {', '.join(recreated)}",)
        state = _assign_numbers(state, request)
        facts = state.model_dump(include={"subnet", "distribution"})
        answer = layout.MadeCluster(
            nodes=(),
            limits_memory=machine.limits_memory(),
            removed=removed,
            notes=notes,
            **facts,
        )
        shared = _shared_folder(state)
        notes += _mount_again(request, state, shared)
        nodes = _start_nodes(request, state, answer, lower, shared)
    more = {*request.packages} - {*state.packages}
    if more - {*state.added} or (more and any(node.made for node in nodes)):
        notes += image.install_packages(state.hosts, sorted(more))
        state = state.model_copy(update={"added": tuple(sorted(more))})
        write_atomic(layout.state_file(request.id), state.model_dump_json())
    return answer.model_copy(update={"nodes": nodes, "notes": notes}).model_dump(mode="json")


def _prepare_this_machine(
    request: layout.ClusterRequest, state: layout.ClusterState
) -> tuple[str, ...]:
    """Create the cluster's network and raise kernel limits. Return notes about changes of this
    machine.
    """
    system.create_network(request.id, state.subnet)
    notes = system.close_network(request.id, state.subnet)
    alive = machine.alive()
    other_machines = len(alive) - len(machines_of(request.id, alive))
    notes += system.raise_kernel_limits(other_machines + len(request.nodes))
    return notes if machine.booted_with_systemd() else notes + system.disable_autogroup()


def _mount_again(
    request: layout.ClusterRequest, state: layout.ClusterState, shared: Path
) -> tuple[str, ...]:
    """Mount the shared folder again in running nodes that have lost it. Return a note of them."""
    running = machine.alive()
    machines = [Machine(request.id, node, state.numbers[node.name]) for node in request.nodes]
    mounted = [
        guest.node.name
        for guest in machines
        if guest.name in running
        and processes.mount_again(running[guest.name], shared, layout.SHARED)
    ]
    return (f"mounted {layout.SHARED} again: {', '.join(mounted)}",) if mounted else ()


def _start_nodes(
    request: layout.ClusterRequest,
    state: layout.ClusterState,
    answer: layout.MadeCluster,
    lower: tuple[Path, ...],
    shared: Path,
) -> tuple[layout.MadeNode, ...]:
    running = machine.alive()
    machines = [Machine(request.id, node, state.numbers[node.name]) for node in request.nodes]
    new = frozenset(guest.node.name for guest in machines if not guest.folder.is_dir())
    classes = {g: key for g in machines if g.node.name in new and (key := request.class_of(g.node))}
    files: dict[str, list[layout.PlacedFile]] = {}
    if classes:
        for key in {*classes.values()}:
            image.class_layer(key)
        planned = tuple(_made_node(guest, state, running, new) for guest in machines)
        files = _ask_for_files(answer.model_copy(update={"nodes": planned}))
        if any(not guest.node.cores for guest in classes) and not any(shared.iterdir()):
            machine.make_homes(request, shared, lower)

    def start_node(guest: Machine) -> None:
        _check_caller()
        if guest.name in running:
            if guest.node.cores:
                machine.pin(guest, running[guest.name])
            return
        note = layout.class_note(guest.folder)
        own = files.get(guest.node.name, ()) if guest in classes else ()
        if guest in classes:
            guest.folder.mkdir(parents=True)
            write_atomic(note, classes[guest])
        layers = (image.class_layer(note.read_text()), *lower) if note.exists() else lower
        machine.prepare(guest, layers, state.subnet, request.admin_key, own)
        release = state.distribution
        machine.start(guest, shared, image.boot_words(release), image.boot_environment(release))

    parallel_map(machines, start_node, most=_PARALLEL)
    if started := [guest for guest in machines if guest.name not in running]:
        machine.check_started(started)
    return tuple(_made_node(guest, state, running, new) for guest in machines)


def _made_node(
    guest: Machine, state: layout.ClusterState, running: Container[str], new: Container[str]
) -> layout.MadeNode:
    key = guest.folder / "host_key"
    return layout.MadeNode(
        name=guest.node.name,
        address=layout.address(state.subnet, guest.number),
        host_key=machine.public_key(key) if key.exists() else "",
        started=guest.name not in running,
        made=guest.node.name in new,
    )


def _ask_for_files(answer: layout.MadeCluster) -> dict[str, list[layout.PlacedFile]]:
    """Send ``answer``, with all nodes' addresses, to the caller. Return its reply: node -> node's
    files.
    """
    system.answer({"ready": answer.model_dump(mode="json")})
    if not (line := sys.stdin.readline()):
        raise ProvisionError(
            "the root helper stopped early",
            code="internal",
            about="caller",
            why="clusterctl has ended",
        )
    files_by_host = json.loads(line)
    return {
        host: [layout.PlacedFile.model_validate(f) for f in files]
        for host, files in files_by_host.items()
    }


def _shared_folder(state: layout.ClusterState) -> Path:
    """Return the folder that nodes mount as /shared. Create it if it is missing."""
    state.shared.mkdir(parents=True, exist_ok=True, mode=0o755)
    return state.shared


def _load_state(request: layout.ClusterRequest) -> layout.ClusterState:
    """Read the cluster's `cluster.json`. For a new cluster, write this file before creating
    anything else.
    """
    path = layout.state_file(request.id)
    if path.exists():
        return layout.ClusterState.model_validate_json(path.read_bytes()).with_packages(
            request.packages
        )
    image.layers(request.image)
    if request.storage:
        _reject_use(request.owner, request.storage)
    subnet = image.free_subnet(request.id, request.subnet)
    state = layout.ClusterState.model_validate(request.model_dump() | {"subnet": subnet})
    layout.make_private(path.parent)
    write_atomic(path, state.model_dump_json())
    return state


def _assign_numbers(
    state: layout.ClusterState, request: layout.ClusterRequest
) -> layout.ClusterState:
    """Give each requested node a number, write this to `cluster.json`, and return the new state."""
    numbers = layout.numbered((node.name for node in request.nodes), state.numbers)
    state = state.model_copy(update={"numbers": numbers})
    write_atomic(layout.state_file(request.id), state.model_dump_json())
    return state


def _remove_nodes(
    request: layout.ClusterRequest, state: layout.ClusterState
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove nodes. Return (nodes that must be created again, nodes that the request does not
    contain).
    """
    nodes = layout.cluster_dir(request.id) / "nodes"
    nodes.mkdir(exist_ok=True)
    system.erase_doomed(nodes)
    existing_nodes = {path.name for path in nodes.iterdir()}
    requested = [node.name for node in request.nodes]
    recreated = [n for n in requested if n in existing_nodes and n in request.anew]
    surplus = sorted(existing_nodes.difference(requested))
    leaving = {*recreated, *surplus, *(state.numbers.keys() - set(requested))}
    names = {
        layout.machine_name(request.id, state.numbers[n]) for n in leaving if n in state.numbers
    }
    # On a busy machine even the search for machines takes a while.
    if names:
        machine.stop([name for name in machine.alive() if name in names])
    for name in (*recreated, *surplus):
        system.erase(nodes / name)
    return tuple(recreated), tuple(surplus)


def down(message: dict[str, Any]) -> dict[str, Any]:
    """Remove a cluster, but not its storage. A repeated call changes nothing."""
    cluster_id = layout.ClusterQuery.model_validate(message).id
    with state_lock("down"):
        machine.stop(machines_of(cluster_id, machine.alive()))
        machine.end_rooted(layout.cluster_dir(cluster_id))
        machine.remove_cgroups(f"c{cluster_id}-")
        system.remove_network(cluster_id)
        system.erase(layout.cluster_dir(cluster_id))
        system.erase_doomed(layout.STATE)
        for place in (layout.STATE, layout.CACHE):
            system.erase(place / system.CHECK)
        if not image.states():
            system.restore_kernel_settings()
            system.remove_netns_folder()
    image.remove_unfinished()
    return {}


def storage(message: dict[str, Any]) -> dict[str, Any]:
    """Delete a storage of an account, if requested. Return the account's remaining storages."""
    query = layout.StorageQuery.model_validate(message)
    top = layout.storages_folder(query.owner)
    # An interrupted removal continues.
    system.erase_doomed(top)
    if query.remove:
        with state_lock("storage remove"):
            _reject_use(query.owner, query.remove)
            system.erase(top / query.remove)
            with suppress(OSError):
                top.rmdir()
                top.parent.rmdir()
    return {"storages": [each.model_dump() for each in _stored_folders(query.owner, top)]}


def _stored_folders(owner: int, top: Path) -> Iterator[layout.StoredFolder]:
    for folder in sorted(top.glob("[!.]*")):
        try:
            yield _stored(owner, folder)
        except (ProvisionError, FileNotFoundError):
            # Another command may have removed it just now.
            if folder.exists():
                raise


def _users_of(owner: int, name: str) -> tuple[layout.ClusterState, ...]:
    """Return the account's clusters that use this storage."""
    return tuple(state for state in image.states() if (state.owner, state.storage) == (owner, name))


def _reject_use(owner: int, name: str) -> None:
    if users := _users_of(owner, name):
        raise ProvisionError(
            f"storage {name!r} is in use",
            code="in-use",
            about="storage",
            where="storage.name",
            why=f"cluster {', '.join(state.name for state in users)} uses it",
            fix="take that cluster down first, or choose another name",
        )


def _stored(owner: int, folder: Path) -> layout.StoredFolder:
    system.progress(f"measuring {folder.name}")
    size = system.run(["du", "-sm", str(folder)], action=f"measuring {folder}").split()[0]
    homes = {path.name: path.lstat().st_uid for path in (folder / "home").glob("[!.]*")}
    users = tuple((state.name, state.id) for state in _users_of(owner, folder.name))
    return layout.StoredFolder(name=folder.name, size_mib=int(size), users=users, homes=homes)


def machines_of(cluster_id: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"c{cluster_id}-")]


def existing(message: dict[str, Any]) -> dict[str, Any]:
    cluster_id = layout.ClusterQuery.model_validate(message).id
    machines = machines_of(cluster_id, machine.alive())
    return existing_of(layout.cluster_dir(cluster_id), machines).model_dump(mode="json")


def existing_of(folder: Path, machines: Sequence[str]) -> layout.ExistingMachines:
    """Return the existing parts of the cluster with this folder. ``machines``: its running
    machines.
    """
    answer = layout.ExistingMachines(machines=tuple(machines))
    with suppress(FileNotFoundError):
        content = (folder / layout.STATE_FILE).read_bytes()
        state = layout.ClusterState.model_validate_json(content)
        nodes = frozenset(node.name for node in (folder / "nodes").glob("[!.]*"))
        running = frozenset(state.hosts[name] for name in machines if name in state.hosts)
        answer = answer.model_copy(update={"state": state, "nodes": nodes, "running": running})
    return answer


def look(message: dict[str, Any]) -> dict[str, Any]:
    """Return a line for each part of a cluster that still exists. Empty after a complete `down`."""
    cluster_id = layout.ClusterQuery.model_validate(message).id
    folder = layout.cluster_dir(cluster_id)
    alive = machine.alive()
    netns = layout.netns_name(cluster_id)
    residue = [f"machine {name} (pid {alive[name][0]})" for name in machines_of(cluster_id, alive)]
    residue += [f"process {pid} in {netns}" for pid in system.in_network(system.NETNS_DIR / netns)]
    residue += [f"process {pid} on a node's file system" for pid in system.rooted_under(folder)]
    residue += [f"mount {point}" for point in system.mounted_under(folder)]
    names = {netns, layout.bridge_name(cluster_id)}
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    residue += [f"link {name}" for name in links if name in names or f"c{cluster_id}-" in name]
    residue += [f"control group {group}" for group in machine.cgroups(f"c{cluster_id}-")]
    if (system.NETNS_DIR / netns).exists():
        residue.append(f"network namespace {netns}")
    residue += [f"folder {path}" for path in (system.doomed(folder), folder) if path.exists()]
    return {"residue": residue}


def clusters(message: dict[str, Any]) -> dict[str, Any]:
    layout.NoQuery.model_validate(message)
    return {"clusters": [state.model_dump(mode="json") for state in image.states()]}


def cache(message: dict[str, Any]) -> dict[str, Any]:
    """Return the cached images. With ``prune`` in the message, delete and return only the unused
    images.
    """
    if layout.CacheQuery.model_validate(message).prune:
        with image.cache_lock("cache prune"), state_lock("cache prune"):
            images = image.prune()
    else:
        images = image.cache_list()
    return {"images": [i.model_dump() for i in images]}


_OWN = (bake, bake_class, up, down, existing, look, clusters, storage, cache)
VERBS = {v.__name__: v for v in (*_OWN, processes.kill_host, processes.signal_ranks)}
_FIELDS = ("code", "about", "what", "where", "why", "fix")


def main() -> int:
    # Ctrl-C in the terminal is meant for the caller. The helper notices the caller's end when stdin
    # closes.
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(name, signal.SIG_IGN)
    os.umask(0o022)
    goes_on = True
    while goes_on and (line := sys.stdin.readline()):
        goes_on = _serve(json.loads(line))
    return 0 if goes_on else 1


def _serve(message: dict[str, Any]) -> bool:
    """Execute a request and send the answer. Return whether the helper can accept another
    request.
    """
    try:
        result = VERBS[message["verb"]](message["request"])
        goes_on = _Caller.reading is None
        system.answer({"result": result, "goes_on": goes_on})
        return goes_on
    except ClusterctlError as exc:
        error = exc
    except OSError as exc:
        reason = f"{exc.strerror}: {exc.filename}" if exc.filename else str(exc)
        failed = ProvisionError(
            "an operation on this machine failed", code="internal", about="machine-work", why=reason
        )
        error = disk_error(exc) if exc.errno in REFUSALS else failed
    system.answer(
        {"error": {"kind": type(error).__name__} | {key: getattr(error, key) for key in _FIELDS}}
    )
    return False


if __name__ == "__main__":
    sys.exit(main())
