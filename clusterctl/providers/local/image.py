"""The node image: a base built by mmdebstrap or dnf, and a layer with changes by the playbook
install.yml.

Both are cached under the hash of their inputs. While Ansible configures the image, it shares this
machine's network and answers SSH on loopback, so that no masquerading is needed.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from clusterctl.errors import LockedError, ProvisionError
from clusterctl.providers.local import layout, machine, system
from clusterctl.providers.local.processes import first_process
from clusterctl.providers.local.system import TOOL_ENV, run
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.names import ADMIN_ID
from clusterctl.state.workspace import WAIT_S, hold
from clusterctl.util.assets import digest, read_table
from clusterctl.util.process import parallel_map

DEFAULT_MIRROR = "http://deb.debian.org/debian"


class BaseImage(BaseModel):
    """The packages and settings of a distribution's base image, as a table of images.toml lists
    them.
    """

    packages: tuple[str, ...]
    masked: tuple[str, ...]
    unused: tuple[str, ...] = ()
    enabled: tuple[str, ...]
    mounts: dict[str, str]
    tmp_in_memory: tuple[str, ...] = ()
    units: dict[str, str] = {}
    suites: dict[str, str] = {}

    @property
    def fstab(self) -> str:
        return "".join(
            f"tmpfs {path} tmpfs {options} 0 0\n" for path, options in self.mounts.items()
        )


_FURNISH = Path(__file__).with_name("data") / "furnish.sh"
_INSTALL = Path(__file__).with_name("data") / "install.sh"
_BASES = read_table(Path(__file__).with_name("data") / "images.toml", dict[str, BaseImage])
DEBIAN = _BASES["debian"]
REDHAT = _BASES["redhat"]
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_RETRIES = "Acquire::Retries 3"
_UNREAD: Final = ("man/*.gz", "doc/*/changelog*.gz", "locale/*.mo")
_MMDEBSTRAP: Final = (
    "--mode=root",
    "--variant=minbase",
    f"--aptopt={_RETRIES}",
    "--dpkgopt=force-unsafe-io",
    # Only files are excluded, because scripts of packages expect the folders, as
    # update-alternatives expects that of man pages.
    *(f"--dpkgopt=path-exclude=/usr/share/{files}" for files in _UNREAD),
)
_DNF: Final = ("install_weak_deps=False", "tsflags=nodocs", "keepcache=False")
# Prefix of the names of machines in which images are built.
_BAKE = "clusterctl-bake-"
_BAKE_TIMEOUT_S = 10.0
# Number of unused node templates to keep: a cluster uses two. A controller's template takes 70 MB.
_KEPT_CLASSES = 6
_FIX_REBUILD: Final = (
    "run `clusterctl up`, which builds it again; if nodes were created from it, run `clusterctl "
    "down` first"
)
# A folder that a builder fills: its name in the cache follows, then the builder's own token.
_BUILDING = ".building-"
# What an image or a template lies on.
_NOTE = "image.json"
# apt and dpkg start their own sessions. A pid namespace ends all its processes when this process
# ends.
_OWN_PROCESSES = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--fork", "--pid", "--mount-proc", "--kill-child", "--"),
)


def base_inputs(release: str) -> tuple[str, ...]:
    """Return everything that determines a distribution's base image, except the mirror, for its
    cache key.
    """
    base, options = (DEBIAN, _MMDEBSTRAP) if release in DEBIAN.suites else (REDHAT, _DNF)
    at_boot = {"unused", "tmp_in_memory"}
    table_of = base.model_dump_json(exclude={"suites", *at_boot})
    suite = base.suites.get(release, release)
    return (suite, platform.machine(), *options, table_of, _FURNISH.read_text(), str(ADMIN_ID))


def boot_words(release: str | None) -> tuple[str, ...]:
    """Return options for systemd in a node with distribution ``release``, such as
    `systemd.mask=UNIT`.
    """
    base = DEBIAN if release in DEBIAN.suites else REDHAT
    return tuple(f"systemd.mask={unit}" for unit in base.unused)


def boot_environment(release: str | None) -> tuple[str, ...]:
    """Return the command prefix that keeps systemd-nspawn from mounting a tmpfs on a node's /tmp.

    Empty for a distribution that has /tmp in memory.
    """
    in_memory = release in (*DEBIAN.tmp_in_memory, *REDHAT.tmp_in_memory)
    return () if in_memory else ("env", "SYSTEMD_NSPAWN_TMPFS_TMP=0")


def image_dir(key: str) -> Path:
    return layout.CACHE / f"image-{key}"


def layers(key: str) -> tuple[Path, ...]:
    """Return the layers of a cached image, topmost first. Raise a ProvisionError if it is not
    cached.
    """
    try:
        meta = json.loads((image_dir(key) / _NOTE).read_text())
    except FileNotFoundError as exc:
        summary = "the node image is not in the cache"
        where = str(image_dir(key))
        raise ProvisionError(
            summary, code="internal", about="image-cache", where=where, fix=_FIX_REBUILD
        ) from exc
    return (image_dir(key) / "upper", layout.CACHE / f"base-{meta['base']}" / "root")


def cached(key: str) -> bool:
    """Return whether an image and its base are cached. Only complete images are put into the
    cache.
    """
    try:
        return all(layer.is_dir() for layer in layers(key))
    except ProvisionError:
        return False


@contextmanager
def cache_lock(verb: str, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of the image cache briefly. Builds do not hold it. First remove files and machines
    that killed builds have left.
    """
    for folder in (layout.RUN, layout.CACHE):
        layout.make_private(folder)
    title = "the cache of node images"
    with hold(layout.RUN / "cache.lock", verb, what=title, wait_s=wait_s, waiting=system.waiting):
        for folder in layout.CACHE.glob(f"{_BUILDING}*"):
            if not _is_being_built(folder):
                machine.stop([_machine_of(folder)])
                system.erase(folder)
        system.erase_doomed(layout.CACHE)
        yield


def remove_unfinished() -> None:
    """Remove files and machines that killed builds have left."""
    if any(layout.CACHE.glob(f"{_BUILDING}*")):
        with suppress(LockedError), cache_lock("down", wait_s=0):
            pass


def _machine_of(building: Path) -> str:
    """Return the name of the machine in which an image or a template is built."""
    return f"{_BAKE}{building.name.rpartition('.')[2]}"


def _is_being_built(building: Path) -> bool:
    """Return whether a builder still works in this folder, which it has locked. If the folder is gone,
    its builder has just ended.
    """
    try:
        fd = os.open(building, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def _building(final: Path, base: str = "") -> Iterator[Path]:
    """Yield a new folder, which enters the cache as ``final`` if the body succeeds. Otherwise, or if
    another builder has already made ``final``, the folder is deleted.

    base: key of the image or base image below, which `cache prune` keeps meanwhile.
    """
    with ExitStack() as stack:
        with cache_lock("up"):
            folder = layout.CACHE / f"{_BUILDING}{final.name}.{secrets.token_hex(4)}"
            folder.mkdir()
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if base:
                (folder / _NOTE).write_text(json.dumps({"base": base, "made": time.time()}))
        try:
            yield folder
            try:
                folder.rename(final)
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            if folder.exists():
                system.erase(folder)


def build_base(request: layout.BakeRequest) -> Path:
    """Return the root folder of the base image. Build it (about 20 s) if it is not cached."""
    final = layout.CACHE / f"base-{request.base_key}"
    if not final.is_dir():
        with _building(final) as building:
            _fill_base(building / "root", request)
    return final / "root"


def _fill_base(root: Path, request: layout.BakeRequest) -> None:
    suite = DEBIAN.suites.get(request.distribution)
    base, tool = (DEBIAN, "mmdebstrap") if suite else (REDHAT, "dnf")
    system.progress(f"building the {distribution_of(request.distribution).title} base ({tool})")
    if suite:
        debootstrap(root, request.mirror, base.packages, suite)
        lists = root / "var/lib/apt/lists"
        # mmdebstrap empties the lists, so they must not look fresh.
        os.utime(lists, (0, 0))
    else:
        dnf_install(root, request.distribution, through=_OWN_PROCESSES)
    words = (str(ADMIN_ID), " ".join(base.masked), *base.enabled)
    argv = ["chroot", str(root), "sh", "-s", "--", *words]
    run(argv, stdin=_FURNISH.read_text(), action="furnishing the base image")
    (root / "etc/fstab").write_text(base.fstab)


def debootstrap(root: Path, mirror: str, packages: Sequence[str], suite: str) -> None:
    argv = ["mmdebstrap", *_MMDEBSTRAP, f"--include={','.join(packages)}"]
    fix = (
        f"check that this machine reaches {mirror}; or set another Debian mirror as provider.mirror"
    )
    if _KEYRING.exists():
        argv.append(f"--keyring={_KEYRING}")
    else:
        fix = (
            f"apt-get install {_KEYRING.stem}, which has the keys of Debian's signatures; or {fix}"
        )
    sources = None
    if mirror != DEFAULT_MIRROR:
        sources = "".join(f"deb {mirror} {part} main\n" for part in (suite, f"{suite}-updates"))
    # Command lines are visible to all accounts, and the addresses of proxy and mirror may contain a
    # password.
    with tempfile.NamedTemporaryFile("w", prefix="clusterctl-") as settings:
        settings.write(f"{apt_proxy()}\n")
        settings.flush()
        argv += [f"--aptopt={settings.name}", suite, str(root), *(["-"] if sources else [])]
        summary = "building the base image"
        run([*_OWN_PROCESSES, *argv], action=summary, where=mirror, fix=fix, stdin=sources)
    # Nodes must not use this machine's proxy.
    (root / "etc/apt/apt.conf.d/99mmdebstrap").write_text(f"{_RETRIES};\n")


def apt_proxy() -> str:
    """Return the apt configuration line that sets this machine's apt proxy. Empty if apt uses no
    proxy.
    """
    if not shutil.which("apt-config", path=TOOL_ENV["PATH"]):
        return ""
    argv = ["apt-config", "dump", "--no-empty", "--format", '%f "%v";%n', "Acquire::http::Proxy"]
    return run(argv, action="reading apt's proxy").strip()


@contextmanager
def baking(request: layout.BakeRequest) -> Iterator[tuple[int, str]]:
    """Create a new image, which answers SSH while the body runs. Yield its SSH port and host
    key.
    """
    with _building(image_dir(request.key), request.base_key) as building:
        base = build_base(request)
        with _answering(building, (base,), request.admin_key) as answer:
            yield answer


def install_packages(hosts: Mapping[str, str], packages: Sequence[str]) -> tuple[str, ...]:
    """Install missing packages in running nodes, which reach the mirrors through this machine's
    network.

    hosts: machine name -> node name. Return a note for each node with the packages that were
        installed.
    """
    settings = f"{apt_proxy()}\n{Path('/etc/resolv.conf').read_text()}"
    action = f"installing {', '.join(packages)}"
    fix = (
        "correct `software.packages` in the spec, or check that this machine reaches the "
        "package mirror"
    )

    def install(name: str) -> str:
        # Not in the network namespace of the node, which has no route to the mirrors.
        inside = [
            "nsenter",
            f"--target={first_process(name)}",
            "--mount",
            "--pid",
            "--uts",
            "--ipc",
        ]
        argv = [*inside, "sh", "-c", _INSTALL.read_text(), "sh", *packages]
        return run(argv, stdin=settings, action=action, where=hosts[name], fix=fix).strip()

    system.progress(f"installing packages in the nodes: {', '.join(packages)}")
    installed = zip(hosts.values(), parallel_map([*hosts], install), strict=True)
    return tuple(f"installed on {host}: {names}" for host, names in installed if names)


def class_key(image_key: str, inputs: str) -> str:
    """Return a node template's cache key: a hash of its image and of its configuration
    (``inputs``).
    """
    return digest(image_key, inputs)


def class_layer(key: str) -> Path:
    """Return the overlay layer of a node template. Raise a ProvisionError if the template is not
    cached.
    """
    folder = layout.class_folder(key)
    if not folder.is_dir():
        summary = "the node template is not in the cache"
        raise ProvisionError(
            summary, code="internal", about="template-cache", where=str(folder), fix=_FIX_REBUILD
        )
    return folder / "upper"


@contextmanager
def class_baking(key: str, image_key: str, admin_key: str) -> Iterator[tuple[int, str]]:
    """Create a new node template, which answers SSH while the body runs. Yield its SSH port and
    host key.
    """
    with (
        _building(layout.class_folder(key), image_key) as building,
        _answering(building, layers(image_key), admin_key) as answer,
    ):
        yield answer


@contextmanager
def _answering(
    building: Path, lower: tuple[Path, ...], admin_key: str
) -> Iterator[tuple[int, str]]:
    """Create a layer over ``lower``, in a machine that answers SSH. Yield the machine's port and
    host key.
    """
    root = system.mount_overlay(lower, building)
    host_key = _open_for_baking(root, admin_key)
    name = _machine_of(building)
    process, port = _serve_ssh(root, name)
    try:
        yield port, host_key
    finally:
        _end(process)
        machine.remove_cgroups(name)
    _close_after_baking(root)
    run(["umount", str(root)], action="unmounting the image")
    shutil.rmtree(building / "work")
    root.rmdir()


def _open_for_baking(root: Path, admin_key: str) -> str:
    policy = root / "usr/sbin/policy-rc.d"
    # Packages must not start their services in the image.
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    (root / "home/clusterctl/.ssh/authorized_keys").write_text(f"{admin_key}\n")
    if proxy := apt_proxy():
        (root / "etc/apt/apt.conf.d/99bake").write_text(f"{proxy}\n")
    return machine.make_host_key(root / "etc/ssh/ssh_host_ed25519_key", "image")


def _serve_ssh(root: Path, name: str) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    sshd = (
        f"mkdir -p /run/sshd && exec /usr/sbin/sshd -D -p {port} -o ListenAddress=127.0.0.1 -o "
        "UseDNS=no"
    )
    sshd += " -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no"
    inside = [] if machine.booted_with_systemd() else machine.enter_cgroup(name)
    nspawn = [
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--as-pid2",
        "--timezone=off",
    ]
    nspawn += [f"--directory={root}", f"--machine={name}", "--resolv-conf=copy-host"]
    # accounting.sh gives slurmdbd its own network.
    nspawn += ["--capability=CAP_NET_ADMIN"]
    process = machine.spawn([*inside, *nspawn, "--", "/bin/sh", "-c", sshd], subprocess.DEVNULL)
    deadline = time.monotonic() + _BAKE_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return process, port
        time.sleep(0.05)
    _end(process)
    raise ProvisionError(
        "sshd did not answer in the node image being built",
        code="internal",
        about="image-ssh",
        where=str(root),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_BAKE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close_after_baking(root: Path) -> None:
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "home/clusterctl/.ssh/authorized_keys").write_text("")
    for name in ("usr/sbin/policy-rc.d", "etc/apt/apt.conf.d/99bake"):
        (root / name).unlink(missing_ok=True)
    (root / "etc/resolv.conf").write_text("")
    for folder in ("var/lib/apt/lists", "var/cache/apt", "var/cache/dnf", "tmp"):
        for path in (root / folder).glob("*"):
            system.delete(path)


def states() -> tuple[layout.ClusterState, ...]:
    """Return the saved states of this machine's local clusters, except clusters that are being
    removed.
    """
    texts = _read_all(sorted(layout.STATE.glob(f"[!.]*/{layout.STATE_FILE}")))
    return tuple(map(layout.ClusterState.model_validate_json, texts))


def _read_all(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the content of these files, without those that a `down` removes just now."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield path.read_text()


def free_subnet(cluster_id: str, requested: IPv4Network | None) -> IPv4Network:
    """Return ``requested``, or by default a free /24 network. A MachineError rejects a network in
    use.
    """
    other_subnets = [state.subnet for state in states()]
    return system.choose_subnet(cluster_id, [*system.used_networks(), *other_subnets], requested)


def classes_of(cluster_id: str) -> frozenset[str]:
    """Return the names of the cache folders of all node templates that a cluster's nodes use."""
    notes = map(layout.class_note, (layout.cluster_dir(cluster_id) / "nodes").glob("[!.]*"))
    return frozenset(layout.class_folder(text).name for text in _read_all(notes))


def cache_list() -> tuple[layout.ImageInCache, ...]:
    """Return the cached images, templates and bases with their sizes and the clusters that use
    them.
    """
    clusters = states()
    images = []
    classes = {state.id: classes_of(state.id) for state in clusters}
    kinds = (sorted(layout.CACHE.glob(f"{kind}-*")) for kind in ("image", "class", "base"))
    for folder in itertools.chain.from_iterable(kinds):
        key = folder.name.removeprefix("image-")
        try:
            size_mib = int(run(["du", "-sm", str(folder)], action="measuring the cache").split()[0])
        except ProvisionError:
            # Nothing keeps another command from removing it just now.
            if folder.exists():
                raise
            continue
        used_by = tuple(
            state.name for state in clusters if key in (state.image, *classes[state.id])
        )
        images.append(layout.ImageInCache(key=key, size_mib=size_mib, used_by=used_by))
    return tuple(images)


def erase_old_classes() -> None:
    """Delete all unused node templates except the latest few. Clusters with other users add
    templates.
    """
    used = {key for state in states() for key in classes_of(state.id)}
    folders = [folder for folder in layout.CACHE.glob("class-*") if folder.name not in used]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[
        _KEPT_CLASSES:
    ]:
        system.erase(folder)


def prune() -> tuple[layout.ImageInCache, ...]:
    """Delete and return the images and templates that no cluster uses, and the bases without an
    image.
    """
    images = cache_list()
    bases = _bases(f"{_BUILDING}*")
    removed = [i for i in images if not (i.used_by or i.key in bases or i.key.startswith("base-"))]
    for image_ in removed:
        system.erase(
            layout.CACHE / image_.key if image_.key.startswith("class-") else image_dir(image_.key)
        )
    bases |= _bases("image-*")
    stale = [
        i for i in images if i.key.startswith("base-") and i.key.removeprefix("base-") not in bases
    ]
    for image_ in stale:
        system.erase(layout.CACHE / image_.key)
    return tuple(removed + stale)


def _bases(folders: str) -> set[str]:
    """Return the keys of the images and base images below these folders of the cache."""
    return {json.loads(p.read_text())["base"] for p in layout.CACHE.glob(f"{folders}/{_NOTE}")}


# Settings of this machine's package sources, which the image gets too.
_REPOSITORIES: Final = ("etc/dnf/vars", "etc/pki/rpm-gpg", "etc/yum.repos.d")
_DNF_CONF: Final = "etc/dnf/dnf.conf"


def dnf_install(
    root: Path, name: str, *, through: tuple[str, ...] = (), host_root: Path = Path("/")
) -> None:
    """Install this machine's distribution ``name`` into ``root``.

    through: words to put before `dnf`. host_root: the root folder of this machine, which has the
    settings of dnf.
    """
    root.mkdir(parents=True)
    # The package that identifies the distribution has different names: rocky-release,
    # redhat-release...
    query = ["rpm", "--query", "--whatprovides", "--queryformat=%{NAME}\n", "system-release"]
    package = run(query, action="finding the package that identifies the distribution").split()[0]
    release = name.rpartition("-")[2]
    argv = ["dnf", "--quiet", "--assumeyes", f"--installroot={root}", f"--releasever={release}"]
    argv += [
        f"--config=/{_DNF_CONF}",
        "--setopt=reposdir=/etc/yum.repos.d",
        "--setopt=varsdir=/etc/dnf/vars",
    ]
    argv += [f"--setopt={option}" for option in _DNF]
    run(
        [*through, *argv, "install", package, *REDHAT.packages],
        action="building the base image",
        where="dnf, with the repositories of this machine",
        fix="check that `dnf makecache` works on this machine, then run the command again",
    )
    for folder in _REPOSITORIES:
        if (host_root / folder).is_dir():
            shutil.copytree(host_root / folder, root / folder, dirs_exist_ok=True)
    shutil.copy(host_root / _DNF_CONF, root / _DNF_CONF)
    shutil.rmtree(root / "var/cache/dnf", ignore_errors=True)
    for unit, text in REDHAT.units.items():
        (root / "etc/systemd/system" / unit).write_text(text)
