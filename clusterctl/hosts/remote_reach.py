"""Runs on a host, as root: what it reaches of its network: package repositories, the other hosts, NFS.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are one JSON object each; ``clusterctl.hosts.reach`` says what is in them. It changes
nothing and listens on nothing: a port on which nothing listens yet refuses, and so is within reach. Standard
library only, Python 3.9.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

CONNECT_S = 3.0
CONCURRENT = 64
PING = ("ping", "-n", "-q", "-c", "2", "-i", "0.2", "-W", "2")
IP_AND_ICMP = 28  # bytes of headers before what ping sends
PORTS = {"http": 80, "https": 443, "ftp": 21}
# dnf's own reading of its files, where variables are replaced: a line a repository that must answer.
DNF = """
import dnf
base = dnf.Base()
base.conf.read()
base.conf.substitutions.update_from_etc("/")
base.conf.substitutions["releasever"] = dnf.rpm.detect_releasever("/") or ""
base.read_all_repos()
for one in base.repos.iter_enabled():
    if not one.skip_if_unavailable:
        url = one.metalink or one.mirrorlist or (one.baseurl or [""])[0]
        print(url, one.proxy or base.conf.proxy or "-")
"""
_PROXY = re.compile(r'^Acquire::(https?)::Proxy "([^"]+)";', re.MULTILINE | re.IGNORECASE)


def run(argv: Sequence[str], timeout_s: float = 10.0) -> str | None:
    """What a command says; None if it fails, takes too long, or is not there."""
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            timeout=timeout_s, check=False, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def repositories() -> list[tuple[str, str]]:
    """The package manager's repositories: URL, and the proxy by which they are asked, or ""."""
    found: list[tuple[str, str]] = []
    said = run(["apt-get", "--print-uris", "update"])
    if said is not None:
        proxies = run(["apt-config", "dump", "Acquire::http::Proxy", "Acquire::https::Proxy"]) or ""
        proxy = {name.lower(): url for name, url in re.findall(_PROXY, proxies)}
        for url in re.findall(r"^'(https?://[^']+)'", said, re.MULTILINE):
            scheme = urlsplit(url).scheme
            found.append((url, proxy.get(scheme) or proxy.get("http") or ""))
    for python in ("/usr/libexec/platform-python", "/usr/bin/python3") if said is None else ():
        listed = run([python, "-c", DNF], 20.0)
        if listed is not None:
            rows = [line.split() for line in listed.splitlines()]
            found += [(row[0], row[1].strip("-")) for row in rows if len(row) > 1]
            break
    return found


def place(url: str) -> tuple[str, int] | None:
    """Host and port of a URL; None of one that needs no network."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.scheme not in PORTS:
        return None
    return parts.hostname, parts.port or PORTS[parts.scheme]


def blocked(host: str, port: int) -> str:
    """Why no packet comes back from there; "" if one does, be it a refusal."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ""
    except socket.timeout:  # noqa: UP041  # another class before Python 3.10
        return f"no answer within {CONNECT_S:g} s"
    except socket.gaierror:
        return "the name is not known there"
    except OSError as exc:
        return "" if exc.errno == errno.ECONNREFUSED else exc.strerror or str(exc)


def refused(host: str, port: int) -> str:
    """The same of a service that must be there: a refusal counts."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ""
    except ConnectionRefusedError:
        return "the connection is refused"
    except OSError:
        return blocked(host, port)


def narrow(address: str, mtu: int) -> bool:
    """Whether small packets get there and back, and the largest ones do not."""
    if run([*PING, address]) is None:  # it answers no ping at all
        return False
    return run([*PING, "-M", "do", "-s", str(mtu - IP_AND_ICMP), address]) is None


def unreached_repositories() -> dict[str, str]:
    """URL -> why it, or the proxy before it, is out of reach; of those at one place the first."""
    places: dict[tuple[str, int], str] = {}
    for url, proxy in repositories():
        at = place(proxy or url)
        if at is not None:
            places.setdefault(at, url)
    with ThreadPoolExecutor(CONCURRENT) as pool:
        answers = dict(zip(places, pool.map(lambda at: refused(*at), places)))  # noqa: B905
    return {places[at]: "{}:{}: {}".format(*at, why) for at, why in answers.items() if why}


def main() -> None:
    asked = json.loads(sys.argv[1])
    pairs = [(name, port) for name, (_, ports) in asked["peers"].items() for port in ports]
    with ThreadPoolExecutor(CONCURRENT) as pool:
        peers = [pool.submit(blocked, asked["peers"][name][0], port) for name, port in pairs]
        narrows = pool.submit(narrow, asked["ping"], asked["mtu"]) if asked["ping"] else None
        server = pool.submit(refused, asked["nfs"], asked["nfs_port"]) if asked["nfs"] else None
        found = unreached_repositories() if asked["repositories"] else {}
        answer = {
            "peers": [[*pair, one.result()] for pair, one in zip(pairs, peers) if one.result()],  # noqa: B905
            "narrow": narrows.result() if narrows else False,
            "nfs": server.result() if server else "",
            "repositories": found,
            "missing": [path for path in asked["folders"] if not Path(path).is_dir()],
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
