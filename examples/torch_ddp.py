"""Distributed data-parallel training with PyTorch, as in its own tutorials: a process per rank.

    clusterctl submit examples/torch_ddp.py --requirements examples/requirements-torch.txt --nodes 2
    --follow

The network learns to classify the points of two spirals. The rank and the address of rank 0 come
from the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), which clusterctl sets
as torchrun does. The backend is NCCL on GPUs and Gloo on CPUs.

With --requeue it survives time limits, failures and dead nodes: see survive.py and the lines with
`run`.
"""

import argparse
import os
import socket
import sys
from itertools import islice

import survive
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(points: int) -> TensorDataset:
    """Points of two spirals in the plane, each with the number of its spiral; the same on every
    rank.
    """
    random = torch.Generator().manual_seed(0)
    turn = torch.rand(points, generator=random) * 3 * torch.pi
    label = torch.arange(points) % 2
    radius = (turn + torch.pi / 2) * (1 - 2 * label) / 8
    place = torch.stack((radius * turn.cos(), radius * turn.sin()), dim=1)
    return TensorDataset(place + 0.02 * torch.randn(points, 2, generator=random), label)


def train(
    model: nn.Module, data: TensorDataset, device: torch.device, args: argparse.Namespace
) -> None:
    """Print the mean loss of each epoch, over all ranks."""
    sampler = DistributedSampler(data)
    batches = DataLoader(data, batch_size=64, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = survive.Training(seconds=args.checkpoint_seconds, model=model, optimizer=optimizer)
    for epoch in range(run.step // len(batches), args.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the same order
        total = torch.zeros(2, device=device)
        for place, label in islice(batches, run.step % len(batches), None):
            loss = nn.functional.cross_entropy(model(place.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0], device=device)
            run.end_step()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}", flush=True)


def check_that_ranks_agree(model: nn.Module) -> None:
    """After equal steps from equal parameters, every rank must hold the same numbers, bit by
    bit.
    """
    mine = nn.utils.parameters_to_vector(model.parameters())
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, mine)
    assert all(torch.equal(mine, other) for other in all_ranks), "the ranks' models differ"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--points", type=int, default=4096)
    parser.add_argument("--checkpoint-seconds", type=float, default=600)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    print(
        f"rank {rank} of {world} on {socket.gethostname()}: {device}, {dist.get_backend()}",
        flush=True,
    )
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    model = DistributedDataParallel(layers.to(device))
    data = spirals(args.points)
    train(model, data, device, args)
    check_that_ranks_agree(model)
    if rank == 0:
        place, label = (part.to(device) for part in data.tensors)
        accuracy = (layers(place).argmax(dim=1) == label).float().mean().item()
        torch.save(layers.state_dict(), "model.pt")
        print(f"accuracy {accuracy:.3f}; all {world} ranks agree; the model is in model.pt")
    dist.barrier()  # rank 0 has the store that all ranks use
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # with Gloo, PyTorch 2.13 sometimes aborts a rank while it destroys its C++ globals
