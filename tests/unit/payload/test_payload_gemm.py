"""gemm: products and their sums, checked by formula on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.cli.arguments import parse
from payload.cli.config import GemmConfig
from payload.cli.values import GemmSize
from payload.comm.base import Solo
from payload.commands.gemm import _Layer, gemm
from payload.device.base import Device


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_products_are_right_on_any_device(device: Device, dtype: str, tmp_path: Path) -> None:
    size = GemmSize(33, 64, 17)
    config = GemmConfig(
        (size,), (dtype,), warmup=1, iterations=1, seed=0, device="auto", out=tmp_path
    )
    (record,) = gemm(config, device, Solo())
    assert (record["ok"], record["wrong_rows"]) == (True, [0])


def test_rounded_product_is_right_and_another_is_not(device: Device) -> None:
    comm = Solo()
    layer = _Layer.draw(device, comm, GemmSize(8, 4096, 33), "bfloat16", seed=0)
    exact = device.matmul(layer.a.astype("float32"), layer.b.astype("float32"))
    rounded = exact.astype(layer.a.dtype).astype("float32")
    assert int((rounded != exact).sum()) > 0
    assert layer.wrong_rows(device, comm, rounded, rounded) == 0
    assert layer.wrong_rows(device, comm, rounded, exact[::-1]) == 8


def test_sizes_and_dtypes() -> None:
    config = parse(["gemm", "--sizes", "8,2x3x4", "--dtypes", "float64,float16"])
    assert isinstance(config, GemmConfig)
    assert config.sizes == (GemmSize(8, 8, 8), GemmSize(2, 3, 4))
    assert config.dtypes == ("float64", "float16")
