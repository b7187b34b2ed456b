"""What a host truly has, read in one round trip: Slurm marks nodes that slurm.conf describes wrongly."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterctl.errors import SlurmError
from clusterctl.hosts.gpus import GPU_SCRIPT, Driver, Gpu, count_cards, driver_fault, parse_gpus

_NODE_SCRIPT = r"""
PATH="$PATH:/usr/sbin:/sbin:/usr/local/bin"
echo @node
if command -v slurmd >/dev/null 2>&1; then slurmd -C; else echo absent; fi
"""
_MPI_SCRIPT = r"""
echo @mpi
for plugin in /usr/lib64/slurm/mpi_*.so /usr/lib/*/slurm*/mpi_*.so; do
    if [ -e "$plugin" ]; then basename "$plugin" .so; fi
done
"""
# NVIDIA's devices of the class `display`, whether a driver knows them or not.
_BUS_SCRIPT = r"""
echo @bus
for device in /sys/bus/pci/devices/*; do
    if read -r vendor <"$device/vendor" && [ "$vendor" = 0x10de ] && read -r class <"$device/class"; then
        case $class in 0x03*) echo "${device##*/}" ;; esac
    fi
done 2>/dev/null
"""
FACTS_ARGV = ("sh", "-c", _NODE_SCRIPT + GPU_SCRIPT + _MPI_SCRIPT + _BUS_SCRIPT)

_SECTION = re.compile(r"^@(\w+)$", re.MULTILINE)
_PAIR = re.compile(r"(\w+)=(\S+)")


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


def has_slurmd(text: str) -> bool:
    """Whether the host that printed this has one, which alone can tell what the node is."""
    return re.search(r"^@node\nabsent$", text, re.MULTILINE) is None


def parse_facts(text: str) -> NodeFacts:
    """Facts from what ``FACTS_ARGV`` printed; lines that are not understood are passed over.

    Raises:
        SlurmError: `slurmd -C` said nothing usable, so Slurm is not installed there, or broken.
    """
    sections, driver = _sections(text), parse_driver(text)
    pairs = dict(_PAIR.findall(sections.get("node", "")))
    try:
        return NodeFacts(
            cpus=int(pairs["CPUs"]),
            boards=int(pairs.get("Boards", "1")),
            sockets=int(pairs["SocketsPerBoard"]),
            cores_per_socket=int(pairs["CoresPerSocket"]),
            threads_per_core=int(pairs["ThreadsPerCore"]),
            memory_mib=int(pairs["RealMemory"]),
            gpus=driver.gpus,
            mpi=tuple(sorted(line.removeprefix("mpi_") for line in sections.get("mpi", "").split())),
        )
    except (KeyError, ValueError) as exc:
        raise SlurmError(
            "`slurmd -C` did not describe the node",
            why=f"no usable {exc.args[0]!r} in: {text.strip()[:500]}",
            fix="see that slurmd is installed there and runs",
        ) from exc


def parse_driver(text: str) -> Driver:
    """What NVIDIA's driver said, from what ``FACTS_ARGV`` printed."""
    sections = _sections(text)
    return Driver(count_cards(sections), parse_gpus(sections), driver_fault(sections))


def count_on_bus(text: str) -> int:
    """How many of NVIDIA's cards are on the PCI bus, from what ``FACTS_ARGV`` printed."""
    return len(_sections(text).get("bus", "").split())


def _sections(text: str) -> dict[str, str]:
    parts = _SECTION.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
