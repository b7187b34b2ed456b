"""Clusterctl's folder on a Slurm cluster that other people run, for a person who uses tcsh and
comes by a jump host: all is in it, and detach takes it.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.foreign.site import Site
from tests.support.foreign.user import user_of
from tests.support.messages import codes, condition

NAME = "placed"


def test_attach_keeps_all_files_in_its_folder_until_detach(national: Site, tmp_path: Path) -> None:
    (tmp_path / "carla").mkdir()
    user = user_of(national, "carla", tmp_path / "carla")
    before = national.listing("carla")
    verb = user.clusterctl
    folder = verb(
        "attach", "national-jump", "--name", NAME, "--folder", "~/ours", "-o", "json"
    ).json["folder"]
    facts = {
        fact["fact"]: fact for fact in verb("doctor", "--cluster", NAME, "-o", "json").json["facts"]
    }
    assert {"Slurm", "account", "partition main", "MPI", "Python", "folder env"} <= {*facts}
    assert all(fact["learned"] and not fact["is_problem"] for fact in facts.values())
    (user.folder / "data.txt").write_text("from home\n")
    (user.folder / "read.sh").write_text(
        f"#!/bin/bash\ncat {folder}/files/data.txt | tee result.txt\n"
    )
    cluster = ("--cluster", NAME)
    assert verb("put", "data.txt", *cluster, "-o", "json").json["folder"] == f"{folder}/files"
    job = verb("submit", "read.sh", *cluster, "--wait", "-o", "json").json["jobs"][0]["job_id"]
    new = {line.rpartition(" ")[2] for line in national.listing("carla") if line not in before}
    assert {
        path for path in new if path not in {".", "./ours"} and not path.startswith("./ours/")
    } == set()

    assert "would-lose/files" in codes(verb("detach", *cluster, "-o", "json", rc=1))
    verb("collect", job, *cluster)
    national.ssh("carla", f"echo made there >{folder}/files/notes.txt")
    refusal = verb("detach", *cluster, "-o", "json", rc=1).json["failures"]
    assert [condition(failure) for failure in refusal] == ["would-lose/files"]
    assert "notes.txt" in refusal[0]["cause"]
    verb("collect", "--all", *cluster)
    (copy,) = user.folder.glob("runs/*/files/notes.txt")
    assert copy.read_text() == "made there\n"
    listed = verb("detach", *cluster, "--dry-run", "-o", "json").json
    assert {"env", "environments", "store", "jobs", "files"} == {
        entry["name"] for entry in listed["entries"]
    }
    verb("detach", *cluster)
    assert national.listing("carla") == before
