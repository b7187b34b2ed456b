"""What things at Google cost, in USD an hour, by a dated table. Not known is None, never a guess."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from ruamel.yaml import YAML

HOURS_A_MONTH: Final = 730.0  # as Google counts
LOCAL_SSD_GIB: Final = 375
_GIB_MIB = 1024

Usd = Annotated[float, Field(ge=0)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Shares(_Row):
    vcpu: Usd
    gib: Usd


class _Family(_Shares):
    spot: _Shares | None = None


class _Gpu(_Row):
    each: Usd
    spot: Usd | None = None


class _Nat(_Row):
    machine: Usd
    machines: int


class Table(_Row):
    """The table of one region on one day."""

    date: str
    region: str
    families: Mapping[str, _Family]
    gpus: Mapping[str, _Gpu]
    machines: Mapping[str, Usd]
    disks: Mapping[str, Usd]
    local_ssd: Usd
    filestore: Mapping[str, Usd]
    nat: _Nat
    address: Usd


@cache
def table() -> Table:
    """The built-in table."""
    text = (files("clusterctl.providers.gcp") / "prices.yaml").read_text()
    document: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return Table.model_validate({**document, "date": str(document["date"])})


def priced_on(region: str) -> str:
    """What a price of ours rests on, in words."""
    known = table()
    text = f"Google's list prices of {known.region} on {known.date}"
    return text if region == known.region else f"{text}; those of {region} differ"


def of_disk(kind: str, gib: float) -> float | None:
    """One persistent disk."""
    rate = table().disks.get(kind)
    return None if rate is None else of_gib(rate, gib)


def of_filestore(tier: str, gib: float) -> float | None:
    """A Filestore instance."""
    rate = table().filestore.get(tier)
    return None if rate is None else of_gib(rate, gib)


def of_nat(hosts: int) -> float:
    """Cloud NAT for this many hosts, with the one address that it takes."""
    known = table()
    return min(hosts, known.nat.machines) * known.nat.machine + known.address


def of_gib(usd_a_month: float, gib: float) -> float:
    """An hour of what is charged by GiB and month."""
    return usd_a_month * gib / HOURS_A_MONTH


def total(parts: Iterable[float | None]) -> float | None:
    """The sum; not known as soon as one part is not."""
    known = 0.0
    for part in parts:
        if part is None:
            return None
        known += part
    return known


def of_resource(kind: str, row: Mapping[str, Any]) -> float | None:
    """What something that the REST API shows costs; 0 for what Google does not charge for by the hour."""
    match kind:
        case "instance" if row.get("status") in {"TERMINATED", "STOPPED", "SUSPENDED"}:
            return 0.0  # its disks are charged for, and shown by themselves
        case "disk":
            return of_disk(_end(row["type"]), float(row["sizeGb"]))
        case "shared folder":
            shares = row.get("fileShares", ())
            return of_filestore(str(row.get("tier", "")), sum(float(share["capacityGb"]) for share in shares))
        case "address" | "router":  # Cloud NAT is charged for by machines, which go first, and by its address
            return table().address
        case "instance" | "bucket":
            return None
        case _:
            return 0.0


def _end(url: str) -> str:
    return url.rpartition("/")[2]
