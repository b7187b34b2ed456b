"""The wheel of clusterctl, and the package index that pip is configured for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "runtime.lock"
SOURCE_ONLY = "python-terraform"  # it has no wheel
CERTIFICATES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
)


def build_wheel(out: Path) -> Path:
    run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, ROOT])
    (wheel,) = out.glob("*.whl")
    return wheel


def lock_of_wheels() -> str:
    """The lock without what has no wheel, which local clusters do not need."""
    entries = re.split(r"\n(?=\S)", LOCK.read_text())
    return "\n".join(entry for entry in entries if not entry.startswith(f"{SOURCE_ONLY}==")) + "\n"


def pip_settings() -> Mapping[str, str]:
    """What the caller's pip is set to, by files or variables, as variables: for users who lack the
    files.
    """
    listing = run([sys.executable, "-m", "pip", "config", "list"])
    found = re.findall(
        r"^(?:global|install|download|:env:)\.([a-z-]+)='(.*)'$", listing, re.MULTILINE
    )
    return {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found}


def uv_settings() -> tuple[Path, dict[str, str], list[str | Path]]:
    """uv, its environment, and the options for the package index that the caller's pip is set
    to.
    """
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


def run(argv: list[str | Path], *, env: Mapping[str, str] | None = None) -> str:
    words = list(map(str, argv))
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert done.returncode == 0, f"$ {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout
