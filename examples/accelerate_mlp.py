"""Hugging Face Accelerate on several nodes: prepare() wraps the model and shards the batches.

clusterctl submit examples/accelerate_mlp.py --requirements examples/requirements-accelerate.txt
--nodes 2
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank = accelerator.process_index
    world = accelerator.num_processes
    print(f"rank {rank} of {world}: {accelerator.device}", flush=True)
    set_seed(0)
    place = torch.rand(4096, 2) * 2 - 1
    label = (place.square().sum(dim=1) < 0.6).long()
    layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    data = DataLoader(TensorDataset(place, label), batch_size=64, shuffle=True)
    model, optimizer, data = accelerator.prepare(
        layers, torch.optim.Adam(layers.parameters(), lr=0.01), data
    )
    for epoch in range(5):
        losses = []
        for batch, target in data:
            loss = nn.functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)
    guess = model(place.to(accelerator.device)).argmax(dim=1).cpu()
    accelerator.print(f"accuracy {(guess == label).float().mean().item():.3f} by {world} ranks")
    accelerator.end_training()


if __name__ == "__main__":
    main()
