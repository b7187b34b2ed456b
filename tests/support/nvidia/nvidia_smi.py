#!/usr/bin/env python3
"""A stand-in for nvidia-smi, which prints the GPUs that a JSON file describes.

It answers the queries of clusterctl, and refuses others as nvidia-smi does.
The file is $NVIDIA_STAND_IN, else /etc/nvidia-stand-in.json. Runs under any Python from 3.9 on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

Machine = dict[str, Any]

FIELDS = {
    "index": "index",
    "name": "name",
    "uuid": "uuid",
    "pci.bus_id": "bus_id",
    "driver_version": "driver",
    "memory.total": "memory_mib",
    "temperature.gpu": "temperature",
    "pstate": "pstate",
    "compute_mode": "compute_mode",
    "persistence_mode": "persistence_mode",
    "mig.mode.current": "mig_mode",
    "mig.mode.pending": "mig_pending",
    "ecc.errors.uncorrected.volatile.total": "ecc",
    "pcie.link.gen.current": "pcie_gen",
    "pcie.link.gen.gpucurrent": "pcie_gen",
    "pcie.link.gen.max": "pcie_gen_max",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max",
    "clocks_throttle_reasons.active": "throttle",
    "clocks_event_reasons.active": "throttle",
    "retired_pages.pending": "retired_pending",
    "remapped_rows.pending": "remap_pending",
    "remapped_rows.failure": "remap_failure",
    "fabric.state": "fabric_state",
    "fabric.status": "fabric_status",
}
SINCE = {
    "clocks_event_reasons.active": 535,
    "pcie.link.gen.gpucurrent": 535,
    "fabric.state": 535,
    "fabric.status": 535,
    "remapped_rows.pending": 570,
    "remapped_rows.failure": 570,
}
"""The branch of drivers from which `--query-gpu` knows a field; the others are older than branch
470.

Read on 2026-11-24 in the help of 470.182.03 (github.com/huggingface/candle/issues/733), 580.173.02
and 590.48.01 (internal/captures of github.com/utkuozdemir/nvidia_gpu_exporter), and in the
programs' own tables: 535.261.03, 550.163.01 and 555.58.02 of Debian's package nvidia-smi,
570.124.06, 580.178.04 and 615.71.09 of Ubuntu's packages nvidia-utils-570-server and so on.
"""
ROWS = ("remapped_rows.pending", "remapped_rows.failure")
"""What `--query-remapped-rows` knows in all of these branches.

Before 570, where `--query-gpu` got the same fields, it said 1 and 0 instead of Yes and No: programs
of that time read numbers (`parse_nvidia_smi_remapped_rows` in public code).
"""
UNITS = {"memory.total": "MiB"}
PART = (
    "\t\t\t<mig_device>\n\t\t\t\t<index>{index}</index>\n"
    "\t\t\t\t<gpu_instance_id>{instance}</gpu_instance_id>\n"
    "\t\t\t\t<compute_instance_id>{compute}</compute_instance_id>\n\t\t\t</mig_device>\n"
)
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main() -> int:
    file = Path(os.environ.get("NVIDIA_STAND_IN", "/etc/nvidia-stand-in.json"))
    machine: Machine = json.loads(file.read_text(encoding="utf-8"))
    time.sleep(machine.get("hangs_s", 0))
    if "fault" in machine:
        sys.stdout.write(machine["fault"])
        return int(machine["exit"])
    gpus = machine["gpus"]
    for gpu in gpus if machine.get("has_devices") and os.geteuid() == 0 else ():
        open_card(gpu)
    asked = sys.argv[1:]
    if asked in (["-L"], ["--list-gpus"]):
        listed(gpus)
    elif asked in (["-q", "-x"], ["--query", "--xml-format"]):
        as_xml(gpus)
    elif asked in (["topo", "-m"], ["topo", "--matrix"]):
        matrix(gpus)
    elif len(asked) == 2 and asked[0].startswith(("--query-gpu=", "--query-remapped-rows=")):
        fields, form = (word.partition("=")[2].split(",") for word in asked)
        return queried(machine, fields, form, of_rows=asked[0].startswith("--query-remapped-rows"))
    else:
        say("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")
        return 6
    return 0


def open_card(gpu: Machine) -> None:
    """Make the device file of a card, as nvidia-modprobe does, which the driver's library calls for
    each client. It makes none of MIG's.
    """
    device = Path(f"/dev/nvidia{gpu['minor']}")
    if not device.is_symlink():
        device.symlink_to("/dev/null")


def listed(gpus: list[Machine]) -> None:
    for gpu in gpus:
        say("GPU {index}: {name} (UUID: {uuid})".format(**gpu))
        for part in gpu.get("parts", []):
            say("  MIG {profile:<11} Device  {index}: (UUID: {uuid})".format(**part))


def branch(machine: Machine) -> int:
    """The driver's: 580 of 580.95.05."""
    return (
        int(machine["gpus"][0]["driver"].split(".")[0]) if machine["gpus"] else max(SINCE.values())
    )


def fields_of(branch: int) -> list[str]:
    """What `--query-gpu` of a branch of drivers knows."""
    return [field for field in FIELDS if SINCE.get(field, 0) <= branch]


def queried(machine: Machine, fields: list[str], form: list[str], *, of_rows: bool) -> int:
    known = [*ROWS] if of_rows else fields_of(branch(machine))
    unknown = [field for field in fields if field not in known]
    if unknown:
        say(f'Field "{unknown[0]}" is not a valid field to query.\n')
        return 2
    if "noheader" not in form:
        say(", ".join(field + (f" [{UNITS[field]}]" if field in UNITS else "") for field in fields))
    for gpu in machine["gpus"]:
        cells = []
        for field in fields:
            value = gpu.get("lost", gpu[FIELDS[field]]) if field != "index" else gpu["index"]
            if of_rows and branch(machine) < SINCE[field]:
                value = {"Yes": 1, "No": 0}.get(value, value)
            unit = f" {UNITS[field]}" if field in UNITS and "nounits" not in form else ""
            cells.append("[N/A]" if value is None else f"{value}{unit}")
        say(", ".join(cells))
    return int(machine.get("exit", 0))


def as_xml(gpus: list[Machine]) -> None:
    say(
        '<?xml version="1.0" ?>\n'
        '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
        "<nvidia_smi_log>"
    )
    say(f"\t<attached_gpus>{len(gpus)}</attached_gpus>")
    for gpu in gpus:
        say('\t<gpu id="{bus_id}">\n\t\t<product_name>{name}</product_name>'.format(**gpu))
        say("\t\t<mig_mode>\n\t\t\t<current_mig>{}</current_mig>".format(gpu["mig_mode"] or "N/A"))
        say(
            "\t\t\t<pending_mig>{}</pending_mig>\n\t\t</mig_mode>".format(
                gpu["mig_pending"] or "N/A"
            )
        )
        parts = "".join(PART.format(**part) for part in gpu.get("parts", [])) or "\t\t\tNone\n"
        say(f"\t\t<mig_devices>\n{parts}\t\t</mig_devices>")
        say("\t\t<uuid>{uuid}</uuid>\n\t\t<minor_number>{minor}</minor_number>".format(**gpu))
        say("\t\t<processes>\n\t\t\t<process_info>\n\t\t\t\t<gpu_instance_id>N/A</gpu_instance_id>")
        say(
            "\t\t\t\t<compute_instance_id>N/A</compute_instance_id>\n"
            "\t\t\t</process_info>\n"
            "\t\t</processes>"
        )
        say("\t</gpu>")
    say("</nvidia_smi_log>")


def matrix(gpus: list[Machine]) -> None:
    names = ["GPU{index}".format(**gpu) for gpu in gpus]
    say(
        "\t\033[4m"
        + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
        + "\033[0m"
    )
    for index, gpu in enumerate(gpus):
        cells = [" X " if other is gpu else near(gpu, other) for other in gpus]
        say("\t".join([names[index], *cells, gpu["cpus"], str(gpu["numa"]) + "\t", "N/A"]))
    say(LEGEND)


def near(gpu: Machine, other: Machine) -> str:
    if gpu["nvlinks"]:
        return "NV{nvlinks}".format(**gpu)
    return "NODE" if gpu["numa"] == other["numa"] else "SYS"


if __name__ == "__main__":
    sys.exit(main())
