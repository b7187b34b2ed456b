"""Container images of jobs: fetched from a registry by the controller, or else here, and sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from clusterctl.errors import NoAnswerError, TransferError, UsageError
from clusterctl.jobs.remote_registry import LOOPBACK, UNREACHABLE, fetch_image, login_of
from clusterctl.packages.wheelhouse import cache_of_downloads
from clusterctl.scheduler.session import Session
from clusterctl.spec.remote_folders import LAYERS
from clusterctl.spec.remote_reference import SCHEME, Reference
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.transport.base import Transport, remote_argv, split_lines
from clusterctl.transport.put import Upload, store_of
from clusterctl.transport.tree import Progress
from clusterctl.util.numbers import counted
from clusterctl.util.progress import LineReporter

_PROGRAM: Final = "clusterctl.jobs.remote_registry"
# A controller whose network drops packets is silent for longer, since registries have many addresses.
_SILENCE_S: Final = 60.0


class ImageProblem(NamedTuple):
    """Why an image can't be fetched: the code of the program, the error message, and the fix."""

    code: str
    what: str
    fix: str


_PROBLEMS: Final = {
    problem.code: problem
    for problem in (
        ImageProblem(
            "registry-login",
            "the registry refuses the image {image}",
            "run `docker login {registry}` or `podman login {registry}` here or on the cluster, and "
            "check the name: registries answer so, too, if there is no such image",
        ),
        ImageProblem(
            "no-such-image",
            "there is no image {image} for the nodes",
            "correct the name and the tag",
        ),
        ImageProblem(
            "registry-busy",
            "the registry does not send the image {image} now",
            "wait, or run `docker login {registry}` here, since users have more requests",
        ),
        ImageProblem(
            "wrong-digest",
            "the registry sent other bytes than those of the image {image}",
            "submit again; if it stays so, ask those who run the registry",
        ),
        ImageProblem(
            "image-not-fetched",
            "the image {image} was not fetched completely",
            "submit again: what was fetched is kept",
        ),
        ImageProblem(
            "no-room-for-image",
            "the image {image} can't be written",
            "make room there, make the folder writable, or move ~/clusterctl on the cluster to a "
            "larger disk",
        ),
        ImageProblem(
            "image-registry-unreachable",
            "neither the controller nor this machine reaches the registry of {image}",
            "correct the name of the registry, or submit a file: `docker save -o FILE.tar` or "
            "`apptainer pull FILE.sif`, then --container FILE",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class FetchedImage:
    """An image from a registry, on the cluster. reference: its name with its digest. file: content
    of image.json in the job's folder.
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
    """Fetch an image to the controller and, if hosts share no folder, to ``nodes``.

    container: docker://NAME. If the controller does not reach the registry, or there are ``nodes``,
    this machine fetches the image and sends it. Its login is the one that this machine has for the
    registry, or else that of the job user on the cluster; it is only in the memory of the program.

    Raises:
        UsageError: the registry refuses the image, or does not have it.
        TransferError: it can't be fetched or sent now.
    """
    image = Reference.parse(container.removeprefix(SCHEME))
    login = login_of(image.registry)
    # A registry on this machine is not that of the same name on the controller.
    sent = "" if LOOPBACK.fullmatch(image.registry) else login
    wanted = {"name": str(image), "login": sent}
    found: Mapping[str, Any] = {}
    where = session.transport.host
    if not nodes:
        report(f"{where} is fetching {container}")
        folder = f"{session.inventory.folder}/{LAYERS}"
        found = _fetch_there(session.transport, {**wanted, "folder": folder}, progress)
    if nodes or found.get("problem") == UNREACHABLE:
        report(f"fetching {container} here")
        machine = found.get("machine", ARCHITECTURE)
        with cache_of_downloads("images") as cache:
            here = _last(fetch_image(str(image), str(cache), login, machine), progress)
        if "image" in here:
            found = _send(session, nodes, here["image"], progress)
        # If neither reaches it, the controller's reason is shown.
        elif nodes or here["problem"] != UNREACHABLE:
            found = here
            where = "this machine"
    if "image" not in found:
        raise _error(container, image.registry, where, found)
    parts = found["image"]
    pinned = f"{SCHEME}{image.registry}/{image.path}@{parts['digest']}"
    report(f"{container} is {parts['digest'][:19]}, {counted(len(parts['layers']), 'layer')}")
    return FetchedImage(pinned, (json.dumps({"name": container, **parts}) + "\n").encode())


def _fetch_there(
    transport: Transport, wanted: Mapping[str, str], progress: Progress
) -> Mapping[str, Any]:
    """Run the program on a host, and return its last line."""
    too_long = TransferError("the answer about an image is too long", code="line-too-long")
    try:
        with transport.converse(remote_argv(_PROGRAM), silence_s=_SILENCE_S) as talk:
            talk.send(json.dumps(wanted).encode() + b"\n")
            lines = split_lines(iter(talk.receive, b""), too_long)
            last = _last(map(json.loads, lines), progress)
            talk.finish()
        return last
    except NoAnswerError as exc:
        return {"problem": UNREACHABLE, "why": str(exc)}


def _last(lines: Iterable[Mapping[str, Any]], progress: Progress) -> Mapping[str, Any]:
    """Return the last line of the program, and show what the others say."""
    last: Mapping[str, Any] = {"problem": "image-not-fetched", "why": "the program gave no answer"}
    for last in lines:
        if "of" in last:
            progress("fetching the image", int(last["bytes"]), int(last["of"]))
    return last


def _send(
    session: Session, nodes: Sequence[Transport], parts: Mapping[str, Any], progress: Progress
) -> Mapping[str, Any]:
    """Send the parts of an image on this machine, and return the program's line for the cluster."""
    files = [Path(path) for path in (parts["config"], *parts["layers"])]
    different = list(dict.fromkeys(files))
    store = store_of(session.inventory.folder)
    places = [
        Upload(to, progress).to_store(different, store=store) for to in (session.transport, *nodes)
    ]
    config, *layers = (places[0][file] for file in files)
    return {"image": {"digest": parts["digest"], "config": config, "layers": layers}}


def _error(
    container: str, registry: str, where: str, found: Mapping[str, Any]
) -> UsageError | TransferError:
    problem = _PROBLEMS.get(str(found["problem"]), _PROBLEMS["image-not-fetched"])
    kind = UsageError if problem.code in ("registry-login", "no-such-image") else TransferError
    return kind(
        problem.what.format(image=container),
        code=problem.code,
        where=where,
        why=str(found.get("why", "")),
        fix=problem.fix.format(registry=registry),
    )
