#!/usr/bin/python3
"""Take an idle cluster down: delete its compute instances, then stop the controller, on which this
runs.

A timer starts this program. The cluster is idle while Slurm has no job, there is no SSH connection,
and no job has ended recently. A failed check counts as activity, so that a cluster is never taken
down by mistake; errors are retried at the next start. The controller is stopped instead of deleted,
because uncollected runs are on its disk. Needs only the standard library, and Python 3.8 or newer.
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
from typing import Any

LABELS = {"cluster": "clusterctl-cluster", "cluster_id": "clusterctl-id"}
GONE = 404
TIMEOUT_S = 60
# Time between the warning and the first deletion.
GRACE_S = 120


class Unknown(Exception):  # noqa: N818
    """A check failed, so it is unknown whether the cluster is idle."""


class Cluster:
    """The cluster. ``settings``: written by Ansible. ``state``: times in Unix seconds, from the
    last run.
    """

    def __init__(self, settings: dict[str, Any], uptime_file: Path) -> None:
        self.settings = settings
        self.state_file = Path(settings["state"])
        self.booted = time.time() - float(uptime_file.read_text().split()[0])
        self.state: dict[str, Any] = {"alive": time.time(), "warned": None}
        if self.state_file.exists():
            self.state.update(json.loads(self.state_file.read_text()))

    def save(self) -> None:
        fresh = self.state_file.with_suffix(".new")
        fresh.write_text(json.dumps(self.state))
        fresh.replace(self.state_file)

    def idle_s(self) -> float:
        """Return the seconds since the last activity. Raise Unknown if Slurm or the system did not
        answer.
        """
        if signs_of_life():
            self.state["alive"] = time.time()
        ended = last_job_end(self.settings["after_s"])
        self.state["alive"] = max(self.state["alive"], self.booted, ended)
        return time.time() - float(self.state["alive"])


def signs_of_life() -> bool:
    """Return whether Slurm has a job in any partition, or there is an SSH connection."""
    return bool(
        run("squeue", "--all", "--noheader", "--format=%i")
        or run("ss", "--no-header", "--tcp", "--numeric", "state", "established", "sport = :22")
    )


def last_job_end(window_s: float) -> float:
    """Return the latest end of a job in the last ``window_s`` seconds, in Unix seconds; 0 without a
    job.
    """
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


def run(*argv: str) -> str:
    """Return a command's output, in which Slurm's times are Unix seconds. Raise Unknown if it
    failed.
    """
    env = {**os.environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    try:
        result = subprocess.run(
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
    if result.returncode != 0:
        raise Unknown(f"{argv[0]}: {result.stderr.strip() or result.returncode}")
    return result.stdout.strip()


class Google:
    """Client of Compute Engine's API, with the rights of the controller's service account."""

    def __init__(self, settings: dict[str, Any]) -> None:
        endpoint = os.environ.get("CLUSTERCTL_GCP_ENDPOINT") or "https://{service}.googleapis.com"
        base = endpoint.replace("{service}", "compute").rstrip("/")
        self.base = (
            f"{base}/compute/v1/projects/{settings['project']}/zones/{settings['zone']}/instances"
        )
        self.token = self._token()

    @staticmethod
    def _token() -> str:
        host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        try:
            with direct.open(request, timeout=TIMEOUT_S) as answer:
                return str(json.load(answer)["access_token"])
        except (OSError, ValueError, KeyError) as exc:
            raise Unknown(f"no token from the metadata server: {exc}") from exc

    def call(self, verb: str, path: str) -> Any:
        """Return the API's answer; None if the instance does not exist. Raise Unknown for other
        errors.
        """
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{self.base}/{path}", method=verb, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            if exc.code == GONE:
                return None
            raise Unknown(
                f"{verb} {path}: {exc.code} {exc.read(500).decode(errors='replace')}"
            ) from exc
        except (OSError, ValueError) as exc:
            raise Unknown(f"{verb} {path}: {exc}") from exc


class Log:
    """A log to stdout, which goes to the journal, and to a file that outlives the journal."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201
        with open(self.path, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n")


def take_down(settings: dict[str, Any], log: Log, dry: bool) -> None:
    """Delete the nodes' instances. Once all are gone, stop the controller. ``dry``: only log these
    steps.
    """
    google = Google(settings)
    if delete_nodes(google, settings, log, dry):
        controller = google.call("GET", settings["controller"])
        if not belongs_to_cluster(controller, settings):
            log(f"not stopped: {settings['controller']} does not carry this cluster's labels")
            return
        log(
            f"{'would stop' if dry else 'stopping'} {settings['controller']}; `clusterctl up` "
            "starts it again"
        )
        # Google stops an instance with local SSDs only if the request says to discard their data.
        if not dry:
            google.call("POST", f"{settings['controller']}/stop?discardLocalSsd=true")


def delete_nodes(google: Google, settings: dict[str, Any], log: Log, dry: bool) -> bool:
    """Request the deletion of the nodes' instances; ``dry``: only log this. Return whether all are
    gone.
    """
    is_empty = True
    for name in settings["hosts"]:
        try:
            instance = google.call("GET", name)
            if instance is None:
                continue
            if not belongs_to_cluster(instance, settings):
                log(f"not deleted: {name} does not carry this cluster's labels")
                continue
            is_empty = is_empty and dry
            log(f"{'would delete' if dry else 'deleting'} {name}")
            if not dry and instance.get("status") != "STOPPING":
                google.call("DELETE", name)
        except Unknown as exc:
            is_empty = False
            log(f"{exc}; retrying at the next tick")
    return is_empty


def belongs_to_cluster(instance: Any, settings: dict[str, Any]) -> bool:
    """Return whether an instance carries the labels of this cluster."""
    labels = (instance or {}).get("labels", {})
    return all(labels.get(label) == settings[key] for key, label in LABELS.items())


def warn(log: Log, text: str) -> None:
    """Log a text and show it on all terminals of this host (wall)."""
    log(text)
    try:
        run("wall", text)
    except Unknown as exc:
        log(str(exc))


def tick(cluster: Cluster, log: Log, dry: bool) -> None:
    """Check whether the cluster is idle. If so, warn its users, and a few minutes later take it
    down.
    """
    settings = cluster.settings
    state = cluster.state
    try:
        idle_s = cluster.idle_s()
    except Unknown as exc:
        state["alive"] = time.time()
        state["warned"] = None
        log(f"could not check whether the cluster is idle: {exc}")
        return
    if idle_s < settings["after_s"]:
        state["warned"] = None
        return
    # A warning from before the last stop does not count.
    if (state["warned"] or 0) < cluster.booted and not dry:
        state["warned"] = time.time()
        warn(
            log,
            f"this cluster has been idle for {idle_s / 3600:.1f} h and takes itself down in a "
            "few minutes",
        )
        return
    if not dry and time.time() - state["warned"] < GRACE_S:
        return
    try:
        take_down(settings, log, dry)
    except Unknown as exc:
        log(f"{exc}; retrying at the next tick")


def main() -> int:
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
