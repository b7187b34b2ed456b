"""Sums in three steps: within each node, between the nodes' leader ranks, and from leaders to their
nodes.

Only a node's leader, not each of its ranks, sends to other nodes, as in Goyal et al., "Accurate,
Large Minibatch SGD" (2017), section 4. This pays off if many ranks of a node share a slow link.
"""

from __future__ import annotations

from collections.abc import Callable

from payload.comm.base import MpiRequest
from payload.comm.staging import Staging
from payload.comm.transport import MPI, LastRequests, MpiTransport, Steps, chunks
from payload.device.base import Array, Device

NodeOf = Callable[[MPI.Comm], MPI.Comm]


def by_shared_memory(comm: MPI.Comm) -> MPI.Comm:
    """Return the communicator of all ranks on this rank's node. MPI finds the ranks that can share
    memory.
    """
    return comm.Split_type(MPI.COMM_TYPE_SHARED)


class Hierarchical(MpiTransport):
    """Transport with a leader rank on each node. Nodes may have any number of ranks, in any order
    of rank.
    """

    name = "hierarchical"

    def __init__(
        self,
        device: Device | None = None,
        comm: MPI.Comm | None = None,
        *,
        staging: Staging | None = None,
        node_of: NodeOf = by_shared_memory,
    ) -> None:
        """Join ``comm``. node_of: function that returns the communicator of the ranks on this
        rank's node.
        """
        super().__init__(device, comm, staging=staging)
        self._node_of = node_of
        self._node = node_of(self._lane_comm)
        leads = self._node.rank == 0
        self._leaders = self._lane_comm.Split(0 if leads else MPI.UNDEFINED, self.rank)
        self._leads = leads
        members: list[int] = self._node.allgather(self.rank)
        # The ranks of each node, in order of leaders.
        ranks_of_nodes = self._leaders.allgather(members) if leads else None
        self._nodes: list[list[int]] = self._node.bcast(ranks_of_nodes)

    def split(self, color: int, key: int) -> Hierarchical:
        comm = self._comm.Split(color, key)
        return Hierarchical(self.device, comm, staging=self.staging, node_of=self._node_of)

    def _sum(self, host: Array) -> Steps:
        """Sum an array in pieces. Up to three pieces are in progress, each in another of the three
        steps.

        All ranks of a node start the steps of all pieces in the same order, as MPI requires.
        """
        pieces = [host[chunk] for chunk in chunks(host)]
        for turn in range(len(pieces) + len(_STAGES)):
            yield [
                stage(self, pieces[turn - number])
                for number, stage in enumerate(_STAGES)
                if 0 <= turn - number < len(pieces)
            ]

    def _reduce(self, piece: Array) -> MpiRequest:
        if self._leads:
            return self._node.Ireduce(MPI.IN_PLACE, piece)
        self.count_sent(piece.nbytes)
        return self._node.Ireduce(piece, None)

    def _between(self, piece: Array) -> MpiRequest:
        if not self._leads:
            return MPI.REQUEST_NULL
        self.count_sent(2 * piece.nbytes * (len(self._nodes) - 1) // len(self._nodes))
        return self._leaders.Iallreduce(MPI.IN_PLACE, piece)

    def _spread(self, piece: Array) -> MpiRequest:
        if self._leads and self._node.size > 1:
            self.count_sent(piece.nbytes)
        return self._node.Ibcast(piece)

    def _scatter(self, host: Array) -> Steps:
        # A leader needs all parts of its node's ranks anyway.
        return self._sum(host)

    def _join(self, host: Array) -> Steps:
        """Gather a node's parts at its leader, exchange them between leaders, send all parts to all
        ranks.
        """
        parts = host.reshape(self.size, -1)
        members = next(node for node in self._nodes if self.rank in node)
        if not self._leads:
            yield [self._node.Isend(parts[self.rank], 0)]
            self.count_sent(parts[self.rank].nbytes)
        else:
            yield [
                self._node.Irecv(parts[rank], place) for place, rank in enumerate(members) if place
            ]
            yield [
                self._leaders.Ibcast(parts[rank], root=leader)
                for leader, node in enumerate(self._nodes)
                for rank in node
            ]
            self.count_sent(parts[0].nbytes * len(members) * (len(self._nodes) > 1))
        yield LastRequests([self._node.Ibcast(host)])


_STAGES = (Hierarchical._reduce, Hierarchical._between, Hierarchical._spread)
