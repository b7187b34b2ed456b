"""Runs on a host, as root: what it reaches of its network: package repositories, the controller, NFS.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are one JSON object each; ``clusterctl.hosts.reach`` says what is in them. It changes
nothing. Standard library only, Python 3.9.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

CONNECT_S = 3.0
SHOWMOUNT_S = 6.0
CONCURRENT = 64
DETECT = ("proxy-auto-detect", "proxyautodetect")
PING = ("ping", "-n", "-q", "-c", "2", "-i", "0.2", "-W", "2")
IP_AND_ICMP = 28  # bytes of headers before what ping sends
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
NONE = "apt has none on the network"
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
_SETTING = re.compile(r'^Acquire::(https?::Proxy\S*) "([^"]+)";', re.MULTILINE | re.IGNORECASE)


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


def repositories() -> list[list[tuple[str, str]]]:
    """The mirrors of each package repository of the host: URL, and the proxy by which it is asked, or "".

    Where apt has no repository, one without mirrors.
    """
    found: list[list[tuple[str, str]]] = []
    said = run(["apt-get", "--print-uris", "update"])
    if said is not None:
        settings = re.findall(_SETTING, run(["apt-config", "dump"]) or "")
        known = {name.lower(): value for name, value in settings}
        for url in re.findall(r"^'(?!cdrom:)([^']+)'", said, re.MULTILINE):
            found.append([(one, unless_bypassed(one, apt_proxy(one, known))) for one in apt_mirrors(url)])
    if not found and (said is not None or run(["apt-get", "--version"]) is not None):
        return [[]]
    for python in ("/usr/libexec/platform-python", "/usr/bin/python3") if said is None else ():
        listed = run([python, "-c", DNF])
        if listed is not None:
            rows = [line.split() for line in listed.splitlines()]
            for url, proxy in (row for row in rows if len(row) > 1):
                chosen = from_environment(urlsplit(url).scheme, "all") if proxy == "-" else proxy
                found.append([(url, unless_bypassed(url, chosen))])
            break
    return found


def apt_mirrors(url: str) -> list[str]:
    """The mirrors of a list on this host, the server that has the list, or the URL itself."""
    scheme, _, path = url.partition(":")
    if scheme in {"mirror+file", "mirror+copy"}:
        lists = [one for one in Path(path).parents if one.is_file()]
        lines = lists[0].read_text(errors="replace").splitlines() if lists else []
        return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    return [f"http:{path}" if scheme == "mirror" else re.sub(r"^mirror\+", "", url)]


def apt_proxy(url: str, settings: Mapping[str, str]) -> str:
    """The proxy that apt takes for a URL: of its host, detected, of all hosts, or of the environment."""
    parts = urlsplit(url)
    schemes = (parts.scheme, "http")
    detect = next(filter(None, (settings.get(f"{parts.scheme}::{name}") for name in DETECT)), "")
    detected = (run(["runuser", "-u", "_apt", "--", detect, url]) or "").strip() if detect else ""
    of_host = settings.get(f"{parts.scheme}::proxy::{parts.hostname}") or detected
    said = [of_host, *(settings.get(f"{one}::proxy::{parts.hostname}") for one in schemes)]
    said += [settings.get(f"{one}::proxy") for one in schemes]
    chosen = next(filter(None, said), "") or from_environment(*schemes)
    return "" if chosen == "DIRECT" else chosen


def take_sudos_environment() -> None:
    """Have the proxies of Ansible's tasks, which sudo starts: a login as root may have others.

    Whether a session of sudo's has what is in /etc/environment, its PAM decides: not on Debian.
    """
    said = None if "SUDO_UID" in os.environ else run(["sudo", "-n", "env"])
    if said is None:  # it is one of sudo's, or there is no sudo
        return
    found = dict(line.partition("=")[::2] for line in said.splitlines())
    for name in PROXIES:
        os.environ.pop(name, None)
        if name in found:
            os.environ[name] = found[name]


def from_environment(*names: str) -> str:
    """The proxy of the first of these."""
    return next(filter(None, (os.environ.get(f"{name}_proxy") for name in names)), "")


def unless_bypassed(url: str, proxy: str) -> str:
    host = urlsplit(url).hostname or ""
    without = [one.strip().lstrip(".") for one in os.environ.get("no_proxy", "").split(",")]
    bypassed = any(one == "*" or (one and f".{host}".endswith(f".{one}")) for one in without)
    return "" if bypassed else proxy


def place(url: str) -> tuple[str, int] | None:
    """Host and port of a URL; None of one that needs no network."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.scheme not in PORTS:
        return None
    return parts.hostname, parts.port or PORTS[parts.scheme]


def refused(host: str, port: int) -> str:
    """Why there is no connection to a service; "" if there is."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ""
    except socket.timeout:  # noqa: UP041  # another class before Python 3.10
        return f"no answer within {CONNECT_S:g} s"
    except socket.gaierror:
        return "the name is not known there"
    except ConnectionRefusedError:
        return "the connection is refused"
    except OSError as exc:
        return exc.strerror or str(exc)


def exports(server: str) -> list[list[str]] | None:
    """What an NFS server says that it exports, as [path, client...]; None where nobody can say it here.

    One that speaks NFS 4 alone says nothing.
    """
    said = run(["showmount", "--no-headers", "--exports", server], SHOWMOUNT_S)
    if said is None:
        return None
    rows = (line.rstrip().rpartition(" ") for line in said.splitlines())
    return [[path.rstrip(), *clients.split(",")] for path, _, clients in rows if path]


def narrow(address: str, mtu: int) -> bool:
    """Whether small packets get there and back, and the largest ones do not."""
    if run([*PING, address]) is None:  # it answers no ping at all
        return False
    return run([*PING, "-M", "do", "-s", str(mtu - IP_AND_ICMP), address]) is None


def unreached_repositories() -> dict[str, str]:
    """URL -> why it, or the proxy before it, is out of reach; of those at one place the first.

    "" where there is no repository.
    """
    asked: dict[tuple[tuple[str, int], ...], str] = {}
    for mirrors in repositories():
        places = [
            place((proxy if "://" in proxy else f"http://{proxy}") if proxy else url)
            for url, proxy in mirrors
        ]
        there = tuple(dict.fromkeys(at for at in places if at is not None))
        if None not in places:  # that one needs no network
            asked.setdefault(there, mirrors[0][0] if mirrors else "")
    every = {at for places in asked for at in places}
    with ThreadPoolExecutor(CONCURRENT) as pool:
        answers = dict(zip(every, pool.map(lambda at: refused(*at), every)))  # noqa: B905
    return {
        url: "; ".join("{}:{}: {}".format(*at, answers[at]) for at in places) or NONE
        for places, url in asked.items()
        if all(answers[at] for at in places)
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    with ThreadPoolExecutor(CONCURRENT) as pool:
        narrows = pool.submit(narrow, asked["ping"], asked["mtu"]) if asked["ping"] else None
        server = pool.submit(refused, asked["nfs"], asked["nfs_port"]) if asked["nfs"] else None
        exported = pool.submit(exports, asked["nfs"]) if asked["nfs"] else None
        if asked["repositories"]:
            take_sudos_environment()
        found = unreached_repositories() if asked["repositories"] else {}
        answer = {
            "narrow": narrows.result() if narrows else False,
            "nfs": server.result() if server else "",
            "exports": exported.result() if exported else None,
            "repositories": found,
            "missing": [path for path in asked["folders"] if not Path(path).is_dir()],
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
