#!/usr/bin/python
"""Ansible module: what clusterctl has in the home of a job user, made with that user's rights.

A job can make anything of what is in its home: a link to /etc, a pipe, terabytes. Root follows none of it.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.user_rights import acting, read_regular

DOCUMENTATION = r"""
module: user_home
short_description: What clusterctl has in the home of a job user
description:
  - Makes keys that may log in, a pair of keys, a folder or a link in the home of an account, with that
    account's rights. A folder C(.ssh) has the mode 0700 then, files with keys 0600.
  - What is in the way is renamed to C(NAME.aside-clusterctl). A C(.ssh) that is a link to a folder of the
    account's own is kept.
options:
  name:
    description: The account.
    type: str
    required: true
  home:
    description: Its home, unless that is the one in the table of accounts.
    type: path
  authorized_keys:
    description: Public keys that may log in; others in the file stay.
    type: list
    elements: str
    default: []
  key_options:
    description: Options of those keys.
    type: str
    default: ""
  key_pair:
    description: Name of a pair of keys in C(.ssh), made unless it is there.
    type: str
  key_comment:
    description: Comment of a pair that is made.
    type: str
    default: ""
  folder:
    description: Name of a folder in the home, with the mode 0700.
    type: str
  link:
    description: Name of a link in the home.
    type: str
  target:
    description: Where the link leads.
    type: path
"""

MOST_BYTES = 1 << 20  # of a file with keys
PUBLIC_KEY = re.compile(rb"ssh-ed25519 [A-Za-z0-9+/]+=*(?: [^\r\n]*)?\n?")


class Home:
    """A home, changed with the rights of its account: all but ``adopt`` is called with these."""

    def __init__(self, module: AnsibleModule, account: pwd.struct_passwd, path: str) -> None:
        self._module = module
        self._account = account
        self._path = path
        self.changed = False

    def adopt(self, name: str) -> None:
        """Give the account a folder that root has put into its home, or that only root can put there."""
        place = f"{self._path}/{name}"
        with acting(self._account.pw_uid, self._account.pw_gid):
            closed = not os.access(self._path, os.W_OK | os.X_OK, effective_ids=True)
        if closed and not os.path.lexists(place) and self._may_change():
            Path(place).mkdir(stat.S_IRWXU)
        try:
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # a link, or no folder: nothing of root's
            return
        try:
            if os.fstat(fd).st_uid == 0 != self._account.pw_uid and self._may_change():
                os.fchown(fd, self._account.pw_uid, self._account.pw_gid)
        finally:
            os.close(fd)

    def folder(self, name: str) -> str:
        """Have a folder of the account's there, with the mode 0700; its path."""
        place = f"{self._path}/{name}"
        with suppress(OSError):
            found = Path(place).stat()  # through a link, which may lead to a folder of the account's own
            if stat.S_ISDIR(found.st_mode) and found.st_uid == self._account.pw_uid:
                if stat.S_IMODE(found.st_mode) != stat.S_IRWXU and self._may_change():
                    Path(place).chmod(stat.S_IRWXU)
                return place
        if self._may_change():
            self._move_aside(place)
            Path(place).mkdir(stat.S_IRWXU)
            Path(place).chmod(stat.S_IRWXU)
            self._module.set_default_selinux_context(place, False)
        return place

    def authorize(self, keys: list[str], options: str) -> None:
        """Have keys in the file of those that may log in."""
        place = f"{self.folder('.ssh')}/authorized_keys"
        text = _read(place, follow=True)
        lines = (text or b"").decode(errors="surrogateescape").splitlines()
        wanted = list(lines)
        for key in keys:
            _add_key(wanted, key.strip(), options)
        if wanted != lines or text is None or not self._is_own(place, 0o600):
            self._write(place, "".join(f"{line}\n" for line in wanted), 0o600, kept=text is not None)

    def public_key(self, name: str) -> str:
        """The public key of a pair in C(.ssh); "" where there is no pair."""
        private = f"{self.folder('.ssh')}/{name}"
        found = _read(f"{private}.pub")
        whole = _read(private) and found and PUBLIC_KEY.fullmatch(found) and self._is_own(private, 0o600)
        return found.decode(errors="replace").strip() if found and whole else ""

    def write_pair(self, name: str, private: str, public: str) -> None:
        """Have this pair in C(.ssh)."""
        place = f"{self.folder('.ssh')}/{name}"
        self._write(place, private, 0o600)
        self._write(f"{place}.pub", public, 0o644)

    def link(self, name: str, target: str) -> None:
        """Have a link there."""
        place = f"{self._path}/{name}"
        if os.path.islink(place) and os.readlink(place) == target:  # noqa: PTH114, PTH115
            return
        if self._may_change():
            self._move_aside(place)
            Path(place).symlink_to(target)

    def _may_change(self) -> bool:
        self.changed = True
        return not self._module.check_mode

    def _is_own(self, place: str, mode: int) -> bool:
        """Whether it is a file of the account's, no link, with that mode."""
        found = os.lstat(place)
        own = stat.S_ISREG(found.st_mode) and found.st_uid == self._account.pw_uid
        return own and stat.S_IMODE(found.st_mode) == mode

    def _write(self, place: str, text: str, mode: int, *, kept: bool = False) -> None:
        """Have a file there; what was there is moved aside, unless the text has what it held."""
        if not self._may_change():
            return
        fresh = f"{place}.clusterctl-{secrets.token_hex(4)}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", errors="surrogateescape") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
        if not kept:
            self._move_aside(place)
        Path(fresh).replace(place)
        self._module.set_default_selinux_context(place, False)

    def _move_aside(self, place: str) -> None:
        if not os.path.lexists(place):
            return
        aside, number = f"{place}.aside-clusterctl", 0
        while os.path.lexists(aside):
            number += 1
            aside = f"{place}.aside-clusterctl.{number}"
        os.rename(place, aside)  # noqa: PTH104
        self._module.warn(f"{place} was in the way: it is {aside} now")


def _read(place: str, *, follow: bool = False) -> bytes | None:
    """The content of a file; None where there is none that can be read."""
    try:
        return read_regular(place, MOST_BYTES, follow=follow)
    except OSError:
        return None


def _add_key(lines: list[str], key: str, options: str) -> None:
    """Have a line with a key and its options in place of one with other options, else at the end."""
    kind, blob = key.split()[:2]
    line = f"{options} {key}" if options else key
    for number, there in enumerate(lines):
        before, found, _ = there.partition(f"{kind} {blob}")
        if found and not before.startswith("#"):
            if before.strip() != options:
                lines[number] = line
            return
    lines.append(line)


def make_pair(module: AnsibleModule, comment: str) -> tuple[str, str]:
    """A new pair of keys: the private one and the public one."""
    fresh = Path(module.tmpdir, secrets.token_hex(8))
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(fresh)]
    module.run_command(argv, check_rc=True)
    return fresh.read_text(), Path(f"{fresh}.pub").read_text()


def converge(module: AnsibleModule, account: pwd.struct_passwd) -> dict[str, Any]:
    """Have all in the home that is asked for; what the module returns."""
    asked, answer = module.params, {}
    home = Home(module, account, asked["home"] or account.pw_dir)
    needs_ssh = asked["authorized_keys"] or asked["key_pair"]
    for name in (".ssh" if needs_ssh else None, asked["folder"]):
        if name:
            home.adopt(name)
    with acting(account.pw_uid, account.pw_gid):
        if asked["authorized_keys"]:
            home.authorize(asked["authorized_keys"], asked["key_options"])
        if asked["folder"]:
            home.folder(asked["folder"])
        if asked["link"]:
            home.link(asked["link"], asked["target"])
        public = home.public_key(asked["key_pair"]) if asked["key_pair"] else ""
    if asked["key_pair"]:
        answer["public_key"] = public
        home.changed |= not public
        if not public and not module.check_mode:
            pair = make_pair(module, asked["key_comment"])
            with acting(account.pw_uid, account.pw_gid):
                home.write_pair(asked["key_pair"], *pair)
            answer["public_key"] = pair[1].strip()
    return {"changed": home.changed, **answer}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "home": {"type": "path"},
            "authorized_keys": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "key_options": {"type": "str", "default": "", "no_log": False},
            "key_pair": {"type": "str", "no_log": False},
            "key_comment": {"type": "str", "default": "", "no_log": False},
            "folder": {"type": "str"},
            "link": {"type": "str"},
            "target": {"type": "path"},
        },
        required_together=[("link", "target")],
        supports_check_mode=True,
    )
    name = module.params["name"]
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        if module.check_mode:
            module.exit_json(changed=True, public_key="")  # it would be made before
        module.fail_json(msg=f"there is no account {name}")
    try:
        answer = converge(module, account)
    except OSError as exc:
        module.fail_json(msg=f"{exc.filename}: {exc.strerror}; see that {name} can write to its home")
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
