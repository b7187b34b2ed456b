"""A node's GPUs as NVIDIA's driver reports them: models, device files, MIG, nearest cores,
NVLinks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, fromstring

from ClusterShell.RangeSet import RangeSet, RangeSetException

from clusterctl.util.assets import read_table

_VENDOR_WORDS = frozenset({"nvidia", "tesla", "geforce", "quadro"})
_FAILED = re.compile(r"^failed: (.*)$", re.MULTILINE)
_GPU_LINE = re.compile(r"^GPU (\d+):")
_MIG_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+):\s+\(UUID: (MIG-\S+)\)")
_MINOR = re.compile(r"^(gpu\d+/gi\d+/(?:ci\d+/)?access) (\d+)$", re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NVLINKS = re.compile(r"^NV(\d+)$")
_AFFINITY = "CPU Affinity"
_TABLE = Path(__file__).with_name("data") / "nvidia.toml"

Sections = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that Slurm allocates to jobs: a card, or a MIG device of a card.

    type: the type that jobs request, such as ``h200`` or ``1g.10gb``. index: the driver's number of
        the card.
    minor: number of the card's device file. caps: numbers of the device files for access to a MIG
        device.
    cores: the nearest cores, in Slurm's numbering. links: the number of NVLinks to each card of the
        node.
    """

    type: str
    index: int
    minor: int | None = None
    caps: tuple[int, ...] = ()
    cores: str = ""
    links: str = ""
    uuid: str = field(default="", compare=False)

    @property
    def device(self) -> str:
        return f"/dev/nvidia{self.index if self.minor is None else self.minor}"

    @property
    def files(self) -> tuple[str, ...]:
        """All device files that a job needs in order to use the GPU."""
        return (self.device, *(f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in self.caps))


@dataclass(frozen=True, slots=True)
class Driver:
    """The state of a host's NVIDIA driver: the number of cards, and the GPUs that jobs can use.

    ``fault`` is the error of nvidia-smi. All fields are empty on a host without a driver.
    """

    cards: int = 0
    gpus: tuple[Gpu, ...] = ()
    fault: str = ""

    @classmethod
    def read(cls, sections: Sections) -> Driver:
        cards = _cards(sections.get("gpus", ""))
        failed = _FAILED.search(sections.get("gpus", ""))
        fault = failed[1].strip() or "nvidia-smi did not answer" if failed else ""
        return cls(len(cards), _gpus(cards, sections), fault)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs in Slurm's order. Empty if CUDA numbers the GPUs in the same way as
        Slurm.

        Slurm numbers GPUs by type, CUDA numbers all cards, and MIG devices have no number in CUDA.
        """
        counted = by_type(self.gpus)
        alike = [gpu.index for gpu in counted] == list(range(self.cards))
        return (
            ()
            if alike and not any(gpu.caps for gpu in counted)
            else tuple(gpu.uuid for gpu in counted)
        )


@dataclass(frozen=True, slots=True)
class NvidiaSmiFault:
    """An error of nvidia-smi, recognised by the text ``says``. ``what``: its title; ``means``: its
    cause.
    """

    says: str
    code: str
    what: str
    means: str
    fix: str


@dataclass(frozen=True, slots=True)
class Flag:
    """A field of nvidia-smi that is Yes or 1 for a faulty card. ``fix``: the remedy; "": a
    reboot.
    """

    field: str
    means: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _Tables:
    faults: tuple[NvidiaSmiFault, ...]
    flags: tuple[Flag, ...]


def faults() -> tuple[NvidiaSmiFault, ...]:
    return read_table(_TABLE, _Tables).faults


def flags() -> tuple[Flag, ...]:
    return read_table(_TABLE, _Tables).flags


def fault_of(output: str) -> NvidiaSmiFault | None:
    """Return the fault for an error message of nvidia-smi, if the message is known."""
    return next((fault for fault in faults() if fault.says in output), None)


def gpu_type(name: str) -> str:
    """Return the short name of a GPU model, such as ``a100`` for ``NVIDIA A100-SXM4-80GB``."""
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w and w not in _VENDOR_WORDS]
    if not words:
        return "gpu"
    return "-".join(words[:2]) if words[0].isalpha() else words[0]


def by_type(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Sort GPUs as Slurm numbers them: by type as in `Gres=`, then in the order of gres.conf."""
    return sorted(gpus, key=lambda gpu: (gpu.type, gpu.index))


def _gpus(cards: Sequence[Element], sections: Sections) -> tuple[Gpu, ...]:
    """Return the GPUs that jobs can use.

    A card in MIG mode is left out, even without MIG devices. MIG devices with unknown capabilities
    are left out too, because Slurm accepts each device file only once.
    """
    profiles = _profiles(sections.get("mig", ""))
    minors = dict(_MINOR.findall(sections.get("minors", "")))
    cores, links = _near(sections, len(cards))
    gpus: list[Gpu] = []
    for index, card in enumerate(cards):
        name, uuid = (card.findtext(tag, "").strip() for tag in ("product_name", "uuid"))
        minor = _number(card, "minor_number")
        gpu = Gpu(gpu_type(name), index, minor, (), cores[index], links[index], uuid)
        if card.findtext("current_mig", "").strip() != "Enabled":
            gpus.append(gpu)
        for part in card.findall("mig_device"):
            profile, uuid = profiles.get((index, _number(part, "index")), ("mig", ""))
            instance = (
                f"gpu{index if minor is None else minor}/gi{_number(part, 'gpu_instance_id')}"
            )
            paths = (
                f"{instance}/access",
                f"{instance}/ci{_number(part, 'compute_instance_id')}/access",
            )
            if all(path in minors for path in paths):
                caps = tuple(int(minors[path]) for path in paths)
                gpus.append(replace(gpu, type=profile, caps=caps, links="", uuid=uuid))
    return tuple(gpus)


def _cards(text: str) -> list[Element]:
    try:
        return fromstring(f"<all>{text}</all>").findall("gpu")  # noqa: S314 - rejects a DOCTYPE here
    except ParseError:
        return []


def _number(element: Element, tag: str) -> int | None:
    """Return the number in the XML subelement ``tag``. None if its text is no number, such as
    N/A.
    """
    text = element.findtext(tag, "").strip()
    return int(text) if text.isdecimal() else None


def _profiles(text: str) -> dict[tuple[int, int | None], tuple[str, str]]:
    """Parse `nvidia-smi -L`: (card number, MIG device number) -> (profile such as 1g.10gb,
    UUID).
    """
    profiles: dict[tuple[int, int | None], tuple[str, str]] = {}
    card = -1
    for line in text.splitlines():
        if match := _GPU_LINE.match(line):
            card = int(match[1])
        elif match := _MIG_LINE.match(line):
            profiles[card, int(match[2])] = (match[1], match[3])
    return profiles


def _near(sections: Sections, count: int) -> tuple[list[str], list[str]]:
    """Return two texts per card: its nearest cores ("" if equal for all cards), its NVLinks to each
    card.
    """
    cpus, links = _matrix(sections.get("links", ""), count)
    core_of = _core_numbers(sections.get("cores", ""))
    cores = [
        sorted({core_of[cpu] for cpu in cpus_of_card if cpu in core_of}) for cpus_of_card in cpus
    ]
    near = [str(RangeSet(",".join(map(str, numbers)) or None)) for numbers in cores]
    if len(set(near)) < 2 or "" in near:  # noqa: PLR2004 - all are equal
        near = [""] * count
    linked = any(number > 0 for row in links for number in row)
    return near, [",".join(map(str, row)) if linked else "" for row in links]


def _matrix(text: str, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Parse `nvidia-smi topo -m`. Return two lists by GPU: nearest CPUs, NVLinks to each GPU."""
    rows = [
        [cell.strip() for cell in _ANSI.sub("", line).split("\t")] for line in text.splitlines()
    ]
    heads = next((row for row in rows if _AFFINITY in row), [])
    titles = [cell for cell in heads if cell]
    cpus: list[list[int]] = [[] for _ in range(count)]
    links: list[list[int]] = [[] for _ in range(count)]
    for row in rows:
        if not row or not re.fullmatch(r"GPU\d+", row[0]) or int(row[0][3:]) >= count:
            continue
        index = int(row[0][3:])
        cells = row[1:]
        links[index] = [_links(cell) for cell in cells[:count]]
        if _AFFINITY in titles and len(cells) > (column := titles.index(_AFFINITY)):
            cpus[index] = _numbers(cells[column])
    is_complete = all(len(row) == count for row in links)
    return cpus, links if is_complete else [[] for _ in range(count)]


def _links(cell: str) -> int:
    if cell == "X":
        return -1
    match = _NVLINKS.match(cell)
    return int(match[1]) if match else 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in RangeSet(text)]
    except RangeSetException:
        return []


def _core_numbers(text: str) -> dict[int, int]:
    """Return processor -> its core's number in Slurm, which sorts cores by socket, then by Linux's
    number.
    """
    rows = [
        tuple(map(int, line.split(",")))
        for line in text.splitlines()
        if re.fullmatch(r"\d+,\d+,\d+", line)
    ]
    order = {core: number for number, core in enumerate(sorted({(row[1], row[2]) for row in rows}))}
    return {row[0]: order[row[1], row[2]] for row in rows}
