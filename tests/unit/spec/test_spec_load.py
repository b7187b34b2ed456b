"""Reading and writing spec files, and what is filled in from the caller."""

from __future__ import annotations

import os
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from clusterctl.errors import SpecError, UsageError
from clusterctl.spec.common import Partition, User
from clusterctl.spec.load import (
    CurrentUser,
    dump_spec,
    job_user_notes,
    load_spec,
    parse_spec,
    resolve_users,
)
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import MAX_LOCAL_HOSTS, find_spec
from clusterctl.util import formatting
from tests.support.messages import refused

ADA = CurrentUser("ada", 1001)
ROOT = CurrentUser("root", 0)
MINIMAL = "version: 1\nname: demo\npartitions:\n  - {name: train, nodes: 2}\n"


def problems(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "c.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_load_without_a_file_is_the_default() -> None:
    spec = load_spec(None, current_user=ADA)
    assert (spec.name, spec.provider.type) == ("local", "local")
    assert [(p.name, p.nodes) for p in spec.partitions] == [("train", 2)]
    assert spec.job_user == User(name="ada", uid=1001)


def test_file_is_loaded_and_resolved(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(MINIMAL)
    assert find_spec(tmp_path) == path
    assert load_spec(path, current_user=ADA).users == (User(name="ada", uid=1001),)


def test_find_spec_without_a_file_is_none(tmp_path: Path) -> None:
    assert find_spec(tmp_path) is None


def test_dangling_link_is_found_and_then_missing(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").symlink_to(tmp_path / "gone")
    path = find_spec(tmp_path)
    assert path is not None
    with refused("not-found/file", UsageError):
        load_spec(path, current_user=ADA)


def test_load_reports_all_problems_in_file_order() -> None:
    text = (
        "nam: demo\n"
        "version: 3\n"
        "partitions:\n"
        "  - {name: train, nodes: two}\n"
        "  - {name: train, nodes: 400, memory: 5}\n"
        "users:\n"
        "  - {name: root, uid: 1001}\n"
        "  - {name: ada, uid: 1001}\n"
    )
    assert [
        [*problem.split(":", 3)[:3], problem.split(": ", 2)[1]] for problem in problems(text)
    ] == [
        ["c.yaml", "1", "1", "nam"],
        ["c.yaml", "2", "10", "version"],
        ["c.yaml", "3", "1", "partitions"],
        ["c.yaml", "4", "26", "partitions[0].nodes"],
        ["c.yaml", "5", "12", "partitions[1].name"],
        ["c.yaml", "5", "39", "partitions[1].memory"],
        ["c.yaml", "7", "12", "users[0].name"],
        ["c.yaml", "8", "22", "users[1].uid"],
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# only words\n", "---\n"])
def test_empty_file(text: str) -> None:
    (problem,) = problems(text)
    assert "empty" in problem


@pytest.mark.parametrize(
    ("text", "what"), [("- a\n", "a list"), ("demo\n", "'demo'"), ("5\n", "5"), ("true\n", "true")]
)
def test_load_of_a_file_that_is_not_a_mapping_is_refused(text: str, what: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith("c.yaml:1:1: spec: ")
    assert problem.endswith(f"not {what}")


def test_parse_of_endless_nesting_is_refused() -> None:
    with refused("bad-yaml", SpecError):
        parse_spec("name: " + "[" * 100_000, "c.yaml")


def test_parse_of_aliases_of_aliases_needs_little_memory() -> None:
    lines = ["a0: &a0 [x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)
    ]
    assert any("partitions is missing" in problem for problem in problems("\n".join(lines)))
    text = "\n".join([*lines, MINIMAL.replace("nodes: 2", "nodes: 2, memory: *a29")])
    with refused("not-a-size", SpecError):
        parse_spec(text, "c.yaml")


def test_anchors_and_merge_keys() -> None:
    text = MINIMAL.replace(
        "  - {name: train, nodes: 2}",
        "  - &p {name: train, nodes: 2, cpus: 1}\n  - {<<: *p, name: infer, cpus: 2}",
    )
    first, second = parse_spec(text, "c.yaml").partitions
    assert (first.nodes, first.cpus, second.name, second.nodes, second.cpus) == (
        2,
        1,
        "infer",
        2,
        2,
    )


def test_merge_of_several_mappings_keeps_the_first_value() -> None:
    text = MINIMAL.replace(
        "  - {name: train, nodes: 2}",
        "  - &a {name: a, nodes: 1}\n"
        "  - &b {name: b, nodes: 2, cpus: 2}\n"
        "  - {<<: [*a, *b], name: c}",
    )
    third = parse_spec(text, "c.yaml").partitions[2]
    assert (third.name, third.nodes, third.cpus) == ("c", 1, 2)


def test_merged_fault_is_shown_where_it_is_written() -> None:
    text = MINIMAL.replace(
        "  - {name: train, nodes: 2}", "  - &p {name: a, nodes: 0}\n  - {<<: *p, name: b}"
    )
    assert [problem.split(" ")[0] for problem in problems(text)] == ["c.yaml:4:25:"] * 2


@pytest.mark.filterwarnings("error")
def test_anchor_may_be_defined_twice() -> None:
    text = MINIMAL.replace(
        "nodes: 2}", "nodes: &n 2, cpus: *n}\n  - {name: infer, nodes: &n 3, cpus: *n}"
    )
    assert [p.cpus for p in parse_spec(text, "c.yaml").partitions] == [2, 3]


def test_long_value_is_quoted_in_part() -> None:
    (problem,) = problems(MINIMAL.replace("demo", "d" * 5000))
    assert problem.endswith("not '" + "d" * 57 + "...'")


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_spec(path, current_user=ADA).name == "demo"


def test_load_of_a_folder_is_refused(tmp_path: Path) -> None:
    with refused("file-unreadable", UsageError, why="Is a directory"):
        load_spec(tmp_path, current_user=ADA)


def test_load_of_an_impossible_path_is_refused() -> None:
    with refused("file-unreadable", UsageError):
        load_spec(Path("a\0b"), current_user=ADA)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"version: 1\nname: \xff\n")
    with refused("file-unreadable", UsageError, "0xff", where=str(path)):
        load_spec(path, current_user=ADA)


def test_load_of_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(MINIMAL.encode() + b"#" * 1024 * 1024)
    with refused("file-unreadable", UsageError, "1 MiB"):
        load_spec(path, current_user=ADA)


def test_load_reads_a_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, MINIMAL.encode())
    os.close(write)
    try:
        assert load_spec(Path(f"/dev/fd/{read}"), current_user=ADA).name == "demo"
    finally:
        os.close(read)


class TestBuiltInPython:
    def test_spec_with_too_many_hosts_is_refused(self) -> None:
        with pytest.raises(
            ValidationError, check=lambda error: f" {MAX_LOCAL_HOSTS} hosts, " in str(error)
        ):
            ClusterSpec(
                version=1, name="a", partitions=(Partition(name="p", nodes=MAX_LOCAL_HOSTS),)
            )
        ClusterSpec(
            version=1, name="a", partitions=(Partition(name="p", nodes=MAX_LOCAL_HOSTS - 1),)
        )

    def test_longest_host_name_is_valid(self) -> None:
        partition = Partition(name="p" * 20, nodes=MAX_LOCAL_HOSTS - 1)
        spec = ClusterSpec(version=1, name="n" * 20, partitions=(partition,))
        assert max(len(name) for name in spec.node_names(partition)) <= 63


class TestResolved:
    SPEC = parse_spec(MINIMAL, "c.yaml")

    def test_resolve_users_of_root_is_hpc(self) -> None:
        spec = resolve_users(self.SPEC, ROOT)
        assert spec.users == (User(name="hpc", uid=10_000),)
        assert job_user_notes(spec, ROOT) == ()

    def test_resolve_users_keeps_named_users(self) -> None:
        users = (User(name="grace", uid=1002),)
        spec = resolve_users(self.SPEC.model_copy(update={"users": users}), ROOT)
        assert spec.users == users

    @pytest.mark.parametrize(
        "caller",
        [
            CurrentUser("Ada.Lovelace", 1001),
            CurrentUser("CORP\\ada", 1001),
            CurrentUser("ada@corp.example", 1001),
            CurrentUser("ada", 999),
            CurrentUser("ada", 1_200_000_001),
            CurrentUser("clusterctl", 1001),
            CurrentUser("", 1001),
        ],
    )
    def test_resolve_users_of_an_unusable_caller_is_hpc_with_note(
        self, caller: CurrentUser
    ) -> None:
        spec = resolve_users(self.SPEC, caller)
        assert spec.users == (User(name="hpc", uid=10_000),)
        (note,) = job_user_notes(spec, caller)
        assert note.code == "caller-unfit-for-nodes"
        assert str(caller.uid) in note

    @pytest.mark.parametrize("uid", [999, 1000, 1001, 1_200_000_001])
    def test_resolve_users_on_gcp_keeps_the_name_with_uid_10000(self, uid: int) -> None:
        """A host gives out the numbers from 1000 on before `up` comes: a workstation's is taken
        there.
        """
        provider = {"type": "gcp", "project": "my-project", "zone": "us-central1-a"}
        partitions = [{"name": "train", "nodes": 1}]
        content = {"version": 1, "name": "demo", "provider": provider, "partitions": partitions}
        caller = CurrentUser("ada", uid)
        spec = resolve_users(ClusterSpec.model_validate(content), caller)
        assert spec.users == (User(name="ada", uid=10_000),)
        assert job_user_notes(spec, caller) == ()

    def test_resolve_users_of_a_usable_caller_has_no_note(self) -> None:
        assert job_user_notes(resolve_users(self.SPEC, ADA), ADA) == ()

    def test_current_user_is_the_effective_user(self) -> None:
        assert CurrentUser.current().uid == os.geteuid()


def exactly(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(pattern, fullmatch=True)


labels = exactly(r"[a-z][a-z0-9-]{0,19}").filter(lambda n: n not in {"ctl", "default"})
accounts = exactly(r"[a-z][a-z0-9_-]{0,30}")
durations = st.integers(1, 3650 * 86400).map(formatting.duration)
partitions = st.fixed_dictionaries(
    {"name": labels, "nodes": st.integers(1, 40)},
    optional={
        "cpus": st.integers(1, 65_533),
        "memory": st.integers(256, 2**30).map(formatting.exact_size),
        "max_time": durations,
    },
)
users = st.fixed_dictionaries(
    {
        "name": exactly(r"u[0-9_-][a-z0-9_-]{0,20}"),
        "uid": st.integers(1000, 60_000),
        "accounts": st.lists(accounts, min_size=1, max_size=3, unique=True),
    }
)
limits = st.dictionaries(
    exactly(r"(Grp|Max|Min)[A-Za-z]{1,9}"), st.integers(0, 100) | exactly(r"[a-z]{1,6}=[0-9]{1,4}")
)
qos = st.fixed_dictionaries(
    {"name": accounts, "priority": st.integers(0, 1_000_000)}, optional={"limits": limits}
)
lines = exactly(r"[A-Za-z]{1,9}X=([a-z0-9é:,@%!&*{}-]{1,20}|\"[a-z :'|>?-]{0,20}\")")
local = st.fixed_dictionaries(
    {"type": st.just("local")}, optional={"subnet": st.just("10.77.0.0/24")}
)
specs = st.fixed_dictionaries(
    {
        "version": st.just(1),
        "name": labels | st.sampled_from(["null", "true", "yes", "no", "on", "e1"]),
        "provider": local,
        "partitions": st.lists(partitions, min_size=1, max_size=6, unique_by=itemgetter("name")),
        "users": st.lists(users, max_size=3, unique_by=(itemgetter("name"), itemgetter("uid"))),
        "slurm": st.fixed_dictionaries(
            {
                "qos": st.lists(qos, max_size=3, unique_by=itemgetter("name")),
                "extra": st.lists(
                    lines, max_size=3, unique_by=lambda one: one.partition("=")[0].lower()
                ),
            }
        ),
        "monitoring": st.fixed_dictionaries({"interval": durations}),
    }
)


@given(specs)
def test_dumped_spec_loads_equal(content: dict[str, object]) -> None:
    spec = ClusterSpec.model_validate(content)
    assert parse_spec(dump_spec(spec), "dump.yaml") == spec


def test_file_that_the_spec_names_is_relative_to_the_spec(tmp_path: Path) -> None:
    head = "version: 1\nname: demo\npartitions: [{name: train, nodes: 1}]\n"
    (tmp_path / "cluster.yaml").write_text(
        f"{head}software: {{python: {{requirements: my reqs.txt}}}}\n"
    )
    spec = load_spec(tmp_path / "cluster.yaml", current_user=ADA)
    assert spec.software.python.requirements == tmp_path / "my reqs.txt"
    elsewhere = tmp_path / "workspace" / "spec.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(dump_spec(spec))
    assert load_spec(elsewhere, current_user=ADA) == spec


def test_recorded_spec_of_existing_hosts_skips_newer_rules(tmp_path: Path) -> None:
    """Else nothing could take hosts down that an older version made, and they would bill."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "version: 1\n"
        "name: demo\n"
        "provider: {type: gcp, project: my-project, zone: us-central1-a}\n"
        "partitions: [{name: train, nodes: 1, gpus: {type: v100}}]\n"
        "users: [{name: ada, uid: 1000}]\n"
    )
    with refused("uid-maybe-taken", SpecError):
        load_spec(path)
    assert load_spec(path, recorded=True).job_user == User(name="ada", uid=1000)
    path.write_text(path.read_text().replace("version: 1", "version: 2"))
    with pytest.raises(SpecError):
        load_spec(path, recorded=True)


def test_recorded_spec_may_have_keys_of_another_version(tmp_path: Path) -> None:
    """The user never wrote them, and can't be asked to correct them."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "version: 1\n"
        "name: demo\n"
        "once: true\n"
        "provider: {type: local, once: 1}\n"
        "storage: {keep: false}\n"
        "partitions: [{name: train, nodes: 1, once: {a: b}}]\n"
    )
    with refused("unknown-key", SpecError):
        load_spec(path)
    assert load_spec(path, recorded=True).partitions[0].nodes == 1
