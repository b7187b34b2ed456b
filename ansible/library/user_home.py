#!/usr/bin/python
"""Ansible module: creates clusterctl's files in the home of the user of jobs, with the rights of
this user.

A job can replace any file in its home by a link to /etc, a pipe, or huge data. Root never follows
these.
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

from ansible.module_utils.user_rights import acting_as, read_regular

DOCUMENTATION = r"""
module: user_home
short_description: Files of clusterctl in the home of a job user
description:
  - Creates authorized keys, a key pair, a folder or a link in the home of an account, with that account's
    rights. The folder C(.ssh) gets the mode 0700, files with keys 0600.
  - Files that are in the way are renamed to C(NAME.aside-clusterctl). A C(.ssh) that is a link to another
    folder of the account is kept.
options:
  name:
    description: The account. Required without C(homes).
    type: str
  home:
    description: Home of the account. Default is the home in the password database.
    type: path
  authorized_keys:
    description: Public keys that may log in. Other keys in the file stay.
    type: list
    elements: str
    default: []
  key_options:
    description: Options of the authorized keys.
    type: str
    default: ""
  key_mark:
    description:
      - End of the lines in C(.ssh/authorized_keys) that only this module manages. Such lines are written as
        they are in C(authorized_keys), and removed if they are missing there.
    type: str
    default: ""
  homes:
    description:
      - Folder with a folder for each account, by name. Lines of C(key_mark) are removed from the keys of all
        these accounts, except those in C(current).
    type: path
  current:
    description: Accounts that keep these lines.
    type: list
    elements: str
    default: []
  key_pair:
    description: Name of a key pair in C(.ssh), created unless it exists.
    type: str
  key_comment:
    description: Comment of a new key pair.
    type: str
    default: ""
  folder:
    description: Name of a folder in the home, with the mode 0700.
    type: str
  link:
    description: Name of a link in the home.
    type: str
  target:
    description: Target of the link.
    type: path
"""

# The largest file with keys that is read.
MOST_BYTES = 1 << 20
PUBLIC_KEY = re.compile(rb"ssh-ed25519 [A-Za-z0-9+/]+=*(?: [^\r\n]*)?\n?")


class Home:
    """The home folder of an account. Call all methods except ``adopt`` with the rights of the
    account.
    """

    def __init__(self, module: AnsibleModule, account: pwd.struct_passwd, path: str) -> None:
        self._module = module
        self._account = account
        self._path = path
        self.changed = False

    def adopt(self, name: str) -> None:
        """Make the account the owner of a folder in its home. Create the folder if the account
        can't.
        """
        place = f"{self._path}/{name}"
        with acting_as(self._account.pw_uid, self._account.pw_gid):
            closed = not os.access(self._path, os.W_OK | os.X_OK, effective_ids=True)
        if closed and not os.path.lexists(place) and self._may_change():
            Path(place).mkdir(stat.S_IRWXU)
        try:
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            # A link or a file is not root's work.
            return
        try:
            if os.fstat(fd).st_uid == 0 != self._account.pw_uid and self._may_change():
                os.fchown(fd, self._account.pw_uid, self._account.pw_gid)
        finally:
            os.close(fd)

    def folder(self, name: str) -> str:
        """Create a folder with the mode 0700 in the home, unless it exists, and return its path."""
        place = f"{self._path}/{name}"
        with suppress(OSError):
            # A link to another folder of the account is followed.
            status = Path(place).stat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == self._account.pw_uid:
                if stat.S_IMODE(status.st_mode) != stat.S_IRWXU and self._may_change():
                    Path(place).chmod(stat.S_IRWXU)
                return place
        if self._may_change():
            self._move_aside(place)
            Path(place).mkdir(stat.S_IRWXU)
            Path(place).chmod(stat.S_IRWXU)
            self._module.set_default_selinux_context(place, False)
        return place

    def authorize(self, keys: list[str], options: str, mark: str) -> None:
        """Add keys with these options to .ssh/authorized_keys. Remove other lines that end in
        ``mark``.
        """
        old_text = _read(f"{self._path}/.ssh/authorized_keys", follow=True) or b""
        if not keys and mark.encode() not in old_text:
            return
        place = f"{self.folder('.ssh')}/authorized_keys"
        text = _read(place, follow=True)
        lines = (text or b"").decode(errors="surrogateescape").splitlines()
        new_lines = [line for line in lines if line in keys or not (mark and line.endswith(mark))]
        for key in keys:
            if mark and key.endswith(mark):
                if key not in new_lines:
                    new_lines.append(key)
            else:
                _add_key(new_lines, key.strip(), options)
        if new_lines != lines or text is None or not self._is_own(place, 0o600):
            self._write(
                place, "".join(f"{line}\n" for line in new_lines), 0o600, kept=text is not None
            )

    def public_key(self, name: str) -> str:
        """Return the public key of pair ``name`` in .ssh; "" if a file of the pair is missing or
        invalid.
        """
        private = f"{self.folder('.ssh')}/{name}"
        public = _read(f"{private}.pub")
        if not (
            _read(private)
            and public
            and PUBLIC_KEY.fullmatch(public)
            and self._is_own(private, 0o600)
        ):
            return ""
        return public.decode(errors="replace").strip()

    def write_pair(self, name: str, private: str, public: str) -> None:
        place = f"{self.folder('.ssh')}/{name}"
        self._write(place, private, 0o600)
        self._write(f"{place}.pub", public, 0o644)

    def link(self, name: str, target: str) -> None:
        """Create a link in the home to ``target``. Rename an existing file or other link of this
        name.
        """
        place = f"{self._path}/{name}"
        if os.path.islink(place) and os.readlink(place) == target:
            return
        if self._may_change():
            self._move_aside(place)
            Path(place).symlink_to(target)

    def _may_change(self) -> bool:
        self.changed = True
        return not self._module.check_mode

    def _is_own(self, place: str, mode: int) -> bool:
        status = os.lstat(place)
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == self._account.pw_uid
        return is_own and stat.S_IMODE(status.st_mode) == mode

    def _write(self, place: str, text: str, mode: int, *, kept: bool = False) -> None:
        """Write a file. Rename an existing file, unless ``kept``: the new text contains the old
        text.
        """
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
        aside = f"{place}.aside-clusterctl"
        number = 0
        while os.path.lexists(aside):
            number += 1
            aside = f"{place}.aside-clusterctl.{number}"
        os.rename(place, aside)
        self._module.warn(f"{place} was in the way and was renamed to {aside}")


def _read(place: str, *, follow: bool = False) -> bytes | None:
    try:
        return read_regular(place, MOST_BYTES, follow=follow)
    except OSError:
        return None


def _add_key(lines: list[str], key: str, options: str) -> None:
    """Append a key with its options. If a line has the key with other options, replace this line
    instead.
    """
    kind, blob = key.split()[:2]
    line = f"{options} {key}" if options else key
    for number, old_line in enumerate(lines):
        old_options, separator, _ = old_line.partition(f"{kind} {blob}")
        if separator and not old_options.startswith("#"):
            if old_options.strip() != options:
                lines[number] = line
            return
    lines.append(line)


def make_pair(module: AnsibleModule, comment: str) -> tuple[str, str]:
    """Return a new SSH key pair as texts: (private key, public key)."""
    fresh = Path(module.tmpdir, secrets.token_hex(8))
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(fresh)]
    module.run_command(argv, check_rc=True)
    return fresh.read_text(), Path(f"{fresh}.pub").read_text()


def converge(module: AnsibleModule, account: pwd.struct_passwd) -> dict[str, Any]:
    """Create the files, folders and links that the parameters ask for, and return the module's
    result.
    """
    params = module.params
    answer = {}
    home = Home(module, account, params["home"] or account.pw_dir)
    needs_ssh = params["authorized_keys"] or params["key_pair"]
    for name in (".ssh" if needs_ssh else None, params["folder"]):
        if name:
            home.adopt(name)
    with acting_as(account.pw_uid, account.pw_gid):
        if params["authorized_keys"] or params["key_mark"]:
            home.authorize(params["authorized_keys"], params["key_options"], params["key_mark"])
        if params["folder"]:
            home.folder(params["folder"])
        if params["link"]:
            home.link(params["link"], params["target"])
        public = home.public_key(params["key_pair"]) if params["key_pair"] else ""
    if params["key_pair"]:
        answer["public_key"] = public
        home.changed |= not public
        if not public and not module.check_mode:
            pair = make_pair(module, params["key_comment"])
            with acting_as(account.pw_uid, account.pw_gid):
                home.write_pair(params["key_pair"], *pair)
            answer["public_key"] = pair[1].strip()
    return {"changed": home.changed, **answer}


def remove_former_keys(module: AnsibleModule) -> bool:
    """Remove the lines that end in ``key_mark`` from the keys of accounts that are not current."""
    params = module.params
    changed = False
    names = os.listdir(params["homes"]) if os.path.isdir(params["homes"]) else []
    for name in sorted({*names} - {*params["current"]}):
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            # A home on kept storage may lack its account.
            continue
        home = Home(module, account, account.pw_dir)
        with acting_as(account.pw_uid, account.pw_gid):
            home.authorize([], "", params["key_mark"])
        changed |= home.changed
    return changed


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str"},
            "home": {"type": "path"},
            "authorized_keys": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "key_options": {"type": "str", "default": "", "no_log": False},
            "key_mark": {"type": "str", "default": "", "no_log": False},
            "homes": {"type": "path"},
            "current": {"type": "list", "elements": "str", "default": []},
            "key_pair": {"type": "str", "no_log": False},
            "key_comment": {"type": "str", "default": "", "no_log": False},
            "folder": {"type": "str"},
            "link": {"type": "str"},
            "target": {"type": "path"},
        },
        required_together=[("link", "target")],
        required_one_of=[("name", "homes")],
        mutually_exclusive=[("name", "homes")],
        supports_check_mode=True,
    )
    name = module.params["name"]
    account = None
    try:
        account = pwd.getpwnam(name) if name else None
    except KeyError:
        if module.check_mode:
            # An earlier task would create the account.
            module.exit_json(changed=True, public_key="")
        module.fail_json(msg=f"the account {name} does not exist")
    try:
        answer = converge(module, account) if account else {"changed": remove_former_keys(module)}
    except OSError as exc:
        module.fail_json(
            msg=f"{exc.filename}: {exc.strerror}\nfix: check that the account can write to its home"
        )
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
