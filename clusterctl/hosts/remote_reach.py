"""Tests whether a host reaches package repositories, the controller and NFS. Runs on the host, as
root.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are JSON objects; ``clusterctl.providers.onprem.members`` describes them.
It changes nothing. Standard library only, Python 3.9.
"""

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Optional
from urllib.parse import urlsplit

from clusterctl.hosts.remote_run import run

CONNECT_S = 3.0
# A slow proxy may serve all hosts at the same time.
ANSWER_S = 10.0
REPOSITORY_S = 20.0
CONCURRENT = 64
PING = ("ping", "-n", "-q", "-c", "2", "-i", "0.2", "-W", "2")
# Bytes of headers before the payload of a ping.
IP_AND_ICMP = 28
APT_HELPER = (
    "/usr/lib/apt/apt-helper",
    "-oAcquire::Retries=0",
    *(f"-oAcquire::{scheme}::Timeout={ANSWER_S:g}" for scheme in ("http", "https", "ftp")),
    "download-file",
)
# Prints URL and cause of the first required repository that dnf can't reach with its own
# configuration, after four tries. A server that answers but lacks the file counts as reached.
# Arguments: seconds to connect, and globs of repositories that are left out.
DNF = """
import dnf, sys
base = dnf.Base()
base.conf.read()
base.conf.substitutions.update_from_etc("/")
base.conf.substitutions["releasever"] = dnf.rpm.detect_releasever("/") or ""
base.read_all_repos()
for pattern in sys.argv[2:]:
    for one in base.repos.get_matching(pattern):
        one.disable()
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
    """Return the command prefix that gives a program the environment of Ansible's tasks, which run
    with sudo.

    A root login may have other proxy settings: sudo's PAM configuration decides whether sudo reads
    /etc/environment.
    """
    return () if "SUDO_UID" in os.environ or shutil.which("sudo") is None else ("sudo", "-n")


def unreached_repositories(left_out: Sequence[str]) -> dict[str, str]:
    """Return URL -> error of the package manager, for repositories that can't be reached.

    Only the first repository of each server is tried. The URL "" means that the host has no
    repositories.
    left_out: globs of dnf's repositories that are not tried.
    """
    output = run(["apt-get", "--print-uris", "update"])
    if output is None and run(["apt-get", "--version"]) is None:
        return first_of_servers(unreached_by_dnf(left_out))
    urls = re.findall(r"^'(?!cdrom:)([^']+)'", output or "", re.MULTILINE)
    if not urls:
        return {"": "apt has no repository on the network"}
    tried = list(first_of_servers(dict.fromkeys(urls, "")))
    with ThreadPoolExecutor(CONCURRENT) as pool:
        causes = dict(zip(tried, pool.map(unreached_by_apt, tried)))
    return {url: cause for url, cause in causes.items() if cause}


def first_of_servers(causes: dict[str, str]) -> dict[str, str]:
    url_by_server: dict[str, str] = {}
    for url in causes:
        url_by_server.setdefault(urlsplit(url).netloc or url, url)
    return {url: causes[url] for url in url_by_server.values()}


def unreached_by_dnf(left_out: Sequence[str]) -> dict[str, str]:
    for python in ("/usr/libexec/platform-python", "/usr/bin/python3"):
        listed = run([*as_sudo(), python, "-c", DNF, f"{CONNECT_S:g}", *left_out], REPOSITORY_S)
        if listed is not None:
            return {
                url: cause
                for url, _, cause in (line.partition(" ") for line in listed.splitlines())
            }
    return {}


def unreached_by_apt(url: str) -> str:
    """Return the reason why apt reaches no mirror of a repository; "" if it reaches or needs no
    mirror.
    """
    causes = []
    for mirror in apt_mirrors(url):
        if not re.match(r"(?:https?|ftp):", mirror):
            return ""
        cause = unread_by_apt(mirror)
        # A server or proxy that answers with a three-digit status counts as reached.
        if not cause or re.match(r"\d{3}\b", cause):
            return ""
        causes.append(cause)
    return "; ".join(dict.fromkeys(causes)) or "its list of mirrors is empty"


def unread(url: str) -> str:
    """Return why apt, or curl, whose library dnf uses, can't read a file; "" if it can."""
    if Path(APT_HELPER[0]).exists():
        return unread_by_apt(url)
    output = merged_output(("curl", "-fsS", "-o", os.devnull, url))
    return no_answer() if output is None else output.strip()


def unread_by_apt(url: str) -> str:
    """Return the reason why apt can't read a file; "" if it can."""
    with tempfile.TemporaryDirectory() as folder:
        output = merged_output((*APT_HELPER, url, f"{folder}/index"))
    if output is None:
        return no_answer()
    failed = re.search(r"^E: Failed to fetch \S+  (.*)$", output, re.MULTILINE)
    return failed.group(1) if failed else ""


def merged_output(argv: Sequence[str]) -> Optional[str]:
    """Return what a program of Ansible's tasks prints to stdout and stderr; None if it takes too
    long.
    """
    merging = ("sh", "-c", 'exec "$@" 2>&1', "sh", *as_sudo())
    return run([*merging, *argv], REPOSITORY_S, any_exit=True)


def no_answer() -> str:
    return f"no answer within {REPOSITORY_S:g} s"


def apt_mirrors(url: str) -> list[str]:
    """Return an apt URL's mirrors from a local list, or the server that has the list, or the URL
    itself.
    """
    scheme, _, path = url.partition(":")
    if scheme in {"mirror+file", "mirror+copy"}:
        listed = next((parent for parent in Path(path).parents if parent.is_file()), None)
        lines = listed.read_text(errors="replace").splitlines() if listed else []
        mirrors = [
            line.split()[0].rstrip("/")
            for line in lines
            if line.strip() and not line.startswith("#")
        ]
        return [f"{mirror}{path[len(str(listed)) :]}" for mirror in mirrors]
    return [f"http:{path}" if scheme == "mirror" else re.sub(r"^mirror\+", "", url)]


def refused(host: str, port: int) -> str:
    """Return why a connection to a port fails; "" if it succeeds."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ""
    except socket.timeout:
        return f"no answer within {CONNECT_S:g} s"
    except socket.gaierror:
        return "the host can't resolve the name"
    except ConnectionRefusedError:
        return "the connection is refused"
    except OSError as exc:
        return exc.strerror or str(exc)


def loses_large_packets(address: str, mtu: int) -> bool:
    """Return whether an address answers small pings, but no pings of the MTU's size."""
    if run([*PING, address]) is None:
        return False
    return run([*PING, "-M", "do", "-s", str(mtu - IP_AND_ICMP), address]) is None


def main() -> None:
    request = json.loads(sys.argv[1])
    bundle = request["bundle"]
    with ThreadPoolExecutor(CONCURRENT) as pool:
        loses = (
            pool.submit(loses_large_packets, request["ping"], request["mtu"])
            if request["mtu"]
            else None
        )
        unreached = unreached_repositories(request["left_out"]) if request["repositories"] else {}
        answer = {
            "loses_large_packets": loses.result() if loses else False,
            "nfs": refused(request["nfs"], request["nfs_port"]) if request["nfs"] else "",
            "repositories": unreached,
            "bundle": f"{bundle}: {cause}" if (bundle and (cause := unread(bundle))) else "",
            "missing": [path for path in request["folders"] if not Path(path).is_dir()],
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
