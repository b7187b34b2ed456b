"""Writes a checkpoint's weights as one file of whole tensors, for other programs."""

from __future__ import annotations

from payload.checkpoint.shards import BrokenError, Reader, read_manifest, verify
from payload.config import ExportConfig
from payload.errors import UsageError
from payload.jsonl import answer
from payload.safetensors import plan


def run(config: ExportConfig) -> int:
    """Write, tell what, and give the exit code.

    Raises:
        UsageError: the checkpoint is broken, or the file cannot be written.
    """
    try:
        manifest = read_manifest(config.checkpoint)
        for facts in manifest.files:
            verify(config.checkpoint, facts)
    except BrokenError as exc:
        raise UsageError(f"--checkpoint: {config.checkpoint} is broken: {exc}") from exc
    tensors = Reader(config.checkpoint, manifest).tensors("weight", "state")
    layout = plan({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, format="np")
    try:
        with config.to.open("wb") as file:
            file.write(layout.header)
            for name in layout.offsets:
                file.write(tensors[name].tobytes())
    except OSError as exc:
        raise UsageError(f"--to: {config.to} cannot be written: {exc.strerror}") from exc
    numbers = sum(tensor.size for tensor in tensors.values())
    answer(iteration=manifest.iteration, tensors=len(tensors), numbers=numbers, bytes=layout.size)
    return 0
