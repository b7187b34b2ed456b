"""Has the container engine of a host pull an image from a registry. Runs on the controller or login
host: standard library only, Python 3.9.

    main(NAME, FOLDER, *ENGINES)

``NAME`` is REGISTRY/PATH@sha256:DIGEST. ``FOLDER`` has the images that jobs use, under the names
that payload/node/images.py gives them; a relative path starts at the home folder. The host's first
engine of ``ENGINES`` pulls the image, with the login that the user has for it there.

Each line of stdout is JSON: {} as a keep-alive, and at the end {"why": TEXT}. TEXT is empty if the
folder has the image.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO

from clusterctl.spec.remote_reference import DOCKER_HUB, Reference

# The registry of Docker Hub has another host than its images' names.
HUB_HOST = "registry-1.docker.io"
HTTPS = 443
REACH_S = 4.0
ALIVE_S = 5.0
PAUSE_S = 1.0
KEPT_BYTES = 1 << 12
SUFFIXES = {"apptainer": ".sif", "singularity": ".sif", "enroot": ".sqsh", "ch-run": ""}
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def main(name: str, folder: str, *engines: str) -> None:
    try:
        image = Reference.parse(name)
        why = obtain(image, os.path.join(os.path.expanduser("~"), folder), engines)
    except OSError as exc:
        why = f"{exc.filename or folder}: {exc.strerror or exc}"
    emit({"why": why})


def emit(answer: Mapping[str, str]) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def obtain(image: Reference, folder: str, engines: Sequence[str]) -> str:
    """Pull an image, unless the folder has it. Return why it could not be pulled, or ""."""
    engine = next(filter(shutil.which, engines), "")
    if not engine:
        return f"no container engine ({', '.join(engines)})"
    os.makedirs(folder, exist_ok=True)
    path = made_path(image.digest, folder, engine)
    with open(f"{folder}/.{os.path.basename(path)}.lock", "a") as lock:
        wait_for(lock)
        if os.path.exists(path):
            os.utime(path)
            return ""
        # A login host that limits programs is not the place to make an image.
        limits = (resource.RLIMIT_CPU, resource.RLIMIT_AS)
        if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
            return "it limits the time or the memory of programs (`ulimit -t`, `ulimit -v`)"
        if not is_reachable(image.registry):
            return f"it does not reach {image.registry}"
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as work:
            new = f"{work}/image{SUFFIXES[engine]}"
            for words in commands(engine, image, new):
                if why := run(words, variables(image, work)):
                    return f"{words[0]}: {why}"
            os.rename(new, path)
    return ""


def wait_for(lock: IO[str]) -> None:
    """Lock a file, in a file system that has locks."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            emit({})
            time.sleep(PAUSE_S)
        except OSError:
            return
        else:
            return


def made_path(digest: str, folder: str, engine: str) -> str:
    """Return the path that payload/node/images.py gives to an image."""
    name = hashlib.sha256(f"{digest}\0{platform.machine()}".encode()).hexdigest()[:32]
    return f"{folder}/{name}{SUFFIXES[engine]}"


def is_reachable(registry: str) -> bool:
    """Return whether the registry accepts a connection. A proxy is left to the engine."""
    if any(map(os.environ.get, PROXIES)):
        return True
    address = urllib.parse.urlsplit(f"//{HUB_HOST if registry == DOCKER_HUB else registry}")
    place = address.hostname or "", address.port or HTTPS
    with suppress(OSError), socket.create_connection(place, REACH_S):
        return True
    return False


def commands(engine: str, image: Reference, new: str) -> Iterator[Sequence[str]]:
    """Yield the commands that pull an image to ``new``."""
    if engine == "enroot":
        host = HUB_HOST if image.registry == DOCKER_HUB else image.registry
        yield [engine, "import", "-o", new, f"docker://{host}#{image.path}@{image.digest}"]
    elif engine == "ch-run":
        yield ["ch-image", "pull", str(image)]
        yield ["ch-convert", "-i", "ch-image", "-o", "dir", str(image), new]
    else:
        plain = ["--no-https"] if image.is_of_this_machine else []
        yield [engine, "pull", "--disable-cache", *plain, new, f"docker://{image}"]


def variables(image: Reference, work: str) -> Mapping[str, str]:
    """Return the environment of the engines."""
    found = {**os.environ, "CH_IMAGE_STORAGE": f"{work}/storage"}
    # Enroot's own folders are there. A login without a session has none.
    if not os.path.isdir(os.environ.get("XDG_RUNTIME_DIR", "")):
        found["XDG_RUNTIME_DIR"] = work
    if image.is_of_this_machine:
        found["ENROOT_ALLOW_HTTP"] = "yes"
    return found


def run(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a program. Return the last line of its output if it fails, or ""."""
    try:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except FileNotFoundError:
        return "it is not installed"
    text = b""
    with process:
        output = process.stdout.fileno()  # type: ignore[union-attr]
        while True:
            emit({})
            if not select.select([output], [], [], ALIVE_S)[0]:
                continue
            if not (piece := os.read(output, KEPT_BYTES)):
                break
            text = (text + piece)[-KEPT_BYTES:]
    lines = text.decode(errors="replace").strip().splitlines()
    return (lines or [f"exit {process.returncode}"])[-1] if process.returncode else ""
