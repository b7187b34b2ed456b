"""A node's GPUs as its driver tells of them: models, device files, parts (MIG), nearest cores and links."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError, fromstring

from ClusterShell.RangeSet import RangeSet, RangeSetException

from clusterctl.util.assets import table

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
    """What Slurm gives to jobs as one GPU: a card, or a part of one.

    ``type`` is as jobs ask for it (``h200``, ``1g.10gb``). ``index`` is as the driver counts cards, whose
    device files it may number otherwise (``minor``). ``caps`` are the capabilities that open a part.
    ``cores`` are the nearest, as Slurm numbers them; ``links`` the NVLinks to each card of the node.
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
        """All device files that a job needs to use it."""
        return (self.device, *(f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in self.caps))


@dataclass(frozen=True, slots=True)
class Driver:
    """What NVIDIA's driver of a host shows: cards, cut into parts or not, and what of them jobs can be given.

    ``fault`` is what it said instead; all is empty where there is none.
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
        """What CUDA calls the GPUs, in Slurm's order, where that needs to be known.

        Slurm counts the GPUs that it gives by type, CUDA all cards; and CUDA finds parts by no number.
        """
        counted = by_type(self.gpus)
        alike = [gpu.index for gpu in counted] == list(range(self.cards))
        return () if alike and not any(gpu.caps for gpu in counted) else tuple(gpu.uuid for gpu in counted)


@dataclass(frozen=True, slots=True)
class Fault:
    """What nvidia-smi says in place of an answer: words that tell it, a code, what it means, what to do."""

    says: str
    code: str
    what: str
    means: str
    fix: str


@dataclass(frozen=True, slots=True)
class Flag:
    """A field of a card that says Yes where something is wrong: what it means, what to do; "": boot."""

    field: str
    means: str
    fix: str = ""

    def is_set(self, card: Mapping[str, str]) -> bool:
        return card.get(self.field) in {"Yes", "1"}


@dataclass(frozen=True, slots=True)
class _Known:
    faults: tuple[Fault, ...]
    flags: tuple[Flag, ...]


def faults() -> tuple[Fault, ...]:
    return table(_TABLE, _Known).faults


def flags() -> tuple[Flag, ...]:
    return table(_TABLE, _Known).flags


def fault_of(said: str) -> Fault | None:
    """The fault that these words of nvidia-smi's are of, if it is known."""
    return next((one for one in faults() if one.says in said), None)


def gpu_type(name: str) -> str:
    """The short name of a GPU model: ``NVIDIA A100-SXM4-80GB`` is ``a100``, ``RTX 4090`` is ``rtx-4090``."""
    words = [w for w in re.split(r"[^a-z0-9]+", name.lower()) if w and w not in _VENDOR_WORDS]
    if not words:
        return "gpu"
    return "-".join(words[:2]) if words[0].isalpha() else words[0]


def by_type(gpus: Iterable[Gpu]) -> list[Gpu]:
    """As Slurm numbers them: in the order of the types in `Gres=`, and of gres.conf in each."""
    return sorted(gpus, key=lambda gpu: (gpu.type, gpu.index))


def _gpus(cards: Sequence[Element], sections: Sections) -> tuple[Gpu, ...]:
    """The GPUs that jobs can be given.

    A card that is cut into parts is not given whole; one that is to be cut, and has no parts, is not given.
    Nor are parts of whose capabilities nothing is known: Slurm takes a device file once only.
    """
    profiles, minors = _profiles(sections.get("mig", "")), dict(_MINOR.findall(sections.get("minors", "")))
    cores, links = _near(sections, len(cards))
    found: list[Gpu] = []
    for index, card in enumerate(cards):
        name, uuid = (card.findtext(tag, "").strip() for tag in ("product_name", "uuid"))
        minor = _number(card, "minor_number")
        whole = Gpu(gpu_type(name), index, minor, (), cores[index], links[index], uuid)
        if card.findtext("current_mig", "").strip() != "Enabled":
            found.append(whole)
        for part in card.findall("mig_device"):
            profile, uuid = profiles.get((index, _number(part, "index")), ("mig", ""))
            at = f"gpu{index if minor is None else minor}/gi{_number(part, 'gpu_instance_id')}"
            opened = (f"{at}/access", f"{at}/ci{_number(part, 'compute_instance_id')}/access")
            if all(path in minors for path in opened):
                caps = tuple(int(minors[path]) for path in opened)
                found.append(replace(whole, type=profile, caps=caps, links="", uuid=uuid))
    return tuple(found)


def _cards(text: str) -> list[Element]:
    """The driver's cards, from its XML's lines that data/node.sh prints: parts are right below cards."""
    try:
        return fromstring(f"<all>{text}</all>").findall("gpu")  # noqa: S314 - a DOCTYPE would be refused here
    except ParseError:
        return []


def _number(element: Element, tag: str) -> int | None:
    """A value that is a number; None for N/A."""
    text = element.findtext(tag, "").strip()
    return int(text) if text.isdecimal() else None


def _profiles(text: str) -> dict[tuple[int, int | None], tuple[str, str]]:
    """(card, MIG device) -> its profile, such as 1g.10gb, and its UUID."""
    found: dict[tuple[int, int | None], tuple[str, str]] = {}
    card = -1
    for line in text.splitlines():
        if match := _GPU_LINE.match(line):
            card = int(match[1])
        elif match := _MIG_LINE.match(line):
            found[card, int(match[2])] = (match[1], match[3])
    return found


def _near(sections: Sections, count: int) -> tuple[list[str], list[str]]:
    """The cores near each card, where cards differ in that; their NVLinks, where they have any."""
    cpus, links = _matrix(sections.get("links", ""), count)
    core_of = _core_numbers(sections.get("cores", ""))
    cores = [sorted({core_of[cpu] for cpu in own if cpu in core_of}) for own in cpus]
    near = [str(RangeSet(",".join(map(str, one)) or None)) for one in cores]
    if len(set(near)) < 2 or "" in near:  # noqa: PLR2004 - all the same: nothing to choose
        near = [""] * count
    linked = any(number > 0 for row in links for number in row)
    return near, [",".join(map(str, row)) if linked else "" for row in links]


def _matrix(text: str, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Of each card: its processors, and for each card the number of NVLinks to it (-1: itself)."""
    rows = [[cell.strip() for cell in _ANSI.sub("", line).split("\t")] for line in text.splitlines()]
    heads = next((row for row in rows if _AFFINITY in row), [])
    titles = [cell for cell in heads if cell]
    cpus: list[list[int]] = [[] for _ in range(count)]
    links: list[list[int]] = [[] for _ in range(count)]
    for row in rows:
        if not row or not re.fullmatch(r"GPU\d+", row[0]) or int(row[0][3:]) >= count:
            continue
        index, cells = int(row[0][3:]), row[1:]
        links[index] = [_links(cell) for cell in cells[:count]]
        if _AFFINITY in titles and len(cells) > (at := titles.index(_AFFINITY)):
            cpus[index] = _numbers(cells[at])
    whole = all(len(row) == count for row in links)
    return cpus, links if whole else [[] for _ in range(count)]


def _links(cell: str) -> int:
    if cell == "X":
        return -1
    match = _NVLINKS.match(cell)
    return int(match[1]) if match else 0


def _numbers(text: str) -> list[int]:
    """``0-2,8`` as numbers; none where it is no such list."""
    try:
        return [int(number) for number in RangeSet(text)]
    except RangeSetException:
        return []


def _core_numbers(text: str) -> dict[int, int]:
    """Processor -> its core as Slurm counts them: those of the first socket first, in the kernel's order."""
    rows = [
        tuple(map(int, line.split(","))) for line in text.splitlines() if re.fullmatch(r"\d+,\d+,\d+", line)
    ]
    order = {core: number for number, core in enumerate(sorted({(row[1], row[2]) for row in rows}))}
    return {row[0]: order[row[1], row[2]] for row in rows}
