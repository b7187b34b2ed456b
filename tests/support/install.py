"""clusterctl as people get it: its wheel, in an environment of its own, with the pinned packages."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "runtime.lock"
SOURCE_ONLY = "python-terraform"  # it has no wheel
SYSTEM_PYTHON = Path("/usr/bin/python3")
CERTIFICATES = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))
PLAIN_PATH = "/usr/local/bin:/usr/bin:/bin"  # what a login has; nothing of this checkout's environment


@dataclass(frozen=True)
class Installed:
    """An environment that holds clusterctl and what it needs, and nothing else."""

    venv: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def script(self) -> Path:
        return self.venv / "bin" / "clusterctl"


def build_wheel(out: Path) -> Path:
    _run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, ROOT])
    (wheel,) = out.glob("*.whl")
    return wheel


def install(wheel: Path, venv: Path) -> Installed:
    """Install a wheel into a new environment, by a Python that any user of this machine can read.

    The packages are those of the lock, from uv's cache where they are there, else from the package index that
    the caller's pip is set to.
    """
    uv, env, from_index = _uv()
    _run([uv, "venv", "--quiet", "--no-config", "--python", _shared_python(), venv], env=env)
    target: list[str | Path] = ["--quiet", "--no-config", "--python", venv / "bin" / "python"]
    wheels = ["--only-binary", ":all:", "--no-binary", SOURCE_ONLY]
    _run([uv, "pip", "sync", *target, *from_index, *wheels, "--require-hashes", LOCK], env=env)
    _run([uv, "pip", "install", *target, "--offline", "--no-deps", wheel], env=env)
    return Installed(venv)


def libraries() -> Path:
    """A folder of packages for ``sys.path``: transformers and torchvision, to use with the PyTorch that this
    environment has. It is made once, in the user's cache."""
    lock = ROOT / "requirements" / "libraries.lock"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clusterctl-tests"
    folder = cache / hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        uv, env, from_index = _uv()
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            packages = Path(unfinished) / "packages"
            target: list[str | Path] = ["--quiet", "--no-config", "--python", sys.executable, "--target"]
            wheels = ["--only-binary", ":all:", "--no-deps", "--require-hashes"]
            _run([uv, "pip", "install", *target, packages, *from_index, *wheels, "-r", lock], env=env)
            with suppress(OSError):  # another worker was quicker
                packages.rename(folder)
    return folder


def lock_of_wheels() -> str:
    """The lock without what has no wheel, which local clusters do not need."""
    entries = re.split(r"\n(?=\S)", LOCK.read_text())
    return "\n".join(entry for entry in entries if not entry.startswith(f"{SOURCE_ONLY}==")) + "\n"


def pip_settings() -> Mapping[str, str]:
    """What the caller's pip is set to, by files or variables, as variables: for users who lack the files."""
    listing = _run([sys.executable, "-m", "pip", "config", "list"])
    found = re.findall(r"^(?:global|install|download|:env:)\.([a-z-]+)='(.*)'$", listing, re.MULTILINE)
    return {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found}


def _uv() -> tuple[Path, dict[str, str], list[str | Path]]:
    """uv, its environment, and the options for the package index that the caller's pip is set to."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UV_", "PYTHON", "VIRTUAL_"))
    }
    env |= {name: os.environ[name] for name in ("UV_CACHE_DIR", "UV_OFFLINE") if name in os.environ}
    certificates = [path for path in CERTIFICATES if path.is_file()]
    if certificates:
        env.setdefault("SSL_CERT_FILE", str(certificates[0]))
    index = os.environ.get("UV_DEFAULT_INDEX") or pip_settings().get("PIP_INDEX_URL")
    return Path(sys.executable).with_name("uv"), env, ["--default-index", index] if index else []


def _shared_python() -> Path:
    """The system's Python if it is new enough, else the one that this environment was made from."""
    program = "import sys; sys.exit(sys.version_info < (3, 11))"
    if SYSTEM_PYTHON.exists() and subprocess.run([SYSTEM_PYTHON, "-c", program], check=False).returncode == 0:
        return SYSTEM_PYTHON
    return Path(sys._base_executable)  # type: ignore[attr-defined]


def _run(argv: list[str | Path], *, env: Mapping[str, str] | None = None) -> str:
    words = list(map(str, argv))
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert done.returncode == 0, f"$ {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout
