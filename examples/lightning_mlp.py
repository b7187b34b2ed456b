"""Lightning on several nodes: its Trainer finds the ranks by Slurm's variables.

clusterctl submit examples/lightning_mlp.py --requirements examples/requirements-lightning.txt --nodes 2
"""

import os

import lightning as L  # noqa: N812, as Lightning's documentation has it
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    """Tells whether a point of the plane lies inside a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        place, label = batch
        loss = nn.functional.cross_entropy(self.layers(place), label)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"]
            print(f"epoch {self.current_epoch}: loss {loss:.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    L.seed_everything(0)
    place = torch.rand(4096, 2) * 2 - 1
    label = (place.square().sum(dim=1) < 0.6).long()
    data = DataLoader(TensorDataset(place, label), batch_size=64, shuffle=True)
    trainer = L.Trainer(
        max_epochs=5,
        num_nodes=int(os.environ.get("SLURM_NNODES", "1")),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    print(f"rank {trainer.global_rank} of {trainer.world_size}", flush=True)
    trainer.fit(model, data)
    if trainer.is_global_zero:
        accuracy = (model.layers(place).argmax(dim=1) == label).float().mean().item()
        print(f"accuracy {accuracy:.3f} by {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
