"""A job of two ranks that keeps the contract of docs/restarts.md, or breaks it in a chosen way."""

import argparse
import os
import signal
import socket
import sys
import time
import zlib
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=160)
parser.add_argument("--save-interval", type=int, default=40)
parser.add_argument(
    "--breaks", choices=["nothing", "continues", "verifies", "hangs"], default="nothing"
)
args = parser.parse_args()
FOLDER = Path("checkpoints")
SIZE = 1000
PLACE = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
signalled: list[int] = []


def other_rank() -> socket.socket:
    """Connect rank 1 to rank 0."""
    if os.environ["RANK"] == "0":
        with socket.create_server(("", PLACE[1])) as server:
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection(PLACE)
        except ConnectionRefusedError:
            time.sleep(0.05)


def exchange(other: socket.socket, stop: bool) -> bool:
    """Meet the other rank, and return whether either rank is to stop."""
    other.send(b"01"[stop : stop + 1])
    answer = other.recv(1)
    if not answer:
        raise ConnectionError("the other rank is gone")
    return stop or answer == b"1"


def read(path: Path) -> list[int]:
    """Return the numbers in a checkpoint. The first line is their checksum."""
    checksum, _, text = path.read_text().partition("\n")
    if args.breaks == "verifies":
        numbers = [int(word) for word in text.split()]
        return numbers + [0] * (SIZE - len(numbers))
    if int(checksum) != zlib.crc32(text.encode()):
        raise ValueError(f"{path} is damaged")
    return [int(word) for word in text.split()]


def newest() -> tuple[int, list[int]]:
    for path in sorted(FOLDER.glob("step-*.ckpt"), reverse=True):
        try:
            return int(path.stem.partition("-")[2]), read(path)
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
    return 0, list(range(SIZE))


def save(step: int, numbers: list[int]) -> None:
    FOLDER.mkdir(exist_ok=True)
    text = " ".join(map(str, numbers))
    new = FOLDER / f"step-{step:08}.{os.environ.get('SLURM_RESTART_COUNT', '0')}.tmp"
    with new.open("w") as file:
        file.write(f"{zlib.crc32(text.encode())}\n{text}")
        file.flush()
        os.fsync(file.fileno())
    new.replace(FOLDER / f"step-{step:08}.ckpt")


def main() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: signalled.append(number))
    step, numbers = (0, list(range(SIZE))) if args.breaks == "continues" else newest()
    if args.breaks == "hangs" and step:
        # A deadlock: each rank waits for itself.
        reads, _ = os.pipe()
        os.read(reads, 1)
    other = other_rank()
    while step < args.steps:
        time.sleep(0.03)
        step += 1
        numbers = [(number * 31 + step) % 1_000_003 for number in numbers]
        stop = exchange(other, bool(signalled))
        if os.environ["RANK"] == "0":
            if step % args.save_interval == 0 or stop:
                save(step, numbers)
            file = os.open(os.environ["CLUSTERCTL_HEARTBEAT"], os.O_WRONLY | os.O_CREAT)
            os.write(file, b"%d\n" % step)
            os.close(file)
        if stop:
            # Rank 1 waits until rank 0 has saved.
            exchange(other, True)
            raise SystemExit(75)


main()
