"""Names of container images in registries. Runs on this machine and on the cluster: standard library
only, Python 3.9.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DOCKER_HUB = "docker.io"
# What an image in a registry begins with.
SCHEME = "docker://"
# The grammar of https://github.com/distribution/reference (regexp.go).
_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_FORM = re.compile(
    rf"(?:(?P<host>{_HOST})/)?(?P<path>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
# As for Docker, a first part without a dot or a port is a folder of Docker Hub, except this.
_LOCAL = "localhost"
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d+){3}|\[::1\])(?::\d+)?")


@dataclass(frozen=True)
class Reference:
    """An image in a registry. registry: its host, with a port if it is not the usual one. digest:
    "": that of the tag.
    """

    registry: str
    path: str
    tag: str
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read ``[REGISTRY/]PATH[:TAG][@sha256:DIGEST]``. As for Docker, the first part is a
        registry if it has a dot or a colon, or is localhost; otherwise the registry is Docker Hub.

        Raises:
            ValueError: the text does not have this form.
        """
        found = _FORM.fullmatch(text)
        host = (found and found["host"]) or ""
        is_host = host == _LOCAL or "." in host or ":" in host
        if found is None or not (is_host or re.fullmatch(f"(?:{_PART})?", host)):
            raise ValueError(f"{text!r} is not the name of an image, such as python:3.12-slim")
        path = found["path"]
        if host and not is_host:
            path = f"{host}/{path}"
            host = ""
        if host in ("", DOCKER_HUB, f"index.{DOCKER_HUB}"):
            host = DOCKER_HUB
            path = path if "/" in path else f"library/{path}"
        tag = found["tag"] or ("" if found["digest"] else "latest")
        return cls(host, path, tag, found["digest"] or "")

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.registry}/{self.path}{tag}{self.digest and '@' + self.digest}"

    @property
    def is_of_this_machine(self) -> bool:
        """Whether the registry is on the machine that asks it. As for Docker, it then needs no
        encryption.
        """
        return _LOOPBACK.fullmatch(self.registry) is not None
