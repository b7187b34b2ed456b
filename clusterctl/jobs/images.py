"""Container images of jobs: pulled from a registry by the controller's engine, or else by skopeo on
this machine, and sent; and files of images on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import (
    MachineError,
    Notice,
    TransferError,
    TransportError,
    UsageError,
)
from clusterctl.packages.wheelhouse import cache_of_downloads
from clusterctl.scheduler.session import Session
from clusterctl.spec.names import ENGINES
from clusterctl.spec.remote_folders import IMAGES
from clusterctl.spec.remote_reference import SCHEME, Reference
from clusterctl.state.workspace import cache_home, hold
from clusterctl.transport.base import Transport, remote_argv, split_lines
from clusterctl.transport.put import Upload, store_of
from clusterctl.transport.tree import Progress
from clusterctl.util.process import run_for_bytes
from clusterctl.util.progress import LineReporter

_PROGRAM: Final = "clusterctl.jobs.remote_pull"
_SKOPEO: Final = "skopeo"
_CACHE: Final = "images"
# Another clusterctl may be fetching a large image.
_WAIT_S: Final = 3600.0
# The names of processors in images, by those of the kernel.
_PROCESSORS: Final = {"x86_64": "amd64", "aarch64": "arm64"}
# Names at the top of an archive of an image, and of a root file system.
_OF_IMAGE: Final = re.compile(
    r"(blobs|index\.json|manifest\.json|oci-layout|repositories|sha256:.*|[0-9a-f]{64}.*)"
)
_OF_ROOT: Final = frozenset(
    {".dockerenv", "bin", "dev", "etc", "home", "lib", "root", "usr", "var"}
)


@dataclass(frozen=True, slots=True)
class FetchedImage:
    """An image from a registry, on the cluster. reference: its name with its digest. file: content
    of container.json in the job's folder.
    """

    reference: str
    file: bytes


def fetch(
    session: Session,
    nodes: Sequence[Transport],
    container: str,
    report: LineReporter,
    progress: Progress,
) -> FetchedImage:
    """Bring an image to the controller and, if hosts share no folder, to ``nodes``.

    container: docker://NAME. The controller's engine pulls it. If it can't, or there are ``nodes``,
    skopeo fetches it to this machine's cache, from which it is sent.

    Raises:
        TransportError: a host can't be reached.
        MachineError: skopeo is needed and is not on this machine.
        LockedError: another clusterctl has locked the cache of images for an hour.
        TransferError: the image can't be fetched or sent.
    """
    image = Reference.parse(container.removeprefix(SCHEME))
    image = replace(image, tag="", digest=image.digest or _digest(image))
    why = ""
    files: Mapping[str, str] = {}
    if not nodes:
        host = session.transport.host
        answer = _pull(session, image, lambda: report(f"{host} is pulling {container}"))
        if answer["why"]:
            why = f"{host}: {answer['why']}"
            report(why)
    if nodes or why:
        machine = [*nodes, session.transport][0].run(("uname", "-m")).stdout.strip()
        processor = _PROCESSORS.get(machine, machine)
        report(f"fetching {container} here")
        with _locked_cache("submit", report) as cache:
            layout = _copy(image, cache, processor, why)
        files = _send(session, nodes, layout, progress)
    content = {"name": container, "digest": image.digest, "files": files}
    return FetchedImage(f"{SCHEME}{image}", (json.dumps(content) + "\n").encode())


def _pull(session: Session, image: Reference, begin: Callable[[], None]) -> Mapping[str, str]:
    """Have the controller's engine pull an image, and return the program's last line.

    begin: called when the engine starts.
    """
    folder = f"{session.inventory.folder}/{IMAGES}"
    too_long = TransferError(
        "the answer about an image is too long", code="internal", about="line-length"
    )
    last: Mapping[str, str] = {}
    try:
        with session.transport.converse(
            remote_argv(_PROGRAM, str(image), folder, *ENGINES)
        ) as talk:
            for number, line in enumerate(split_lines(iter(talk.receive, b""), too_long)):
                last = json.loads(line)
                if not (number or last):
                    begin()
            talk.finish()
    except TransportError as exc:
        return {"why": exc.cause}
    return last


def _digest(image: Reference) -> str:
    """Return the digest that a tag has now."""
    return f"sha256:{hashlib.sha256(_skopeo(image, 'inspect', '--raw')).hexdigest()}"


def _copy(image: Reference, cache: Path, processor: str, why: str) -> Mapping[str, Path]:
    """Fetch an image to the cache, and return path in its OCI layout -> file.

    The layers of all images are in one folder. processor: its name in images. why: as for
    ``_skopeo``.
    """
    # A digest may be that of a list of images for several processors.
    layout = cache / f"{image.digest.rpartition(':')[2]}-{processor}"
    blobs = cache / "blobs"
    # skopeo writes it at the end.
    if not (layout / "index.json").is_file():
        # So that layers are those of the registry, and are known again.
        plain = "--dest-oci-accept-uncompressed-layers"
        own = ("copy", f"--dest-shared-blob-dir={blobs}", plain)
        wanted = ("--override-os=linux", f"--override-arch={processor}")
        _skopeo(image, *own, to=f"oci:{layout}", options=wanted, why=why)
    manifest = _digests(json.loads((layout / "index.json").read_text())["manifests"])[0]
    content = json.loads((blobs / manifest).read_text())
    names = {manifest, *_digests([content["config"], *content["layers"]])}
    return {
        **{name: layout / name for name in ("index.json", "oci-layout")},
        **{f"blobs/{name}": blobs / name for name in sorted(names)},
    }


def _digests(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the paths of blobs, such as sha256/0a1b."""
    return [entry["digest"].replace(":", "/") for entry in entries]


def _skopeo(
    image: Reference,
    verb: str,
    *words: str,
    to: str = "",
    options: Sequence[str] = (),
    why: str = "",
) -> bytes:
    """Run skopeo, and return its output.

    to: where an image is copied. options: those before the verb. why: why the controller could not
        pull the image.

    Raises:
        MachineError: this machine has no skopeo.
        TransferError: skopeo fails.
    """
    by_hand = f"`docker pull {image} && docker save -o FILE.tar {image}`, then --container FILE.tar"
    if not shutil.which(_SKOPEO):
        raise MachineError(
            f"the image {image} can't be fetched",
            code="tool-missing",
            about="skopeo",
            where="this machine",
            why=f"{why and why + '; '}skopeo, which asks the registry for the image's digest, is not "
            "installed here",
            fix=f"install the package skopeo here; or {by_hand}",
        )
    plain = [f"--{'src-' if to else ''}tls-verify=false"] if image.is_of_this_machine else []
    name = f"{SCHEME}{image}"
    output, result = run_for_bytes(
        [_SKOPEO, *options, verb, *words, *plain, name, *([to] if to else [])]
    )
    if result.rc:
        reason = result.reason.splitlines()[-1]
        if text := re.search(r'level=fatal msg="(.*)"$', reason):
            reason = text[1].replace('\\"', '"')
        raise TransferError(
            f"the image {image} can't be fetched",
            about="image",
            where="this machine",
            why=f"{why and why + '; '}skopeo: {reason}",
            fix=f"correct the name; log in by `skopeo login {image.registry}`; or {by_hand}",
        )
    return output


def _send(
    session: Session, nodes: Sequence[Transport], layout: Mapping[str, Path], progress: Progress
) -> Mapping[str, str]:
    """Send the files of an image, and return path in the layout -> path on the cluster."""
    store = store_of(session.inventory.folder)
    files = list(layout.values())
    places = [
        Upload(to, progress).to_store(files, store=store) for to in (session.transport, *nodes)
    ]
    return {name: places[0][file] for name, file in layout.items()}


@contextmanager
def _locked_cache(verb: str, report: LineReporter) -> Iterator[Path]:
    """Yield the folder of fetched images, which no other clusterctl changes meanwhile. verb, report:
    as for ``hold``.
    """
    with cache_of_downloads(_CACHE) as cache:
        cache.parent.mkdir(parents=True, exist_ok=True)
        what = "the cache of container images"
        lock = cache.with_suffix(".lock")
        with hold(lock, verb, what=what, wait_s=_WAIT_S, waiting=report):
            cache.mkdir(exist_ok=True)
            yield cache


def cached_bytes() -> int:
    """Return the size of the fetched images on this machine, and of those being fetched."""
    size = 0
    for folder, _, names in os.walk(cache_home() / _CACHE):
        for name in names:
            # skopeo may have renamed or removed a file.
            with suppress(FileNotFoundError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def prune(report: LineReporter) -> int:
    """Remove the fetched images from this machine, and return their size.

    report: called if another clusterctl is fetching an image, which is waited for.
    """
    if not (cache_home() / _CACHE).is_dir():
        return 0
    with _locked_cache("cache prune", report) as cache:
        size = cached_bytes()
        shutil.rmtree(cache)
    return size


def archive_notice(file: Path) -> Notice | None:
    """Return a note about an image file on this machine that is a tar of a root file system.

    Raises:
        UsageError: it is a tar of something else.
    """
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                top = member.name.removeprefix("./").partition("/")[0]
                if _OF_IMAGE.fullmatch(top):
                    return None
                if top in _OF_ROOT:
                    text = (
                        f"{file} is a root file system, as `docker export` writes it, without the "
                        "variables of its image, such as PATH; `docker save` writes an image"
                    )
                    return Notice("image-without-settings", text)
    # Such as a .sif file, or one that can't be read or is damaged, which is noticed later. Each kind of
    # compression has its own error, and this Python may lack some kinds.
    except Exception:
        return None
    raise UsageError(
        f"{file} is not a container image",
        code="file-invalid",
        about="image",
        why="it is a tar file that has neither an image nor a root file system",
        fix="write one by `docker save -o FILE.tar IMAGE`",
    )
