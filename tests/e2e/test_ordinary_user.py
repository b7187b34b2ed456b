"""clusterctl by an ordinary user who may run just the helper as root: all results theirs, the jobs theirs.

That the sudoers line allows nothing but the helper is a spy, too: any other use of sudo would fail. Another
account of the same machine, without any right, reads, holds, fills and signals nothing of their cluster, and
root of a node reaches nothing of the machine.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import select
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.local import machine
from tests.support.install import PLAIN_PATH, ROOT, Installed, build_wheel, install, pip_settings
from tests.support.manual import Block, blocks, follow
from tests.support.nested import leader
from tests.support.remains import marked
from tests.support.residue import nothing_left
from tests.support.verbs import Clusterctl

pytestmark = pytest.mark.platform("real", "ordinary-user")

SUDOERS = Path("/etc/sudoers.d")
INSTALL_PAGE = ROOT / "docs" / "install.md"
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
HERE = "tests/e2e/test_ordinary_user.py"
TYPING_S = 1200  # PyTorch is fetched, sent and unpacked

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions:
  - {{name: train, nodes: 2}}
"""
WHO_AM_I = """\
#!/bin/bash
srun bash -c 'echo "$(hostname) $(id -un) $(id -u) $(id -gn) $HOME"; touch "$HOME/was-here-$(hostname)"'
"""

# What another account of this machine tries: a script of sh that ends with 0 where the harm is done. By root
# each of READS must end so, or it would show nothing.
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
PORTS = {22, 6817, 6818, 6819}  # sshd, which wants a key; slurmctld, slurmd and slurmdbd, which want munge's

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


@dataclass(frozen=True)
class Person:
    """An account of this machine, their clusterctl, and the folder where they work."""

    name: str
    uid: int
    home: Path
    work: Path
    installed: Installed
    clusterctl: Clusterctl
    cluster: str

    @property
    def state(self) -> Path:
        return self.home / ".local" / "state" / "clusterctl"

    @property
    def rule(self) -> str:
        """The sudoers line of docs/install.md, for this account and its installation."""
        (line,) = re.findall(r"^ *(ada ALL=.*helper \*)$", INSTALL_PAGE.read_text(), re.MULTILINE)
        _, rest = str(line).split(" ", 1)
        return f"{self.name} " + rest.replace(
            "/opt/clusterctl/bin/python", str(self.installed.python).replace(" ", "\\ ")
        )

    def runs(self, *argv: str) -> str:
        """What a program prints that they run in their folder."""
        return as_root("sudo", "-n", "-u", self.name, "--", "env", "-C", str(self.work), *argv)


def as_root(*argv: str, stdin: str = "") -> str:
    """What a program prints that root runs.

    Raises:
        AssertionError: it failed.
    """
    words = list(argv) if os.geteuid() == 0 else ["sudo", "-n", "--", *argv]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"$ {shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A new user, without any right so far, who installed clusterctl in their home as pipx would."""
    name = f"kim-2_{secrets.token_hex(2)}"
    wheel = build_wheel(tmp_path_factory.mktemp("dist"))
    with ExitStack() as stack:
        # Not below pytest's own folder, which is for its user's eyes only.
        folder = Path(tempfile.mkdtemp(prefix=marked("home of ")))
        stack.callback(as_root, "rm", "-rf", "--", str(folder))
        folder.chmod(0o755)
        home = folder / f"{name} at home"
        work = home / "my work"
        work.mkdir(parents=True)
        installed = install(wheel, home / "venv")
        as_root("useradd", "--no-create-home", "--home-dir", str(home), "--shell", "/bin/sh", name)
        stack.callback(as_root, "userdel", name)
        # Folders only: the files of the environment may be links into the cache of whoever runs this test.
        as_root("find", str(home), "-type", "d", "-exec", "chown", f"{name}:", "{}", "+")
        script = folder / "clusterctl"
        script.write_text(_as_person(name, home, work, installed))
        script.chmod(0o755)
        runner = Clusterctl(folder / "unused", folder, {}, script)  # the script drops its variables
        uid = pwd.getpwnam(name).pw_uid
        with nothing_left(home):
            yield Person(name, uid, home, work, installed, runner, f"u{secrets.token_hex(3)}")


def _as_person(name: str, home: Path, work: Path, installed: Installed) -> str:
    """A script that runs clusterctl as someone's login would: their folder, their variables and no others."""
    login = {"HOME": home, "USER": name, "LOGNAME": name, "PATH": PLAIN_PATH, "LANG": "C.UTF-8"}
    variables = [f"{key}={value}" for key, value in {**login, **pip_settings()}.items()]
    argv = ["sudo", "-n", "-u", name, "--", "env", "-C", str(work), "-i", *variables, str(installed.script)]
    return f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n'


@contextmanager
def allowed(person: Person) -> Iterator[None]:
    """While this lasts, they may start the helper, and nothing else, as root."""
    file = SUDOERS / f"clusterctl-test-{person.name}"
    try:
        as_root("tee", str(file), stdin=person.rule + "\n")
        as_root("chmod", "440", str(file))
        as_root("visudo", "--check", "--quiet", "--file", str(file))
        yield
    finally:
        as_root("rm", "-f", "--", str(file))


@pytest.fixture(scope="module")
def rights(person: Person) -> Iterator[None]:
    with allowed(person):
        yield
        if as_root("find", str(person.home), "-path", str(person.state / person.cluster)):
            person.clusterctl("down", "--yes", "--discard", rc=None)


@pytest.fixture(scope="module")
def up(person: Person, rights: None) -> dict[str, Any]:
    """Their cluster."""
    as_root(
        "sudo",
        "-n",
        "-u",
        person.name,
        "tee",
        f"{person.work}/cluster.yaml",
        stdin=SPEC.format(name=person.cluster),
    )
    as_root("sudo", "-n", "-u", person.name, "tee", f"{person.work}/who am i.sh", stdin=WHO_AM_I)
    return dict(person.clusterctl("-o", "json", "up").json)


@pytest.fixture(scope="module")
def trained(person: Person, up: dict[str, Any]) -> Path:
    """The folder of a two-node training of theirs."""
    person.clusterctl("submit", "train", "--nodes", "2", "--wait")
    (run,) = person.clusterctl("-o", "json", "collect").json["runs"]
    return Path(run["dir"])


@pytest.fixture(scope="module")
def stranger(person: Person) -> Iterator[str]:
    """Another account of this machine."""
    name = f"mal-{secrets.token_hex(2)}"
    as_root("useradd", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/sh", name)
    yield name
    as_root("userdel", name)


@pytest.fixture(scope="module")
def known(person: Person, up: dict[str, Any]) -> dict[str, str]:
    """What the other account is given to know of the cluster, more than it could find out."""
    state = person.state / person.cluster
    hosts = {
        host["name"]: host["address"]
        for host in json.loads(as_root("cat", str(state / "hosts.json")))["hosts"]
    }
    cluster_id = as_root("cat", str(state / "id")).strip()
    local, host = f"/var/lib/clusterctl/{cluster_id}", f"{person.cluster}-train-1"
    nspawn = {name: pid for name, pid in machine.running().items() if name.startswith(f"c{cluster_id}-")}
    as_root("install", "-m", "4755", "/usr/bin/id", f"{local}/nodes/{host}/root/usr/local/bin/ready")
    return {
        "ID": cluster_id,
        "LOCAL": local,
        "HOST": host,
        "NODE": f"{local}/nodes/{host}/root",
        "STATE": str(state),
        "ADDRESS": hosts[host],
        "NSPAWN": str(nspawn[f"c{cluster_id}-002"]),
        "INIT": str(leader(f"c{cluster_id}-002")),
        "PYTHON": str(person.installed.python),
    }


def belonging_to_others(person: Person) -> list[str]:
    """What lies in their home and isn't theirs. Of the installation only folders: see `person`."""
    venv = str(person.installed.venv)
    files = ["(", "-type", "d", "-o", "-not", "-path", f"{venv}/*", "-o", "-name", "*.pyc", ")"]
    return as_root("find", str(person.home), *files, "-not", "-user", person.name).splitlines()


def test_without_rights_there_is_one_error_and_a_way_out(person: Person) -> None:
    ran = person.clusterctl("-o", "json", "up", rc=1)
    (failure,) = ran.json["failures"]
    assert failure["code"] == "machine", str(ran)
    assert "no right" in failure["cause"]
    assert "sudo -v" in failure["fix"]
    assert "password" in failure["fix"]
    assert sum(line.startswith("error: ") for line in ran.stderr.splitlines()) == 1
    assert "no clusters" in person.clusterctl("list").stdout
    assert "make" in person.clusterctl("plan").stdout, "to look at what would be takes no right"


def test_up_in_their_name(person: Person, up: dict[str, Any]) -> None:
    assert up["ready"]
    assert up["workspace"] == str(person.state / person.cluster)
    assert up["probed"] == [f"{person.cluster}-train-{i}" for i in (1, 2)]
    (listed,) = person.clusterctl("-o", "json", "list").json["clusters"]
    assert listed["cluster"] == person.cluster
    assert "no changes" in person.clusterctl("plan", "--check").stdout


def test_the_job_runs_under_their_name_and_number(person: Person, up: dict[str, Any]) -> None:
    answer = person.clusterctl("-o", "json", "submit", "who am i.sh", "--nodes", "2", "--wait").json
    said = sorted(person.clusterctl("logs", answer["job_id"]).stdout.splitlines())
    assert said == [
        f"{person.cluster}-train-{i} {person.name} {person.uid} {person.name} /shared/home/{person.name}"
        for i in (1, 2)
    ]
    (run,) = person.clusterctl("-o", "json", "collect", answer["job_id"]).json["runs"]
    accounting = json.loads(person.runs("cat", f"{run['dir']}/sacct.json"))
    assert {job["association"]["user"] for job in accounting["jobs"]} == {person.name}


def test_everything_written_is_theirs(person: Person, trained: Path) -> None:
    assert trained.parent == person.work / "runs"
    result = json.loads(person.runs("cat", f"{trained}/metrics.jsonl").splitlines()[-1])
    assert result["kind"] == "result"
    assert result["accuracy"] >= 0.95
    assert belonging_to_others(person) == []
    assert person.runs("find", str(person.work), str(person.state), "-not", "-readable") == ""


def test_the_state_folder_is_private(person: Person, trained: Path) -> None:
    assert as_root("find", str(person.state), "-type", "f")
    exposed = ["(", "-type", "d", "-not", "-perm", "700", "-o", "-type", "f", "-not", "-perm", "600", ")"]
    assert as_root("find", str(person.state), *exposed, "-printf", "%m %p\\n") == ""


def test_root_leaves_their_cluster_alone(person: Person, trained: Path, clusterctl: Clusterctl) -> None:
    """The name is theirs and unlike any other, so that a mistake here costs nobody a cluster."""
    spec = clusterctl.cwd / "same-name.yaml"
    spec.write_text(SPEC.format(name=person.cluster))
    listed = clusterctl("-o", "json", "list").json["clusters"]
    assert person.cluster not in [entry["cluster"] for entry in listed]
    ran = clusterctl("-f", spec, "down", "--yes", rc=2)
    assert "there is no cluster" in ran.stderr
    assert person.clusterctl("-o", "json", "status").json["ready"]


def test_another_home_of_theirs_leaves_it_alone_too(person: Person, trained: Path) -> None:
    script = person.clusterctl.script.with_name("elsewhere")
    text = person.clusterctl.script.read_text()
    script.write_text(text.replace(" -i ", f" -i CLUSTERCTL_HOME={shlex.quote(f'{person.home}/another')} "))
    script.chmod(0o755)
    elsewhere = Clusterctl(person.clusterctl.home, person.clusterctl.cwd, {}, script)
    ran = elsewhere("down", "--yes", rc=2)
    assert "there is no cluster" in ran.stderr
    assert person.clusterctl("-o", "json", "status").json["ready"]


def tries(script: str, known: dict[str, str], *before: str) -> bool:
    """Whether the harm is done."""
    words = [f"{key}={value}" for key, value in known.items()]
    argv = ["sudo", "-n", *before, "--", "env", "-C", "/", *words, "sh", "-c", script]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    return done.returncode == 0


@pytest.mark.parametrize("attempt", [*READS, *OTHERS])
def test_another_account_does_no_harm(attempt: str, stranger: str, known: dict[str, str]) -> None:
    if attempt in READS:
        assert tries(READS[attempt], known), "it shows nothing: not even root can"
    assert not tries({**READS, **OTHERS}[attempt], known, "-u", stranger)


def test_another_account_holds_nothing_up(person: Person, stranger: str, known: dict[str, str]) -> None:
    """One that held the machine's lock blocked each `up`, without a word of why."""
    argv = [
        "sudo",
        "-n",
        "-u",
        stranger,
        "--",
        "/usr/bin/python3",
        "-c",
        HOLDS,
        *LOCKS,
        f"{known['STATE']}/../.*",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().split() == []
            person.clusterctl("cache", "list")  # it takes the machine's lock
        finally:
            as_root("kill", str(process.pid))


def test_the_machines_accounts_find_no_other_port(known: dict[str, str]) -> None:
    """Each reaches the nodes. What listens there at no address but loopback is open to none."""
    found = set()
    for number in (1, 2, 3):
        pid = leader(f"c{known['ID']}-{number:03d}")
        for line in as_root("cat", f"/proc/{pid}/net/tcp", f"/proc/{pid}/net/tcp6").splitlines():
            address, port = line.split()[1].partition(":")[::2]
            if line.split()[3] == LISTENING and address not in LOOPBACK:
                found.add(int(port, 16))
    assert found == PORTS


def test_a_node_reaches_nothing_of_the_machine(person: Person, known: dict[str, str]) -> None:
    """Nor what the machine would forward. Answers to what the machine itself asks go through."""
    links = json.loads(as_root("ip", "-json", "address", "show"))
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
        as_root(
            "nsenter", "--target", known["INIT"], "--net", sys.executable, "-c", REACHES_OUT, *ports, *asked
        )
        reached = []
        while ready := select.select([tcp, udp], [], [], 0)[0]:
            reached.append(tcp.accept()[1] if tcp in ready else udp.recvfrom(99))
    assert reached == []
    assert person.clusterctl("-o", "json", "status").json["ready"]


def test_down_leaves_their_runs_and_nothing_else(person: Person, trained: Path) -> None:
    person.clusterctl("submit", "who am i.sh", "--wait")
    done = person.clusterctl("-o", "json", "down", "--yes").json
    assert [Path(run).parent for run in done["runs"]] == [person.work / "runs"]
    assert as_root("find", str(person.home), "-path", str(person.state / person.cluster)) == ""
    assert belonging_to_others(person) == []
    assert "no clusters" in person.clusterctl("list").stdout


def first_screen() -> list[Block]:
    """The program with which README.md begins, and how it is run."""
    return [block for block in blocks(README) if block.file or block.elsewhere == HERE]


def tutorial() -> list[Block]:
    return [block for block in blocks(TUTORIAL) if block.file or block.runs]


@pytest.mark.sweep  # PyTorch comes along
@pytest.mark.timeout(2 * TYPING_S)
@pytest.mark.parametrize("page", [first_screen, tutorial])
def test_what_a_newcomer_reads_is_typed(
    person: Person, rights: None, page: Callable[[], list[Block]]
) -> None:
    """By someone with nothing but the wheel and the right to start the helper."""

    def types(text: str, place: Path) -> tuple[int, str, Path]:
        login = {"HOME": person.home, "USER": person.name, "LOGNAME": person.name, "LANG": "C.UTF-8"}
        path = f"{person.installed.script.parent}:{PLAIN_PATH}"
        variables = {**login, **pip_settings(), "PATH": path, "COLUMNS": "200"}
        # Where the command leaves the person is the last line.
        script = f"exec 2>&1\n{text}\ncode=$?\necho; pwd\nexit $code"
        argv = ["sudo", "-n", "-u", person.name, "--", "env", "-C", str(place), "-i"]
        argv += [*(f"{name}={value}" for name, value in variables.items()), "bash", "-c", script]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TYPING_S, check=False
        )
        said, _, where = done.stdout.rstrip("\n").rpartition("\n")
        return done.returncode, said + done.stderr, Path(where or place)

    place = person.home / page.__name__
    types(f"mkdir {shlex.quote(str(place))}", person.home)
    try:
        follow(page(), place, types)
    finally:
        for folder in (place, place / "my-project"):
            if folder.exists():
                types("clusterctl down --yes --discard", folder)
