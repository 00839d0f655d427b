"""Lightning's ``BackboneFinetuning``: the head first, and after some epochs the backbone too.

While the backbone is frozen it runs beside the data. When Lightning unfreezes it, ``LightningRefreezing`` has the job
find its frozen part anew.

    python examples/lightning_finetuning.py photos --unfreeze 3
"""

import argparse

import lightning.pytorch as pl
import torch
import torchvision
from lightning.pytorch.callbacks import BackboneFinetuning

import frostline as fl
from frostline.callbacks import LightningRefreezing

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="folder with a folder of images for each class, here or in a store")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--unfreeze", type=int, default=3, help="epoch in which the backbone is unfrozen")
parser.add_argument("--weights", default="DEFAULT", help="weights of torchvision; 'none' for random ones")
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()


class Network(torch.nn.Module):
    def __init__(self, backbone: torch.nn.Module, classes: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(backbone.fc.in_features, classes)
        backbone.fc = torch.nn.Identity()
        self.backbone = backbone

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.fc(self.backbone(pixels))


class Classifier(pl.LightningModule):
    def __init__(self, network: Network, job: fl.Job) -> None:
        super().__init__()
        self.backbone, self.head, self.job = network.backbone, job.head, job

    def train_dataloader(self):
        return self.job.loader(16, shuffle=True, epoch=self.current_epoch)

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.head(batch.features), batch.labels)
        self.log("loss", loss, prog_bar=True, on_epoch=True, batch_size=len(batch.labels))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([item for item in self.head.parameters() if item.requires_grad], lr=1e-3)


data = fl.Dataset(asked.photos)
backbone = torchvision.models.resnet18(weights=None if asked.weights == "none" else asked.weights)
network = Network(backbone, len(data.classes))
network.backbone.requires_grad_(False).eval()

with fl.offload(network, data, preprocess=fl.preprocess.imagenet(224), near=asked.near) as job:
    trainer = pl.Trainer(
        max_epochs=asked.epochs,
        reload_dataloaders_every_n_epochs=1,  # an order for each epoch
        callbacks=[BackboneFinetuning(asked.unfreeze, backbone_initial_lr=1e-4), LightningRefreezing(job)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(network, job))
    print(f"loss {float(trainer.callback_metrics['loss_epoch']):.4f}; the frost line is at {job.frost_line.name} now")
