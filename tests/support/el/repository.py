"""The repositories: signed packages under the places on the web where the distribution has them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from clusterctl.providers.local.system import run
from tests.support.el.packages import DATA, Package

# Where each repository lies, and who signs it.
_PLACES = {
    "baseos": ("dl.rockylinux.org/pub/rocky/9/BaseOS/x86_64/os", "rocky"),
    "appstream": ("dl.rockylinux.org/pub/rocky/9/AppStream/x86_64/os", "rocky"),
    "crb": ("dl.rockylinux.org/pub/rocky/9/CRB/x86_64/os", "rocky"),
    "extras": ("dl.rockylinux.org/pub/rocky/9/extras/x86_64/os", "rocky"),
    "epel": ("dl.fedoraproject.org/pub/epel/9/Everything/x86_64", "epel"),
    "cuda": ("developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64", "nvidia"),
    "openhpc": ("repos.openhpc.community/OpenHPC/3/EL_9", "openhpc"),
    "openhpc-updates": ("repos.openhpc.community/OpenHPC/3/updates/EL_9", "openhpc"),
}
# Where each signer's public key is found: on the web, and on a host.
_KEYS = {
    "rocky": "dl.rockylinux.org/pub/rocky/RPM-GPG-KEY-Rocky-9",
    "epel": "dl.fedoraproject.org/pub/epel/RPM-GPG-KEY-EPEL-9",
    "nvidia": "developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64/D42D0685.pub",
    "openhpc": (
        "github.com/openhpc/ohpc/raw/refs/heads/3.x/components/admin/ohpc-release/SOURCES/RPM-GPG-KEY-OpenHPC-3"
    ),
}
_GPG = ("gpg", "--batch", "--homedir", "/quarry/gnupg")


def hosts() -> tuple[str, ...]:
    """The names by which machines ask for them."""
    return tuple(sorted({place.partition("/")[0] for place in (*_KEYS.values(), *_web_folders())}))


def _web_folders() -> tuple[str, ...]:
    return tuple(folder for folder, _ in _PLACES.values())


def make_keys(root: Path, web: Path) -> None:
    """A key for each signer: private in the quarry, public there and on the web."""
    chroot = ["chroot", str(root)]
    (root / "quarry/gnupg").mkdir(mode=0o700)
    (root / "quarry/keys").mkdir()
    for signer, place in _KEYS.items():
        new = ["--passphrase", "", "--quick-generate-key", f"{signer} (test)", "rsa2048", "sign", "never"]
        run([*chroot, *_GPG, *new], what=f"making the key of {signer}")
        export = [*_GPG, "--armor", "--export", f"{signer} (test)"]
        public = run([*chroot, *export], what=f"writing the key of {signer}")
        (root / "quarry/keys" / signer).write_text(public)
        _write(web / place, public)


def public_key(root: Path, signer: str) -> str:
    """A signer's public key, as text."""
    return (root / "quarry/keys" / signer).read_text()


def publish(root: Path, built: Path, packages: Sequence[Package], web: Path) -> None:
    """Sign the packages and lay them out. ``built`` is where rpmbuild put them, in ``root``."""
    for repo, (place, signer) in _PLACES.items():
        files = [built / package.arch / package.file for package in packages if package.repo == repo]
        if files:
            name = ["--define", f"_gpg_name {signer} (test)", "--define", "_gpg_path /quarry/gnupg"]
            name += ["--define", "__gpg /usr/bin/gpg"]
            inside = [f"/{file.relative_to(root)}" for file in files]
            sign = ["chroot", str(root), "rpmsign", *name, "--addsign", *inside]
            run(sign, what=f"signing the packages of {repo}")
        folder = web / place
        (folder / "Packages").mkdir(parents=True)
        for file in files:
            file.rename(folder / "Packages" / file.name)


def index(root: Path, web: Path) -> None:
    """Write what dnf reads of each repository. ``web`` lies in ``root``."""
    for place in _web_folders():
        inside = f"/{(web / place).relative_to(root)}"
        argv = ["chroot", str(root), "/quarry/usr/bin/createrepo_c", "--quiet", "--general-compress-type=gz"]
        run([*argv, inside], what=f"indexing {place}")
    modules = DATA / "nvidia-driver.modules.yaml"
    shutil.copyfile(modules, root / "quarry" / "modules.yaml")
    repodata = f"/{(web / _PLACES['cuda'][0]).relative_to(root)}/repodata"
    modify = ["chroot", str(root), "/quarry/usr/bin/modifyrepo_c", "--mdtype=modules", "/quarry/modules.yaml"]
    run([*modify, repodata], what="adding the modules of NVIDIA's driver")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
