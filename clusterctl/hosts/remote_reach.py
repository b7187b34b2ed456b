"""Runs on a host, as root: what it reaches of its network: package repositories, the controller, NFS.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are one JSON object each; ``clusterctl.providers.onprem.members`` says what is in them.
It changes nothing. Standard library only, Python 3.9.
"""

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from clusterctl.hosts.remote_run import run

CONNECT_S = 3.0
# A slow proxy answers for all hosts at once.
ANSWER_S = 10.0
REPOSITORY_S = 20.0
CONCURRENT = 64
PING = ("ping", "-n", "-q", "-c", "2", "-i", "0.2", "-W", "2")
IP_AND_ICMP = 28  # bytes of headers before what ping sends
APT_HELPER = (
    *("/usr/lib/apt/apt-helper", "-oAcquire::Retries=0"),
    *(f"-oAcquire::{scheme}::Timeout={ANSWER_S:g}" for scheme in ("http", "https", "ftp")),
    "download-file",
)
# By dnf's own reading of its files and its own connections, which it tries four times: URL and cause of the
# first repository that must answer and does not. A server that lacks the file is reached.
DNF = """
import dnf, sys
base = dnf.Base()
base.conf.read()
base.conf.substitutions.update_from_etc("/")
base.conf.substitutions["releasever"] = dnf.rpm.detect_releasever("/") or ""
base.read_all_repos()
for one in base.repos.iter_enabled():
    if not one.skip_if_unavailable:
        one.timeout = int(sys.argv[1])
        url = one.metalink or one.mirrorlist or (one.baseurl or [""])[0].rstrip("/") + "/repodata/repomd.xml"
        try:
            base.urlopen(url, one)
        except Exception as exc:
            if "Status code" not in str(exc):
                print(url, " ".join(str(exc).split()))
                break
"""


def as_sudo() -> tuple[str, ...]:
    """The command that gives a program the environment of Ansible's tasks, which sudo starts.

    A login as root may have other proxies: whether sudo reads /etc/environment, its PAM decides.
    """
    return () if "SUDO_UID" in os.environ or shutil.which("sudo") is None else ("sudo", "-n")


def unreached_repositories() -> dict[str, str]:
    """URL -> why this repository is out of reach, in the words of the host's package manager.

    Of the repositories of one server the first is tried. "" stands for those that a host lacks altogether.
    """
    said = run(["apt-get", "--print-uris", "update"])
    if said is None and run(["apt-get", "--version"]) is None:
        return first_of_servers(unreached_by_dnf())
    urls = re.findall(r"^'(?!cdrom:)([^']+)'", said or "", re.MULTILINE)
    if not urls:
        return {"": "apt has none on the network"}
    tried = list(first_of_servers(dict.fromkeys(urls, "")))
    with ThreadPoolExecutor(CONCURRENT) as pool:
        causes = dict(zip(tried, pool.map(unreached_by_apt, tried)))  # noqa: B905
    return {url: why for url, why in causes.items() if why}


def first_of_servers(causes: dict[str, str]) -> dict[str, str]:
    """Keep the first URL of each server."""
    found: dict[str, str] = {}
    for url in causes:
        found.setdefault(urlsplit(url).netloc or url, url)
    return {url: causes[url] for url in found.values()}


def unreached_by_dnf() -> dict[str, str]:
    for python in ("/usr/libexec/platform-python", "/usr/bin/python3"):
        listed = run([*as_sudo(), python, "-c", DNF, f"{CONNECT_S:g}"], REPOSITORY_S)
        if listed is not None:
            return {url: why for url, _, why in (line.partition(" ") for line in listed.splitlines())}
    return {}


def unreached_by_apt(url: str) -> str:
    """Why apt does not reach any mirror of a repository; "" if it does, or asks no network."""
    causes = []
    for mirror in apt_mirrors(url):
        if not re.match(r"(?:https?|ftp):", mirror):
            return ""
        with tempfile.TemporaryDirectory() as folder:
            argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", *as_sudo(), *APT_HELPER, mirror, f"{folder}/index"]
            said = run(argv, REPOSITORY_S, any_exit=True)
        if said is None:
            said = f"E: Failed to fetch {mirror}  no answer within {REPOSITORY_S:g} s"
        # A server, or a proxy, that says in three digits why it does not give the file is reached.
        failed = re.search(r"^E: Failed to fetch \S+  (?!\d{3}\b)(.*)$", said, re.MULTILINE)
        if failed is None:
            return ""
        causes.append(failed.group(1))
    return "; ".join(dict.fromkeys(causes)) or "its list of mirrors is empty"


def apt_mirrors(url: str) -> list[str]:
    """The mirrors of a list on this host, the server that has the list, or the URL itself."""
    scheme, _, path = url.partition(":")
    if scheme in {"mirror+file", "mirror+copy"}:
        listed = next((one for one in Path(path).parents if one.is_file()), None)
        lines = listed.read_text(errors="replace").splitlines() if listed else []
        mirrors = [line.split()[0].rstrip("/") for line in lines if line.strip() and not line.startswith("#")]
        return [f"{mirror}{path[len(str(listed)) :]}" for mirror in mirrors]
    return [f"http:{path}" if scheme == "mirror" else re.sub(r"^mirror\+", "", url)]


def refused(host: str, port: int) -> str:
    """Why there is no connection to a service; "" if there is."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ""
    except socket.timeout:  # another class before Python 3.10
        return f"no answer within {CONNECT_S:g} s"
    except socket.gaierror:
        return "the name is not known there"
    except ConnectionRefusedError:
        return "the connection is refused"
    except OSError as exc:
        return exc.strerror or str(exc)


def loses_large_packets(address: str, mtu: int) -> bool:
    """Whether small packets get to an address and back, and packets of the MTU's size do not."""
    if run([*PING, address]) is None:  # it answers no ping at all
        return False
    return run([*PING, "-M", "do", "-s", str(mtu - IP_AND_ICMP), address]) is None


def main() -> None:
    asked = json.loads(sys.argv[1])
    with ThreadPoolExecutor(CONCURRENT) as pool:
        loses = pool.submit(loses_large_packets, asked["ping"], asked["mtu"]) if asked["mtu"] else None
        server = pool.submit(refused, asked["nfs"], asked["nfs_port"]) if asked["nfs"] else None
        found = unreached_repositories() if asked["repositories"] else {}
        answer = {
            "loses_large_packets": loses.result() if loses else False,
            "nfs": server.result() if server else "",
            "repositories": found,
            "missing": [path for path in asked["folders"] if not Path(path).is_dir()],
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
