"""The folder on a foreign cluster with everything of clusterctl: it is marked, and has the Python
of jobs.

Jobs have their own Python environment there, as on other clusters. Its wheels are chosen and sent
from this machine, because a site's nodes may have no internet access, no pip and no ensurepip.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Final

from clusterctl.errors import CommandError, TransferError, UsageError, printable
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.remote_environment import build_environment, lock_of, pip_wheel
from clusterctl.packages.standalone_python import (
    RELEASE,
    fetch_standalone_python,
    order_of,
    version_of,
)
from clusterctl.packages.wheelhouse import wheelhouse
from clusterctl.providers.existing.detach import CHECK_S, AttachedFolder, folder_program
from clusterctl.providers.existing.site_description import (
    MPI_MODULE,
    SiteDescription,
    is_mpi_module,
)
from clusterctl.spec.base import PATTERNS
from clusterctl.spec.remote_folders import ENVIRONMENTS, PYTHONS
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.transport.base import Transport
from clusterctl.transport.put import store_of
from clusterctl.util import formatting
from clusterctl.util.assets import job_lock
from clusterctl.util.progress import SILENT, LineReporter

# Releases of Python for which payload/requirements.lock has wheels, and the glibc that these need.
OLDEST_PYTHON: Final = (3, 11)
NEWEST_PYTHON: Final = (3, 14)
_RELEASES: Final = f"{OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} to {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]}"
OLDEST_GLIBC: Final = 28
_CLAIM: Final = folder_program("remote_claim.sh")
_EXPAND: Final = folder_program("remote_expand.sh")
_PYTHON: Final = folder_program("remote_python.sh")
_PIECE: Final = 1 << 20
# Unpacking many small files on a network file system takes long.
_UNPACKED_S: Final = 900.0
_MPI_MODULE: Final = re.compile(MPI_MODULE, re.IGNORECASE)
_MOST_MODULES: Final = 6
# Seven times, a shell loads modules, and Python its packages from a network file system.
_MPI_S: Final = 120.0
_MPI: Final = Path(__file__).with_name("remote_mpi.sh").read_text(encoding="utf-8")
_FINISH: Final = Path(__file__).with_name("remote_finish.sh").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class PreparedFolder:
    """The folder on the cluster, after ``place``.

    folder: its absolute path. cluster_id: the id in its mark, which may be of an earlier `attach`.
    python, version: path of the site's Python that the environment uses, and its version, such as
        `3.11.2`.
    node: the release of Python and the glibc that the environment's packages are chosen for.
    modules: that jobs load: the chosen ones, and one with an MPI library that mpi4py can load.
    built: whether the environment was missing.
    """

    folder: str
    cluster_id: str
    python: str
    version: str
    node: NodePlatform
    modules: tuple[str, ...]
    built: bool

    @property
    def has_own_python(self) -> bool:
        """Whether the Python is clusterctl's own, in the folder."""
        return self.python.startswith(f"{self.folder}/{PYTHONS}/")


def python_minor(version: str) -> tuple[int, int]:
    """Return the release of a Python version: (3, 11) for `3.11.2`. (0, 0): the text is not a
    version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def choose_python(pythons: Mapping[str, str], python: str | None = None) -> str:
    """Return the path of the Python for jobs: ``python``, or else the first that jobs can use.

    pythons: path -> version, in the order of preference. Raise UsageError if jobs can't use any of
        them.
    """
    usable = usable_pythons(pythons)
    if python is not None and python in usable:
        return python
    if python is None and usable:
        return usable[0]
    found = ", ".join(f"{path} ({version})" for path, version in pythons.items()) or "none"
    raise UsageError(
        f"jobs can't use {python}" if python else f"the cluster has no Python {_RELEASES}",
        code="host-unfit",
        about="python",
        why=f"jobs need Python {_RELEASES}; found: {found}",
        fix="pass a module that has such a Python with --module, or its path with --python; "
        "`module avail python` on the login node lists the site's modules; without either, "
        "`attach` sends a Python of its own",
    )


def usable_pythons(pythons: Mapping[str, str]) -> list[str]:
    """Return the paths of the Pythons that jobs can use. pythons: path -> version."""
    return [
        path
        for path, version in pythons.items()
        if OLDEST_PYTHON <= python_minor(version) <= NEWEST_PYTHON
    ]


def platform_of(version: str, glibc: str, arch: str) -> NodePlatform:
    """Return the platform of the site's nodes. Raise UsageError if jobs' packages have no wheels
    for it.
    """
    minor = glibc_minor(glibc)
    if arch != ARCHITECTURE:
        problem = f"its processors are {arch}"
        need = ARCHITECTURE
    elif 0 < minor < OLDEST_GLIBC:
        problem = f"its C library is glibc {glibc}"
        need = f"glibc 2.{OLDEST_GLIBC} or later"
    else:
        release = ".".join(map(str, python_minor(version)))
        return NodePlatform(release, minor or OLDEST_GLIBC)
    raise UsageError(
        "the packages of jobs can't be installed on the cluster",
        code="packages-unmet",
        about="platform",
        why=f"{problem}, and the packages need {need}",
        fix="attach a cluster, or choose a partition, with newer nodes",
    )


def place(
    transport: Transport,
    site: SiteDescription,
    folder: str,
    cluster_id: str,
    *,
    python: str | None = None,
    modules: Sequence[str] = (),
    report: LineReporter = SILENT.note,
) -> PreparedFolder:
    """Create clusterctl's folder on the cluster with the environment of jobs, or complete it.

    After it was killed, the next call continues. If an `attach` on another machine has created the
    folder, both share it, and its id.

    folder: an absolute path, or a path that begins with ~/ or a variable such as $SCRATCH/.
    python: path of a Python on the cluster. Default: the first of the site's that jobs can use.
    modules: environment modules that are loaded before each job.

    Raises:
        UsageError: the folder has other files or is that of another Slurm cluster, or jobs can't
            use the site's Python or C library.
        TransferError: the folder or the files can't be written.
        MachineError: the wheels can't be downloaded on this machine.
        TransportError: the environment can't be installed, or the connection was lost.
    """
    _reject_unfit(folder)
    pythons = site.pythons
    path = choose_python(pythons, python)
    node = platform_of(pythons[path], site.glibc, site.arch)
    # The nodes may have an older C library than the login node.
    oldest = NodePlatform(node.python, OLDEST_GLIBC)
    wheels = [*sorted(wheelhouse(job_lock(), oldest).glob("*.whl")), pip_wheel()]
    lock = lock_of(wheels, oldest, path)
    answer, cluster_id = _claim(transport, folder, cluster_id, site.cluster_name)
    at = answer["folder"][0]
    built = False
    damaged = AttachedFolder(transport, at, cluster_id).damaged(mend=True)
    if damaged:
        report(
            f"files of {', '.join(damaged)} were removed or changed: they are made again, those of "
            "your own packages with the next job that uses them"
        )
    is_there = lock.key in answer["environments"][0].split()
    if not is_there or f"{ENVIRONMENTS}/{lock.key}" in damaged:
        report(
            f"sending {formatting.size(sum(wheel.stat().st_size for wheel in wheels))} of wheels"
        )
        built = build_environment(
            transport,
            lock,
            wheels,
            folder=f"{at}/{ENVIRONMENTS}",
            store=store_of(at),
            report=report,
            python=path,
        )
    loaded = _with_mpi(transport, f"{at}/{ENVIRONMENTS}/{lock.key}/bin/python", site, modules)
    profile = job_profile(loaded, site.slurm_path)
    argv = ["sh", "-c", _FINISH, "finish", at, lock.key]
    transport.run(argv, stdin=profile.encode())
    return PreparedFolder(at, cluster_id, path, pythons[path], node, loaded, built)


def _with_mpi(
    transport: Transport, python: str, site: SiteDescription, modules: Sequence[str]
) -> tuple[str, ...]:
    """Return the modules with the first of the site's, if any, with which mpi4py finds its MPI
    library on the login node. If mpi4py finds no MPI library, return the modules.
    """
    variants = mpi_variants(modules, site.modules)
    argv = ["bash", "-c", _MPI, "mpi", python, *map(" ".join, variants)]
    # ~/.bashrc may print something before.
    *_, last = transport.run(argv, check=False, timeout_s=_MPI_S).stdout.split() or [""]
    return next((each for n, each in enumerate(variants) if str(n) == last), variants[0])


def mpi_variants(chosen: Sequence[str], modules: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the chosen modules, and then, unless one of them is of MPI, these with each MPI module
    of the site.
    """
    others = [] if any(map(is_mpi_module, chosen)) else mpi_modules(modules)
    return [(*chosen,), *((*chosen, name) for name in others)]


def mpi_modules(modules: Iterable[str]) -> list[str]:
    """Return the MPI modules to try: the newest version of each library first, then the second
    newest.
    """
    libraries: dict[str, list[str]] = {}
    for name in modules:
        if match := _MPI_MODULE.fullmatch(name):
            libraries.setdefault(match[2].lower(), []).append(name)

    def version(name: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", name.replace("x86_64", ""))))

    newest_first = (sorted(names, key=version, reverse=True) for names in libraries.values())
    return [name for names in zip_longest(*newest_first) for name in names if name][:_MOST_MODULES]


def glibc_minor(version: str) -> int:
    """Return the x of a glibc 2.x. 0: the text is not such a version."""
    _, _, minor = version.partition(".")
    return int(minor) if minor.isdecimal() else 0


def with_standalone_python(
    transport: Transport,
    site: SiteDescription,
    folder: str,
    cluster_id: str,
    *,
    report: LineReporter = SILENT.note,
) -> SiteDescription:
    """Return the site with clusterctl's own Python, if jobs can't use the site's Pythons.

    The Python is sent to clusterctl's folder on the cluster, unless the folder has one. No Python
    is needed on the login node.

    Raises the errors of ``place``. MachineError: the Python can't be downloaded on this machine.
    """
    if usable_pythons(site.pythons):
        return site
    _reject_unfit(folder)
    own = _whole_pythons(transport, folder)
    if not own:
        own = _send_python(transport, site, folder, cluster_id, report)
    pythons = {path: version_of(Path(path).parents[1].name) for path in own}
    newest_first = sorted(pythons.items(), key=lambda one: order_of(one[1]), reverse=True)
    return replace(site, pythons={**site.pythons, **dict(newest_first)})


def _send_python(
    transport: Transport,
    site: SiteDescription,
    folder: str,
    cluster_id: str,
    report: LineReporter,
) -> list[str]:
    """Send a standalone Python. Return the paths of all in the folder."""
    platform_of(RELEASE, site.glibc, site.arch)
    python = fetch_standalone_python(report)
    answer, _ = _claim(transport, folder, cluster_id, site.cluster_name)
    at = answer["folder"][0]
    size = formatting.size(python.archive.stat().st_size)
    report(f"the cluster has no Python {_RELEASES}: sending one of {size}")
    argv = ["sh", "-c", _PYTHON, "python", at, python.name]
    try:
        with (
            transport.converse(argv, silence_s=_UNPACKED_S) as talk,
            python.archive.open("rb") as file,
        ):
            while piece := file.read(_PIECE):
                talk.send(piece)
            talk.finish()
    except CommandError as exc:
        raise TransferError(
            "the Python of jobs can't be unpacked on the cluster",
            about="python",
            where=f"{transport.host}:{at}",
            why=exc.why,
            fix="choose a folder with --folder on a disk that has room, and whose programs may be run",
            host=transport.host,
        ) from exc
    return _whole_pythons(transport, at)


def _whole_pythons(transport: Transport, folder: str) -> list[str]:
    """Return the paths of the standalone Pythons in the folder that have all their files."""
    argv = ["sh", "-c", _PYTHON, "python", folder]
    return transport.run(argv, timeout_s=CHECK_S).stdout.splitlines()[1:]


def _claim(
    transport: Transport, folder: str, cluster_id: str, cluster_name: str
) -> tuple[dict[str, list[str]], str]:
    """Create and mark the folder. Return the answer by names, and the id in the mark."""
    result = transport.run(
        ["sh", "-c", _CLAIM, "claim", folder, cluster_id, cluster_name], check=False
    )
    answer: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        name, _, value = line.partition("\t")
        answer.setdefault(name, []).append(value)
    where = f"{transport.host}:{folder}"
    if result.rc == 0 and answer.keys() == {"folder"}:
        raise _unfit(answer["folder"][0])
    if result.rc != 0 or "environments" not in answer:
        raise TransferError(
            "the folder can't be created on the cluster",
            code="file-unwritable",
            about="remote-folder",
            where=where,
            why=printable(result.stderr.strip()),
            fix="choose another folder with --folder",
        )
    (path,) = answer["folder"]
    (mark,) = answer["mark"]
    (marked_name,) = answer["cluster"]
    if not mark:
        problem = "has files that are not clusterctl's"
        reason = f"{path} is not empty, and it has no mark of clusterctl"
    elif marked_name != cluster_name:
        problem = "belongs to another Slurm cluster"
        reason = f"{path} is in use for Slurm's cluster {printable(marked_name)!r}"
    else:
        return answer, mark
    raise UsageError(
        f"the folder on the cluster {problem}",
        code="exists",
        about="taken-folder",
        where=where,
        why=reason,
        fix=f"choose a new folder, for example with `--folder {path}-2`",
    )


def expanded(transport: Transport, folder: str) -> str:
    """Return the path of a folder that may begin with ~/ or a variable. TransportError: it is not
    set.
    """
    return transport.run(["sh", "-c", _EXPAND, "expand", folder]).stdout.rstrip("/\n")


def _reject_unfit(folder: str) -> None:
    if not PATTERNS["remote_folder"].matches(folder):
        raise _unfit(folder)


def _unfit(folder: str) -> UsageError:
    return UsageError(
        f"{folder!r} can't be the folder on the cluster",
        about="remote-folder",
        fix="use an absolute path, or a path such as ~/clusterctl or $SCRATCH/clusterctl, of "
        "letters, digits and ._+@-",
    )


def job_profile(modules: Sequence[str], slurm_path: str) -> str:
    """Return the script that jobs, and the shells of `clusterctl shell`, source before anything
    else.
    """
    return "".join(
        [
            "# Written by clusterctl; sourced by each job before its program starts.\n",
            "# A login session's runtime folder does not exist on compute nodes.\n",
            "unset XDG_RUNTIME_DIR\n",
            "clusterctl_path=$PATH\n",
            f"PATH=$PATH:{shlex.quote(slurm_path)}\n" if slurm_path else "",
            *(_LOADING.format(module=shlex.quote(module)) for module in modules),
            "unset clusterctl_path\n",
        ]
    )


_LOADING: Final = """\
# /etc/profile may replace PATH.
type module >/dev/null 2>&1 || {{ . /etc/profile >/dev/null 2>&1; PATH=$clusterctl_path:$PATH; }}
module load {module} || echo "clusterctl: the module {module} can't be loaded" >&2
"""
