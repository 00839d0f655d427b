"""Texts in Parquet files: the last layers of a DistilBERT, over features that are computed once.

python examples/text_classification.py reviews --column text
"""

import argparse

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("texts", help="folder of Parquet files with a column of texts and a column label")
parser.add_argument("--column", default="text")
parser.add_argument("--model", default="distilbert-base-uncased", help="name on the hub, or a folder")
parser.add_argument("--until", default="distilbert.transformer.layer.4", help="last frozen layer")
parser.add_argument("--max-length", type=int, default=128)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()

data = fl.Dataset(asked.texts, column=asked.column)
model = AutoModelForSequenceClassification.from_pretrained(asked.model, num_labels=len(data.classes))
tokens = fl.preprocess.text(AutoTokenizer.from_pretrained(asked.model), max_length=asked.max_length)
fl.freeze(model, asked.until, input_shape=tokens.inputs)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)

with fl.offload(model, data, preprocess=tokens, near=asked.near, frozen_in_eval=True) as job:
    for epoch in range(asked.epochs):
        losses = []
        for x, y in job.loader(16, shuffle=True, epoch=epoch):
            loss = torch.nn.functional.cross_entropy(job.head(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}")
    counts = job.statistics()
    print(f"{counts.from_cache} of {counts.samples} texts came from memory")
