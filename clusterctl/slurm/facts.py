"""What a host truly has, read in one round trip: Slurm marks nodes that slurm.conf describes wrongly."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterctl.errors import SlurmError

_SCRIPT = r"""
PATH="$PATH:/usr/sbin:/sbin"
echo @node
if command -v slurmd >/dev/null 2>&1; then slurmd -C; else echo absent; fi
echo @gpus
if command -v nvidia-smi >/dev/null 2>&1; then
    nvidia-smi --query-gpu=index,name --format=csv,noheader
fi
echo @mpi
for plugin in /usr/lib64/slurm/mpi_*.so /usr/lib/*/slurm*/mpi_*.so; do
    if [ -e "$plugin" ]; then basename "$plugin" .so; fi
done
"""
FACTS_ARGV = ("sh", "-c", _SCRIPT)

_SECTION = re.compile(r"^@(\w+)$", re.MULTILINE)
_PAIR = re.compile(r"(\w+)=(\S+)")
_GPU = re.compile(r"^\s*(\d+)\s*,\s*(\S.*?)\s*$", re.MULTILINE)
_VENDOR_WORDS = frozenset({"nvidia", "tesla", "geforce", "quadro"})


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: ``type`` as jobs ask for it (``h200``), ``index`` as the driver counts."""

    type: str
    index: int

    @property
    def device(self) -> str:
        """Its device file."""
        return f"/dev/nvidia{self.index}"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Hardware of one node; ``cpus`` counts threads, ``memory_mib`` is what the kernel sees."""

    cpus: int
    boards: int
    sockets: int
    cores_per_socket: int
    threads_per_core: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    mpi: tuple[str, ...] = ()


def gpu_type(name: str) -> str:
    """The short name of a GPU model: ``NVIDIA A100-SXM4-80GB`` is ``a100``, ``RTX 4090`` is ``rtx_4090``."""
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w and w not in _VENDOR_WORDS]
    if not words:
        return "gpu"
    return "_".join(words[:2]) if words[0].isalpha() else words[0]


def has_slurmd(text: str) -> bool:
    """Whether the host that printed this has one, which alone can tell what the node is."""
    return re.search(r"^@node\nabsent$", text, re.MULTILINE) is None


def parse_facts(text: str) -> NodeFacts:
    """Facts from what ``FACTS_ARGV`` printed; lines that are not understood are passed over.

    Raises:
        SlurmError: `slurmd -C` said nothing usable, so Slurm is not installed there, or broken.
    """
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    pairs = dict(_PAIR.findall(sections.get("node", "")))
    try:
        return NodeFacts(
            cpus=int(pairs["CPUs"]),
            boards=int(pairs.get("Boards", "1")),
            sockets=int(pairs["SocketsPerBoard"]),
            cores_per_socket=int(pairs["CoresPerSocket"]),
            threads_per_core=int(pairs["ThreadsPerCore"]),
            memory_mib=int(pairs["RealMemory"]),
            gpus=tuple(Gpu(gpu_type(name), int(i)) for i, name in _GPU.findall(sections.get("gpus", ""))),
            mpi=tuple(sorted(line.removeprefix("mpi_") for line in sections.get("mpi", "").split())),
        )
    except (KeyError, ValueError) as exc:
        raise SlurmError(
            "`slurmd -C` did not describe the node",
            why=f"no usable {exc.args[0]!r} in: {text.strip()[:500]}",
            fix="see that slurmd is installed there and runs",
        ) from exc
