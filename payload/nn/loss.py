"""Losses, summed over samples: the caller scales by the *global* batch, so shards may differ in size."""

from __future__ import annotations

from payload.device import Array, Device


class SoftmaxCrossEntropy:
    """-log softmax(logits)[label], summed over the batch."""

    def __init__(self, device: Device) -> None:
        self._xp = device.xp

    def forward(self, logits: Array, labels: Array) -> float:
        """(B, classes), (B,) whole numbers → the sum over B."""
        xp = self._xp
        shifted = logits - logits.max(axis=1, keepdims=True)  # exp cannot overflow
        log_norm = xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
        self._log_p = shifted - log_norm  # (B, classes)
        self._rows, self._labels = xp.arange(len(labels)), labels
        return -float(self._log_p[self._rows, labels].sum(dtype="float64"))

    def backward(self, scale: float) -> Array:
        """Gradient of ``scale`` times the sum by the logits, (B, classes)."""
        dlogits: Array = self._xp.exp(self._log_p)
        dlogits[self._rows, self._labels] -= 1
        dlogits *= scale
        return dlogits
