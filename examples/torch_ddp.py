"""Distributed data-parallel training with PyTorch: ranks that srun, mpirun or torchrun starts.

    clusterctl submit examples/torch_ddp.py --requirements examples/requirements-torch.txt --nodes 2 --follow

Learns to tell two spirals apart. NCCL where every rank has a GPU, else Gloo.
"""

import argparse
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def join() -> tuple[int, int, torch.device]:
    """Meet the other ranks; returns rank, number of ranks, and the device of this one."""
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if cuda
        else torch.device("cpu")
    )
    dist.init_process_group("nccl" if cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def spirals(points: int) -> TensorDataset:
    """Two spirals of points in the plane, and which of them each belongs to; the same on every rank."""
    random = torch.Generator().manual_seed(0)
    turn = torch.rand(points, generator=random) * 3 * torch.pi
    label = torch.arange(points) % 2
    radius = (turn + torch.pi / 2) * (1 - 2 * label) / 8
    place = torch.stack((radius * turn.cos(), radius * turn.sin()), dim=1)
    return TensorDataset(place + 0.02 * torch.randn(points, 2, generator=random), label)


def train(model: nn.Module, data: TensorDataset, device: torch.device, *, epochs: int, rank: int) -> None:
    """Print the mean loss of each epoch, over all ranks."""
    sampler = DistributedSampler(data)
    batches = DataLoader(data, batch_size=64, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # else every epoch has the same order
        total = torch.zeros(2, device=device)
        for place, label in batches:
            loss = nn.functional.cross_entropy(model(place.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0], device=device)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}", flush=True)


def check_that_ranks_agree(model: nn.Module, world: int) -> None:
    """After equal steps from an equal start, every rank must hold the same numbers, bit by bit."""
    mine = nn.utils.parameters_to_vector(model.parameters())
    all_ranks = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(all_ranks, mine)
    assert all(torch.equal(mine, other) for other in all_ranks), "the ranks' models differ"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--points", type=int, default=4096)
    args = parser.parse_args()

    rank, world, device = join()
    print(f"rank {rank} of {world} on {socket.gethostname()}: {device}, {dist.get_backend()}", flush=True)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DistributedDataParallel(layers.to(device))
    data = spirals(args.points)
    train(model, data, device, epochs=args.epochs, rank=rank)
    check_that_ranks_agree(model, world)
    if rank == 0:
        place, label = (part.to(device) for part in data.tensors)
        accuracy = (layers(place).argmax(dim=1) == label).float().mean().item()
        torch.save(layers.state_dict(), "model.pt")
        print(f"accuracy {accuracy:.3f}; all {world} ranks agree; the model is in model.pt")
    dist.barrier()  # rank 0 keeps the others' meeting point
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # with Gloo, PyTorch 2.13 sometimes aborts a rank while it takes its C++ globals down
