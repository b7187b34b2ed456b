"""Which builds of PyTorch, JAX and TensorFlow the nodes get: with CUDA, which are gigabytes, or for CPUs."""

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
    from clusterctl.state.facts import ClusterFacts

INDEX_VARIABLE: Final = "CLUSTERCTL_TORCH_INDEX"
_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
_LOOK_S: Final = 10.0
# For Linux, PyPI's torch is built for CUDA. Other builds have a local version, such as 2.13.0+cpu.
_CUDA_TORCH: Final = re.compile(
    r"(?:Downloading|Using cached|Processing) (?:\S*/)?torch-([0-9][^-+%\s]*)-\S*linux\S*\.whl"
)
_LARGE: Final = re.compile(
    r"Downloading (?:\S*/)?([\w.]+)-([^-\s]+)-\S+\.whl \(([0-9.]+ GB|[0-9]{3,}[0-9.]* MB)\)"
)
_CUDA_EXTRAS: Final = {"jax": "cuda12", "tensorflow": "and-cuda"}
_WITH_CUDA: Final = re.compile(
    r"^([ \t]*(?:jax|tensorflow)[ \t]*)\[[ \t]*(?:cuda[\w-]*|and-cuda)[ \t]*\]", re.M | re.I
)
_INCLUDE: Final = re.compile(r"^(-r|--requirement|-c|--constraint)[ \t=]*(?!/|\w+://)(\S.*)$", re.M)


class CudaBuildError(Exception):
    """pip has chosen a build of torch for CUDA, and the nodes have no GPU."""


def has_gpus(cluster: ClusterSpec | ClusterFacts, partition: str | None = None) -> bool | None:
    """Whether nodes of a partition, or of any, have GPUs; None where a spec need not say it."""
    asked = [one for one in cluster.partitions if partition in (None, one.name)]
    if any(one.gpus is not None for one in asked):
        return True
    return False if cluster.has_slurm else None


def cpu_index() -> str:
    return os.environ.get(INDEX_VARIABLE) or _CPU_INDEX


@dataclass
class Builds:
    """Has pip choose the builds for nodes with GPUs, or without; None leaves it to pip.

    ``report`` gets a line on each large wheel before it is downloaded.
    """

    gpus: bool | None
    report: LineReporter
    folder: Path  # for files of ours
    arguments: list[str] = field(default_factory=list)
    _decided: bool = False

    def files(self, files: Sequence[Path]) -> list[Path]:
        """The requirements files; for nodes without GPUs, without JAX's and TensorFlow's extras for CUDA."""
        found = []
        for number, file in enumerate(files):
            text = file.read_text(errors="surrogateescape")
            rest = _WITH_CUDA.sub(r"\1", text) if self.gpus is False else text
            if rest == text:
                found.append(file.absolute())
                continue
            self.report(f"{file.name}: the nodes have no GPU, so the extras for CUDA are left out")
            folder = str(file.absolute().parent).replace("\\", r"\\")
            rest = _INCLUDE.sub(rf"\1 {folder}/\2", rest)
            found.append(self.folder / f"{number}-{file.name}")
            found[-1].write_text(rest, errors="surrogateescape")
        return found

    def ask_for_cuda(self, text: str) -> None:
        """Where the nodes have GPUs, have JAX and TensorFlow come with CUDA, as torch does by itself."""
        for name, extra in _CUDA_EXTRAS.items() if self.gpus and "--hash" not in text else ():
            for found in re.finditer(
                rf"^[ \t]*{name}[ \t]*(?:[=<>~!][^;#\n]*)?(;[^#\n]*)?(?:#.*)?$", text, re.M | re.I
            ):
                self.arguments.append(f"{name}[{extra}]{found[1] or ''}")

    def hear(self, line: str) -> None:
        """Take a line of pip's.

        Raises:
            CudaBuildError: see there; once.
        """
        if not self._decided and (found := _CUDA_TORCH.search(line)):
            self._decided = True
            if self.gpus is False:
                raise CudaBuildError
            self.report(f"torch {found[1]} is built for CUDA: with its libraries it is some gigabytes")
        if large := _LARGE.search(line):
            self.report(f"downloading {large[1]} {large[2].replace('%2B', '+')}, {large[3]}")

    def take_for_cpus(self) -> None:
        """Have pip find torch for CPUs, from now on, if its index can be reached."""
        index = cpu_index()
        if _is_there(f"{index.rstrip('/')}/torch/"):
            self.report(f"torch comes from {index}: the nodes have no GPU")
            more = self.folder / "index.txt"  # an option would give way to an --index-url of the user's files
            more.write_text(f"--extra-index-url {index}\n")
            self.arguments += ["--requirement", str(more)]
        else:
            self.report(
                f"note: {index} can't be reached, so torch comes with CUDA, which is gigabytes; "
                f"name a mirror of it in {INDEX_VARIABLE}"
            )


def _is_there(url: str) -> bool:
    import requests  # noqa: PLC0415 - 60 ms of verbs that ask no index

    if url.startswith("file:"):
        return True
    try:
        certificates = os.environ.get("PIP_CERT") or True
        # Some mirrors refuse HEAD. The answer's body is not read.
        with requests.get(url, timeout=_LOOK_S, verify=certificates, stream=True) as answer:
            return answer.ok
    except (OSError, ValueError):
        return False
