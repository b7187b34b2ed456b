"""clusterctl by an ordinary user, who may run only the helper as root, and types README.md.

All files and jobs belong to the user. The line of sudoers allows only the helper, so any other use
of sudo fails. Another account of the machine, without rights, cannot read, block, fill or signal
the user's cluster, and root of a node reaches nothing of the machine.
"""

from __future__ import annotations

import json
import secrets
import select
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.providers.local import machine
from tests.e2e.person import CLUSTER, SPEC, Person
from tests.support.install import ROOT
from tests.support.manual import Block, blocks, follow
from tests.support.messages import codes, condition, shows
from tests.support.nested import leader
from tests.support.processes import run_as_root
from tests.support.verbs import Clusterctl

pytestmark = pytest.mark.platform("real", "ordinary-user")

README = ROOT / "README.md"
DOWN = "clusterctl down --yes"
# Where an installed clusterctl finds itself and its data, and what else can be imported beside it.
SURROUNDINGS = """
import importlib.util, json, sys
import clusterctl
from clusterctl.util.assets import data_folder
data = ("ansible", "docs", "examples", "payload", "skills", "templates", "terraform")
folders = {name: str(data_folder(name)) for name in data}
also = [name for name in ("payload", "tests", "mpi4py") if importlib.util.find_spec(name)]
print(json.dumps({"package": clusterctl.__path__[0], "folders": folders, "path": sys.path, "also": also}))
"""
WHO_AM_I = """\
#!/bin/bash
srun bash -c 'echo "$(hostname) $(id -un) $(id -u) $(id -gn) $HOME"; touch "$HOME/was-here-$(hostname)"'
"""

# What another account of this machine tries: a script of sh that ends with 0 where the harm is
# done. By root each of READS must end so, or it would show nothing.
READS = {
    "list the nodes": 'ls "$LOCAL"',
    "read a node's file": 'cat "$NODE/etc/machine-id"',
    "run root's program that root of a node has laid ready": 'test "$("$NODE/usr/local/bin/ready" -u)" = 0',
    "read what the nodes share": 'ls "$LOCAL/shared/home"',
    "read an image": "ls /var/cache/clusterctl/image-*/upper/etc",
    "read the admin's key": 'cat "$STATE/id_ed25519"',
    "read munge's key": 'wc -c <"$STATE/munge.key"',
    "read a node's private host key": 'cat "$LOCAL/nodes/$HOST/host_key"',
    "fill the disk below a node": 'dd if=/dev/zero of="$NODE/tmp/fill" count=1 && rm "$NODE/tmp/fill"',
    "fill what the nodes share": 'dd if=/dev/zero of="$LOCAL/shared/fill" count=1 && rm "$LOCAL/shared/fill"',
    "lay a file beside the images": "touch /var/cache/clusterctl/image-mine",
    "end a node": 'kill -0 "$NSPAWN"',
    "end a daemon in a node": 'kill -0 "$INIT"',
    "walk into a node by /proc": 'ls "/proc/$INIT/root/etc"',
    "read a daemon's environment": 'cat "/proc/$INIT/environ"',
    "enter a node": 'nsenter --target "$INIT" --mount --net true',
    "enter the cluster's network": 'ip netns exec "cc$ID" true',
}
OTHERS = {
    "enter a node by a key of their own": (
        'cd "$(mktemp -d)" && ssh-keygen -q -t ed25519 -N "" -f key && '
        "ssh -F none -i key -o BatchMode=yes -o UserKnownHostsFile=known -o StrictHostKeyChecking=no "
        '"clusterctl@$ADDRESS" true'
    ),
    "be asked for a password": (
        "ssh -F none -o PreferredAuthentications=none -o UserKnownHostsFile=/dev/null "
        '-o StrictHostKeyChecking=no "root@$ADDRESS" 2>&1 | grep -E "password|keyboard"'
    ),
    "start the helper": """echo '{"verb": "clusters", "request": {}}' """
    '| sudo -n "$PYTHON" -I -B -m clusterctl.providers.local.helper serve',
}
HOLDS = """
import fcntl, glob, os, sys, time
held = []
for path in sys.argv[1:]:
    for found in glob.glob(path, include_hidden=True):
        try:
            fd = os.open(found, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(found)
        except OSError:
            pass
for place in ("/run/clusterctl", "/run/clusterctl/lock", "/var/lib/clusterctl/x", "/run/x"):
    for make in (os.mkdir, lambda path: os.symlink("/etc/passwd", path)):
        try:
            make(place)
            held.append(place)
        except OSError:
            pass
print(*held, flush=True)
time.sleep(600)
"""
LOCKS = tuple(
    f"{place}{entries}"
    for place in ("/run/clusterctl", "/var/lib/clusterctl", "/var/cache/clusterctl")
    for entries in ("", "/*", "/.*")
)
LISTENING = "0A"  # in /proc/net/tcp
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
# Sshd, which wants a key; the fence and Slurm, which want munge's.
PORTS = {
    22,
    6816,
    6817,
    6818,
    6819,
}

# Root of a node: ports of this machine, then its addresses.
REACHES_OUT = """
import contextlib, socket, subprocess, sys
tcp, udp, *addresses = sys.argv[1:]
def ip(*argv):
    subprocess.run(["ip", *argv], stderr=subprocess.DEVNULL, check=False)
ip("link", "set", "host0", "addrgenmode", "eui64")
ip("address", "add", "fe80::5/64", "dev", "host0", "nodad")
ip("address", "add", "203.0.113.9/32", "dev", "host0")
ip("route", "add", "default", "via", addresses[0])
for address in addresses:
    for source in ("fe80::5",) if ":" in address else ("0.0.0.0", "203.0.113.9"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        scope = (0, socket.if_nametoindex("host0")) if ":" in address else ()
        for kind, port in ((socket.SOCK_DGRAM, udp), (socket.SOCK_STREAM, tcp)):
            with socket.socket(family, kind) as tried, contextlib.suppress(OSError):
                tried.settimeout(0.2)
                tried.bind((source, 0, *scope))
                tried.connect((address, int(port), *scope))
                tried.send(f"{address} from {source}".encode())
ip("route", "delete", "default")
ip("address", "delete", "203.0.113.9/32", "dev", "host0")
ip("address", "delete", "fe80::5/64", "dev", "host0")
"""


@pytest.fixture(scope="module")
def demo(person: Person, rights: None) -> Iterator[None]:
    """The cluster after all commands of README.md but the last, which removes it."""
    person.writes("cluster.yaml", SPEC)
    follow(readme(last=False), person.work, person.types)
    yield
    person.types("clusterctl down --yes --discard", person.work)


def readme(*, last: bool) -> Iterator[Block]:
    """Return the blocks of README.md that are run: all but the last command, or that alone."""
    for block in blocks(README):
        if block.runs:
            before, down, after = block.text.partition(f"$ {DOWN}\n")
            text = down + after if last else before
            if text and (not last or down):
                yield replace(block, text=text)


@pytest.fixture(scope="module")
def stranger(person: Person) -> Iterator[str]:
    """Another account of this machine."""
    name = f"mal-{secrets.token_hex(2)}"
    run_as_root(
        "useradd", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/sh", name
    )
    yield name
    run_as_root("userdel", name)


@pytest.fixture(scope="module")
def known(person: Person, demo: None) -> dict[str, str]:
    """Facts of the cluster that the other account is given, more than it could find out."""
    state = person.state / CLUSTER
    hosts = {
        one["name"]: one["address"]
        for one in json.loads(run_as_root("cat", state / "hosts.json"))["hosts"]
    }
    cluster_id = run_as_root("cat", state / "id").strip()
    local = f"/var/lib/clusterctl/{cluster_id}"
    host = f"{CLUSTER}-train-1"
    nspawn = {
        name: pid for name, pid in machine.running().items() if name.startswith(f"c{cluster_id}-")
    }
    run_as_root(
        "install", "-m", "4755", "/usr/bin/id", f"{local}/nodes/{host}/root/usr/local/bin/ready"
    )
    return {
        "ID": cluster_id,
        "LOCAL": local,
        "HOST": host,
        "NODE": f"{local}/nodes/{host}/root",
        "STATE": str(state),
        "ADDRESS": hosts[host],
        "NSPAWN": str(nspawn[f"c{cluster_id}-002"]),
        "INIT": str(leader(f"c{cluster_id}-002")),
        "PYTHON": str(person.venv / "bin/python"),
    }


def belonging_to_others(person: Person) -> list[str]:
    """Return files in the user's home with another owner. Of the installation only folders: see
    `new_person`.
    """
    venv = str(person.venv)
    files = ["(", "-type", "d", "-o", "-not", "-path", f"{venv}/*", "-o", "-name", "*.pyc", ")"]
    return run_as_root("find", person.home, *files, "-not", "-user", person.name).splitlines()


def test_environment_holds_the_wheel_and_no_checkout(person: Person) -> None:
    found = json.loads(person.runs(str(person.venv / "bin/python"), "-c", SURROUNDINGS))
    assert Path(found["package"]).is_relative_to(person.venv)
    for name, folder in found["folders"].items():
        assert Path(folder) == Path(found["package"]) / "_assets" / name
        assert any(path.is_file() for path in Path(folder).rglob("*")) or name == "terraform"
    assert not [path for path in found["path"] if Path(path).is_relative_to(ROOT) and path]
    assert found["also"] == []


def test_plan_without_a_spec_is_the_built_in_cluster(person: Person) -> None:
    """The plan is shown without any rights. The examples are installed with the wheel."""
    plan = person.clusterctl("-o", "json", "plan")
    assert shows(plan.stderr, "built-in-spec")
    hosts = [one["name"] for one in plan.json["changes"] if one["kind"] == "host"]
    assert hosts == ["local-ctl", "local-train-1", "local-train-2"]
    assert person.runs("ls", "-A") == ""
    person.clusterctl("init", "--examples")
    run_as_root(
        "diff", "--recursive", "--exclude=__pycache__", ROOT / "examples", person.work / "examples"
    )


def test_clusterctl_runs_by_a_symbolic_link(person: Person) -> None:
    """pipx and `uv tool` install it so: a link in a folder of the PATH."""
    script = shlex.quote(str(person.venv / "bin/clusterctl"))
    typed = f"ln -s {script} ~/linked; clusterctl --version; ~/linked --version"
    _, output, _ = person.types(typed, person.work)
    own, linked = output.splitlines()
    assert own == linked != ""


def test_up_without_sudo_is_refused_with_a_fix(person: Person) -> None:
    ran = person.clusterctl("-o", "json", "up", rc=1)
    (failure,) = ran.json["failures"]
    assert condition(failure) == "sudo/nodes", str(ran)
    assert "sudo -v" in failure["fix"]
    assert "password" in failure["fix"]
    assert sum(line.startswith("error: ") for line in ran.stderr.splitlines()) == 1
    assert "no clusters" in person.clusterctl("list").stdout


def test_up_of_the_readme_makes_a_cluster_for_the_user(person: Person, demo: None) -> None:
    (listed,) = person.clusterctl("-o", "json", "list").json["clusters"]
    assert (listed["cluster"], listed["workspace"]) == (CLUSTER, str(person.state / CLUSTER))
    assert "no changes" in person.clusterctl("plan", "--check").stdout


def test_job_runs_as_the_name_and_uid_of_the_user(person: Person, demo: None) -> None:
    person.writes("who am i.sh", WHO_AM_I)
    answer = person.clusterctl("-o", "json", "submit", "who am i.sh", "--nodes", "2", "--wait").json
    output = sorted(person.clusterctl("logs", answer["job_id"]).stdout.splitlines())
    home = f"/shared/home/{person.name}"
    assert output == [
        f"{CLUSTER}-train-{i} {person.name} {person.uid} {person.name} {home}" for i in (1, 2)
    ]
    (run,) = person.clusterctl("-o", "json", "collect", answer["job_id"]).json["runs"]
    accounting = json.loads(person.runs("cat", f"{run['dir']}/sacct.json"))
    assert {job["association"]["user"] for job in accounting["jobs"]} == {person.name}


def test_all_files_belong_to_the_user_and_state_is_private(person: Person, demo: None) -> None:
    result = json.loads(person.runs("sh", "-c", "tail -n 1 runs/demo-*-train/metrics.jsonl"))
    assert (result["kind"], result["accuracy"] >= 0.95) == ("result", True)
    assert belonging_to_others(person) == []
    assert person.runs("find", str(person.work), str(person.state), "-not", "-readable") == ""
    assert run_as_root("find", person.state, "-type", "f")
    exposed = [
        "(",
        "-type",
        "d",
        "-not",
        "-perm",
        "700",
        "-o",
        "-type",
        "f",
        "-not",
        "-perm",
        "600",
        ")",
    ]
    assert run_as_root("find", person.state, *exposed, "-printf", "%m %p\\n") == ""


def test_clusters_of_the_same_name_are_independent(
    person: Person, demo: None, clusterctl: Clusterctl
) -> None:
    """Root uses this name for a cluster, and the user too, with another CLUSTERCTL_HOME."""
    spec = clusterctl.cwd / "same-name.yaml"
    spec.write_text(SPEC)
    assert CLUSTER not in [
        one["cluster"] for one in clusterctl("-o", "json", "list").json["clusters"]
    ]
    assert codes(clusterctl("-o", "json", "-f", spec, "down", "--yes", rc=2)) == [
        "not-found/cluster"
    ]
    code, output, _ = person.types("CLUSTERCTL_HOME=~/another clusterctl down --yes", person.work)
    assert code == 2
    assert shows(output, "unknown-cluster"), output
    assert person.clusterctl("-o", "json", "status").json["ready"]


def tries(script: str, known: dict[str, str], *before: str) -> bool:
    """Return whether the attempt had an effect."""
    words = [f"{key}={value}" for key, value in known.items()]
    argv = ["sudo", "-n", *before, "--", "env", "-C", "/", *words, "sh", "-c", script]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    return done.returncode == 0


@pytest.mark.parametrize("attempt", [*READS, *OTHERS])
def test_another_account_cannot_harm_the_cluster(
    attempt: str, stranger: str, known: dict[str, str]
) -> None:
    if attempt in READS:
        # Else it shows nothing: not even root can.
        assert tries(READS[attempt], known)
    assert not tries({**READS, **OTHERS}[attempt], known, "-u", stranger)


def test_another_account_cannot_block_up(
    person: Person, stranger: str, known: dict[str, str]
) -> None:
    """An account that held the lock of the machine blocked each `up` without a message."""
    as_stranger = f"sudo -n -u {stranger} -- /usr/bin/python3 -c".split()
    argv = [*as_stranger, HOLDS, *LOCKS, f"{known['STATE']}/../.*"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().split() == []
            person.clusterctl("cache", "list")  # it takes the machine's lock
        finally:
            run_as_root("kill", str(process.pid))


def test_nodes_listen_on_expected_ports_only(known: dict[str, str]) -> None:
    """All accounts of the machine reach the nodes, so each port outside loopback is listed."""
    found = set()
    for number in (1, 2, 3):
        pid = leader(f"c{known['ID']}-{number:03d}")
        for line in run_as_root(
            "cat", f"/proc/{pid}/net/tcp", f"/proc/{pid}/net/tcp6"
        ).splitlines():
            address, port = line.split()[1].partition(":")[::2]
            if line.split()[3] == LISTENING and address not in LOOPBACK:
                found.add(int(port, 16))
    assert found == PORTS


def test_node_cannot_reach_services_of_the_machine(person: Person, known: dict[str, str]) -> None:
    """The machine forwards nothing for a node. It accepts answers to its own requests."""
    links = json.loads(run_as_root("ip", "-json", "address", "show"))
    links.sort(key=lambda link: link["ifname"] != f"cc{known['ID']}")
    cable = [f["local"] for f in links[0]["addr_info"]]
    others = [f["local"] for link in links[1:] for f in link["addr_info"] if f["family"] == "inet"]
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as tcp,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as udp,
    ):
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        udp.bind(("", 0))
        ports = [str(one.getsockname()[1]) for one in (tcp, udp)]
        asked = [address for address in [*cable, *others] if not address.startswith("127.")]
        run_as_root(
            "nsenter",
            "--target",
            known["INIT"],
            "--net",
            sys.executable,
            "-c",
            REACHES_OUT,
            *ports,
            *asked,
        )
        reached = []
        while ready := select.select([tcp, udp], [], [], 0)[0]:
            reached.append(tcp.accept()[1] if tcp in ready else udp.recvfrom(99))
    assert reached == []
    assert person.clusterctl("-o", "json", "status").json["ready"]


def test_down_leaves_only_the_collected_runs(person: Person, demo: None) -> None:
    """README.md ends so. `down` collects the runs that were not collected."""
    person.clusterctl("submit", "who am i.sh", "--wait")
    follow(readme(last=True), person.work, person.types)
    assert person.runs("find", "runs", "-name", "run.json").count("\n") == 3
    assert run_as_root("find", person.home, "-path", person.state / CLUSTER) == ""
    assert belonging_to_others(person) == []
    assert "no clusters" in person.clusterctl("list").stdout
