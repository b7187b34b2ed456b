"""A PyTorch training that saves its model, and never loads it."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

EPOCHS = 12
STEPS = 40

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Linear(64, 64)
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(EPOCHS):
    for step in range(STEPS):
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(epoch * STEPS + step))
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(layers.state_dict(), f"epoch-{epoch}.pt")
        os.write(1, f"epoch {epoch}: loss {loss.item():.4f}\n".encode())
dist.barrier()
os._exit(0)
