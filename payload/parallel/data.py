"""Data parallelism: every rank holds the whole model and a share of each batch; gradients are summed."""

from __future__ import annotations

from payload.comm.base import Communicator, total
from payload.device import Array
from payload.models import Model
from payload.nn.loss import SoftmaxCrossEntropy


def shard(count: int, rank: int, size: int) -> slice:
    """One rank's share of ``count`` things: contiguous, no share more than one above another, some empty."""
    return slice(count * rank // size, count * (rank + 1) // size)


class DataParallel:
    """A model that is the same on every rank, fed with global batches."""

    def __init__(self, model: Model, loss: SoftmaxCrossEntropy, comm: Communicator) -> None:
        self._model, self._loss, self._comm = model, loss, comm
        comm.broadcast(model.buffers.values)

    def gradients(self, x: Array, labels: Array) -> float:
        """Set the gradients of the mean loss over a global batch, and give that loss.

        Each rank sums over its own samples, scaled by the size of the *global* batch: the sum over ranks is
        then the mean over the batch, however unevenly it was divided.

        Args:
            x: the global batch's inputs (B, ...), of which this rank uses its share.
            labels: (B,)
        """
        mine = shard(len(labels), self._comm.rank, self._comm.size)
        loss = self._loss.forward(self._model.forward(x[mine]), labels[mine])
        self._model.backward(self._loss.backward(scale=1 / len(labels)))
        self._comm.allreduce(self._model.buffers.grads)
        return total(self._comm, loss) / len(labels)

    def evaluate(self, x: Array, labels: Array) -> tuple[float, float]:
        """Accuracy, in [0, 1], and mean loss over all samples (B, ...), each rank doing its share."""
        mine = shard(len(labels), self._comm.rank, self._comm.size)
        logits = self._model.forward(x[mine])
        loss = self._loss.forward(logits, labels[mine])
        correct = int((logits.argmax(axis=1) == labels[mine]).sum())
        return total(self._comm, correct) / len(labels), total(self._comm, loss) / len(labels)
