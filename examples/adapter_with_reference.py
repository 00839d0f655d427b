"""LoRA on the last blocks of a ViT, kept near to the network without adapters, as DPO and distillation do.

Both come from the same head on the same features: PEFT's ``disable_adapter`` switches the adapters off in it.

    python examples/adapter_with_reference.py photos
"""

import argparse

import timm
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="folder with a folder of images for each class, here or in a store")
parser.add_argument("--model", default="vit_small_patch16_224", help="a ViT of timm")
parser.add_argument("--random", action="store_true", help="random weights in place of pretrained ones")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()

data = fl.Dataset(asked.photos)
network = timm.create_model(asked.model, pretrained=not asked.random, num_classes=len(data.classes))
last = len(network.blocks) - 1
lora = LoraConfig(target_modules=rf"blocks\.({last - 1}|{last})\.attn\.qkv", modules_to_save=["head"], r=8)
model = get_peft_model(network, lora).train()

with fl.offload(model, data, preprocess=fl.preprocess.imagenet(224), near=asked.near) as job:
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-3)
    for epoch in range(asked.epochs):
        losses = []
        for batch in job.loader(16, shuffle=True, epoch=epoch):
            scores = job.head(batch.features)
            with torch.no_grad(), model.disable_adapter():
                reference = job.head(batch.features)
            apart = functional.kl_div(scores.log_softmax(1), reference.softmax(1), reduction="batchmean")
            loss = functional.cross_entropy(scores, batch.labels) + 0.1 * apart
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), apart.item()))
        mean, distance = torch.tensor(losses).mean(0).tolist()
        print(f"epoch {epoch + 1}: loss {mean:.4f}, {distance:.4f} from the network without adapters")
    print(f"blocks up to {job.frost_line.name} ran beside the data")
