"""The quotas of processors and GPUs that new hosts use up, and which of them are too small.

Sources: cloud.google.com/compute/resource-usage (CPU and GPU quotas) and
cloud.google.com/compute/docs/instances/spot ("Quotas for Spot VMs"), 2026-11.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.providers.gcp.images import HostGroup

# Machine family -> quota of CPUs that regions.get lists.
_CPUS: Final = {"e2": "CPUS", "n1": "CPUS"} | {
    family: f"{family.upper()}_CPUS" for family in ("n2", "n2d", "c2", "c2d", "c3")
}


@dataclass(frozen=True, slots=True)
class Quota:
    """A quota. ``family``: the dimension and value of a quota that Google counts by machine or GPU
    family, such as ("vm_family", "A3"). regions.get does not list these quotas.
    """

    metric: str
    family: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """An amount of a quota that hosts use up.

    by_family: the quota on which the hosts count if Google does not list ``quota``.
    preemptible: metric of the quota on which the hosts count as soon as Google has granted it.
        Until then, they count on ``quota``. None: always on ``quota``.
    is_certain: whether Google documents that these hosts count on the quota.
    """

    quota: Quota
    amount: int
    by_family: Quota | None = None
    preemptible: str | None = None
    is_certain: bool = True

    def counted_on(self, listed: Mapping[str, Mapping[str, Any]]) -> Quota:
        """Return the quota on which the hosts count. ``listed``: metric -> quota of regions.get.

        "After Compute Engine grants you preemptible quota in a region, all Spot VMs [...] in that
        region count against that quota. [...] In regions where you don't have preemptible quota,
        you can use standard quota to launch Spot VMs." Google's answer of 2021 to
        github.com/hail-is/hail/pull/10588 is the same: "if it is non-zero preemptible is in use and
        if it is zero normal quota is in use".
        """
        if self.preemptible and listed.get(self.preemptible, {}).get("limit", 0) > 0:
            return Quota(self.preemptible)
        if self.by_family and self.quota.metric not in listed:
            return self.by_family
        return self.quota


@dataclass(frozen=True, slots=True)
class Shortage:
    """A quota that is too small, or that can't be checked (``limit`` None).

    needed, certain: amount that the hosts need, and the part of it of which Google documents that
        it counts.
    preemptible: metrics that Google has not granted, in whose place hosts count on this quota.
    """

    quota: Quota
    needed: int
    certain: int
    limit: float | None = None
    used: float = 0.0
    preemptible: tuple[str, ...] = ()

    @property
    def free(self) -> float:
        return max(0.0, (self.limit or 0.0) - self.used)

    @property
    def is_certain(self) -> bool:
        return self.limit is not None and self.certain > self.free

    @property
    def reason(self) -> str:
        sentences = [f"the cluster needs {self.needed}"]
        if self.limit is not None:
            sentences[0] += f", but only {self.free:g} of {self.limit:g} are free"
        if self.quota.family:
            name, value = self.quota.family
            sentences.append(
                f"Google counts them by family ({name}={value}), and does not tell the limit"
            )
        if self.preemptible:
            sentences.append(
                "spot and flex-start machines count on it until Google grants the quota "
                f"{', '.join(self.preemptible)}"
            )
        if self.limit is not None and not self.is_certain:
            sentences.append(
                "Google's documentation says that machines with GPUs don't count on it"
            )
        return "; ".join(sentences)


def shortages(needs: Iterable[Need], rows: Iterable[Mapping[str, Any]]) -> Iterator[Shortage]:
    """Yield the quotas that these needs exceed, and the quotas by family, which can't be checked.

    rows: `quotas` of regions.get or projects.get. A project has no limit of other quotas that these
        rows lack.
    """
    listed = {row["metric"]: row for row in rows}
    parts = defaultdict[Quota, list[Need]](list)
    for need in needs:
        parts[need.counted_on(listed)].append(need)
    for quota, same in parts.items():
        row = listed.get(quota.metric, {})
        shortage = Shortage(
            quota,
            sum(need.amount for need in same),
            sum(need.amount for need in same if need.is_certain),
            float(row["limit"]) if "limit" in row else None,
            float(row.get("usage", 0)),
            tuple(
                dict.fromkeys(
                    need.preemptible
                    for need in same
                    if need.preemptible and need.preemptible != quota.metric
                )
            ),
        )
        is_checkable = shortage.limit is not None
        if shortage.needed > shortage.free and (is_checkable or quota.family):
            yield shortage


def regional_needs(groups: Collection[HostGroup]) -> Iterator[Need]:
    """Yield the hosts' needs of the region's quotas."""
    for group in groups:
        # Google already counts the processors and GPUs of a reservation.
        if not group.nodes.reservation:
            yield from _cpus(group)
            yield from _gpus(group)


def project_needs(groups: Collection[HostGroup]) -> Iterator[Need]:
    """Yield the hosts' needs of the project's quotas of all regions."""
    for group in groups:
        machine = group.machine
        if group.nodes.reservation:
            continue
        yield Need(
            Quota("CPUS_ALL_REGIONS"),
            machine.vcpus * group.count,
            is_certain=not machine.is_limited_by_gpu,
        )
        if machine.gpu:
            yield Need(Quota("GPUS_ALL_REGIONS"), machine.gpu.count * group.count)


def _cpus(group: HostGroup) -> Iterator[Need]:
    machine = group.machine
    if machine.is_limited_by_gpu:
        return
    by_family = Quota("CPUS_PER_VM_FAMILY", ("vm_family", machine.family.upper()))
    metric = _CPUS.get(machine.family)
    yield Need(
        Quota(metric) if metric else by_family,
        machine.vcpus * group.count,
        preemptible=_preemptible(group, "PREEMPTIBLE_CPUS"),
    )


def _gpus(group: HostGroup) -> Iterator[Need]:
    if gpu := group.machine.gpu:
        model = f"NVIDIA_{gpu.type.upper().replace('-', '_')}"
        yield Need(
            Quota(f"{model}_GPUS"),
            gpu.count * group.count,
            by_family=Quota("GPUS_PER_GPU_FAMILY", ("gpu_family", model)),
            preemptible=_preemptible(group, f"PREEMPTIBLE_{model}_GPUS"),
        )


def _preemptible(group: HostGroup, metric: str) -> str | None:
    """Return the preemptible metric of spot and flex-start hosts. None: the hosts count on the
    standard quota.
    """
    model = group.nodes.provisioning_model
    return metric if model in {"SPOT", "FLEX_START"} else None
