#!/usr/bin/python3
"""Take an idle cluster down: delete its compute instances, then stop the controller, which this runs on.

Started by a timer. The cluster is idle while Slurm has no job, nobody is connected by SSH, and no job has
ended lately. What can't be looked at counts as life: a cluster is never taken down by mistake, and errors are
tried again at the next tick. The controller is stopped, not deleted: runs that nobody has brought home are on
its disk. Only the standard library, and any Python from 3.8 on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

LABELS = {"cluster": "clusterctl-cluster", "cluster_id": "clusterctl-id"}
GONE = 404
TIMEOUT_S = 60
GRACE_S = 120  # from the warning on


class Unknown(Exception):  # noqa: N818
    """Something could not be looked at."""


class Cluster:
    """What is known of it: ``settings`` as the role wrote them, ``state`` as the last tick left it."""

    def __init__(self, settings, uptime_file):
        self.settings = settings
        self.state_file = Path(settings["state"])
        self.booted = time.time() - float(uptime_file.read_text().split()[0])
        self.state = {"alive": time.time(), "warned": None}
        if self.state_file.exists():
            self.state.update(json.loads(self.state_file.read_text()))

    def save(self):
        fresh = self.state_file.with_suffix(".new")
        fresh.write_text(json.dumps(self.state))
        fresh.replace(self.state_file)

    def idle_s(self):
        """Seconds since the last sign of life.

        Raises:
            Unknown: Slurm or the system did not answer.
        """
        if signs_of_life():
            self.state["alive"] = time.time()
        ended = last_job_end(self.settings["after_s"])
        self.state["alive"] = max(self.state["alive"], self.booted, ended)
        return time.time() - self.state["alive"]


def signs_of_life():
    """Whether Slurm has a job, in any partition, or somebody is connected by SSH."""
    return bool(
        run("squeue", "--all", "--noheader", "--format=%i")
        or run("ss", "--no-header", "--tcp", "--numeric", "state", "established", "sport = :22")
    )


def last_job_end(window_s):
    """When the last job of this window ended, in Unix seconds; 0 if none did."""
    ends = run(
        "sacct",
        "--allusers",
        "--allocations",
        "--noheader",
        "--parsable2",
        "--format=End",
        f"--starttime=now-{int(window_s)}seconds",
        "--endtime=now",
    ).split()
    return max([float(end) for end in ends if end.isdigit()], default=0.0)


def run(*argv):
    """What a command prints; epochs instead of dates.

    Raises:
        Unknown: it failed.
    """
    env = {**os.environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Unknown(f"{argv[0]}: {exc}") from exc
    if done.returncode != 0:
        raise Unknown(f"{argv[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


class Google:
    """Compute Engine, as the controller's own account."""

    def __init__(self, settings):
        endpoint = os.environ.get("CLUSTERCTL_GCP_ENDPOINT") or "https://{service}.googleapis.com"
        base = endpoint.replace("{service}", "compute").rstrip("/")
        self.base = f"{base}/compute/v1/projects/{settings['project']}/zones/{settings['zone']}/instances"
        self.token = self._token()

    @staticmethod
    def _token():
        host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        try:
            with direct.open(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)["access_token"]
        except (OSError, ValueError, KeyError) as exc:
            raise Unknown(f"no token from the metadata server: {exc}") from exc

    def call(self, verb, path):
        """The answer; None where the instance is not there.

        Raises:
            Unknown: Google refused, or did not answer.
        """
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{self.base}/{path}", method=verb, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            if exc.code == GONE:
                return None
            raise Unknown(f"{verb} {path}: {exc.code} {exc.read(500).decode(errors='replace')}") from exc
        except (OSError, ValueError) as exc:
            raise Unknown(f"{verb} {path}: {exc}") from exc


class Log:
    """The journal, by what is printed, and a file that outlives the journal."""

    def __init__(self, path):
        self.path = path

    def __call__(self, text):
        print(text, flush=True)  # noqa: T201
        with open(self.path, "a") as file:  # noqa: PTH123
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n")


def take_down(settings, log, dry):
    """Delete the nodes that are there and, once none is, stop the controller."""
    google = Google(settings)
    if settle(google, settings, log, dry):
        mine = google.call("GET", settings["controller"])
        if not is_ours(mine, settings):
            log(f"{settings['controller']} does not carry this cluster's labels: it is left running")
            return
        log(
            f"{'would stop' if dry else 'stopping'} {settings['controller']}; `clusterctl up` starts it again"
        )
        if not dry:  # Google stops no instance with local SSDs without being told what becomes of their data
            google.call("POST", f"{settings['controller']}/stop?discardLocalSsd=true")


def settle(google, settings, log, dry):
    """Ask for the deletion of every node of ours; whether none is there any more."""
    empty = True
    for name in settings["hosts"]:
        try:
            instance = google.call("GET", name)
            if instance is None:
                continue
            if not is_ours(instance, settings):
                log(f"{name} does not carry this cluster's labels: it is left alone")
                continue
            empty = empty and dry
            log(f"{'would delete' if dry else 'deleting'} {name}")
            if not dry and instance.get("status") != "STOPPING":
                google.call("DELETE", name)
        except Unknown as exc:
            empty = False
            log(f"{exc}; tried again at the next tick")
    return empty


def is_ours(instance, settings):
    """Whether an instance carries the labels of this very cluster."""
    labels = (instance or {}).get("labels", {})
    return all(labels.get(label) == settings[key] for key, label in LABELS.items())


def warn(log, text):
    """Tell whoever is on a terminal of this host."""
    log(text)
    try:
        run("wall", text)
    except Unknown as exc:
        log(str(exc))


def tick(cluster, log, dry):
    """Look once, and do what there is to do."""
    settings, state = cluster.settings, cluster.state
    try:
        idle_s = cluster.idle_s()
    except Unknown as exc:
        state["alive"], state["warned"] = time.time(), None
        log(f"not known to be idle: {exc}")
        return
    if idle_s < settings["after_s"]:
        state["warned"] = None
        return
    if (state["warned"] or 0) < cluster.booted and not dry:  # a warning of before the last stop is none
        state["warned"] = time.time()
        warn(
            log, f"this cluster has been idle for {idle_s / 3600:.1f} h and takes itself down in some minutes"
        )
        return
    if not dry and time.time() - state["warned"] < GRACE_S:
        return
    try:
        take_down(settings, log, dry)
    except Unknown as exc:
        log(f"{exc}; tried again at the next tick")


def main():
    parser = argparse.ArgumentParser(description="take an idle cluster down")
    parser.add_argument("settings", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="only log what would be done")
    parser.add_argument("--uptime", type=Path, default=Path("/proc/uptime"))
    options = parser.parse_args()
    settings = json.loads(options.settings.read_text())
    cluster = Cluster(settings, options.uptime)
    try:
        tick(cluster, Log(settings["log"]), options.dry_run)
    finally:
        if not options.dry_run:
            cluster.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
