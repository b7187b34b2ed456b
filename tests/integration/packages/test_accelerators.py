"""Nodes without GPUs get CPU wheels, and nodes with GPUs get CUDA wheels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from clusterctl.packages.accelerators import INDEX_VARIABLE, _is_reachable, has_gpus
from clusterctl.packages.node_platform import DEFAULT_PLATFORM
from clusterctl.packages.project_files import PackageList
from clusterctl.packages.resolution import Requirements, resolve
from clusterctl.packages.wheelhouse import Pip
from clusterctl.spec.models import ClusterSpec
from tests.support.wheels import a_wheel

LINUX = "cp313-cp313-manylinux_2_28_x86_64"
Solve = Callable[..., set[str]]


def published(
    index: Path, name: str, version: str = "1.0", *, tag: str = "py3-none-any", **more: str
) -> None:
    """Put a wheel into a package index, which is a folder. more: extras, with their requirements."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    requires = [
        f"{wheel}; extra == '{extra}'\nProvides-Extra: {extra}"
        for extra, wheel in more.items()
        if extra != "always"
    ]
    requires += [more["always"]] if "always" in more else []
    a_wheel(folder, name.replace("-", "_"), version, tag=tag, requires=requires)
    links = (
        f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>'
        for wheel in folder.glob("*.whl")
    )
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")


class Mirror(BaseHTTPRequestHandler):
    """An HTTP server that answers GET and has one page."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_mirror_is_reachable_if_it_has_the_page() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [_is_reachable(f"{url}/{name}/") for name in ("torch", "other")] == [True, False]
        server.shutdown()
    assert not _is_reachable(f"{url}/torch/")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def solve(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Solve:
    """Resolve lines of a requirements file, with an index like PyPI. Return the wheels."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv(INDEX_VARIABLE, f"file://{tmp_path}/cpu")
    pypi = tmp_path / "pypi"
    published(pypi, "torch", "2.0", tag=LINUX, always="nvidia-cublas")
    published(pypi, "lightning", always="torch")
    for name in ("nvidia-cublas", "jax-cuda12-plugin"):
        published(pypi, name)
    published(pypi, "jax", cuda12="jax-cuda12-plugin")
    published(tmp_path / "cpu", "torch", "2.0+cpu", tag=LINUX)
    (tmp_path / "base.lock").touch()

    def call(*lines: str, gpus: bool | None) -> set[str]:
        file = tmp_path / "requirements.txt"
        file.write_text("\n".join((f"--index-url file://{pypi}", *lines, "")))
        lists = (PackageList.read(file, DEFAULT_PLATFORM),)
        asked = Requirements(lists, tmp_path / "base.lock", gpus=gpus)
        return {
            f"{wheel.name} {wheel.version}"
            for wheel in resolve(asked, Pip(asked.node, notes.append)).wheels
        }

    return call


def test_torch_without_gpus_is_built_for_cpus(solve: Solve, notes: list[str]) -> None:
    assert solve("lightning", gpus=False) == {"lightning 1.0", "torch 2.0+cpu"}
    assert "no GPU" in notes[-1]


@pytest.mark.parametrize("gpus", [True, None])
def test_torch_with_gpus_is_built_for_cuda_and_reported(
    solve: Solve, notes: list[str], gpus: bool
) -> None:
    assert solve("torch", gpus=gpus) == {"torch 2.0", "nvidia-cublas 1.0"}
    assert "gigabytes" in notes[-1]


def test_torch_without_cpu_index_is_cuda_build_with_note(
    solve: Solve, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INDEX_VARIABLE, "http://127.0.0.1:9/cpu")
    assert solve("torch", gpus=False) == {"torch 2.0", "nvidia-cublas 1.0"}
    assert "http://127.0.0.1:9/cpu can't be reached" in notes[-1]
    assert INDEX_VARIABLE in notes[-1]


def test_jax_is_built_for_cuda_where_nodes_have_gpus(solve: Solve) -> None:
    assert solve("jax[cuda12]", "lightning", gpus=False) == {
        "jax 1.0",
        "lightning 1.0",
        "torch 2.0+cpu",
    }
    assert solve("jax", gpus=False) == solve("jax", gpus=None) == {"jax 1.0"}
    for line in ("jax", "jax[cuda12]", "jax==1.0; sys_platform == 'linux'"):
        assert solve(line, gpus=True) == {"jax 1.0", "jax-cuda12-plugin 1.0"}


def test_has_gpus_is_read_from_the_spec() -> None:
    partitions: list[dict[str, Any]] = [
        {"name": "cpu", "hosts": "one"},
        {"name": "gpu", "hosts": "two"},
    ]
    partitions[1]["gpus"] = {"type": "l4", "count": 1}
    hosts = {"type": "onprem", "controller": "one", "hosts": {"one": "10.0.0.1", "two": "10.0.0.2"}}
    spec = {"version": 1, "name": "d", "provider": hosts}
    found = ClusterSpec.model_validate({**spec, "partitions": partitions})
    assert [has_gpus(found), has_gpus(found, "cpu"), has_gpus(found, "gpu")] == [True, False, True]
    undeclared = ClusterSpec.model_validate(
        {**spec, "partitions": partitions[:1], "scheduler": "none"}
    )
    assert has_gpus(undeclared) is None
