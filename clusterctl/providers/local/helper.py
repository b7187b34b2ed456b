"""The one part that runs as root: ``python -I -B -m clusterctl.providers.local.helper serve``.

A request is one JSON line on stdin, ``{"verb": …, "request": …}``. Answers are JSON lines on stdout: any
number of ``{"progress": …}``, ``{"waiting": …}`` or ``{"ready": …}``, then ``{"result": …, "goes_on": …}``,
which tells whether another request is taken, or ``{"error": …}``, after which none is. When stdin closes
before an image is baked, the caller is gone: what was started is ended and removed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from clusterctl.errors import ClusterctlError, MachineError, ProvisionError
from clusterctl.providers.local import image, layout, machine, system
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
DNF_NAMES = {"ip": "iproute", "mount": "util-linux", "ssh-keygen": "openssh"}  # where dnf's differ
DONE = json.dumps("done")  # what the caller replies once an image is baked
_PARALLEL = 8  # nodes that are made ready; what each needs is mostly waited for


def _check_tools(*, disks: bool = False) -> None:
    tools = {**TOOLS, "mkfs.ext4": "e2fsprogs"} if disks else TOOLS
    maker = "dnf" if distributions.redhat_release() else "mmdebstrap"
    tools = {**tools, maker: maker, **(DNF_NAMES if has_dnf() else {})}
    missing = {tool: pkg for tool, pkg in tools.items() if not shutil.which(tool, path=TOOL_ENV["PATH"])}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        what = f"missing tool{'s' if len(missing) > 1 else ''}: {', '.join(missing)}"
        why = "the local provider boots its nodes with systemd-nspawn from an image made by " + maker
        fix = f"{'dnf' if has_dnf() else 'apt-get'} install {packages}"
        raise MachineError(what, code="tool-missing", where="this machine", why=why, fix=fix)


def bake(request: dict[str, Any]) -> dict[str, Any]:
    """Make an image unless it is cached; the caller runs install.yml on it between `ready` and its `done`.

    Nodes of a cluster that is there stay what they were made from; for another one, this machine is checked.
    """
    wanted = layout.BakeRequest.model_validate(request)
    if wanted.id and layout.state_file(wanted.id).exists():
        return {}
    _check_tools()
    with state_lock("up"):
        for place in (layout.STATE, layout.CACHE):
            system.check_overlay(place)
    _have({"image": (lambda: image.cached(wanted.key) or None, lambda: image.baking(wanted))})
    return {}


def bake_class(request: dict[str, Any]) -> dict[str, Any]:
    """Make the layers of classes that are not there; the caller runs class.yml on them, as in ``bake``.

    The answer has the key of each group's.
    """
    wanted = layout.ClassRequest.model_validate(request)
    over = wanted.image
    with suppress(FileNotFoundError):
        over = layout.ClusterState.model_validate_json(layout.state_file(wanted.id).read_bytes()).image
    keys = {group: image.class_key(over, inputs) for group, inputs in wanted.inputs.items()}
    missing: dict[str, _Cached] = {}
    for group, key in keys.items():
        try:
            os.utime(layout.class_folder(key))  # which of them are used
        except FileNotFoundError:
            making = partial(image.class_baking, key, over, wanted.admin_key)
            missing[group] = layout.class_folder(key).is_dir, making
    if missing:
        _have(missing)
        with image.cache_lock("up"), state_lock("up"):
            image.erase_old_classes()
    return keys


# Whether it is in the cache; and what makes it while the body runs: (port, host key) answer SSH.
_Cached = tuple[Callable[[], object], Callable[[], AbstractContextManager[tuple[int, str]]]]


def _have(wanted: Mapping[str, _Cached]) -> None:
    """Have all of it in the cache: what is missing is baked at once, and the caller told of it by name."""
    if all(found() for found, _ in wanted.values()):
        return
    watch = _Caller.reading or _Caller()
    watch.has_begun = False
    with image.cache_lock("up"), ExitStack() as stack:
        watch.has_begun = True
        missing = {name: baking for name, (found, baking) in wanted.items() if not found()}
        if missing:
            watch.check()
            answering = {name: stack.enter_context(baking()) for name, baking in missing.items()}
            system.answer(
                {"ready": {n: {"port": port, "host_key": key} for n, (port, key) in answering.items()}}
            )
            watch.wait()


class _Caller:
    """Watches the caller's end of stdin while something is being built on its behalf."""

    reading: _Caller | None = None  # who takes what the caller says next for the end of that

    def __init__(self) -> None:
        self.has_begun = False
        self._done = threading.Event()
        self._word = ""
        _Caller.reading = self
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self._word = sys.stdin.readline().strip()
        _Caller.reading = None
        if self._word != DONE:
            if not self.has_begun:
                # Another clusterctl builds, perhaps for minutes, and this process only waits for its lock.
                os._exit(1)
            end_children()
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        self.check()

    def check(self) -> None:
        """That it has not gone away."""
        if self._done.is_set() and self._word != DONE:
            raise ProvisionError(
                "the image was not finished", code="image-not-finished", why="clusterctl went away or gave up"
            )


def _refuse_to_go_on_alone() -> None:
    """In long work: that the caller, who has nothing more to say, has not gone away."""
    said, _, _ = select.select([0], [], [], 0)
    if said and not os.read(0, 1):
        raise ProvisionError("the work was not finished", code="caller-gone", why="clusterctl went away")


@contextmanager
def state_lock(verb: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """One clusterctl at a time changes what is local clusters' on this machine."""
    for folder in (layout.RUN, layout.STATE):
        layout.make_private(folder)
    with hold(layout.RUN / "lock", verb, what="this machine", wait_s=wait_s, waiting=system.waiting):
        yield


def up(request: dict[str, Any]) -> dict[str, Any]:
    """Make what is missing of a cluster, remove nodes that are no longer named."""
    wanted = layout.ClusterRequest.model_validate(request)
    _check_tools(disks=any(node.disk_mib for node in wanted.nodes))
    with state_lock("up"):
        system.erase_doomed(layout.STATE)
        state = _state(wanted)
        lower = image.layers(state.image)  # without its image nothing is begun
        notes = _prepare_this_machine(wanted, state)
        notes += tuple(state.kept(wanted.subnet, wanted.image, wanted.distribution, wanted.slurm))
        anew, removed = _remove_nodes(wanted, state)
        notes += (f"made anew: {', '.join(anew)}",) if anew else ()
        state = _number(state, wanted)
        told = state.model_dump(include={"subnet", "distribution", "slurm"})
        answer = layout.MadeCluster(nodes=(), removed=removed, notes=notes, **told)
        nodes = _raise_nodes(wanted, state, answer, lower)
    return answer.model_copy(update={"nodes": nodes}).model_dump(mode="json")


def _prepare_this_machine(wanted: layout.ClusterRequest, state: layout.ClusterState) -> tuple[str, ...]:
    """Make the cluster's network, and change settings of this machine; returns what was changed."""
    system.create_network(wanted.id, state.subnet)
    notes = system.close_network(wanted.id, state.subnet)
    alive = machine.alive()
    others = len(alive) - len(_machines_of(wanted.id, alive))
    notes += system.raise_kernel_limits(others + len(wanted.nodes))
    return notes if machine.booted_with_systemd() else notes + system.disable_autogroup()


def _raise_nodes(
    wanted: layout.ClusterRequest,
    state: layout.ClusterState,
    answer: layout.MadeCluster,
    lower: tuple[Path, ...],
) -> tuple[layout.MadeNode, ...]:
    """Make and start the nodes that do not run, over ``lower``. The caller has the own files of new ones."""
    shared, running = _shared(wanted), machine.alive()
    machines = [Machine(wanted.id, node, state.numbers[node.name]) for node in wanted.nodes]
    new = frozenset(one.node.name for one in machines if not one.folder.is_dir())
    classes = {one: key for one in machines if one.node.name in new and (key := wanted.class_of(one.node))}
    files: dict[str, list[layout.PlacedFile]] = {}
    if classes:
        for key in {*classes.values()}:
            image.class_layer(key)  # it may have been pruned: then nothing is begun
        planned = tuple(_made(one, state, running, new) for one in machines)
        files = _files_of_each(answer.model_copy(update={"nodes": planned}))
        if any(not one.node.cores for one in classes) and not any(shared.iterdir()):
            machine.make_homes(wanted, shared, lower)

    def raise_node(one: Machine) -> None:
        _refuse_to_go_on_alone()
        if one.name in running:
            if one.node.cores:
                machine.pin(one, running[one.name])
            return
        note, own = layout.class_note(one.folder), files.get(one.node.name, ()) if one in classes else ()
        if one in classes:
            one.folder.mkdir(parents=True)
            write_atomic(note, classes[one])
        layers = (image.class_layer(note.read_text()), *lower) if note.exists() else lower
        machine.prepare(one, layers, state.subnet, wanted.admin_key, own)
        release = state.distribution
        machine.start(one, shared, image.boot_words(release), image.boot_environment(release))

    parallel_map(machines, raise_node, most=_PARALLEL)
    if started := [one for one in machines if one.name not in running]:
        machine.check_started(started)
    return tuple(_made(one, state, running, new) for one in machines)


def _made(
    one: Machine, state: layout.ClusterState, running: Container[str], new: Container[str]
) -> layout.MadeNode:
    key = one.folder / "host_key"
    return layout.MadeNode(
        name=one.node.name,
        address=layout.address(state.subnet, one.number),
        host_key=machine.public_key(key) if key.exists() else "",
        started=one.name not in running,
        made=one.node.name in new,
    )


def _files_of_each(answer: layout.MadeCluster) -> dict[str, list[layout.PlacedFile]]:
    """Ask the caller for the own files of new nodes, now that all have addresses."""
    system.answer({"ready": answer.model_dump(mode="json")})
    if not (said := sys.stdin.readline()):
        raise ProvisionError("the work was not finished", code="caller-gone", why="clusterctl went away")
    return {
        host: [layout.PlacedFile.model_validate(file) for file in files]
        for host, files in json.loads(said).items()
    }


def _shared(wanted: layout.ClusterRequest) -> Path:
    """The folder that nodes have as /shared: kept from an earlier cluster, or a new one."""
    shared = layout.shared_folder(wanted.id)
    layout.storage_file(wanted.id).unlink(missing_ok=True)
    is_new = not shared.exists() or not any(shared.iterdir())  # made by an `up` that was ended just then
    if wanted.storage is not None and is_new:
        before = next((one for one in _kept_folders() if one.id == wanted.storage), None)
        if before is None or before.owner != wanted.owner:
            what = "the kept storage is gone"
            raise ProvisionError(what, code="storage-gone", where=str(layout.shared_folder(wanted.storage)))
        layout.shared_folder(before.id).rename(shared)
        system.erase(layout.cluster_dir(before.id))
    shared.mkdir(exist_ok=True, mode=0o755)
    return shared


def _state(wanted: layout.ClusterRequest) -> layout.ClusterState:
    """The cluster's record, written before anything of it exists. Its image stays as it was first made."""
    path = layout.state_file(wanted.id)
    if path.exists():
        return layout.ClusterState.model_validate_json(path.read_bytes())
    image.layers(wanted.image)  # it may have been pruned since it was baked
    others = [s.subnet for s in image.states()]
    subnet = system.choose_subnet(wanted.id, [*system.used_networks(), *others], wanted.subnet)
    keep = wanted.keep_storage or layout.storage_file(wanted.id).exists()  # of a `down` that was ended midway
    asked = wanted.model_dump() | {"subnet": subnet, "keep_storage": keep}
    state = layout.ClusterState.model_validate(asked)
    layout.make_private(path.parent)
    write_atomic(path, state.model_dump_json())
    return state


def _number(state: layout.ClusterState, wanted: layout.ClusterRequest) -> layout.ClusterState:
    """The state with a number for each node, written down before one that is new is started."""
    numbers = layout.numbered((node.name for node in wanted.nodes), state.numbers)
    keep = state.keep_storage or wanted.keep_storage  # until a `down` that has looked says otherwise
    state = state.model_copy(update={"numbers": numbers, "keep_storage": keep})
    write_atomic(layout.state_file(wanted.id), state.model_dump_json())
    return state


def _remove_nodes(
    wanted: layout.ClusterRequest, state: layout.ClusterState
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove nodes that are to be made anew, also since their disk has another size, and those not named."""
    nodes = layout.cluster_dir(wanted.id) / "nodes"
    nodes.mkdir(exist_ok=True)
    system.erase_doomed(nodes)
    there = {path.name for path in nodes.iterdir()}
    disks = {node.name: node.disk_mib for node in wanted.nodes}
    anew = [
        name
        for name in disks
        if name in there and (name in wanted.anew or system.disk_mib(nodes / name) != disks[name])
    ]
    surplus = sorted(there - disks.keys())
    going = {*anew, *surplus, *(state.numbers.keys() - disks.keys())}
    gone = {layout.machine_name(wanted.id, state.numbers[name]) for name in going if name in state.numbers}
    if gone:  # to look for nothing would take a while, too, on a busy machine
        machine.stop([name for name in machine.alive() if name in gone])
    for name in (*anew, *surplus):
        system.erase(nodes / name)
    return tuple(anew), tuple(surplus)


def down(request: dict[str, Any]) -> dict[str, Any]:
    """Remove everything of a cluster; done twice it does nothing the second time."""
    asked = layout.ClusterQuery.model_validate(request)
    cluster_id = asked.id
    with state_lock("down"):
        machine.stop(_machines_of(cluster_id, machine.alive()))
        machine.end_rooted(layout.cluster_dir(cluster_id))
        machine.remove_cgroups(f"c{cluster_id}-")  # of machines that died by themselves
        system.remove_network(cluster_id)
        if not _keep_shared(cluster_id, asked=asked.keep_storage):
            system.erase(layout.cluster_dir(cluster_id))
        system.erase_doomed(layout.STATE)
        for place in (layout.STATE, layout.CACHE):
            system.erase(place / system.CHECK)  # of a check that was ended midway
        if not image.states():
            system.restore_kernel_settings()
            system.remove_netns_folder()
    image.remove_unfinished()
    return {}


def _keep_shared(cluster_id: str, *, asked: bool | None) -> bool:
    """Where that is asked for, now or (None) by an earlier `up`, keep the shared folder, with a note of
    whose it is.
    """
    folder, record = layout.cluster_dir(cluster_id), layout.state_file(cluster_id)
    shared, note = layout.shared_folder(cluster_id), layout.storage_file(cluster_id)
    if not record.exists():
        return note.exists()  # done already
    state = layout.ClusterState.model_validate_json(record.read_bytes())
    keep = state.keep_storage if asked is None else asked
    if not (keep and shared.exists()):
        return False
    system.progress("measuring the shared folder")
    size_mib = int(system.run(["du", "-sm", str(shared)], what="measuring the shared folder").split()[0])
    with suppress(OSError):  # the next cluster makes its own
        (shared / "home" / f".clusterctl-{cluster_id}").rmdir()
    kept = layout.KeptFolder(**state.model_dump(), since=time.time(), size_mib=size_mib)
    write_atomic(note, kept.model_dump_json())
    for path in folder.iterdir():
        if path not in (shared, note, record):
            system.erase(path)
    record.unlink()
    return True


def _kept_folders() -> tuple[layout.KeptFolder, ...]:
    """The shared folders that clusters left; the caller holds the lock."""
    found = []
    for note in sorted(layout.STATE.glob("[!.]*/storage.json")):
        kept = layout.KeptFolder.model_validate_json(note.read_bytes())
        shared = layout.shared_folder(kept.id)
        if layout.state_file(kept.id).exists():  # its `down` did not end
            continue
        if not shared.exists():  # taken up, by an `up` that was ended then
            system.erase(note.parent)
            continue
        homes = {path.name: path.lstat().st_uid for path in (shared / "home").glob("[!.]*")}
        found.append(kept.model_copy(update={"homes": homes}))
    return tuple(found)


def storage(request: dict[str, Any]) -> dict[str, Any]:
    """The kept shared folders, without those that are removed now."""
    remove = layout.StorageQuery.model_validate(request).remove
    with state_lock("down" if remove else "list"):
        for kept in _kept_folders():
            if kept.id in remove:
                system.erase(layout.cluster_dir(kept.id))
        return {"kept": [kept.model_dump(mode="json") for kept in _kept_folders()]}


def _machines_of(cluster_id: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(f"c{cluster_id}-")]


def existing(request: dict[str, Any]) -> dict[str, Any]:
    cluster_id = layout.ClusterQuery.model_validate(request).id
    found = layout.Existing(machines=tuple(_machines_of(cluster_id, machine.alive())))
    with suppress(FileNotFoundError):
        state = layout.ClusterState.model_validate_json(layout.state_file(cluster_id).read_bytes())
        folders = sorted((layout.cluster_dir(cluster_id) / "nodes").glob("[!.]*"))  # hidden: being removed
        numbers = {layout.machine_name(cluster_id, number): name for name, number in state.numbers.items()}
        disks = {folder.name: system.disk_mib(folder) for folder in folders}
        running = frozenset(numbers[name] for name in found.machines if name in numbers)
        found = found.model_copy(update={"state": state, "nodes": disks, "running": running})
    return found.model_dump(mode="json")


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Everything of a cluster that is still there, a line each; nothing when it is gone."""
    cluster_id = layout.ClusterQuery.model_validate(request).id
    folder = layout.cluster_dir(cluster_id)
    alive, netns = machine.alive(), layout.netns_name(cluster_id)
    found = [f"machine {name} (pid {alive[name][0]})" for name in _machines_of(cluster_id, alive)]
    found += [f"process {pid} in {netns}" for pid in system.in_network(system.NETNS_DIR / netns)]
    found += [f"process {pid} on a node's file system" for pid in system.rooted_under(folder)]
    found += [f"mount {point}" for point in system.mounted_under(folder)]
    for place in (folder, system.doomed(folder)):
        found += [f"loop device {name}" for name in system.loops_under(place)]
    names = {netns, layout.bridge_name(cluster_id)}
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    found += [f"link {name}" for name in links if name in names or f"c{cluster_id}-" in name]
    found += [f"control group {group}" for group in machine.cgroups(f"c{cluster_id}-")]
    if (system.NETNS_DIR / netns).exists():
        found.append(f"network namespace {netns}")
    is_kept = layout.storage_file(cluster_id).exists() and not layout.state_file(cluster_id).exists()
    folders = (system.doomed(folder), *(() if is_kept else (folder,)))
    found += [f"folder {path}" for path in folders if path.exists()]
    return {"residue": found}


def clusters(_: dict[str, Any]) -> dict[str, Any]:
    return {"clusters": [state.model_dump(mode="json") for state in image.states()]}


def cache(request: dict[str, Any]) -> dict[str, Any]:
    """List the image cache, or prune it: then nobody bakes, and no cluster is made from what goes."""
    if request.get("prune"):
        with image.cache_lock("cache prune"), state_lock("cache prune"):
            images = image.prune()
    else:
        with state_lock("cache list"):
            images = image.cache_list()
    return {"images": [i.model_dump() for i in images]}


VERBS = {
    verb.__name__: verb for verb in (bake, bake_class, up, down, existing, look, clusters, storage, cache)
}
_TOLD = ("code", "what", "where", "why", "fix")  # of an error, besides its kind


def main() -> int:
    # The terminal's Ctrl-C is for the caller; we notice that it is gone when stdin closes.
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(name, signal.SIG_IGN)
    os.umask(0o022)
    goes_on = True
    while goes_on and (line := sys.stdin.readline()):
        goes_on = _serve(json.loads(line))
    return 0 if goes_on else 1


def _serve(asked: dict[str, Any]) -> bool:
    """Answer a request; whether another one can be read."""
    try:
        result = VERBS[asked["verb"]](asked["request"])
        goes_on = _Caller.reading is None
        system.answer({"result": result, "goes_on": goes_on})
        return goes_on
    except ClusterctlError as exc:
        error = exc
    except OSError as exc:
        why = f"{exc.strerror}: {exc.filename}" if exc.filename else str(exc)
        error = (
            disk_error(exc)
            if exc.errno in REFUSALS
            else ProvisionError("machine work failed", code="machine-work-failed", why=why)
        )
    system.answer({"error": {"kind": type(error).__name__} | {key: getattr(error, key) for key in _TOLD}})
    return False


if __name__ == "__main__":
    sys.exit(main())
