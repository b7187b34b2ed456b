"""Who calls clusterctl, and the defaults of a spec that depend on it."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from clusterctl.spec.models import ClusterSpec, User

FALLBACK_USER: Final = User(name="hpc", uid=10_000)


@dataclass(frozen=True, slots=True)
class CurrentUser:
    """The account that runs clusterctl. ``name`` is empty for a uid without an account."""

    name: str
    uid: int

    @classmethod
    def current(cls) -> CurrentUser:
        """Whom this process runs as. Under sudo that is root, not the one who called sudo."""
        uid = os.geteuid()
        try:
            return cls(pwd.getpwuid(uid).pw_name, uid)
        except KeyError:
            return cls("", uid)


def resolve_users(spec: ClusterSpec, caller: CurrentUser) -> ClusterSpec:
    """The spec with its caller-dependent default filled in: ``users``.

    That is the caller, or `hpc` when the caller is root or can't be an account of the nodes.
    """
    if spec.users:
        return spec
    return spec.model_copy(update={"users": (_as_user(caller) or FALLBACK_USER,)})


def job_user_notes(spec: ClusterSpec, caller: CurrentUser) -> tuple[str, ...]:
    """What the user should know about a resolved spec: that jobs don't run under the caller's own name."""
    if caller.uid == 0 or _as_user(caller) or spec.users != (FALLBACK_USER,):
        return ()
    who = f"{caller.name!r} (uid {caller.uid})" if caller.name else f"uid {caller.uid}"
    name, uid = FALLBACK_USER.name, FALLBACK_USER.uid
    return (
        f"{who} can't be an account of the nodes: jobs run as {name} (uid {uid}); name others under users",
    )


def _as_user(caller: CurrentUser) -> User | None:
    """The caller as an account of the nodes, if that can be: neither root nor any other odd one can."""
    try:
        return User(name=caller.name, uid=caller.uid)
    except ValidationError:
        return None
