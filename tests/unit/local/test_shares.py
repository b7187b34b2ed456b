"""Nodes share the machine honestly."""

import pytest

from clusterctl.providers.local.provider import Hardware, divide, is_oversubscribed
from clusterctl.spec.common import Partition
from clusterctl.spec.models import ClusterSpec


def spec(*partitions: Partition) -> ClusterSpec:
    return ClusterSpec(version=1, name="demo", partitions=partitions)


def test_cores_are_disjoint_while_there_are_enough() -> None:
    shares, notes = divide(spec(Partition(name="train", nodes=3)), Hardware(tuple(range(8)), 16384))
    cores = [core for share in shares for core in share.cores]
    assert [share.size.cpus for share in shares] == [2, 2, 2]
    assert len(cores) == len(set(cores)) == 6
    assert notes == ()


def test_cores_we_may_not_use_are_never_given() -> None:
    shares, _ = divide(spec(Partition(name="train", nodes=2)), Hardware((3, 5), 16384))
    assert [share.cores for share in shares] == [(3,), (5,)]


def test_oversubscription_is_said_aloud() -> None:
    shares, notes = divide(spec(Partition(name="train", nodes=16)), Hardware((0, 1), 24576))
    assert all(share.size.cpus == 1 for share in shares)
    assert {share.cores for share in shares} == {(0,), (1,)}
    assert len(notes) == 1
    assert all(word in notes[0] for word in ("have 16 cores", "machine has 2;"))


def test_memory_is_divided_after_a_reserve() -> None:
    shares, _ = divide(spec(Partition(name="train", nodes=4)), Hardware(tuple(range(4)), 9 * 1024))
    assert [share.size.memory_mib for share in shares] == [2048] * 4


def test_what_the_spec_asks_for_wins() -> None:
    wide = Partition(name="wide", nodes=1, cpus=4, memory="32GiB")
    shares, notes = divide(spec(wide, Partition(name="thin", nodes=1)), Hardware((0, 1), 8192))
    assert (shares[0].size.cpus, shares[0].size.memory_mib) == (4, 32 * 1024)
    assert shares[0].cores == (0, 1)
    assert [note.split(":")[0] for note in notes] == ["oversubscribed", "oversubscribed"]


def test_hosts_are_named_after_cluster_and_partition() -> None:
    shares, _ = divide(
        spec(Partition(name="a", nodes=2), Partition(name="b", nodes=1)), Hardware((0, 1, 2), 4096)
    )
    assert [(s.host, s.partition) for s in shares] == [
        ("demo-a-1", "a"),
        ("demo-a-2", "a"),
        ("demo-b-1", "b"),
    ]


def test_here_reads_the_kernel() -> None:
    here = Hardware.here()
    assert here.cores
    assert here.memory_mib > 0


@pytest.mark.parametrize(("cores", "oversubscribed"), [((0, 1), True), ((0, 1, 2), False)])
def test_nodes_that_share_cores_are_oversubscribed(cores: tuple[int, ...], oversubscribed: bool) -> None:
    shares, _ = divide(spec(Partition(name="train", nodes=3)), Hardware(cores, 4096))
    assert is_oversubscribed(shares) is oversubscribed
