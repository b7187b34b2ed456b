"""What a cluster leaves on its shared folder when its machines are released: the homes of its users.

They stay in any case. Kept, they are listed, and `down --storage` removes them: nothing but what jobs had in
them where the account is somebody's own. On an NFS server of the user's they are the user's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from clusterctl.errors import ClusterctlError
from clusterctl.providers.onprem.login import Login
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.onprem import OnpremSettings

# PATH USER...: their homes with the owner's uid; anybody may see that.
_LOOK: Final = """
cd "$1/home" 2>/dev/null || exit 0
shift
for user do
    if [ -d "$user" ] && [ ! -L "$user" ]; then stat -c '%n %u' -- "$user"; fi
done
"""
# PATH NAME UID ...: of an account that is there still, its home is its own.
_REMOVE: Final = """
path=$1
cd "$path/home" 2>/dev/null || exit 0
shift
while [ $# -gt 0 ]; do
    if [ -d "$1" ] && [ ! -L "$1" ] && [ "$(stat -c %u -- "$1")" = "$2" ]; then
        if getent passwd "$1" >/dev/null; then
            rm -rf --one-file-system -- "./$1/clusterctl"
        else
            rm -rf --one-file-system -- "./$1"
        fi
    fi
    shift 2
done
cd /
rmdir "$path/home" "$path" 2>/dev/null || true
"""


def find(login: Login, settings: OnpremSettings, name: str, users: Sequence[str]) -> tuple[KeptStorage, ...]:
    """The homes of these users on the shared folder; none on an NFS server, which we have no access to."""
    shared, host = settings.shared, settings.controller
    if shared.server is not None:
        return ()
    if lost := login.trust([host]):
        raise lost[host]
    lines = login.run(host, ("sh", "-c", _LOOK, "sh", shared.path, *users)).splitlines()
    homes = {name: int(uid) for name, uid in map(str.split, lines)}
    if not homes:
        return ()
    size_mib = None
    with suppress(ClusterctlError):  # without a password for sudo the homes themselves are closed
        said = login.root(host, ("du", "-smc", "--", *(f"{shared.path}/home/{user}" for user in homes)))
        size_mib = int(said.splitlines()[-1].split()[0])
    what = f"folder {shared.path}/home on {host}"
    kept = KeptStorage(
        cluster=name, id=shared.path, what=what, size_mib=size_mib, usd_per_month=0.0, homes=homes
    )
    return (kept,)


def remove(login: Login, settings: OnpremSettings, kept: KeptStorage) -> None:
    """Remove the homes of a cluster's users."""
    host = settings.controller
    if lost := login.trust([host]):
        raise lost[host]
    pairs = [word for user, uid in kept.homes.items() for word in (user, str(uid))]
    login.root(host, ("sh", "-c", _REMOVE, "sh", kept.id, *pairs))
