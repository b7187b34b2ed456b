"""What a cluster leaves on its shared folder when its machines are released: the homes of its users.

They stay in any case. Kept, they are listed, and `down --storage` removes them: nothing but what jobs had in
them where the account is somebody's own. On an NFS server of the user's they are the user's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from clusterctl.providers.onprem.login import Login
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.onprem import OnpremSettings

# PATH USER...: their homes with the owner's uid, then the size of all.
_LOOK: Final = """
cd "$1/home" 2>/dev/null || exit 0
shift
for user do
    if [ -d "$user" ] && [ ! -L "$user" ]; then
        stat -c 'home %n %u' -- "$user"
        du -sm -- "$user"
    fi
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
    lines = login.root(host, ("sh", "-c", _LOOK, "sh", shared.path, *users)).splitlines()
    rows = [line.split() for line in lines]
    homes = {row[1]: int(row[2]) for row in rows if row[0] == "home"}
    if not homes:
        return ()
    size_mib = sum(int(row[0]) for row in rows if row[0] != "home")
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
