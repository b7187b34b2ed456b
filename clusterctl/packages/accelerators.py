"""The choice between CUDA builds (gigabytes) and CPU builds of PyTorch, JAX and TensorFlow for the
nodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.util.progress import LineReporter

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.inventory import Inventory

INDEX_VARIABLE: Final = "CLUSTERCTL_TORCH_INDEX"
_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
_LOOK_S: Final = 10.0
# PyPI's torch wheels for Linux are built for CUDA. Other builds have a local version, such as
# 2.13.0+cpu.
_CUDA_TORCH: Final = re.compile(
    r"(?:Downloading|Using cached|Processing) (?:\S*/)?torch-([0-9][^-+%\s]*)-\S*linux\S*\.whl"
)
_LARGE: Final = re.compile(
    r"Downloading (?:\S*/)?([\w.]+)-([^-\s]+)-\S+\.whl \(([0-9.]+ GB|[0-9]{3,}[0-9.]* MB)\)"
)
_CUDA_EXTRAS: Final = {"jax": "cuda12", "tensorflow": "and-cuda"}
_WITH_CUDA: Final = re.compile(
    r"^([ \t]*(?:jax|tensorflow)[ \t]*)\[[ \t]*(?:cuda[\w-]*|and-cuda)[ \t]*\]",
    re.MULTILINE | re.IGNORECASE,
)
_INCLUDE: Final = re.compile(
    r"^(-r|--requirement|-c|--constraint)[ \t=]*(?!/|\w+://)(\S.*)$", re.MULTILINE
)


class CudaBuildError(Exception):
    """pip chose a CUDA build of torch although the nodes have no GPU."""


def has_gpus(cluster: ClusterSpec | Inventory, partition: str | None = None) -> bool | None:
    """Return whether a cluster or partition has GPUs. None (unknown): no GPUs are declared, and no
    Slurm.
    """
    chosen = [p for p in cluster.partitions if partition in (None, p.name)]
    if any(p.gpus is not None for p in chosen):
        return True
    return False if cluster.scheduler_needs.declares_gpus else None


def cpu_index() -> str:
    return os.environ.get(INDEX_VARIABLE) or _CPU_INDEX


@dataclass
class Builds:
    """The arguments that make pip choose CUDA builds or CPU builds. Temporary files go to
    ``folder``.

    gpus: whether the nodes have GPUs; None: pip decides. report: called with a line about each
        large wheel.
    """

    gpus: bool | None
    report: LineReporter
    folder: Path
    arguments: list[str] = field(default_factory=list)
    _decided: bool = False

    def files(self, files: Sequence[Path]) -> list[Path]:
        """Return requirements files; for nodes without GPUs, copies without extras such as
        jax[cuda12].
        """
        result = []
        for number, file in enumerate(files):
            text = file.read_text(errors="surrogateescape")
            new_text = _WITH_CUDA.sub(r"\1", text) if self.gpus is False else text
            if new_text == text:
                result.append(file.absolute())
                continue
            self.report(f"{file.name}: CUDA extras are left out, because the nodes have no GPU")
            folder = str(file.absolute().parent).replace("\\", r"\\")
            new_text = _INCLUDE.sub(rf"\1 {folder}/\2", new_text)
            result.append(self.folder / f"{number}-{file.name}")
            result[-1].write_text(new_text, errors="surrogateescape")
        return result

    def request_cuda(self, text: str) -> None:
        """If nodes have GPUs and ``text`` requires JAX or TensorFlow, add the package's CUDA
        extra.
        """
        for name, extra in _CUDA_EXTRAS.items() if self.gpus and "--hash" not in text else ():
            for match in re.finditer(
                rf"^[ \t]*{name}[ \t]*(?:[=<>~!][^;#\n]*)?(;[^#\n]*)?(?:#.*)?$",
                text,
                re.MULTILINE | re.IGNORECASE,
            ):
                self.arguments.append(f"{name}[{extra}]{match[1] or ''}")

    def read_line(self, line: str) -> None:
        """Report a large download in pip's output. Raises CudaBuildError for CUDA torch without
        GPUs.
        """
        if not self._decided and (torch := _CUDA_TORCH.search(line)):
            self._decided = True
            if self.gpus is False:
                raise CudaBuildError
            self.report(
                f"torch {torch[1]} is built for CUDA; with its libraries it has several gigabytes"
            )
        if large := _LARGE.search(line):
            self.report(f"downloading {large[1]} {large[2].replace('%2B', '+')}, {large[3]}")

    def use_cpu_index(self) -> None:
        """Make pip use the index with CPU builds of torch, if that index can be reached."""
        index = cpu_index()
        if _is_reachable(f"{index.rstrip('/')}/torch/"):
            self.report(f"downloading torch from {index}, because the nodes have no GPU")
            # A command-line option would be overridden by an --index-url in the user's files.
            index_file = self.folder / "index.txt"
            index_file.write_text(f"--extra-index-url {index}\n")
            self.arguments += ["--requirement", str(index_file)]
        else:
            self.report(
                f"note: {index} can't be reached, so torch is installed with CUDA (several "
                f"gigabytes); set {INDEX_VARIABLE} to a mirror of this index"
            )


def _is_reachable(url: str) -> bool:
    import requests

    if url.startswith("file:"):
        return True
    try:
        certificates = os.environ.get("PIP_CERT") or True
        # Some mirrors reject HEAD. The body of the response is not read.
        with requests.get(url, timeout=_LOOK_S, verify=certificates, stream=True) as answer:
            return answer.ok
    except (OSError, ValueError):
        return False
