"""The description of GPUs, from which the stand-in shows them, taken from what an nvidia-smi says of them."""

from __future__ import annotations

import os
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from tests.support.nvidia.machines import Machine
from tests.support.nvidia.nvidia_smi import FIELDS, ROWS, fields_of

LASTING = ("index", "name", "uuid", "pci.bus_id", "driver_version", "memory.total", "pcie.link.width.max")
"""Fields that are the same at every look."""
_PART = re.compile(r"^\s+MIG (?P<profile>\S+)\s+Device\s+(?P<index>\d+):\s+\(UUID: (?P<uuid>MIG-\S+)\)")
_INSTANCES = {"instance": "gpu_instance_id", "compute": "compute_instance_id"}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

Environment = Mapping[str, str]


def ask(environment: Environment, *argv: str) -> tuple[int, str]:
    """The exit status of the nvidia-smi on PATH, and what it says."""
    done = subprocess.run(
        ["nvidia-smi", *argv], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def rows(environment: Environment, *fields: str, switch: str = "--query-gpu") -> list[list[str]]:
    rc, said = ask(environment, f"{switch}={','.join(fields)}", "--format=csv,noheader,nounits")
    assert rc == 0, said
    return [line.split(", ") for line in said.splitlines()]


def described(environment: Environment) -> Machine:
    branch = int(rows(environment, "driver_version")[0][0].split(".")[0])
    asked = {"--query-gpu": [f for f in fields_of(branch) if f not in ROWS], "--query-remapped-rows": [*ROWS]}
    told = [rows(environment, *fields, switch=switch) for switch, fields in asked.items()]
    names = [FIELDS[field] for fields in asked.values() for field in fields]
    cards = [
        dict(zip(names, map(_value, [cell for row in of_card for cell in row]), strict=True))
        for of_card in zip(*told, strict=True)
    ]
    _, listed = ask(environment, "--list-gpus")
    _, log = ask(environment, "--query", "--xml-format")
    _, matrix = ask(environment, "topo", "--matrix")
    logs = ET.fromstring(log).findall("gpu")  # noqa: S314 - nvidia-smi wrote it just now
    for card, parts, logged, near in zip(cards, _parts(listed), logs, _near(matrix), strict=True):
        card |= {"minor": int(logged.findtext("minor_number") or -1), **near}
        devices = logged.findall("mig_devices/mig_device")
        card["parts"] = [
            part | {own: int(device.findtext(tag) or -1) for own, tag in _INSTANCES.items()}
            for part, device in zip(parts, devices, strict=True)
        ]
    return {"gpus": cards}


def _value(cell: str) -> Any:
    if cell in {"[N/A]", "[Not Supported]"}:
        return None
    return int(cell) if cell.isdecimal() else cell


def _parts(listed: str) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    for line in listed.splitlines():
        if match := _PART.match(line):
            found[-1].append({**match.groupdict(), "index": int(match["index"])})
        else:
            found.append([])
    return found


def _near(matrix: str) -> list[dict[str, Any]]:
    """Of each card: its processors, its memory, and its NVLinks to another one."""
    lines = [[cell.strip() for cell in _ANSI.sub("", line).split("\t")] for line in matrix.splitlines()]
    heads = [cell for cell in lines[0] if cell]
    found = []
    for row in lines[1:]:
        if not row[0].startswith("GPU"):
            continue
        cells = dict(zip(heads, row[1:], strict=False))
        links = {int(cell[2:]) for cell in cells.values() if re.fullmatch(r"NV\d+", cell)}
        numa = cells["NUMA Affinity"]
        found.append(
            {
                "cpus": cells["CPU Affinity"],
                "numa": int(numa) if numa.isdecimal() else numa,
                "nvlinks": max(links, default=0),
            }
        )
    return found
