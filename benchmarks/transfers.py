"""Transfers of files as clusterctl makes them, beside rsync and tar over a shared connection.

Raises a cluster of its own, transfers in turn, checks what arrived, and prints every round, medians
and ratios. Both sides use an open ssh connection, so that only the transfer counts.

Usage: python benchmarks/transfers.py [--rounds N] [--mb N] [--files N] [WHAT...]
WHAT: copies (put and get of a large file and of small files, and again), changed (a byte of the
large file), cut (put killed in the middle, and again), folders (of jobs with one file and with
2,000), runs (20 small ones). Default: all. Needs rsync.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.clusters import BIN, Cluster, raised
from support.rounds import machine, measure

from clusterctl.runs.fetch import RunSource, fetch_tree, sender
from clusterctl.scheduler.session import Session, connect_session
from clusterctl.state.inventory import job_inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.get import fetch
from clusterctl.transport.put import Upload, store_of
from clusterctl.transport.tree import ItemKind, hash_items, list_items

RUNS = 20
NOT_SLOWER = 1.1


@dataclass
class Bench:
    """A cluster with an open connection, and new folders here and there for each transfer."""

    cluster: Cluster
    session: Session
    mb: int
    files: int
    rounds: int
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def shell(self) -> list[str]:
        config = self.cluster.workspace / "ssh_config"
        return ["ssh", "-F", str(config), "-l", "hpc"]

    def here(self) -> Path:
        (new := self.cluster.folder / f"here-{next(self._numbers)}").mkdir()
        return new

    def there(self) -> str:
        new = f"bench/{next(self._numbers)}"
        self.ssh(f"mkdir -p {new}")
        return new

    def ssh(self, line: str) -> str:
        argv = [*self.shell, self.cluster.controller, line]
        return subprocess.run(
            argv, check=True, stdin=subprocess.DEVNULL, capture_output=True
        ).stdout.decode()

    def rsync(self, *words: str | Path) -> None:
        """Words that begin with a colon are paths on the controller."""
        ends = [f"{self.cluster.controller}{word}" if str(word)[:1] == ":" else word
                for word in words]  # fmt: skip
        subprocess.run(["rsync", "-e", shlex.join(self.shell), *ends], check=True)

    def push_tar(self, path: Path, folder: str) -> None:
        """Send a file or folder to a folder on the controller, by tar."""
        pack = ["tar", "-c", "-C", path.parent, path.name]
        unpack = [*self.shell, self.cluster.controller, f"tar -x -C {folder}"]
        self._pipe(pack, unpack)

    def pull_tar(self, words: str, folder: Path) -> None:
        """Fetch what `tar -c` packs with these words on the controller."""
        pack = [*self.shell, self.cluster.controller, f"tar -c {words}"]
        self._pipe(pack, ["tar", "-x", "-C", folder])

    def _pipe(self, first: Sequence[str | Path], second: Sequence[str | Path]) -> None:
        with subprocess.Popen(first, stdout=subprocess.PIPE) as packed:
            subprocess.run(second, stdin=packed.stdout, check=True)
        assert packed.returncode == 0

    def make_large(self) -> Path:
        path = self.here() / "large"
        with path.open("wb") as file:
            for _ in range(self.mb):
                file.write(os.urandom(1_000_000))
        return path

    def make_small(self, count: int) -> Path:
        top = self.here() / "small"
        for number in range(count):
            folder = top / str(number // 100)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(number)).write_bytes(secrets.token_bytes(2000))
        return top

    def put(self, path: Path, folder: str) -> int:
        return Upload(self.session.transport).into(list_items([path])[0], folder).sent_bytes

    def forget(self) -> None:
        """Remove what was transferred, and write the rest to the disk."""
        for folder in self.cluster.folder.glob("here-*"):
            shutil.rmtree(folder)
        self.ssh("rm -rf bench; sync")


def timed(call: Callable[[], object]) -> float:
    os.sync()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copies(bench: Bench) -> None:
    """Put and get, each to a new folder; then the same again, when nothing has changed."""
    _copies(bench, f"{bench.mb} MB", bench.make_large())
    bench.ssh("rm -rf bench; sync")
    _copies(bench, f"{bench.files:,} files", bench.make_small(bench.files))


def _copies(bench: Bench, what: str, path: Path) -> None:
    origin = bench.there()
    bench.put(path, origin)
    names = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(name.stat().st_size for name in names)
    listed = path.parent / "list"
    listed.write_bytes(b"\0".join(os.fsencode(name.relative_to(path.parent)) for name in names))

    def put(folder: str) -> float:
        seconds = timed(lambda: bench.put(path, folder))
        found = bench.ssh(f"find {folder} -type f -printf '%s\\n'")
        assert sum(map(int, found.split())) == size
        return seconds

    def push(folder: str) -> float:
        return timed(lambda: bench.rsync("-a", path, f":{folder}/"))

    def get(folder: Path) -> float:
        remote = f"{origin}/{path.name}"
        seconds = timed(lambda: fetch(bench.session.transport, [remote], folder))
        assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) == size
        return seconds

    def pull(folder: Path) -> float:
        return timed(lambda: bench.rsync("-a", f":{origin}/{path.name}", f"{folder}/"))

    def push_tar(folder: str) -> float:
        return timed(lambda: bench.push_tar(path, folder))

    def pull_tar(folder: Path) -> float:
        return timed(lambda: bench.pull_tar(f"-C {origin} {path.name}", folder))

    def pull_listed() -> float:
        words = ("-rt", "--from0", f"--files-from={listed}", f":{origin}/", f"{bench.here()}/")
        return timed(lambda: bench.rsync(*words))

    measure(
        f"put of {what}",
        bench.rounds,
        times=NOT_SLOWER,
        put=lambda: put(bench.there()),
        rsync=lambda: push(bench.there()),
        tar=lambda: push_tar(bench.there()),
    ).show()
    measure(
        f"get of {what}",
        bench.rounds,
        times=NOT_SLOWER,
        get=lambda: get(bench.here()),
        rsync=lambda: pull(bench.here()),
        rsync_files_from=pull_listed,
        tar=lambda: pull_tar(bench.here()),
    ).show()
    sent, pushed = bench.there(), bench.there()
    fetched, pulled = bench.here(), bench.here()
    for first in (
        lambda: put(sent),
        lambda: push(pushed),
        lambda: get(fetched),
        lambda: pull(pulled),
    ):
        first()
    measure(
        f"put of {what}, nothing changed",
        bench.rounds,
        put=lambda: put(sent),
        rsync=lambda: push(pushed),
        tar=lambda: push_tar(pushed),
    ).show()
    measure(
        f"get of {what}, nothing changed",
        bench.rounds,
        get=lambda: get(fetched),
        rsync=lambda: pull(pulled),
        tar=lambda: pull_tar(pulled),
    ).show()


def changed(bench: Bench) -> None:
    """Put the large file again after a byte in its middle has changed."""
    path = bench.make_large()
    ours, theirs, unpacked = bench.there(), bench.there(), bench.there()

    def change() -> None:
        with path.open("r+b") as file:
            file.seek(bench.mb * 500_000)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    def put() -> float:
        change()
        return timed(lambda: bench.put(path, ours))

    def rsync() -> float:
        change()
        return timed(lambda: bench.rsync("-a", path, f":{theirs}/"))

    def tar() -> float:
        change()
        return timed(lambda: bench.push_tar(path, unpacked))

    for prepare in (put, rsync, tar):
        prepare()
    title = f"put of {bench.mb} MB, a byte changed"
    measure(title, bench.rounds, put=put, rsync=rsync, tar=tar).show()


def cut(bench: Bench) -> None:
    """Seconds of a put that continues another, killed when half of the file had arrived."""
    path = bench.make_large()
    half = bench.mb * 500_000

    def continued(argv: list[str | Path], folder: str) -> float:
        environ = dict(bench.cluster.environ)
        process = subprocess.Popen(
            argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None:
            if int(bench.ssh(f"du -sb {folder}").split()[0]) > half:
                process.terminate()
                process.wait()
        assert "large" not in bench.ssh(f"ls {folder}").split()
        seconds = timed(lambda: subprocess.run(
            argv, env=environ, check=True, capture_output=True
        ))  # fmt: skip
        assert bench.ssh(f"stat -c %s {folder}/large").strip() == str(2 * half)
        return seconds

    def put() -> float:
        spec = bench.cluster.folder / "cluster.yaml"
        folder = bench.there()
        return continued([BIN / "clusterctl", "-f", spec, "put", path, folder], folder)

    def rsync() -> float:
        words: list[str | Path] = ["rsync", "-a", "--partial-dir=.partial"]
        words += ["-e", shlex.join(bench.shell), path]
        folder = bench.there()
        return continued([*words, f"{bench.cluster.controller}:{folder}/"], folder)

    def tar() -> float:
        """tar has no rest, and sends all again."""
        folder = bench.there()
        return timed(lambda: bench.push_tar(path, folder))

    title = f"put of {bench.mb} MB, killed in the middle: the rest"
    measure(title, bench.rounds, put=put, rsync=rsync, tar=tar).show()


def folders(bench: Bench) -> None:
    """The folder of a job: into the store and from there; by rsync; by tar in one ssh command."""
    area = bench.session.inventory.folder
    for count in (1, 2000):
        path = bench.make_small(count)

        def write(path: Path = path) -> None:  # else the store would have the files
            for file in path.rglob("*"):
                if file.is_file():
                    file.write_bytes(secrets.token_bytes(2000))

        def ours(path: Path = path) -> float:
            write(path)
            target = f"{bench.there()}/job"

            def send() -> None:
                items = list_items([path])[0]
                hashes = hash_items([item for item in items if item.kind is ItemKind.FILE])
                Upload(bench.session.transport).new_folder(
                    items, hashes, target, store=store_of(area), ours={"job.sbatch": b"true\n"}
                )

            return timed(send)

        def by_rsync(path: Path = path) -> float:
            write(path)
            return timed(lambda: bench.rsync("-a", path, f":{bench.there()}/"))

        def by_tar(path: Path = path) -> float:
            write(path)
            target = bench.there()

            return timed(lambda: bench.push_tar(path, target))

        measure(f"a job's folder of {count:,} new files", bench.rounds * 2, folder=ours,
                rsync=by_rsync, tar=by_tar).show()  # fmt: skip


def runs(bench: Bench) -> None:
    """Small runs in turn, as `collect` copies them, without accounting; by an rsync for each."""
    top = bench.there()
    bench.ssh(
        f"cd {top} && for run in $(seq {RUNS}); do mkdir -p $run/files/out && "
        "for i in $(seq 10); do echo $i >$run/files/out/$i; done; echo hello >$run/stdout.log; done"
    )
    home = bench.ssh("pwd").strip()

    def collect() -> float:
        out = bench.here()

        def bring() -> None:
            with closing(sender(bench.session.transport)) as one:
                for run in range(1, RUNS + 1):
                    source = RunSource(f"{home}/{top}/{run}", files="files")
                    fetch_tree(one, source, out / str(run))

        seconds = timed(bring)
        assert len(list(out.glob("*/out/10"))) == RUNS
        return seconds

    def rsync() -> float:
        out = bench.here()

        def bring() -> None:
            for run in range(1, RUNS + 1):
                bench.rsync("-a", f":{top}/{run}/", f"{out}/{run}/")

        seconds = timed(bring)
        assert len(list(out.glob("*/files/out/10"))) == RUNS
        return seconds

    def tar() -> float:
        out = bench.here()
        seconds = timed(lambda: bench.pull_tar(f"-C {top} .", out))
        assert len(list(out.glob("*/files/out/10"))) == RUNS
        return seconds

    title = f"{RUNS} runs of 11 files"
    sides = {"collect": collect, "rsync": rsync, "tar_of_all": tar}
    measure(title, bench.rounds, times=NOT_SLOWER, **sides).show()


@contextmanager
def raised_bench(given: argparse.Namespace) -> Iterator[Bench]:
    """Raise a cluster, and open the connection that clusterctl, rsync and tar share."""
    with raised(1) as cluster:
        os.environ.update(cluster.environ)
        workspace = Workspace.of(cluster.name)
        with connect_session(job_inventory(workspace), workspace) as session:
            session.transport.run(["true"])
            yield Bench(cluster, session, given.mb, given.files, given.rounds)


ALL = {one.__name__: one for one in (copies, changed, cut, folders, runs)}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=[[], *ALL], metavar="WHAT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--files", type=int, default=10_000)
    given = parser.parse_args()
    if shutil.which("rsync") is None:
        sys.exit("rsync is missing, which this compares with: install it (`apt install rsync`)")
    print(machine())
    with raised_bench(given) as bench:
        for name in given.what or ALL:
            ALL[name](bench)
            bench.forget()


if __name__ == "__main__":
    main()
