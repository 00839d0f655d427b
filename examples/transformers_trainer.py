"""A ``Trainer`` of transformers over the head of one of its networks.

python examples/transformers_trainer.py photos --out run
"""

import argparse

import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="folder with a folder of images for each class, here or in a store")
parser.add_argument("--model", default="google/vit-base-patch16-224", help="name on the hub, or a folder")
parser.add_argument("--out", default="run", help="folder for checkpoints and the network")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()


class Classifier(torch.nn.Module):
    """What the trainer is given: it takes what crosses the frost line, and gives a loss."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features, labels):
        scores = self.head(features).logits
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


class OverFrostline(Trainer):
    """Takes loaders as they are, since they make the batches themselves."""

    def get_train_dataloader(self):
        return self.train_dataset

    def get_eval_dataloader(self, eval_dataset=None):
        return self.eval_dataset


def as_inputs(batch, _):
    return {"features": batch.features, "labels": batch.labels}


data = fl.Dataset(asked.photos)
network = AutoModelForImageClassification.from_pretrained(
    asked.model, num_labels=len(data.classes), ignore_mismatched_sizes=True
)
network.requires_grad_(False).eval()
network.classifier.requires_grad_(True)
train, held_out = data.split(0.2)
processor = AutoImageProcessor.from_pretrained(asked.model)
mean, std = (tuple(255 * value for value in values) for values in (processor.image_mean, processor.image_std))
*steps, _ = fl.preprocess.imagenet(network.config.image_size).steps
preprocess = fl.preprocess.Preprocess(steps=(*steps, fl.preprocess.Normalize(mean=mean, std=std)))

with fl.offload(network, data, preprocess=preprocess, near=asked.near) as job:
    trainer = OverFrostline(
        model=Classifier(job.head),
        args=TrainingArguments(asked.out, num_train_epochs=asked.epochs, eval_strategy="epoch", report_to=[]),
        train_dataset=job.loader(16, data=train, shuffle=True, augment=as_inputs),
        eval_dataset=job.loader(16, data=held_out, augment=as_inputs),
    )
    trainer.train()
    print(f"loss {trainer.evaluate()['eval_loss']:.4f} on {len(held_out)} held-out photographs")
network.save_pretrained(asked.out)  # whole, as transformers loads it
