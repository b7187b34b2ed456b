"""The choice between CUDA builds (gigabytes) and CPU builds of PyTorch, JAX and TensorFlow for the
nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clusterctl.util.progress import LineReporter

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.inventory import Inventory

INDEX_VARIABLE: Final = "CLUSTERCTL_TORCH_INDEX"
_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
_LOOK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class OtherBuilds:
    """Settings with which uv chooses other builds. lines: of a requirements file. left_out:
    packages that are useless on the nodes.
    """

    lines: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def has_gpus(cluster: ClusterSpec | Inventory, partition: str | None = None) -> bool | None:
    """Return whether a cluster or partition has GPUs. None: unknown, because the spec declares no
    GPUs and there is no Slurm to ask.
    """
    chosen = [p for p in cluster.partitions if partition in (None, p.name)]
    if any(p.gpus is not None for p in chosen):
        return True
    return False if cluster.scheduler_needs.declares_gpus else None


def cpu_index() -> str:
    return os.environ.get(INDEX_VARIABLE) or _CPU_INDEX


def other_builds(
    versions: Mapping[str, str], *, gpus: bool | None, report: LineReporter
) -> OtherBuilds | None:
    """Return settings with which uv chooses CPU builds for nodes without GPUs, and CUDA builds for
    nodes with GPUs. None: uv has chosen such builds already.

    versions: of the packages that uv chose. gpus: whether the nodes have GPUs. None: it is unknown.
    report: called with a line about the choice.
    """
    lines = []
    left_out = []
    # PyPI's torch wheels for Linux are built for CUDA. Other builds have a local version, such as
    # 2.13.0+cpu.
    is_cuda = "+" not in versions.get("torch", "+")
    if is_cuda and gpus is False and _reaches_cpu_index(report):
        lines.append(f"--extra-index-url {cpu_index()}")
        is_cuda = False
    if is_cuda and gpus is not False:
        report(
            f"torch {versions['torch']} is built for CUDA; with its libraries it has several "
            "gigabytes"
        )
    has_jax_cuda = any(name.startswith("jax-cuda") for name in versions)
    if gpus is False and {"jax", "tensorflow"} & versions.keys():
        kinds = ("jax-cuda",) if is_cuda else ("jax-cuda", "nvidia-")
        left_out += [name for name in versions if name.startswith(kinds)]
        if left_out:
            report("CUDA extras are left out, because the nodes have no GPU")
    if gpus and "jax" in versions and not has_jax_cuda:
        lines.append("jax[cuda12]")
    if gpus and "tensorflow" in versions:
        lines.append("tensorflow[and-cuda]")
    return OtherBuilds(tuple(lines), tuple(left_out)) if lines or left_out else None


def _reaches_cpu_index(report: LineReporter) -> bool:
    index = cpu_index()
    if is_reachable := _is_reachable(f"{index.rstrip('/')}/torch/"):
        report(f"downloading torch from {index}, because the nodes have no GPU")
    else:
        report(
            f"note: {index} can't be reached, so torch is installed with CUDA (several gigabytes); "
            f"set {INDEX_VARIABLE} to a mirror of this index"
        )
    return is_reachable


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
