"""Sums inside each node, then between one leader a node, then inside again.

Between nodes each sum passes once a node and not once a rank, as in Goyal et al., "Accurate, Large Minibatch
SGD" (2017), section 4: worth it where many ranks of a node share one slow link.
"""

from __future__ import annotations

from collections.abc import Callable

from payload.comm.base import Request
from payload.comm.staging import Staging
from payload.comm.transport import MPI, Last, Steps, Transport, chunks
from payload.device.base import Array, Device

NodeOf = Callable[[MPI.Comm], MPI.Comm]


def by_shared_memory(comm: MPI.Comm) -> MPI.Comm:
    """The ranks that MPI finds on this one's node."""
    return comm.Split_type(MPI.COMM_TYPE_SHARED)


class Hierarchical(Transport):
    """Nodes may have different numbers of ranks, and these need not be neighbours."""

    name = "hierarchical"

    def __init__(
        self,
        device: Device | None = None,
        comm: MPI.Comm | None = None,
        *,
        staging: Staging | None = None,
        node_of: NodeOf = by_shared_memory,
    ) -> None:
        """``node_of``: which ranks share a node."""
        super().__init__(device, comm, staging=staging)
        self._node_of = node_of
        self._node = node_of(self._lane_comm)
        leads = self._node.rank == 0
        self._leaders = self._lane_comm.Split(0 if leads else MPI.UNDEFINED, self.rank)
        self._leads = leads
        members: list[int] = self._node.allgather(self.rank)
        of_leaders = self._leaders.allgather(members) if leads else None
        self._nodes: list[list[int]] = self._node.bcast(of_leaders)  # the ranks of each, in order of leaders

    def split(self, color: int, key: int) -> Hierarchical:
        comm = self._comm.Split(color, key)
        return Hierarchical(self.device, comm, staging=self.staging, node_of=self._node_of)

    def _sum(self, host: Array) -> Steps:
        """Three pieces are under way at once, one in each stage. All ranks of a node start the stages of its
        pieces in the same order, as they must."""
        pieces = [host[chunk] for chunk in chunks(host)]
        for turn in range(len(pieces) + len(_STAGES)):
            yield [
                stage(self, pieces[turn - number])
                for number, stage in enumerate(_STAGES)
                if 0 <= turn - number < len(pieces)
            ]

    def _reduce(self, piece: Array) -> Request:
        if self._leads:
            return self._node.Ireduce(MPI.IN_PLACE, piece)
        self.sent(piece.nbytes)
        return self._node.Ireduce(piece, None)

    def _between(self, piece: Array) -> Request:
        if not self._leads:
            return MPI.REQUEST_NULL
        self.sent(2 * piece.nbytes * (len(self._nodes) - 1) // len(self._nodes))
        return self._leaders.Iallreduce(MPI.IN_PLACE, piece)

    def _spread(self, piece: Array) -> Request:
        if self._leads and self._node.size > 1:
            self.sent(piece.nbytes)
        return self._node.Ibcast(piece)

    def _scatter(self, host: Array) -> Steps:
        return self._sum(host)  # a leader needs all of its members' parts anyway

    def _join(self, host: Array) -> Steps:
        """The leader collects its node's parts, leaders give each other theirs, and members get the whole."""
        parts = host.reshape(self.size, -1)
        members = next(node for node in self._nodes if self.rank in node)
        if not self._leads:
            yield [self._node.Isend(parts[self.rank], 0)]
            self.sent(parts[self.rank].nbytes)
        else:
            yield [self._node.Irecv(parts[rank], place) for place, rank in enumerate(members) if place]
            yield [
                self._leaders.Ibcast(parts[rank], root=leader)
                for leader, node in enumerate(self._nodes)
                for rank in node
            ]
            self.sent(parts[0].nbytes * len(members) * (len(self._nodes) > 1))
        yield Last([self._node.Ibcast(host)])


_STAGES = (Hierarchical._reduce, Hierarchical._between, Hierarchical._spread)
