"""The storage of a local cluster survives a killed `down`, and the next `up` uses it.

Users log in with their own keys. No secret passes to another cluster of the same layer.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults import Victim, eventually_none
from tests.support.cluster import Cluster, raised
from tests.support.messages import codes, condition
from tests.support.processes import as_root, eventually
from tests.support.verbs import SCRIPT, Clusterctl
from tests.support.wheels import a_wheel

ROOT = Path(__file__).resolve().parents[2]
SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
storage: {{name: {name}}}
partitions:
  - {{name: train, nodes: 1, cpus: 8}}
users:
  - {{name: ada, uid: 12001}}
  - {{name: bob, uid: 12002}}
  - {{name: cyd, uid: 12004}}
"""
STORAGE = re.compile("storage: .*\n")
OWNERS = "cd /shared/home; sudo stat -c '%n %u' ada/datasets/set.txt ada/out/weights bob bob/notes"
# A line each: what must be a cluster's own. MariaDB's accounts have no passwords: theirs are the
# system's.
SECRETS = """\
set -e
sha256sum /etc/munge/munge.key /etc/ssh/ssh_host_*_key /etc/machine-id ~clusterctl/.ssh/authorized_keys \\
    /shared/home/*/.ssh/authorized_keys
mariadb -BNe "select user, plugin from mysql.user where authentication_string not in ('', 'invalid')" >&2
"""
OF_LAYER = (
    *("*/munge/*", "*/ssh_host_*", "*/machine-id", "*/random-seed", "*/.ssh/id_*", "*/shared/*"),
    *("*/var/lib/slurm/*/*", "*/var/log/slurm/*", "*/etc/slurm/jwt*", "*/*.pem", "*/*.key"),
)


def key_pair(folder: Path, name: str) -> Path:
    """Make a person's key pair, and return the private key. The public key is in NAME.pub."""
    argv = [
        "ssh-keygen",
        "-q",
        "-t",
        "ed25519",
        "-N",
        "",
        "-C",
        f"{name}@laptop",
        "-f",
        folder / name,
    ]
    subprocess.run(argv, check=True)
    return folder / name


CANARY = "canary-of"
PEOPLE = ("ada", "bob", "cyd")
# This person stays attached over a `down` and the next `up`. STAYS_JOB: the file with her job's ID.
STAYS = "cyd"
STAYS_JOB = "job-of-cyd"
# Each person's job has a secret, packages, a build and a staged copy.
JOB = """\
import os, time, empty
print(os.environ["TOKEN"], open("built").read(), open(f"/var/tmp/{os.environ['WHO']}/set").read(), flush=True)
time.sleep(600)
"""
SUBMIT = (
    "clusterctl -o json submit ./wait.py --cpus 1 --mem 256M --requirements need.txt --secret TOKEN=../token"
    " --build 'echo built >built' --env WHO={who} --set stage=/shared/home/{who}/data:/var/tmp/{who}"
)
# What each person tries on the controller at another's running job.
ATTEMPTS = """\
scancel {job}
scontrol hold {job}
scontrol requeue {job}
scontrol update jobid={job} timelimit=1
scontrol write batch_script {job} -
srun --overlap --jobid={job} env
ls /shared/home/{who}
ls {folder}/jobs
cat {folder}/jobs/*/stdout.log
cat {folder}/jobs/*/job.sbatch
cat {folder}/secrets/*/environ
ls {folder}/environments
ls {folder}/builds
touch {folder}/store/x
touch {folder}/environments/x
cat /shared/home/{who}/.ssh/authorized_keys
ssh -o BatchMode=yes -o StrictHostKeyChecking=no {node} true
srun --immediate=60 sh -c 'cat /proc/[0-9]*/environ | grep -a canary-of-{who}'
srun --immediate=60 pkill -u {who}
srun --immediate=60 cat /var/tmp/{who}/set
srun --immediate=60 ls /var/tmp/.clusterctl-staged-{uid}
srun --immediate=60 rm /var/tmp/{who}
srun --immediate=60 touch /opt/clusterctl/env/x
sbatch --uid={who} --wrap true
scontrol update nodename={node} state=drain reason=x
sacctmgr -i modify user {who} set maxjobs=0
sudo -n true
cat /etc/munge/munge.key
cat /etc/slurm/slurmdbd.conf
""".splitlines()
# These print that they are refused, and exit with 0.
EXIT_0 = ("scontrol write batch_script",)
# Verbs at another's job, and the codes of their errors.
VERBS = {
    "logs": "not-yours/user",
    "code": "not-yours/user",
    "collect": "not-yours/user",
    "cancel": "slurm-refused/job-cancel",
    "replay": "not-found/job",
}


def colleague(
    folder: Path, key: Path, *, again: bool = False
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a line of shell as a person whose ~/.ssh has only this key.

    again: ``folder`` has the person's files.
    """
    ssh, work = (folder / name for name in ("ssh", "work"))
    ssh.mkdir(mode=0o700, parents=True, exist_ok=again)
    work.mkdir(exist_ok=again)
    shutil.copy(key, ssh / "id_ed25519")
    home = Path.home() / ".ssh"
    home.mkdir(mode=0o700, exist_ok=True)
    enter = f"mount --bind {shlex.quote(str(ssh))} {home}; cd {shlex.quote(str(work))}; "
    enter += (
        f"export CLUSTERCTL_HOME={shlex.quote(str(folder / 'home'))} PATH={SCRIPT.parent}:$PATH; "
    )

    def run(line: str) -> subprocess.CompletedProcess[str]:
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", enter + line]
        return subprocess.run(
            [*as_root(), *words], capture_output=True, text=True, timeout=300, check=False
        )

    return run


def submitted_as(who: str, run: Callable[..., Any], work: Path) -> str:
    """Submit a person's job, wait until it runs, and return its ID."""
    (work / "wait.py").write_text(JOB)
    (work.parent / "token").write_text(f"{CANARY}-{who}")
    (work / "data").mkdir()
    (work / "data" / "set").write_text(f"set of {who}\n")
    a_wheel(work, "empty")
    (work / "need.txt").write_text("--no-index\n--find-links .\nempty\n")
    assert run("clusterctl put data .").returncode == 0
    asked = run(SUBMIT.format(who=who))
    assert asked.returncode == 0, asked
    job = str(json.loads(asked.stdout)["job_id"])
    shown = f"{CANARY}-{who} built\n set of {who}\n"
    eventually(lambda: shown in run(f"clusterctl logs {job}").stdout)
    return job


def intrude(run: Callable[..., Any], login: str, victim: Mapping[str, str]) -> None:
    """Have a person try to reach what is another's. victim: the values of ``ATTEMPTS``."""
    for line in ATTEMPTS:
        tried = run(f"ssh {login} {shlex.quote(line.format(**victim))}")
        assert f"{CANARY}-{victim['who']}" not in tried.stdout, line
        assert tried.returncode or line.startswith(EXIT_0), (line, tried)
    for verb, code in VERBS.items():
        tried = run(f"clusterctl -o json {verb} {victim['job']} || true")
        assert [condition(each) for each in json.loads(tried.stdout)["failures"]] == [code], verb


def let_colleagues_in(cluster: Cluster, keys: Mapping[str, Path], folder: Path) -> None:
    """Have three people attach the cluster, and each try to reach what is another's."""
    people = {name: colleague(folder / f"as-{name}", keys[name]) for name in PEOPLE}
    victims = {}
    for number, (name, run) in enumerate(people.items()):
        # The operator's jobs run as ada.
        place = "clusterctl-attached" if name == "ada" else "clusterctl"
        attach(cluster, name, run, folder / f"as-{name}" / "ssh", place)
        victims[name] = {
            "who": name,
            "job": submitted_as(name, run, folder / f"as-{name}" / "work"),
            "node": f"{cluster.name}-train-1",
            "uid": str((12001, 12002, 12004)[number]),
            "folder": f"/shared/home/{name}/{place}",
        }
    for name, victim in zip(PEOPLE, (*PEOPLE[1:], PEOPLE[0]), strict=True):
        intrude(people[name], f"{cluster.name}-ctl", victims[victim])
    _operator_keeps_jobs_of_others(cluster, victims)
    for name, run in people.items():
        assert run(f"clusterctl cancel {victims[name]['job']}").returncode == 0
        if name == STAYS:
            (folder / STAYS_JOB).write_text(victims[name]["job"])
            continue
        left = run(f"clusterctl detach --cluster {cluster.name} --discard")
        assert left.returncode == 0, (name, left)
        assert run(f"ssh {cluster.name}-ctl rm -r data").returncode == 0


def _operator_keeps_jobs_of_others(cluster: Cluster, jobs: Mapping[str, Mapping[str, str]]) -> None:
    """`up` leaves the jobs of all people running, and `down` refuses: it names them, and nothing that
    clusterctl or `--set stage=` has copied.
    """
    cluster("up")
    failures = cluster.json("down", "--yes", rc=1)["failures"]
    lines = [failure["cause"] for failure in failures]
    for who, job in jobs.items():
        assert cluster.job(job["job"])["state"] == "RUNNING"
        assert any(f"job {job['job']} " in line and f"of {who} " in line for line in lines), lines
    assert not any("staged" in line or "clusterctl-attached" in line for line in lines), lines
    assert "sudo scancel" in failures[0]["fix"]
    theirs = cluster.json("cancel", jobs["bob"]["job"], rc=1)["failures"][0]
    assert f"sudo scancel {jobs['bob']['job']}" in theirs["fix"]


def way_to(cluster: Cluster, user: str, folder: Path) -> tuple[Path, Path]:
    """Write the two files for a person to a folder, as docs/howto/colleagues.md tells the
    administrator. Return their paths: entries of ssh_config, and of known_hosts.
    """
    page = (ROOT / "docs/howto/colleagues.md").read_text()
    recipe = next(block for block in page.split("```") if "known_hosts >~/bob.known_hosts" in block)
    commands = recipe.partition("\n")[2].replace(
        "~/.local/state/clusterctl/demo", str(cluster.workspace)
    )
    commands = commands.replace("demo-ctl", f"{cluster.name}-ctl").replace(
        "User bob", f"User {user}"
    )
    folder.mkdir(exist_ok=True)
    subprocess.run(["bash", "-ec", commands.replace("~/bob.", f"{folder}/bob.")], check=True)
    return folder / "bob.config", folder / "bob.known_hosts"


def attach(cluster: Cluster, user: str, run: Callable[..., Any], ssh: Path, place: str) -> None:
    """Have a person attach the cluster. ssh: the person's ~/.ssh. place: the folder for jobs."""
    for path, name in zip(way_to(cluster, user, ssh), ("config", "known_hosts"), strict=True):
        shutil.copy(path, ssh / name)
    words = f"--name {cluster.name} --folder '~/{place}'"
    attached = run(f"clusterctl attach {cluster.name}-ctl {words}")
    assert attached.returncode == 0, attached


def as_person(cluster: Cluster, user: str, key: Path, command: str = "true") -> str:
    """Run a command on the controller with plain ssh and only this key. "refused": sshd accepts no
    key.
    """
    config, known_hosts = way_to(cluster, user, cluster.runner.cwd / "person")
    own = ("ControlPath=none", "BatchMode=yes", "IdentitiesOnly=yes", f"IdentityFile={key}")
    known = (f"UserKnownHostsFile={known_hosts}", "GlobalKnownHostsFile=/dev/null")
    options = [word for option in (*own, *known) for word in ("-o", option)]
    done = subprocess.run(
        ["ssh", "-F", config, *options, f"{cluster.name}-ctl", command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 255 and "Permission denied (publickey" in done.stderr:
        return "refused"
    assert done.returncode == 0, done
    return done.stdout.strip()


def planned(cluster: Cluster) -> set[tuple[str, str]]:
    """Kind and name of the changes that `up` would make; `plan --check` tells whether there are
    any.
    """
    changes = cluster("-o", "json", "plan", "--check", rc=None)
    assert changes.rc == (3 if changes.json["changes"] else 0)
    return {(change["kind"], change["name"]) for change in changes.json["changes"]}


def own_of(cluster: Cluster, host: str) -> dict[str, str]:
    """Return the hashes of the files whose content must not be in another cluster."""
    script = shlex.quote(SECRETS if host.endswith("-ctl") else SECRETS.partition("mariadb")[0])
    lines = cluster.ssh(host, f"sudo sh -c {script} 2>&1").splitlines()
    return {path: found for found, path in (line.split() for line in lines)}


@pytest.fixture(scope="module")
def storage_cluster(clusterctl: Clusterctl, cluster_name: str) -> Iterator[Cluster]:
    """A cluster that is removed at the end, with its storage."""
    spec = clusterctl.cwd / "cluster.yaml"
    spec.write_text(SPEC.format(name=cluster_name))
    yield Cluster(cluster_name, spec, clusterctl, clusterctl("-o", "json", "up").json)
    clusterctl("down", "--yes", "--discard", rc=None)
    clusterctl("storage", "remove", "--yes", "--discard", cluster_name, rc=None)


def as_class(up: dict[str, Any]) -> int:
    """Return the number of hosts on which Ansible had nothing to do."""
    return int(re.findall(r"(\d+) hosts? already", phase_note(up, "converge"))[-1])


def phase_note(up: dict[str, Any], name: str) -> str:
    (note,) = (phase["note"] for phase in up["phases"] if phase["phase"] == name)
    return str(note)


def test_clusters_from_one_layer_share_no_secret(storage_cluster: Cluster, tmp_path: Path) -> None:
    """Two clusters of one kind with two names; the shared layer contains no secret either."""
    name = f"{storage_cluster.name}x"
    text = STORAGE.sub("", storage_cluster.spec.read_text()).replace(storage_cluster.name, name)
    with raised(name, text, tmp_path / "home", tmp_path) as other_cluster:
        assert phase_note(other_cluster.raised, "prepare_template") == "cached"
        assert as_class(storage_cluster.raised) == 2
        assert as_class(other_cluster.raised) == 2
        for kind in ("ctl", "train-1"):
            mine = own_of(storage_cluster, f"{storage_cluster.name}-{kind}")
            user_keys = own_of(other_cluster, f"{name}-{kind}")
            assert len(mine) == 7
            assert not [path for path in mine if mine[path] == user_keys[path]]
        named = "sacctmgr -n show {} format=cluster%20 | sort -u"
        for table in ("cluster", "associations"):
            assert other_cluster.ssh(f"{name}-ctl", named.format(table)).split() == [name]
        assert other_cluster.json("submit", "probe", "--wait")["state"] == "COMPLETED"
        # None is of the cluster that it was made from.
        assert len(other_cluster.json("jobs")["jobs"]) == 1
    cluster_id = (storage_cluster.workspace / "id").read_text().strip()
    note = Path(
        f"/var/lib/clusterctl/{cluster_id}/nodes/{storage_cluster.name}-ctl/class"
    ).read_text()
    layer = Path(f"/var/cache/clusterctl/class-{note}/upper")
    assert (layer / "var/lib/mysql/slurm_acct_db").is_dir()
    files = [path for path in layer.rglob("*") if path.is_file() and path.stat().st_size]
    assert not [path for path in files if any(path.match(pattern) for pattern in OF_LAYER)]


def test_authorized_keys_follow_the_spec_and_keep_the_users_own(storage_cluster: Cluster) -> None:
    folder = storage_cluster.runner.cwd
    text = storage_cluster.spec.read_text()
    ctl = f"{storage_cluster.name}-ctl"
    keys = {name: key_pair(folder, name) for name in (*PEOPLE, "own", "late")}
    text = text.replace("12004}", "12004, ssh_keys: [cyd.pub]}")
    of_bob = f'["restrict,pty {(folder / "bob.pub").read_text().strip()}"]'
    storage_cluster.spec.write_text(
        text.replace("12001}", "12001, ssh_keys: [ada.pub]}").replace(
            "12002}", f"12002, ssh_keys: {of_bob}}}"
        )
    )
    assert planned(storage_cluster) == {
        ("setting", "users.ada.ssh_keys"),
        ("setting", "users.bob.ssh_keys"),
        ("setting", "users.cyd.ssh_keys"),
    }
    # Only the controller, which has the homes, is configured.
    assert as_class(storage_cluster.json("up")) == 1
    assert planned(storage_cluster) == set()
    assert as_person(storage_cluster, "ada", keys["ada"], "id -un") == "ada"
    assert as_person(storage_cluster, "bob", keys["ada"]) == "refused"
    job = as_person(
        storage_cluster, "bob", keys["bob"], "sbatch --parsable --wait -o /dev/null --wrap hostname"
    )
    assert (
        storage_cluster.sacct(job, "User,State,NodeList")
        == f"bob|COMPLETED|{storage_cluster.name}-train-1"
    )

    let_colleagues_in(storage_cluster, keys, folder)
    submit = "sbatch --parsable -o /dev/null --wrap 'sleep 600'"
    sleeper = as_person(storage_cluster, "bob", keys["bob"], submit)
    own = (folder / "own.pub").read_text().strip()
    listed = as_person(
        storage_cluster,
        "ada",
        keys["ada"],
        f"echo '{own}' >>.ssh/authorized_keys; cat .ssh/authorized_keys",
    )
    as_person(storage_cluster, "bob", keys["bob"], f"echo '{own}' >>.ssh/authorized_keys")
    storage_cluster.spec.write_text(text.replace("  - {name: bob, uid: 12002}\n", ""))
    assert planned(storage_cluster) >= {("setting", "users.ada.ssh_keys"), ("setting", "users")}
    storage_cluster("up")
    assert [as_person(storage_cluster, user, keys[user]) for user in ("ada", "bob")] == [
        "refused",
        "refused",
    ]
    assert [as_person(storage_cluster, user, keys["own"], "id -un") for user in ("ada", "bob")] == [
        "ada",
        "bob",
    ]
    assert planned(storage_cluster) == set()
    storage_cluster.job_in("RUNNING", sleeper)
    for command in ("sudo scancel --user bob", "sudo rm /shared/home/bob/.ssh/authorized_keys"):
        storage_cluster("ssh", "--admin", "--", command)
    assert storage_cluster.sacct(sleeper, "State").startswith("CANCELLED")
    assert as_person(storage_cluster, "bob", keys["own"]) == "refused"

    # Someone restores an old copy of the file.
    as_person(storage_cluster, "ada", keys["own"], f"echo '{listed}' >.ssh/authorized_keys")
    assert planned(storage_cluster) == {("drift", ctl)}
    storage_cluster.spec.write_text(text.replace("12001}", "12001, ssh_keys: [ada.pub]}"))
    storage_cluster("up")
    assert [as_person(storage_cluster, "ada", keys[name], "id -un") for name in ("ada", "own")] == [
        "ada",
        "ada",
    ]
    assert as_person(storage_cluster, "bob", keys["bob"]) == "refused"


def test_killed_down_is_finished_by_the_next(storage_cluster: Cluster) -> None:
    (storage_cluster.runner.cwd / "set.txt").write_text("rows\n")
    storage_cluster("put", "set.txt", "datasets/")
    (storage_cluster.runner.cwd / "train.sh").write_text(
        "#!/bin/sh\nmkdir ~/out && echo 0.5 > ~/out/weights\n"
    )
    storage_cluster("submit", "train.sh", "--wait")
    storage_cluster("ssh", "--user", "bob", "--", "touch", "notes")
    victim = Victim(storage_cluster.runner, "down", "--yes")
    victim.until_phase("destroy")
    ended = victim.hit("kill")
    assert ended.rc == -signal.SIGKILL, ended
    assert "Traceback" not in ended.stderr
    ran = storage_cluster("-o", "json", "down", "--yes", rc=None)
    assert ran.rc == 0 or codes(ran) == ["not-found/cluster"], ran
    assert eventually_none(storage_cluster.runner.home) == []


def storage_of(cluster: Cluster) -> dict[str, Any] | None:
    listed = cluster.json("storage", "list")["storage"]
    return next((one for one in listed if one["name"] == cluster.name), None)


def test_up_uses_the_storage_again(storage_cluster: Cluster) -> None:
    """Files keep their owners. Another uid is refused before anything is created."""
    storage = storage_of(storage_cluster)
    assert storage is not None
    assert storage["used_by"] == []
    other = storage_cluster.runner.cwd / "other.yaml"
    other.write_text(storage_cluster.spec.read_text().replace("12001", "12003"))
    (refused,) = storage_cluster.runner("-o", "json", "-f", other, "up", rc=2).json["failures"]
    assert condition(refused) == "option-invalid/storage-users"
    assert re.findall("ada|[0-9]+", refused["cause"])[-3:] == ["ada", "12003", "12001"]
    assert not (storage_cluster.workspace / "id").exists()
    storage_cluster.spec.write_text(storage_cluster.spec.read_text().replace("ada.pub", "late.pub"))
    assert any(storage["what"] in note for note in storage_cluster.json("plan")["notes"])
    storage_cluster("up")
    assert as_person(storage_cluster, "ada", storage_cluster.runner.cwd / "late", "id -un") == "ada"
    assert as_person(storage_cluster, "ada", storage_cluster.runner.cwd / "ada") == "refused"
    used = storage_of(storage_cluster)
    assert used is not None
    assert used["used_by"] == [storage_cluster.name]
    look = f"sudo du -sm /shared/home/{STAYS} | cut -f 1"
    theirs = int(storage_cluster.ssh(f"{storage_cluster.name}-ctl", look))
    # The files, and the archive of the payload.
    assert 1 <= storage["size_mib"] - theirs <= 4
    found = storage_cluster(
        "ssh", "--admin", f"{storage_cluster.name}-ctl", OWNERS
    ).stdout.splitlines()
    of_ada = ["ada/datasets/set.txt 12001", "ada/out/weights 12001"]
    of_bob = ["bob 12002", "bob/notes 12002"]
    assert found == of_ada + of_bob


def test_colleague_attaches_again_after_down_and_up(storage_cluster: Cluster) -> None:
    """The cluster has another host key and address. The earlier job's files are there."""
    folder = storage_cluster.runner.cwd
    cyd = colleague(folder / f"as-{STAYS}", folder / STAYS, again=True)
    assert cyd(f"clusterctl status --cluster {storage_cluster.name}").returncode == 1
    attach(storage_cluster, STAYS, cyd, folder / f"as-{STAYS}" / "ssh", "clusterctl")
    job = (folder / STAYS_JOB).read_text()
    collected = cyd(f"clusterctl -o json collect {job}")
    (run,) = json.loads(collected.stdout)["runs"]
    assert f"{CANARY}-{STAYS} built" in (Path(run["dir"]) / "stdout.log").read_text()
    new = cyd("clusterctl -o json submit probe --wait")
    assert json.loads(new.stdout)["state"] == "COMPLETED"
    left = cyd(f"clusterctl detach --cluster {storage_cluster.name} --discard")
    assert left.returncode == 0, left
    assert cyd(f"ssh {storage_cluster.name}-ctl rm -r data").returncode == 0


def test_storage_remove_deletes_the_storage(storage_cluster: Cluster) -> None:
    """The storage holds the only copies: `down` leaves it, and `collect --all` copies them to this
    machine.
    """
    (storage_cluster.runner.cwd / "set.txt").unlink()
    folders = map(Path, storage_cluster.json("collect", "--all")["folders"])
    brought = {path.name for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert {"set.txt", "weights"} <= brought
    storage_cluster("down", "--yes")
    remove = ("storage", "remove", storage_cluster.name)
    storage = storage_of(storage_cluster)
    assert storage is not None
    assert storage["what"] in storage_cluster.runner(*remove, "--yes", rc=1).stderr
    # --discard does not replace the confirmation.
    assert codes(storage_cluster.runner("-o", "json", *remove, "--discard", rc=2)) == [
        "confirmation-needed"
    ]
    assert storage["what"] in storage_cluster.runner(*remove, "--yes", "--discard").stderr
    assert storage_of(storage_cluster) is None
    ran = storage_cluster.runner("-o", "json", *remove, rc=None)
    assert codes(ran) == ["not-found/storage"]
