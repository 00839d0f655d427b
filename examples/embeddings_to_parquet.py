"""Embeddings of all photographs of a folder as a Parquet file, and the neighbours of the first one.

python examples/embeddings_to_parquet.py photos --out embeddings.parquet
"""

import argparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import timm

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="folder of images, here or in a store; it needs no classes")
parser.add_argument("--model", default="resnet18", help="name in timm")
parser.add_argument("--random", action="store_true", help="take random weights")
parser.add_argument("--out", default="embeddings.parquet")
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()

model = fl.freeze(timm.create_model(asked.model, pretrained=not asked.random), until="features")
data = fl.Dataset(asked.photos)

with fl.offload(model, data, near=asked.near) as job:
    schema = pa.schema({"id": pa.int64(), "embedding": pa.list_(pa.float32(), job.frost_line.shapes[0][0])})
    with pq.ParquetWriter(asked.out, schema) as file:
        for batch in job.arrays(64):
            rows = pa.FixedSizeListArray.from_arrays(batch.features.reshape(-1), batch.features.shape[1])
            file.write_batch(pa.record_batch([pa.array(batch.ids), rows], schema=schema))

table = pq.read_table(asked.out)
found = np.stack(table["embedding"].to_numpy())
found /= np.linalg.norm(found, axis=1, keepdims=True)
nearest = np.argsort(-(found @ found[0]))[1:4]
names = dict(zip(data.samples.ids_at(np.arange(len(data))).tolist(), data.names, strict=True))
ids = table["id"].to_pylist()
print(f"{len(table)} embeddings of {found.shape[1]} numbers in {asked.out}")
print(f"nearest to {names[ids[0]]}: {', '.join(names[ids[place]] for place in nearest)}")
