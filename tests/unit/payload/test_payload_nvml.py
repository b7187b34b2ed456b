"""What GPUs do, where NVML answers as it does on nodes whose driver or cards are old or not well."""

from __future__ import annotations

import math

import pynvml
import pytest

from payload.node.nvml import COUNTERS, GpuSensor, open_card
from payload.training.gpu_use import GpuMeasurement, GpuMeter, figures_of, total_joules
from tests.support.doubles.nvml import (
    DRAM,
    LIB_RM_VERSION_MISMATCH,
    NO_PERMISSION,
    PCIE_TX,
    TENSOR,
    Gpu,
    Nvml,
)

pytestmark = pytest.mark.platform("stand-in", "nvidia-smi")
ACTIVE = 1


def indices(monkeypatch: pytest.MonkeyPatch, library: Nvml) -> list[tuple[object, object]]:
    library.put_into(monkeypatch)
    return [(one["index"], one["uuid"]) for one in GpuSensor().describe()]


def meter(monkeypatch: pytest.MonkeyPatch, library: Nvml) -> GpuMeter:
    library.put_into(monkeypatch)
    card = open_card(library.gpus[0].uuid)
    assert card is not None
    return GpuMeter(card)


def sampled(monkeypatch: pytest.MonkeyPatch, library: Nvml) -> GpuSensor:
    """Return the node's GPUs after a first sample, with which their counters begin."""
    library.put_into(monkeypatch)
    gpus = GpuSensor()
    gpus.read()
    return gpus


def test_gpu_off_the_bus_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    all_three = [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2")]
    assert indices(monkeypatch, Nvml(Gpu(), Gpu(), Gpu())) == all_three
    assert indices(monkeypatch, Nvml(Gpu(), Gpu(is_lost=True), Gpu())) == all_three[::2]


def test_nvml_of_another_version_than_the_driver_has_no_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert indices(monkeypatch, Nvml(Gpu(), fault=LIB_RM_VERSION_MISMATCH)) == []


def test_reasons_of_slow_clocks_are_named_but_not_the_power_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits are those of nvml.h: 0x04 the power limit, 0x40 heat, 0x80 the power brake."""
    cards = Gpu(slowed_by=0x04), Gpu(slowed_by=0xC4), Gpu(slowed_by=None, pids=[7])
    Nvml(*cards).put_into(monkeypatch)
    monkeypatch.setenv("CLUSTERCTL_JOB_GPUS", "3")
    gpus = GpuSensor()
    found = gpus.read()
    assert found["job_gpus"] == 3
    slowed_by = [gpu["slowed_by"] for gpu in found["gpus"]]
    assert slowed_by == [[], ["its temperature (hardware)", "the power supply"], None]
    assert [gpu["processes"] for gpu in found["gpus"]] == [0, 0, 1]
    assert gpus.users == {7: [2]}


def test_counters_have_the_numbers_of_nvidias_library() -> None:
    names = {
        "active_percent": "GRAPHICS_UTIL",
        "sm_percent": "SM_UTIL",
        "occupancy_percent": "SM_OCCUPANCY",
        "tensor_percent": "ANY_TENSOR_UTIL",
        "bandwidth_percent": "DRAM_BW_UTIL",
        "pcie_tx_bytes_per_s": "PCIE_TX_PER_SEC",
        "pcie_rx_bytes_per_s": "PCIE_RX_PER_SEC",
        "nvlink_rx_bytes_per_s": "NVLINK_TOTAL_RX_PER_SEC",
        "nvlink_tx_bytes_per_s": "NVLINK_TOTAL_TX_PER_SEC",
    }
    expected = {name: getattr(pynvml, f"NVML_GPM_METRIC_{own}") for name, own in names.items()}
    assert {name: number for name, number, _ in COUNTERS} == expected


def test_sample_has_the_means_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's own figure of use is a snapshot. An H200 has 4,917 GB/s by clock and bus."""
    card = Gpu(util=(100, 50), levels={ACTIVE: 90, DRAM: 50, PCIE_TX: 2})
    library = Nvml(card)
    library.put_into(monkeypatch)
    gpus = GpuSensor()
    (described,) = gpus.describe()
    assert described["counters_missing"] is None
    assert described["peak_bytes_per_s"] == pytest.approx(4.917e12, rel=1e-3)
    library.work(3.0)
    card.levels = {ACTIVE: 30, DRAM: 10, PCIE_TX: 0}
    library.work(1.0)
    (state,) = gpus.read()["gpus"]
    assert (state["util"], state["active_percent"], state["bandwidth_percent"]) == (100, 75, 40)
    assert state["bandwidth_bytes_per_s"] == 0.4 * described["peak_bytes_per_s"]
    assert state["pcie_tx_bytes_per_s"] == 1.5 * (1 << 20)
    # The driver has no figure of these: they are not 0.
    assert not {"tensor_percent", "nvlink_rx_bytes_per_s"} & state.keys()
    library.work(1.0)
    assert gpus.read()["gpus"][0]["active_percent"] == 30


def test_samples_closer_than_the_driver_refreshes_are_taken_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Gpu(levels={ACTIVE: 100})
    library = Nvml(card)
    gpus = sampled(monkeypatch, library)
    library.work(0.06)
    assert "active_percent" not in gpus.read()["gpus"][0]
    card.levels = {ACTIVE: 0}
    library.work(0.06)
    assert gpus.read()["gpus"][0]["active_percent"] == pytest.approx(50)


REFUSALS = {
    "no counters, as on an A100": (Nvml(Gpu(has_counters=False)), "no performance counters"),
    "only for root": (Nvml(Gpu(refusal=NO_PERMISSION)), "Insufficient Permissions"),
    "older driver": (Nvml(Gpu(), lacks=["nvmlGpmQueryDeviceSupport"]), "Function Not Found"),
    "older driver without samples": (Nvml(Gpu(), lacks=["nvmlGpmSampleGet"]), "Not Found"),
    "in parts": (Nvml(Gpu(mig=True)), "MIG"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_gpu_without_counters_tells_why_and_has_none_of_their_figures(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    library, why = REFUSALS[name]
    library.gpus[0].util = (40, 10)
    library.put_into(monkeypatch)
    gpus = GpuSensor()
    (described,) = gpus.describe()
    assert why in described["counters_missing"]
    library.work(1.0)
    (state,) = gpus.read()["gpus"]
    assert state["util"] == 40
    assert not {counter for counter, *_ in COUNTERS} & state.keys()


def test_pynvml_without_counters_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in releases before those of 2022."""
    Nvml(Gpu(util=(40, 10))).put_into(monkeypatch)
    monkeypatch.delattr(pynvml, "nvmlGpmQueryDeviceSupport")
    assert "nvmlGpmQueryDeviceSupport" in GpuSensor().describe()[0]["counters_missing"]


def test_refusal_of_a_sample_leaves_out_its_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu(levels={ACTIVE: 100})
    library = Nvml(card)
    gpus = sampled(monkeypatch, library)
    library.work(1.0)
    card.refusal = NO_PERMISSION
    assert "active_percent" not in gpus.read()["gpus"][0]
    card.refusal = 0
    card.levels = {ACTIVE: 0}
    library.work(1.0)
    assert gpus.read()["gpus"][0]["active_percent"] == 50


def test_value_that_the_driver_can_not_compute_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Nvml(Gpu(levels={ACTIVE: math.nan, TENSOR: 20}))
    gpus = sampled(monkeypatch, library)
    library.work(1.0)
    (state,) = gpus.read()["gpus"]
    assert ("active_percent" in state, state["tensor_percent"]) == (False, 20)


@pytest.mark.parametrize(("mhz", "bits"), [(None, 6144), (3201, None)])
def test_bandwidth_is_a_share_alone_if_its_peak_is_unknown(
    monkeypatch: pytest.MonkeyPatch, mhz: int | None, bits: int | None
) -> None:
    library = Nvml(Gpu(levels={DRAM: 50}, memory_mhz=mhz, bus_bits=bits))
    gpus = sampled(monkeypatch, library)
    library.work(1.0)
    (state,) = gpus.read()["gpus"]
    assert (state["bandwidth_percent"], "bandwidth_bytes_per_s" in state) == (50, False)
    assert gpus.describe()[0]["peak_bytes_per_s"] is None


def test_energy_of_a_gpu_in_parts_is_that_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(Gpu(mig=True, energy_mj=5000), Gpu(mig=None, energy_mj=5000)).put_into(monkeypatch)
    assert [gpu["energy_mj"] for gpu in GpuSensor().read()["gpus"]] == [None, 5000]


def test_turns_are_weighted_by_their_time_and_breaks_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns of 3 s at 400 W and 1 s at 200 W, with 700 samples: 0.5 of them per joule."""
    card = Gpu(pids=[1])
    library = Nvml(card)
    turns = meter(monkeypatch, library)
    for seconds, active, tensor, watts, samples in ((3, 80, 40, 400, 600), (1, 40, 0, 200, 100)):
        turns.begin()
        card.levels = {ACTIVE: active, TENSOR: tensor}
        card.watts = watts
        library.work(seconds)
        turns.end(samples)
        # The turn of another side.
        card.levels = {ACTIVE: 10, TENSOR: 100}
        card.watts = 700
        library.work(5)
    figures = figures_of([(turns.use(), 1)])
    assert figures == pytest.approx(
        {
            "gpu_active_percent": 70,
            "gpu_tensor_percent": 30,
            "gpu_idle_percent": 30,
            "samples_per_joule": 0.5,
        }
    )


def test_turns_that_are_too_short_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu(levels={ACTIVE: 50}, watts=100)
    library = Nvml(card)
    turns = meter(monkeypatch, library)
    for seconds in (0.9, 2.0):
        turns.begin()
        library.work(seconds)
        turns.end(100)
        if seconds < 1:
            assert turns.use() is None
    assert figures_of([(turns.use(), 1)])["samples_per_joule"] == pytest.approx(0.5)


def test_figure_that_a_turn_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu(levels={ACTIVE: 50, TENSOR: 20}, watts=100, util=(90, 0))
    library = Nvml(card)
    turns = meter(monkeypatch, library)
    for refusal in (0, NO_PERMISSION):
        card.refusal = refusal
        turns.begin()
        library.work(2)
        card.energy_mj = None if refusal else card.energy_mj
        turns.end(100)
    assert figures_of([(turns.use(), 1)]) == {"gpu_active_percent": 70, "gpu_idle_percent": 30}


def test_begin_that_the_driver_refuses_leaves_no_figure_of_the_time_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Gpu(levels={TENSOR: 50}, util=None)
    library = Nvml(card)
    turns = meter(monkeypatch, library)
    library.work(5)
    card.refusal = NO_PERMISSION
    turns.begin()
    card.refusal = 0
    library.work(2)
    turns.end(100)
    use = turns.use()
    assert use is not None
    assert use.means == {}


def test_idle_share_without_counters_is_that_of_the_end_of_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Gpu(has_counters=False, energy_mj=None)
    library = Nvml(card)
    turns = meter(monkeypatch, library)
    for use in ((60, 0), (100, 0)):
        turns.begin()
        card.util = use
        library.work(2)
        turns.end(100)
    assert figures_of([(turns.use(), 1)]) == {"gpu_active_percent": 80, "gpu_idle_percent": 20}


def use(active: float, joules: float | None = 100.0, processes: int | None = 1) -> GpuMeasurement:
    return GpuMeasurement(2.0, 50, {"active_percent": active}, joules, processes)


IDLE = {"gpu_active_percent": 60, "gpu_idle_percent": 40}


@pytest.mark.parametrize(
    ("gpus", "figures"),
    [
        # 2 J each per sample.
        ([(use(40), 1), (use(80), 1)], {**IDLE, "samples_per_joule": 0.25}),
        # Two ranks share the GPU.
        ([(use(60, processes=2), 2)], {**IDLE, "samples_per_joule": 0.5}),
        # Another program computes on one of them.
        ([(use(40), 1), (use(80, processes=2), 1)], IDLE),
        ([(use(60, processes=None), 1)], {**IDLE, "samples_per_joule": 0.5}),
        ([(use(40), 1), (use(80, joules=None), 1)], IDLE),
        ([(use(60, joules=0.0), 1)], IDLE),
        ([(use(60), 1), (None, 1)], {}),
        ([], {}),
    ],
    ids=["two", "ranks", "others", "unseen", "uncounted", "still", "unmeasured", "none"],
)
def test_figures_are_those_of_all_gpus_or_left_out(
    gpus: list[tuple[GpuMeasurement | None, int]], figures: dict[str, float]
) -> None:
    assert figures_of(gpus) == figures


@pytest.mark.parametrize(
    ("ranks", "joules"),
    [
        ([("a", 5.0, 2), ("a", 5.0, 2), ("b", 7.0, 1)], 12),
        ([("a", 5.0, 1), ("b", 7.0, 2)], None),
        ([("a", 5.0, 1), ("b", None, 1)], None),
        ([("a", 5.0, 0)], 5),
    ],
    ids=["shared-by-ranks", "others", "uncounted", "processes-unseen"],
)
def test_energy_counts_each_gpu_once_and_only_if_it_is_that_of_the_program(
    ranks: list[tuple[str, float | None, int]], joules: float | None
) -> None:
    assert total_joules(ranks) == joules


def test_gpu_is_found_by_its_id_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may not tell the id, and that of a part is not that of a card."""
    Nvml(Gpu(), Gpu()).put_into(monkeypatch)
    found = open_card("GPU-1")
    assert found is not None
    assert (found.index, open_card("MIG-1")) == (1, None)
    Nvml(Gpu(), lacks=["nvmlDeviceGetUUID"]).put_into(monkeypatch)
    assert open_card(None) is None


def gpm_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the names of NVML's functions of counters as they are called."""
    asked: list[str] = []
    real = pynvml._nvmlGetFunctionPointer

    def noted(name: str) -> object:
        if "Gpm" in name:
            asked.append(name)
        return real(name)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", noted)
    return asked


def test_sampling_asks_a_bounded_number_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample is to cost the training nothing: one call more for all counters, and one sample."""
    library = Nvml(Gpu(levels={ACTIVE: 50}))
    gpus = sampled(monkeypatch, library)
    asked = gpm_calls(monkeypatch)
    library.work(1.0)
    gpus.read()
    assert asked == ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"]


def test_training_which_needs_the_energy_alone_opens_no_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Nvml(Gpu(energy_mj=2000), Gpu())
    library.put_into(monkeypatch)
    asked = gpm_calls(monkeypatch)
    card = open_card("GPU-0")
    assert card is not None
    assert (card.energy_j(), card.processes()) == (2, [])
    assert asked == []
