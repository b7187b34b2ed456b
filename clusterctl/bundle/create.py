"""Pack a bundle: OS packages for each distribution, wheels for its Python, the payload, all versions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from clusterctl import __version__
from clusterctl.assets import payload_hash
from clusterctl.bundle import debian, redhat
from clusterctl.bundle.archive import Bundle, entries_of, open_bundle, write_bundle
from clusterctl.bundle.manifest import FORMAT, LOCK, PAYLOAD, WHEELS, Manifest, System
from clusterctl.bundle.packed import Packed, Packer, Say
from clusterctl.bundle.parts import base_digest, base_lock, left_out, lock_path, system_folder
from clusterctl.configure.payload import pack_payload
from clusterctl.distributions import Distribution
from clusterctl.errors import UsageError
from clusterctl.inventory import ARCHITECTURE
from clusterctl.lock import WAIT_S, hold
from clusterctl.mortal import temporary_folder
from clusterctl.packages import package_names
from clusterctl.spec import ClusterSpec
from clusterctl.wheels import Node, Question, content, resolve, wheel_path, wheelhouse
from clusterctl.workspace import cache_home

Sources = dict[str, Path | bytes]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a bundle is made for. ``archives``: release -> a file that names the repositories to use."""

    spec: ClusterSpec
    distributions: Sequence[Distribution]
    archives: Mapping[str, Path]


def create(wanted: Wanted, out: Path, *, say: Say) -> Bundle:
    """Pack all that a spec needs into one file. What was downloaded is kept in the cache.

    Raises:
        MachineError: this machine lacks a tool, or a repository or an index can't be reached.
        UsageError: the requirements can't be met, or packages of a distribution can't be had here.
    """
    for key, why in left_out(wanted.spec).items():
        raise UsageError("a bundle can't serve this spec", where=key, why=why, fix="leave it out of the spec")
    with temporary_folder() as folder, _cache_lock(say):
        sources: Sources = {PAYLOAD: pack_payload(folder)}
        systems, versions = {}, {}
        for distribution in wanted.distributions:
            packed = _packages(wanted, distribution, say)
            sources |= {
                f"{system_folder(distribution.release)}/{path}": of for path, of in packed.files.items()
            }
            say("downloading the wheels of the job environment")
            base = sorted(wheelhouse(base_lock(), Node.of(distribution)).glob("*.whl"))
            more = _more_wheels(wanted.spec, Node.of(distribution), say)
            sources |= {f"{WHEELS}/{path.name}": path for path in (*base, *more.wheels)}
            if more.lock is not None:
                sources[lock_path(distribution.release)] = more.lock.encode()
            systems[distribution.release] = System(
                family=distribution.family,
                asked=package_names(distribution),
                packages=len(packed.versions),
                python=distribution.python_version,
                base=base_digest(),
                requirements=more.asked,
                wheels=_names(base),
                more=_names(more.wheels),
            )
            versions[distribution.release] = _versions(packed, (*base, *more.wheels))
        sources[LOCK] = (json.dumps(versions, indent=1) + "\n").encode()
        say("packing")
        manifest = Manifest(
            format=FORMAT,
            clusterctl=__version__,
            cluster=wanted.spec.name,
            architecture=ARCHITECTURE,
            payload=payload_hash(),
            systems=systems,
            files=entries_of(sources),
        )
        write_bundle(out, manifest, sources)
    return open_bundle(out)


def _packages(wanted: Wanted, distribution: Distribution, say: Say) -> Packed:
    folder = cache_home() / "bundle" / f"{distribution.release}-{ARCHITECTURE}"
    folder.mkdir(parents=True, exist_ok=True)
    archive = wanted.archives.get(distribution.release)
    packer = Packer(distribution.release, ARCHITECTURE, folder, archive)
    pack = {"Debian": debian.packed, "RedHat": redhat.packed}[distribution.family]
    return pack(packer, package_names(distribution), say=say)


@dataclass(frozen=True, slots=True)
class _More:
    """What the spec's requirements come to: hash of what they ask, the wheels, and their lock."""

    asked: str | None = None
    wheels: tuple[Path, ...] = ()
    lock: str | None = None


def _more_wheels(spec: ClusterSpec, node: Node, say: Say) -> _More:
    asked = spec.software.python.requirements
    if asked is None:
        return _More()
    lock = resolve(Question((asked,), base_lock(), node=node), say=say)
    return _More(content((asked,)), tuple(map(wheel_path, lock.wheels)), lock.text)


def _names(wheels: Sequence[Path]) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in wheels))


def _versions(packed: Packed, wheels: Sequence[Path]) -> Mapping[str, object]:
    packages = [{"name": n, "version": v, "sha256": s} for n, v, s in packed.versions]
    return {"packages": packages, "wheels": _names(wheels)}


def _cache_lock(say: Say) -> AbstractContextManager[None]:
    folder = cache_home() / "bundle"
    folder.mkdir(parents=True, exist_ok=True)
    return hold(folder / ".lock", "bundle create", what="the cache of packages", wait_s=WAIT_S, waiting=say)
