"""Create the file system of an EL-shaped node, a layer over Debian, and its package repositories.

Needs root, and takes a minute.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

from clusterctl.providers.local import machine, system
from clusterctl.providers.local.image import REDHAT, apt_proxy
from clusterctl.providers.local.system import run
from tests.support.el.packages import DATA, Package, base_names, packages, spec, stage

_NO_CA = "basicConstraints=critical,CA:FALSE"
_RPMBUILD = (
    "rpmbuild",
    "-bb",
    "--define",
    "_rpmdir /quarry/rpms",
    "--define",
    "_topdir /quarry/top",
)
# What is installed from the first, beside the base: a server has them.
_SERVER = frozenset("dbus iproute openssh openssh-clients openssh-server sudo systemd".split())


def inputs() -> tuple[bytes, ...]:
    """All that decides how the node looks."""
    return inputs_of(Path(__file__).parent)


def inputs_of(folder: Path) -> tuple[bytes, ...]:
    """The names and contents of the files in a folder."""
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return tuple(
        word
        for path in files
        for word in (str(path.relative_to(folder)).encode(), path.read_bytes())
    )


def build(base: Path, folder: Path) -> None:
    """Make ``folder/upper``, the layer; ``folder/web``, what is on the web for it; and
    ``folder/tls``.
    """
    root = system.mount_overlay((base,), folder)
    web = root / "quarry/web"
    try:
        _install(root)
        _certify(folder / "tls", hosts())
        make_keys(root, web)
        _give_keys(root)
        every = packages()
        quarry = root / "quarry"
        # NVIDIA's packages have names and links of the distribution's packages, so they have their
        # own spec.
        for name, own in (("all", False), ("doca", True)):
            some = [one for one in every if (one.repo == "doca") == own]
            tree = quarry / f"tree-{name}"
            contents = [(package, stage(package, quarry, tree)) for package in some]
            (quarry / f"{name}.spec").write_text(spec(contents, f"/quarry/{tree.name}"))
            run(
                ["chroot", str(root), *_RPMBUILD, f"/quarry/{name}.spec"],
                action="building the packages",
            )
        publish(root, quarry / "rpms", every, web)
        index(root, web)
        for place in ("dl.rockylinux.org/pub/rocky", "dl.fedoraproject.org/pub/epel"):
            (web / place / "10").symlink_to("9")  # the same packages: see tests/support/furnish.py
        shutil.copytree(web, folder / "web", symlinks=True)
        shutil.copyfile(
            next(web.rglob("rocky-release10-*.rpm")), root / "usr/share/rocky-release10.rpm"
        )
        shutil.copyfile(folder / "tls/ca.crt", root / "quarry/ca.crt")
        names = base_names() | _SERVER
        first = [next(web.rglob(package.file)) for package in every if package.name in names]
        _script(root, "identity.sh", *(f"/{path.relative_to(root)}" for path in first))
        (root / "etc/fstab").write_text(REDHAT.fstab)
    finally:
        machine.end_rooted(folder)  # gpg's agent
        for point in system.mounted_under(root):
            run(["umount", str(point)], action="unmounting the tree")
    shutil.rmtree(folder / "work")


def open_to_apt(root: Path) -> None:
    """Let apt install packages in a tree, and keep them from starting their services there."""
    run(["mount", "-t", "proc", "proc", str(root / "proc")], action="mounting /proc")
    (root / "etc/resolv.conf").write_text(Path("/etc/resolv.conf").read_text())
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    if proxy := apt_proxy():
        (root / "etc/apt/apt.conf.d/99build").write_text(f"{proxy}\n")


def _install(root: Path) -> None:
    """The tools, and Debian's programs in the quarry."""
    open_to_apt(root)
    with (DATA / "debs.toml").open("rb") as file:
        debs = tomllib.load(file)
    _script(root, "tools.sh", *(" ".join(debs[kind].split()) for kind in ("tools", "payload")))
    (root / "etc/resolv.conf").unlink()


def _certify(folder: Path, hosts: Sequence[str]) -> None:
    """Write ``ca.crt``, which machines are to trust, and ``server.pem``, a key with its
    certificate.
    """
    folder.mkdir()
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365".split()
    ca = ["-subj", "/CN=test lab", "-keyout", "ca.key", "-out", "ca.crt"]
    names = ",".join(f"DNS:{host}" for host in hosts)
    own = [
        "-subj",
        f"/CN={hosts[0]}",
        "-keyout",
        "server.key",
        "-out",
        "server.crt",
        "-CA",
        "ca.crt",
    ]
    own += ["-CAkey", "ca.key", "-addext", f"subjectAltName={names}", "-addext", _NO_CA]
    for options in (ca, own):
        subprocess.run([*new, *options], cwd=folder, check=True, capture_output=True)
    parts = (folder / "server.key", folder / "server.crt")
    (folder / "server.pem").write_text("".join(part.read_text() for part in parts))


def _give_keys(root: Path) -> None:
    """The keys that two packages bring along."""
    for package, signer, name in (
        ("rocky-gpg-keys", "rocky", "RPM-GPG-KEY-Rocky-9"),
        ("epel-release", "epel", "RPM-GPG-KEY-EPEL-9"),
        ("epel-release", "epel", "RPM-GPG-KEY-EPEL-10"),
    ):
        place = root / "quarry/own" / package / "etc/pki/rpm-gpg" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / "quarry/keys" / signer, place)


def _script(root: Path, name: str, *argv: str) -> None:
    inside = root / "quarry" / name
    inside.parent.mkdir(exist_ok=True)
    shutil.copyfile(DATA / name, inside)
    run(["chroot", str(root), "sh", "-e", f"/quarry/{name}", *argv], action=name)


# Where each repository lies, and who signs it.
_PLACES = {
    "baseos": ("dl.rockylinux.org/pub/rocky/9/BaseOS/x86_64/os", "rocky"),
    "appstream": ("dl.rockylinux.org/pub/rocky/9/AppStream/x86_64/os", "rocky"),
    "crb": ("dl.rockylinux.org/pub/rocky/9/CRB/x86_64/os", "rocky"),
    "extras": ("dl.rockylinux.org/pub/rocky/9/extras/x86_64/os", "rocky"),
    "epel": ("dl.fedoraproject.org/pub/epel/9/Everything/x86_64", "epel"),
    "cuda": ("developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64", "nvidia"),
    "doca": ("linux.mellanox.com/public/repo/doca/2.10.0/rhel9.6/x86_64", "mellanox"),
    "openhpc": ("repos.openhpc.community/OpenHPC/3/EL_9", "openhpc"),
    "openhpc-updates": ("repos.openhpc.community/OpenHPC/3/updates/EL_9", "openhpc"),
}
# Where each signer's public key is found: on the web, and on a host.
_KEYS = {
    "rocky": "dl.rockylinux.org/pub/rocky/RPM-GPG-KEY-Rocky-9",
    "epel": "dl.fedoraproject.org/pub/epel/RPM-GPG-KEY-EPEL-9",
    "nvidia": "developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64/D42D0685.pub",
    "mellanox": "linux.mellanox.com/public/repo/doca/GPG-KEY-Mellanox.pub",
    "openhpc": (
        "github.com/openhpc/ohpc/raw/refs/heads/3.x/components/admin/ohpc-release/SOURCES/RPM-GPG-KEY-OpenHPC-3"
    ),
}
_GPG = ("gpg", "--batch", "--homedir", "/quarry/gnupg")


def hosts() -> tuple[str, ...]:
    """The names by which machines ask for them."""
    places = (*_KEYS.values(), *(folder for folder, _ in _PLACES.values()))
    return tuple(sorted({place.partition("/")[0] for place in places}))


def make_keys(root: Path, web: Path) -> None:
    """A key for each signer: private in the quarry, public there and on the web."""
    chroot = ["chroot", str(root)]
    (root / "quarry/gnupg").mkdir(mode=0o700)
    (root / "quarry/keys").mkdir()
    for signer, place in _KEYS.items():
        new = [
            "--passphrase",
            "",
            "--quick-generate-key",
            f"{signer} (test)",
            "rsa2048",
            "sign",
            "never",
        ]
        run([*chroot, *_GPG, *new], action=f"making the key of {signer}")
        export = [*_GPG, "--armor", "--export", f"{signer} (test)"]
        public = run([*chroot, *export], action=f"writing the key of {signer}")
        (root / "quarry/keys" / signer).write_text(public)
        (web / place).parent.mkdir(parents=True, exist_ok=True)
        (web / place).write_text(public)


def publish(root: Path, built: Path, packages: Sequence[Package], web: Path) -> None:
    """Sign the packages and lay them out. ``built`` is where rpmbuild put them, in ``root``."""
    for repo, (place, signer) in _PLACES.items():
        files = [
            built / package.arch / package.file for package in packages if package.repo == repo
        ]
        if files:
            name = ["--define", f"_gpg_name {signer} (test)", "--define", "_gpg_path /quarry/gnupg"]
            name += ["--define", "__gpg /usr/bin/gpg"]
            inside = [f"/{file.relative_to(root)}" for file in files]
            sign = ["chroot", str(root), "rpmsign", *name, "--addsign", *inside]
            run(sign, action=f"signing the packages of {repo}")
        folder = web / place
        (folder / "Packages").mkdir(parents=True)
        for file in files:
            file.rename(folder / "Packages" / file.name)


def index(root: Path, web: Path) -> None:
    """Write what dnf reads of each repository. ``web`` lies in ``root``."""
    for place, _ in _PLACES.values():
        inside = f"/{(web / place).relative_to(root)}"
        argv = [
            "chroot",
            str(root),
            "/quarry/usr/bin/createrepo_c",
            "--quiet",
            "--general-compress-type=gz",
        ]
        run([*argv, inside], action=f"indexing {place}")
    modules = DATA / "nvidia-driver.modules.yaml"
    shutil.copyfile(modules, root / "quarry" / "modules.yaml")
    repodata = f"/{(web / _PLACES['cuda'][0]).relative_to(root)}/repodata"
    modify = [
        "chroot",
        str(root),
        "/quarry/usr/bin/modifyrepo_c",
        "--mdtype=modules",
        "/quarry/modules.yaml",
    ]
    run([*modify, repodata], action="adding the modules of NVIDIA's driver")
