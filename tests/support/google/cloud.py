"""A Google Cloud for tests: Terraform works on it by a stand-in provider, and it is one JSON file.

    cloud = GoogleCloud(tmp_path)                     # its provider serves google's real schema
    subprocess.run(["terraform", "init"], env=os.environ | cloud.env, ...)
    cloud.addresses({"demo-ctl": "10.0.3.2"})         # an instance of that name "is" that machine
    cloud.fail("quota_of_region", name="demo-train-*")   # whenever one is made
    cloud.fail("slow", seconds=2, times=1)
    cloud.instances["demo-ctl"]["machine_type"]       # what exists, by name, Terraform's attributes
    cloud.done()                                      # [("create", "google_compute_instance", "demo-ctl")]
    cloud.given["google_compute_instance"]            # {"boot_disk.auto_delete", ...}: what was set

The test's own process serves the provider: started anew, three times for a plan, it costs thrice as
much. The ``terraform`` in ``cloud.bin``, first on the PATH of ``cloud.env``, tells Terraform where
it is (``TF_REATTACH_PROVIDERS``). ``lag`` calls that need a new service account, or an API that was
just enabled, do not know it yet, as at Google (cloud.google.com/iam/docs/access-change-propagation,
2025-10: "typically 2 minutes"; of APIs the text of the refusal says it).

Kinds of faults are in ``refusals.py``; the file's form in ``provider/store.py``.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from tf.gen import tfplugin_pb2_grpc as rpc

from tests.support.google.provider.schema import SOURCE
from tests.support.google.provider.servicer import Google
from tests.support.google.provider.store import Store
from tests.support.google.provider.world import delete
from tests.support.google.refusals import KINDS
from tests.support.terraform import program

LARGEST = 64 * 1024 * 1024  # bytes of one message


class GoogleCloud:
    """A cloud in ``folder``, whose provider Terraform finds by ``env``."""

    def __init__(self, folder: Path, *, lag: int = 0, serves: bool = True) -> None:
        self.folder = folder / "google-cloud"
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        self.store = Store(self.folder / "cloud.json")
        self.bin = self.folder / "bin"
        with self.store.change() as world:
            world["lag"] = lag
        (self.folder / "terraform.rc").write_text("disable_checkpoint = true\n")
        if serves:
            self._serve()

    @property
    def env(self) -> Mapping[str, str]:
        """What Terraform, or whoever starts it, needs in its environment."""
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "TF_CLI_CONFIG_FILE": str(self.folder / "terraform.rc"),
            "CHECKPOINT_DISABLE": "1",
            "HOME": str(self.home),
            "GOGC": "400",  # Terraform ends before it would have to collect its garbage
        }

    @property
    def terraform(self) -> Path:
        """Terraform, as it is found by ``env``."""
        return self.bin / "terraform"

    @property
    def instances(self) -> dict[str, dict[str, Any]]:
        """Instance name -> its attributes, of all that exist, whatever Terraform's state says."""
        return {each["name"]: each for each in self.resources("google_compute_instance").values()}

    def resources(self, kind: str | None = None) -> dict[str, Any]:
        """Id -> attributes of what exists of a type; without one, all ids with their type."""
        there = self.store.read()["resources"]
        if kind is not None:
            return dict(there.get(kind, {}))
        return {each: kind for kind, all_of_it in there.items() for each in all_of_it}

    def done(self, *ops: str) -> list[tuple[str, str, str]]:
        """What was done without error, in order: (create | update | delete, type, name)."""
        return [
            (entry["op"], entry["type"], entry["name"])
            for entry in self.store.read()["log"]
            if not entry["error"] and (not ops or entry["op"] in ops)
        ]

    def forget_log(self) -> None:
        """Begin a new log."""
        with self.store.change() as world:
            world["log"] = []

    def addresses(self, by_name: Mapping[str, str]) -> None:
        """The internal addresses that these instances (or Filestores) get when they are made."""
        with self.store.change() as world:
            world["addresses"] |= by_name

    def fail(
        self,
        kind: str,
        *,
        name: str = "*",
        of: str = "google_compute_instance",
        on: str = "create",
        times: int | None = None,
        seconds: float = 0,
    ) -> None:
        """Play a fault when a resource of type ``of`` is made, or ``on`` delete, at most ``times``
        times.
        """
        if kind not in KINDS:
            raise ValueError(f"no fault {kind!r}; there are {', '.join(sorted(KINDS))}")
        if kind == "no_credentials":
            of = "provider"
            on = "configure"
            name = "*"
        fault = {
            "kind": kind,
            "name": name,
            "type": of,
            "on": on,
            "times": times,
            "seconds": seconds,
        }
        with self.store.change() as world:
            world["faults"].append(fault | {"played": 0})

    def heal(self) -> None:
        """No fault plays any more."""
        with self.store.change() as world:
            world["faults"] = []

    def stop(self, name: str) -> None:
        """It is powered off, by its owner or by Google: it is there, and does not run."""
        with self.store.change() as world:
            for each in world["resources"]["google_compute_instance"].values():
                if each["name"] == name:
                    each["current_status"] = "TERMINATED"
                    each["desired_status"] = "TERMINATED" if each["desired_status"] else None

    def lose(self, name: str, kind: str = "google_compute_instance") -> None:
        """Somebody else deletes it."""
        with self.store.change() as world:
            for identifier in [
                i for i, each in world["resources"][kind].items() if each["name"] == name
            ]:
                delete(world, kind, identifier)

    def fill(self, bucket: str) -> None:
        """Something is put into a bucket."""
        with self.store.change() as world:
            world["filled"].append(bucket)

    def _serve(self) -> None:
        limits = [(f"grpc.max_{way}_message_length", LARGEST) for way in ("send", "receive")]
        self._server = grpc.server(ThreadPoolExecutor(max_workers=32), options=limits)
        provider = Google(self.store)
        self.given = provider.given
        rpc.add_ProviderServicer_to_server(provider, self._server)
        # A socket's path may be too long in a test's folder.
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        at = {"Network": "tcp", "String": f"127.0.0.1:{port}"}
        known = {
            "Protocol": "grpc",
            "ProtocolVersion": 6,
            "Pid": os.getpid(),
            "Test": True,
            "Addr": at,
        }
        self.bin.mkdir()
        self.terraform.write_text(
            f"#!/bin/sh\nexport TF_REATTACH_PROVIDERS={shlex.quote(json.dumps({SOURCE: known}))}\n"
            f'exec {shlex.quote(str(program().path))} "$@"\n'
        )
        self.terraform.chmod(0o755)
