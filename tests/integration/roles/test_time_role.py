"""The role time keeps other time services, and lets chrony on nodes follow the controller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.plays import program, role_data, run_play, run_tasks

THEIRS = "pool 2.rocky.pool.ntp.org iburst\n"
UNIT = (
    r"LoadState=loaded\nActiveState=active\nUnitFileState=enabled\nNeedDaemonReload=no\n"
    r"InactiveExitTimestampMonotonic=0\n"
)


@pytest.mark.parametrize(
    ("installed", "refused"),
    [(["systemd-timesyncd"], True), (["systemd-timesyncd", "chrony"], False), (["bash"], False)],
)
def test_time_role_refuses_to_replace_another_time_service(
    tmp_path: Path, installed: list[str], refused: bool
) -> None:
    facts = {"packages": {name: [] for name in installed}}
    rivals = role_data("time", "vars/Debian.yml")["time_rivals"]
    done = run_tasks(tmp_path, "time", "rivals", facts=facts, time_rivals=rivals)
    assert (done.returncode != 0) is refused, done.stdout
    assert ("--now systemd-timesyncd`" in " ".join(done.stdout.split())) is refused


@dataclass(frozen=True)
class Clocks:
    """Hosts with chrony, all on this machine. Each has its own settings."""

    folder: Path
    hosts: tuple[str, ...]

    def say(self, **follows: bool) -> None:
        for host in self.hosts:
            leap = "Normal" if follows.get(host, True) else "Not synchronised"
            program(
                self.folder / host, "chronyc", f'[ "$*" = "-c tracking" ] && echo "0,,3,{leap}"'
            )
            program(self.folder / host, "systemctl", f"[ $1 = show ] || exit 0; printf '{UNIT}'")

    def configure(self, *hosts: str) -> dict[str, str]:
        """Run the role; the first host is the controller. Return host -> the commands to its
        chrony.
        """
        tasks = [{"ansible.builtin.include_role": {"name": "time", "tasks_from": "configure"}}]
        environment = {
            "PATH": "{{ folder }}/{{ inventory_hostname }}/bin:{{ lookup('env', 'PATH') }}"
        }
        play = {
            "hosts": "all",
            "gather_facts": False,
            "strategy": "clusterctl_linear",
            "environment": environment,
            "tasks": tasks,
        }
        config = "{{ folder }}/{{ inventory_hostname }}/chrony.conf"
        variables = {"folder": str(self.folder), "time_config": config, "time_in_containers": True}
        variables |= {
            "time_controller": "10.0.0.1",
            "time_network": "10.0.0.0/24",
            "time_pause_s": 0,
        }
        done = run_play(self.folder, play, hosts, known={}, **variables)
        assert done.returncode == 0, done.stdout
        files = {host: self.folder / host / "chrony.conf" for host in hosts}
        return {host: file.read_text().removeprefix(THEIRS) for host, file in files.items()}


def test_chrony_without_source_follows_the_controller(
    tmp_path: Path,
) -> None:
    clocks = Clocks(tmp_path, ("lead", "alone", "led"))
    for host in clocks.hosts:
        (tmp_path / host).mkdir()
        (tmp_path / host / "chrony.conf").write_text(THEIRS)
    clocks.say()
    assert clocks.configure("lead") == {"lead": ""}
    clocks.say(alone=False)
    result = clocks.configure(*clocks.hosts)
    assert {"allow 10.0.0.0/24", "local stratum 10"} <= set(result["lead"].splitlines())
    assert "\nserver 10.0.0.1 iburst\n" in result["alone"]
    assert not result["led"]
    clocks.say()
    again = clocks.configure("lead", "alone")
    assert again == {host: result[host] for host in again}
