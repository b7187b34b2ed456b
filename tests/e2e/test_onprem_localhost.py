"""`address: localhost`: the machine of clusterctl becomes a cluster, and `down` restores it.

It is a workstation: no sshd listens, and sudo asks for a password.
"""

from __future__ import annotations

import compileall
import json
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from clusterctl.packages.wheelhouse import wheelhouse
from clusterctl.util.assets import data_folder
from tests.e2e.own import differences, picture
from tests.support.install import build_wheel
from tests.support.lab import PASSWORD, Box, lab
from tests.support.nested import PLACE, PLATFORM, Host, tree

pytestmark = pytest.mark.platform("real", "localhost")
USER = "ada"
SPEC = """\
version: 1
name: mine
provider: {type: onprem, controller: desk, hosts: {desk: localhost}}
partitions: [{name: train, hosts: desk}]
"""
ASKPASS = f"/home/{USER}/askpass"
CLUSTERCTL = ("env", f"SUDO_ASKPASS={ASKPASS}", f"{PLACE}/bin/python", "-m", "clusterctl")
# The wheels of jobs are lent: there is no package index here.
MAKE = f"""\
systemctl disable --quiet --now ssh
mkdir -p ~{USER}/.cache/clusterctl /shared
ln -s /lent/wheels-* ~{USER}/.cache/clusterctl/
chown -R {USER}: ~{USER}/.cache
printf '{SPEC}' > ~{USER}/cluster.yaml
printf '#!/bin/sh\necho "{PASSWORD}"\n' > {ASKPASS}; chmod 755 {ASKPASS}
chmod 640 /etc/hosts
cd ~{USER}
mkdir -p clusterctl dotfiles .ssh
echo clone > clusterctl/README
echo '# mine' > dotfiles/keys
chmod 640 dotfiles/keys
ln -sf ../dotfiles/keys .ssh/authorized_keys
chown -hR {USER}: clusterctl dotfiles .ssh
"""
# Ends clusterctl, and nothing else, once it has begun to change the machine.
KILLED = f"""\
{" ".join(CLUSTERCTL)} up & up=$!
until [ -e /var/lib/clusterctl-host.json ]; do kill -0 $up; sleep 0.1; done
kill -KILL $up
"""


@pytest.fixture(scope="module")
def desk(no_residue: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    own = tmp_path_factory.mktemp("own")
    installed = own / "lib/python3.11/site-packages"
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as wheel:
        wheel.extractall(installed)
    compileall.compile_dir(installed, quiet=1, maxlevels=20, stripdir=str(own), prependdir=PLACE)
    own.chmod(0o755)
    wheels = wheelhouse(data_folder("payload") / "requirements.lock", PLATFORM)
    options = [
        f"--overlay-ro={tree()}{PLACE}:{own}:{PLACE}",
        f"--bind-ro={wheels}:/lent/{wheels.name}",
    ]
    boxes = [Box("bench", sudo="password")]
    with lab("debian", boxes, user=USER, internet=True, options=options) as one:
        inside = one.host("bench").inside
        inside.sh(MAKE)
        yield inside


def clusterctl(desk: Host, *argv: str, rc: int = 0) -> Any:
    """Return the answer of a verb with `-o json`."""
    return desk(*CLUSTERCTL, "-o", "json", *argv, user=USER, rc=rc, timeout_s=600).json


def listening(desk: Host) -> list[str]:
    """Return the addresses and ports on which the machine listens."""
    return sorted(line.split()[4] for line in desk("ss", "-ltunH").stdout.splitlines())


def test_localhost_becomes_a_cluster_and_down_restores_it(desk: Host) -> None:
    before = picture(desk)
    listened = listening(desk)
    desk("bash", "-c", KILLED, user=USER, rc=None)
    up = clusterctl(desk, "up")
    assert (up["ready"], up["probed"]) == (True, ["desk"])
    job = clusterctl(desk, "submit", "train", "--nodes", "1", "--wait", "--", "--epochs", "1")[
        "job_id"
    ]
    (run,) = clusterctl(desk, "collect", job)["runs"]
    start = json.loads(desk("head", "-n1", f"{run['dir']}/metrics.jsonl").stdout)
    assert [rank["host"] for rank in start["ranks"]] == ["desk"]
    assert [one for one in listening(desk) if one.endswith(":22")] == []
    assert desk("sudo", "-n", "true", user=USER, rc=1)  # the user may do no more than before
    clusterctl(desk, "down", "--yes")
    made = rf"/home/{USER}/(\.ansible|\.cache|\.local|runs)(/|\s|$)"
    jobs = rf"/shared/home(/{USER}(/clusterctl\S*)?)?(\s|$)"
    assert differences(desk, before, allowed=f"{made}|{jobs}") == []
    assert listening(desk) == listened
    assert desk.sh(f"ls ~{USER}/.local/state/clusterctl") == "runs.jsonl\n", "where runs are"
