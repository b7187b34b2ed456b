"""The user's login to on-prem hosts: passwords, host keys, and refusals of ssh and sudo."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    ProvisionError,
    TransportError,
    UnreachableError,
)
from clusterctl.providers.base import OfferedKey, fingerprint, reject_unknown_keys
from clusterctl.providers.onprem.access import (
    HostKeys,
    JumpHost,
    SshHost,
    access_config,
    as_ssh_resolves,
    explain,
    raise_failures,
)
from clusterctl.providers.onprem.login import Login
from clusterctl.spec.hosts import OnpremHost
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.workspace import Workspace
from clusterctl.transport.ssh import Connections, SSHTransport
from clusterctl.transport.sudo import Passwords, SudoError
from clusterctl.util.process import Result, call_on_hosts
from tests.support.messages import condition
from tests.support.messages import refused as rejected

PASSWORD = 'it\'s "a" $secret'  # noqa: S105


def access(
    played: Path, password: str | None = None, asked: list[str] | None = None, **hosts: str
) -> Login:
    """Return a login to hosts whose sudo does what ``hosts`` says. asked: gets a line for each
    question.
    """
    for name, how in hosts.items():
        (played / name).write_text(how)
    machines = {name: OnpremHost(user="rocky") for name in hosts}
    login = Login(machines, Workspace(played))

    def ask() -> str | None:
        (asked if asked is not None else []).append("?")
        return password

    passwords = Passwords(ask)
    for name in hosts:
        transport = login._connections.to(name)
        assert isinstance(transport, SSHTransport)
        transport.passwords = passwords
    return login


def test_stdin_arrives_whole_with_and_without_a_sudo_password(played: Path) -> None:
    data = bytes(range(256)) * 100
    way = access(
        played,
        PASSWORD,
        a="free",
        b=PASSWORD,
        c="requiretty free",
        d=f"requiretty {PASSWORD}",
        e=f"trial {PASSWORD}",
    )
    for host in way.hosts:
        assert way.root(host, ("sha256sum",), data) == way.run(host, ("sha256sum",), data)
        assert way.root(host, ("echo", PASSWORD)) == f"{PASSWORD}\n"


@pytest.mark.parametrize(
    ("how", "password", "code"),
    [
        ("other", PASSWORD, "sudo/wrong-password"),
        (PASSWORD, None, "sudo/password"),
        ("nobody", PASSWORD, "sudo/refused"),
        ("requiretty other", PASSWORD, "sudo/wrong-password"),
        ("requiretty nobody", PASSWORD, "sudo/refused"),
    ],
)
def test_failed_sudo_has_a_code_and_a_fix(
    played: Path, how: str, password: str | None, code: str
) -> None:
    with pytest.raises(SudoError) as caught:
        access(played, password, a=how).root("a", ("true",))
    (failure,) = caught.value.failures
    assert (condition(failure), failure.host) == (code, "a")
    assert failure.fix
    assert PASSWORD not in f"{caught.value}{failure}"


def test_password_is_asked_only_if_a_host_needs_it_and_bad_hosts_are_named(played: Path) -> None:
    """Hosts with another password, and those that no password helps, have errors of their own."""
    asked: list[str] = []
    way = access(
        played, PASSWORD, asked, a="free", b=PASSWORD, c="other", d="nobody", e="requiretty free"
    )
    assert way.try_sudo(["a", "e"]) == {}
    assert asked == []
    assert way.try_sudo(["b"]) == {}
    done, failed = call_on_hosts("abcde", lambda host: way.root(host, ("echo", host)))
    assert done == {"a": "a\n", "b": "b\n", "e": "e\n"}
    assert {host: condition(exc) for host, exc in failed.items()} == {
        "c": "sudo/wrong-password",
        "d": "sudo/refused",
    }
    assert len(asked) == 1


def test_refused_password_is_asked_once_again_and_reaches_no_other_host(played: Path) -> None:
    asked: list[str] = []
    way = access(played, "mistyped", asked, a=PASSWORD, b=PASSWORD)
    first, second = way.try_sudo(["a"]), way.try_sudo(["b"])
    assert (first["a"].about, second["b"].about) == ("wrong-password", "password")
    assert len(asked) == 2


@pytest.mark.parametrize(("how", "questions"), [(f"denies {PASSWORD}", 1), ("expired", 2)])
def test_password_reaches_the_next_host_only_once_a_host_has_accepted_it(
    played: Path, how: str, questions: int
) -> None:
    """sudo refuses a command after the password; other words do not tell of it."""
    asked: list[str] = []
    way = access(played, PASSWORD, asked, a=how, b=PASSWORD)
    first, second = way.try_sudo(["a"]), way.try_sudo(["b"])
    assert (first["a"].about, second, len(asked)) == ("refused", {}, questions)


def test_host_that_hangs_after_login_is_unreachable(played: Path) -> None:
    (played / "a").write_text("free")
    way = Login({"a": OnpremHost(user="rocky")}, Workspace(played), answer_s=0.2)
    with rejected("unreachable", UnreachableError) as caught:
        way.root("a", ("sleep", "3600"))
    assert "0.2 s" in caught.value.why


def test_owners_ssh_configuration_fills_in_what_the_spec_leaves_out(played: Path) -> None:
    """Played: `ssh -G`, with an owner whose configuration has the host gpu1."""
    said = "#!/bin/sh\ncase $* in *HostName=*) name=10.0.0.9;; *) name=10.1.1.1;; esac\n"
    ssh = played.parent / "bin/ssh"
    ssh.write_text(f"{said}printf 'user marta\\nhostname %s\\nport 2222\\n' $name\n")
    hosts = {"gpu1": {}, "gpu2": {"address": "10.0.0.9"}, "desk": {"address": "localhost"}}
    given = {"type": "onprem", "controller": "gpu1", "hosts": hosts}
    resolved = as_ssh_resolves(OnpremSettings.model_validate(given))
    found = {name: (one.user, one.address, one.port) for name, one in resolved.machines.items()}
    assert found == {
        "gpu1": ("marta", "10.1.1.1", 2222),
        "gpu2": ("marta", "10.0.0.9", 2222),
        "desk": (None, "localhost", 22),
    }
    assert resolved.jumps == {}


@pytest.mark.parametrize(
    ("jump", "found"),
    [
        ("gate", JumpHost("gate", None, None)),
        ("me@gate.example.org:2222", JumpHost("gate.example.org", "me", "2222")),
        # ssh itself connects through several.
        ("me@a,b", None),
    ],
)
def test_jump_host_is_that_of_the_owners_ssh_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: str, found: JumpHost | None
) -> None:
    """By the real `ssh -G`, with another file than the owner's."""
    own = tmp_path / "config"
    own.write_text(f"Host gpu1\n    ProxyJump {jump}\n")
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {own} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    hosts = {"gpu1": {"address": "10.0.0.1"}, "gpu2": {"address": "10.0.0.2"}}
    given = {"type": "onprem", "controller": "gpu1", "hosts": hosts}
    resolved = as_ssh_resolves(OnpremSettings.model_validate(given))
    assert resolved.jumps == ({"gpu1": found} if found else {})


def test_mistake_in_the_owners_ssh_configuration_is_named(played: Path) -> None:
    """Played: `ssh -G`, with OpenSSH 9.2's words."""
    said = "/h/a/.ssh/config: terminating, 1 bad configuration options"
    (played.parent / "bin/ssh").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 255\n")
    given = {"type": "onprem", "controller": "gpu1", "hosts": {"gpu1": {}}}
    with rejected("file-invalid/ssh-config", TransportError) as caught:
        as_ssh_resolves(OnpremSettings.model_validate(given))
    assert caught.value.where == "/h/a/.ssh/config"


def test_failed_command_is_no_failed_login(played: Path) -> None:
    with pytest.raises(CommandError) as caught:
        access(played, a="free").root("a", ("sh", "-c", "echo no >&2; exit 3"))
    assert caught.value.rc == 3


def test_call_on_hosts_reports_each_failure(played: Path) -> None:
    way = access(played, a="free", b="nobody", c="free", d=PASSWORD)
    done, failed = call_on_hosts(list("abcd"), lambda host: way.root(host, ("echo", host)))
    assert done == {"a": "a\n", "c": "c\n"}
    with pytest.raises(ProvisionError) as caught:
        raise_failures(failed, summary="login failed", then="go on")
    assert [(f.host, condition(f)) for f in caught.value.failures] == [
        ("b", "sudo/refused"),
        ("d", "sudo/password"),
    ]
    raise_failures({}, summary="", then="")


def test_explain_names_a_key_file_that_other_users_may_read() -> None:
    """OpenSSH 9.2 then goes on without the key, so that the login is refused, too."""
    said = (
        "Permissions 0644 for '/home/a/.ssh/x' are too open.\n"
        "This private key will be ignored.\n"
        'Load key "/home/a/.ssh/x": bad permissions\n'
        "rocky@10.0.0.9: Permission denied (publickey,password).\n"
    )
    error = explain(said, host="gpu9", user="rocky", address="10.0.0.9")
    assert error is not None
    (failure,) = error.failures
    assert condition(failure) == "login-refused/key-file"
    assert "chmod 600 /home/a/.ssh/x" in failure.fix


CLOSED = "kex_exchange_identification: Connection closed by remote host"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("ssh: Could not resolve hostname gpu9: Name or service not known", "unreachable"),
        ("ssh: connect to host 10.0.0.9 port 22: Connection refused", "unreachable"),
        ("ssh: connect to host 10.0.0.9 port 22: No route to host", "unreachable"),
        ("Connection timed out during banner exchange", "unreachable"),
        # The second is that of a shared connection. ssh's line about its own follows.
        (f"stdio forwarding failed\n{CLOSED}", "unreachable/jump-host"),
        (
            f"Stdio forwarding request failed: Session open refused by peer\n{CLOSED}",
            "unreachable/jump-host",
        ),
        ("rocky@10.0.0.9: Permission denied (publickey,password).", "login-refused"),
        # By OpenSSH 9.2: of servers with Kerberos alone and with a second factor, and of an agent that
        # waited for a touch.
        (
            "rocky@10.0.0.9: Permission denied (gssapi-keyex,gssapi-with-mic).",
            "login-refused/kerberos",
        ),
        ("rocky@10.0.0.9: Permission denied (keyboard-interactive).", "login-refused/login-asks"),
        (
            "rocky@10.0.0.9: Permission denied (publickey,gssapi-with-mic,password).",
            "login-refused",
        ),
        (
            'sign_and_send_pubkey: signing failed for ED25519-SK "" from agent: agent refused operation\n'
            "rocky@10.0.0.9: Permission denied (publickey).",
            "login-refused/key-not-signed",
        ),
        (
            'sign_and_send_pubkey: signing failed for ED25519-SK "/h/a/.ssh/id_sk": device not found\n'
            "rocky@10.0.0.9: Permission denied (publickey).",
            "login-refused/key-not-signed",
        ),
        ("Host key verification failed.", "host-key"),
        ('Load key "/home/a/.ssh/x": error in libcrypto', "login-refused/key-file"),
    ],
)
def test_explain_finds_causes_in_messages_of_ssh(said: str, code: str) -> None:
    error = explain(f"{said}\n", host="gpu9", user="rocky", address="10.0.0.9")
    assert error is not None
    assert condition(error.failures[0]) == code
    assert "{" not in f"{error.why}{error.fix}"


@pytest.mark.parametrize(("kind", "wants_a_touch"), [("ED25519-SK", True), ("RSA", False)])
def test_only_a_security_key_wants_a_touch(kind: str, wants_a_touch: bool) -> None:
    """A locked agent refuses other keys, too."""
    said = f'signing failed for {kind} "/h/k" from agent: agent refused operation\n'
    error = explain(said, host="gpu9", user="rocky", address="10.0.0.9")
    assert error is not None
    assert (condition(error), "touch" in error.fix) == (
        "login-refused/key-not-signed",
        wants_a_touch,
    )


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("env: 'sudo': No such file or directory", "sudo/refused"),
        (
            "Sorry, user rocky is not allowed to execute '/usr/bin/sh -c :' as root on gpu9.",
            "sudo/refused",
        ),
        ("sudo: sorry, you must have a tty to run sudo", "sudo/terminal"),
        ("sudo: a word that no rule knows", "sudo/refused"),
    ],
)
def test_refusals_of_sudo_have_a_code(said: str, code: str) -> None:
    with rejected(code, SudoError, "gpu9"):
        Passwords().way_to("gpu9", lambda _argv, _stdin: Result(1, "", said))


def test_changed_host_key_names_the_offered_key() -> None:
    offered = "SHA256:EpTvcnZJRrZj5lZuSTQ6RxeFRiYGLpCfpTjYgNFnEVU"
    said = (
        "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n"
        "sent by the remote host is\n"
        f"{offered}.\n"
    )
    error = explain(said + "Host key verification failed.\n", host="a", user="b", address="c")
    assert error is not None
    assert "ssh-keygen -R" in error.fix
    assert offered in error.why


def test_explain_of_an_unknown_message_is_none() -> None:
    assert explain("something else\n", host="a", user="b", address="c") is None


def test_access_config_is_read_by_ssh(tmp_path: Path) -> None:
    machines = {
        "gpu1": OnpremHost(
            address="10.0.0.1",
            port=2222,
            user="rocky",
            key=str(tmp_path / "a key"),
        ),
        "gpu2": OnpremHost(address="10.0.0.2", port=22),
    }
    workspace = Workspace(tmp_path / "a folder")
    workspace.root.mkdir()
    config = workspace.access_config
    by_jump = {"gpu1": ("ssh", "-F", str(config), "-W", "x", "gate")}
    jumps = [JumpHost("gate", "me", "23"), JumpHost("door", None, None)]
    config.write_text(access_config(machines, workspace, by_jump, {}, jumps))

    def of(host: str) -> dict[str, str]:
        said = subprocess.run(
            ["ssh", "-G", "-F", config, host], capture_output=True, text=True, check=True
        )
        return dict(line.partition(" ")[::2] for line in said.stdout.splitlines())

    gate = of("gate")
    gpu1 = of("gpu1")
    gpu2 = of("gpu2")
    assert (gpu1["hostname"], gpu1["port"], gpu1["user"]) == ("10.0.0.1", "2222", "rocky")
    assert (gpu1["identityfile"], gpu1["hostkeyalias"]) == (str(tmp_path / "a key"), "gpu1")
    assert shlex.split(gpu1["proxycommand"])[2::3] == [str(config), "gate"]
    assert (gate["hostname"], gate["user"], gate["port"]) == ("gate", "me", "23")
    # The owner's ssh trusts a jump host, or not.
    assert gate["userknownhostsfile"] != str(workspace.trusted_hosts)
    assert "proxycommand" not in gpu2
    sockets = [of(host).get("controlpath") for host in ("gpu1", "gpu2", "gate", "door")]
    assert len({*sockets, None}) == 5
    workspace.connections.rmdir()
    workspace.connections.symlink_to(tmp_path)
    assert "controlpath" not in of("gate")
    workspace.connections.unlink()
    for one in (gpu1, gpu2):
        assert (one["stricthostkeychecking"], one["batchmode"]) == ("true", "yes")
        assert one["userknownhostsfile"] == str(workspace.trusted_hosts)


def test_raise_failures_keeps_other_errors() -> None:
    def broken(_: str) -> None:
        raise ClusterctlError("broken", why="so", fix="mend it")

    _, failed = call_on_hosts(["a"], broken)
    with rejected("unreachable/hosts", ProvisionError) as caught:
        raise_failures(failed, summary="nothing works", then="")
    assert caught.value.failures[0].cause == "broken: so"


ADDRESS = "192.0.2.1"  # of nobody, by RFC 5737: who asks there finds out by waiting


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty known_hosts of the user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    return tmp_path / ".ssh/known_hosts"


def confirm(offered: Sequence[OfferedKey]) -> None:
    raise AssertionError(f"nobody is to be asked about {offered}")


@pytest.mark.parametrize("port", [22, 2222])
def test_host_key_in_a_hashed_known_hosts_file_is_found(
    known: Path, tmp_path: Path, port: int
) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True
    )
    key = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    known.write_text(f"{ADDRESS if port == 22 else f'[{ADDRESS}]:{port}'} {key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert ADDRESS not in known.read_text()
    keys = HostKeys(tmp_path / "kept", Connections(tmp_path / "ssh_config"))
    assert keys.trust({"node": OnpremHost(address=ADDRESS, port=port)}, confirm) == {}
    assert keys.key_of("node") == key


def test_host_key_of_a_pattern_is_found_and_a_revoked_key_is_not(
    known: Path, tmp_path: Path
) -> None:
    revoked = "ssh-ed25519 AAAAREVOKED"
    trusted = "ecdsa-sha2-nistp256 AAAATRUSTED"
    known.write_text(f"@revoked {ADDRESS} {revoked}\n192.0.2.* {trusted}\n")
    keys = HostKeys(tmp_path / "kept", Connections(tmp_path / "ssh_config"))
    assert keys.trust({"node": OnpremHost(address=ADDRESS)}, confirm) == {}
    assert keys.key_of("node") == trusted


def test_unresolved_name_is_not_a_dead_machine(known: Path, tmp_path: Path) -> None:
    machines = {"node": OnpremHost(address="no-such.invalid")}  # RFC 6761: nobody's
    (tmp_path / "ssh_config").write_text(access_config(machines, Workspace(tmp_path), {}, {}))
    lost = HostKeys(tmp_path / "kept", Connections(tmp_path / "ssh_config")).trust(
        machines, confirm
    )
    (failure,) = lost["node"].failures
    assert "name no-such.invalid" in failure.cause
    assert "address:" in failure.fix
    assert "switched on" not in str(lost["node"])
    assert not known.exists()


def test_unconfirmed_host_key_is_reported_with_other_obstacles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'K' * 43}"

    def offered(peer: SshHost, _: Connections) -> OfferedKey:
        return OfferedKey(peer.title, peer.address, key)

    monkeypatch.setattr("clusterctl.providers.onprem.access._offered_key", offered)
    keys = HostKeys(tmp_path / "kept", Connections(tmp_path / "ssh_config"))
    known = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'J' * 43}"
    machines = {
        "n1": OnpremHost(address="10.0.0.1", host_key=known),
        "n2": OnpremHost(address="10.0.0.2"),
    }
    with pytest.raises(ProvisionError):
        keys.trust(machines, reject_unknown_keys)
    lost = keys.trust(machines, reject_unknown_keys, find_all=True)
    assert [*lost] == ["n2"]
    (failure,) = lost["n2"].failures
    assert fingerprint(key) in failure.cause
    assert keys.key_of("n1") == known
    with pytest.raises(KeyError):
        keys.key_of("n2")


def test_confirmed_host_key_is_added_to_the_users_known_hosts_and_asked_once(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'K' * 43}"
    monkeypatch.setattr(
        "clusterctl.providers.onprem.access._offered_key",
        lambda peer, _: OfferedKey(peer.title, peer.address, key),
    )
    known.write_text("# the user's own, without a line feed")
    machines = {"n1": OnpremHost(address=ADDRESS, port=2222)}
    asked: list[OfferedKey] = []
    for _ in range(2):
        keys = HostKeys(tmp_path / "kept", Connections(tmp_path / "ssh_config"))
        assert keys.trust(machines, asked.extend) == {}
        assert keys.key_of("n1") == key
    others = HostKeys(tmp_path / "kept", Connections(tmp_path / "ssh_config"))
    assert others.trust({"n2": OnpremHost(address="192.0.2.2")}, asked.extend) == {}
    assert (tmp_path / "kept").read_text() == f"n1 {key}\nn2 {key}\n"
    assert [one.title for one in asked] == ["n1", "n2"]
    assert known.read_text().splitlines()[1:] == [f"[{ADDRESS}]:2222 {key}", f"192.0.2.2 {key}"]


def test_host_key_of_the_user_goes_before_that_of_the_spec(known: Path, tmp_path: Path) -> None:
    """The user has accepted the key of a machine that was installed anew."""
    mine, old = (f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{letter * 43}" for letter in "KJ")
    known.write_text(f"{ADDRESS} {mine}\n")
    keys = HostKeys(tmp_path / "kept", Connections(tmp_path / "ssh_config"))
    assert keys.trust({"n1": OnpremHost(address=ADDRESS, host_key=old)}, confirm) == {}
    assert keys.key_of("n1") == mine
