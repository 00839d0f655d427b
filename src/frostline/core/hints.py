"""What to write instead of a name that Frostline does not have, from other libraries or misspelt."""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

__all__ = (
    "Hinting",
    "HintingColumns",
    "HintingType",
    "add_field_hints",
    "add_hints",
    "data_hint",
    "hint_for",
    "suggest_names",
    "synonym",
)

# The field's own words, by the first of our names that the function or table in question knows.
_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("address", "endpoint", "host", "node_address", "node_url", "nodes", "port", "server"), ("near",)),
    **dict.fromkeys(("freeze_to", "freeze_until", "frozen_until", "layer", "layers"), ("until", "freeze")),
    "freeze": ("until",),
    **dict.fromkeys(
        ("data_dir", "data_files", "data_path", "dataset", "input_dir", "path", "root", "train_data", "uri"),
        ("url", "data"),
    ),
    **dict.fromkeys(("feature_extractor", "image_processor", "processor"), ("transform",)),
    **dict.fromkeys(("callback", "callbacks", "observe", "observer"), ("on_event",)),
    **dict.fromkeys(("beside", "save_manifest"), ("manifest_location",)),
    **dict.fromkeys(("changed", "on_changed"), ("on_change",)),
    **dict.fromkeys(("dtype", "precision"), ("accuracy",)),
    **dict.fromkeys(
        (
            "DataLoader",
            "ImageDataLoaders",
            "StreamingDataLoader",
            "create_loader",
            "dataloader",
            "image_dataset_from_directory",
            "read_images",
        ),
        ("loader",),
    ),
    **dict.fromkeys(
        ("ImageFolder", "StreamingDataset", "WebDataset", "create_dataset", "load_dataset", "load_from_disk"),
        ("Dataset",),
    ),
    **dict.fromkeys(("class_names", "features"), ("classes",)),
    **dict.fromkeys(("columns", "image_column", "input_columns"), ("column",)),
    **dict.fromkeys(("describe", "metrics", "stats"), ("statistics",)),
    **dict.fromkeys(("disconnect", "shutdown", "stop", "terminate"), ("close",)),
    **dict.fromkeys(("label_column", "label_col"), ("label",)),
    **dict.fromkeys(("labels", "y"), ("targets",)),
    **dict.fromkeys(("column_names", "info", "schema"), ("columns",)),
    **dict.fromkeys(("augmentation", "transforms"), ("transform", "preprocess")),
    **dict.fromkeys(("concat", "concatenate_datasets", "union"), ("concatenate",)),
    **dict.fromkeys(("e", "max_epochs", "n_epochs", "num_epochs", "num_train_epochs"), ("epochs",)),
    **dict.fromkeys(("test_size", "val_fraction", "val_ratio", "valid_pct", "validation_split"), ("val_share",)),
    **dict.fromkeys(("max_shard_size", "maxsize", "shard_size"), ("object_size", "part_size")),
    "save_every": ("checkpoint_every",),
    "scheduler": ("schedule",),
    **dict.fromkeys(("csv", "jsonl", "tsv"), ("urls",)),
    **dict.fromkeys(("tar", "wds"), ("webdataset",)),
    **dict.fromkeys(("b", "batch", "bs"), ("batch_size",)),
    "cache_dir": ("cache", "cache_folder"),
    "class_weights": ("weights",),
    "embeddings": ("features",),
    "groupby": ("split_by",),
    **dict.fromkeys(("logdir", "o", "output", "output_dir", "output_path", "save_dir"), ("out",)),
    **dict.fromkeys(("checkpoint", "ckpt", "ckpt_path", "run_dir"), ("run", "resume")),
    "lr": ("learning_rate",),
    **dict.fromkeys(("m", "network"), ("model",)),
    **dict.fromkeys(("image_size", "img_size", "size"), ("resize",)),
    **dict.fromkeys(("num_proc", "num_workers"), ("workers",)),
    **dict.fromkeys(("data_seed", "random_seed", "random_state", "shuffle_seed"), ("seed",)),
    "summary": ("explain",),
    "target_column": ("targets",),
    "warmup": ("warm_up",),
    "warmup_steps": ("warm_up",),
    "gpu": ("device",),
    "wd": ("weight_decay",),
}
# The line to write with one of our names.
_EXAMPLES: Mapping[str, str] = {
    "Dataset": 'Dataset("photos")',
    "classes": "data.classes",
    "columns": "data.columns",
    "freeze": 'freeze(model, until="layer4")',
    "loader": 'loader("photos", batch_size=32, shuffle=True)',
    "near": 'near="http://store-1:7070"',
    "url": 'Dataset("photos")',
    "until": 'freeze(model, until="layer4")',
}
# The whole call, where what is given does not fit the parameters.
_CALLS: Mapping[str, str] = {
    "Dataset.split": "train, held_out = data.split(0.2)",
    "Job.arrays": "job.arrays(batch_size=32, shuffle=True)",
    "Job.epochs": "job.epochs(32, range(10), shuffle=True)",
    "Job.train": "job.head.train() for train mode, or job.train(Recipe(epochs=3)) to train on the node",
    "Job.loader": "job.loader(batch_size=32, shuffle=True, data=part)",
    "Dataset.train_test_split": "data.train_test_split(test_size=0.2, seed=0)",
    "freeze": 'freeze(model, until="layer4")',
    "BlockShuffle": "BlockShuffle(samples=16, mixed=64)",
    "Dataset": 'Dataset("photos")',
    "FeatureMixup": "FeatureMixup(alpha=0.2)",
    "FeatureNoise": "FeatureNoise(share=0.1)",
    "Mixture": "Mixture(parts=[cats, dogs], ratios=[3, 1])",
    "Ranks": "Ranks(rank=0, world_size=2)",
    "Recipe": 'Recipe(epochs=3, optimizer="adamw", learning_rate=1e-3)',
    "imagenet": "preprocess.imagenet(224, augment=True)",
    "loader": 'loader("photos", batch_size=32, shuffle=True)',
    "offload": 'offload(model, "photos", near="http://store-1:7070")',
}
# Arguments of other loaders that have no counterpart here, and what to do instead.
_OF_WORKERS = (
    "threads read ahead by themselves, so leave {name} out; processes of PyTorch's own take the loader as "
    "DataLoader(loader, batch_size=None, num_workers=2)"
)
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("multiprocessing_context", "num_proc", "num_workers", "persistent_workers", "worker_init_fn", "workers"),
        _OF_WORKERS,
    ),
    **dict.fromkeys(
        ("image_size", "img_size", "input_size", "resize", "size"),
        "steps say the size: write preprocess=frostline.preprocess.imagenet(224)",
    ),
    **dict.fromkeys(
        ("mean", "normalize", "std"),
        "other numbers come with a transform: write transform=v2.Compose([..., v2.Normalize(mean, std)])",
    ),
    **dict.fromkeys(
        ("crop_pct", "interpolation", "re_prob", "ToTensor"),
        "a transform says it: write transform=timm.data.create_transform(224), or one of torchvision",
    ),
    **dict.fromkeys(
        ("after_item", "item_tfms", "item_transforms"),
        "write transform=v2.Compose([...]) for images, or map=function for samples",
    ),
    **dict.fromkeys(
        ("after_batch", "aug_transforms", "batch_tfms", "batch_transforms"),
        "write augment=function, which takes a batch and gives another one",
    ),
    **dict.fromkeys(("mixup", "mixup_alpha", "mixup_fn"), "write augment=FeatureMixup(alpha=0.2)"),
    **dict.fromkeys(
        (
            "buffer_size",
            "local_shuffle_buffer_size",
            "shardshuffle",
            "shuffle_algo",
            "shuffle_block_size",
            "shuffle_buffer_size",
        ),
        "shuffle=True draws from all samples without a buffer, so leave {name} out; shuffle=BlockShuffle(samples=16) "
        "reads neighbours together",
    ),
    **dict.fromkeys(
        ("local", "remote"), 'data is read where it lies and needs no copy: write "s3://bucket/photos" alone'
    ),
    **dict.fromkeys(
        ("handler", "ignore_errors", "on_error", "skip_errors"),
        "samples that cannot be read are left out, named and counted, so leave {name} out; "
        "settings=LoaderSettings(max_skipped_fraction=0.01) bounds their share",
    ),
    **dict.fromkeys(
        ("epochs", "repeat", "repeats"), "a pass is an epoch: write for loader in loader(...).epochs(range(10))"
    ),
    **dict.fromkeys(
        ("limit_batches", "max_batches", "num_batches", "steps", "steps_per_epoch"),
        "write itertools.islice(loader, 10) for 10 batches",
    ),
    **dict.fromkeys(("limit", "max_samples", "subsample"), "a part is a data set: write data.take(100)"),
    **dict.fromkeys(("resampled", "replacement"), "weights=[1.0] * len(data) draws with replacement"),
    **dict.fromkeys(
        ("channels_last", "memory_format"), "write x = x.to(memory_format=torch.channels_last) in the loop"
    ),
    **dict.fromkeys(("compress", "compression"), 'what crosses is compressed by itself; accuracy="fp16" rounds it too'),
    **dict.fromkeys(("timeout", "timeout_s"), "write settings=LoaderSettings(deadline_s=120, retry_for_s=60)"),
    **dict.fromkeys(
        ("interleave", "probabilities"), "write data=Mixture(parts=[cats, dogs], ratios=[3, 1]) of a loader"
    ),
    **dict.fromkeys(
        ("subset", "valid_pct", "valid_split", "validation_split"),
        "parts are data sets: write train, held_out = data.split(0.2), and loader(train, batch_size=32)",
    ),
    **dict.fromkeys(
        ("label_mode", "one_hot"),
        "labels are numbers of classes: write torch.nn.functional.one_hot(batch.labels) in the loop",
    ),
    **dict.fromkeys(
        ("distributed", "nodesplitter", "num_replicas", "num_shards", "rank", "split_by_node", "world_size"),
        "ranks of torch.distributed share an epoch by themselves; others write ranks=Ranks(rank=0, world_size=2)",
    ),
    **dict.fromkeys(
        ("allow_empty", "decoder", "extensions", "is_valid_file", "item_loader", "serializers"),
        "files are told by their suffixes, and those that are no samples are left out and named, so leave {name} out",
    ),
    **dict.fromkeys(
        ("cast_column", "class_encode_column", "remove_columns", "rename_column", "select_columns"),
        "columns are read where they are asked for: write data.column(name), or Dataset(url, label=..., targets=...)",
    ),
    "amp": 'write with torch.autocast(...) in the loop; accuracy="bf16" is for the frozen layers',
    "batch_sampler": "write batch_size=32 with shuffle=True, or with data=data.take(rows) for rows in an order of your "
    "own",
    **dict.fromkeys(
        ("batch", "iter", "iter_batches", "iter_torch_batches", "to_iterable_dataset", "to_tf_dataset"),
        "batches are a loader's: write loader(data, batch_size=32, shuffle=True)",
    ),
    **dict.fromkeys(
        ("set_format", "with_format"),
        "samples are arrays and a loader's batches are tensors, so leave {name} out; job.arrays(32) gives NumPy",
    ),
    **dict.fromkeys(
        ("Subset", "random_split"), "parts are data sets: write train, held_out = data.split(0.2), or data.take(rows)"
    ),
    **dict.fromkeys(("imgs", "image_paths", "filenames", "paths"), "write zip(data.names, data.targets)"),
    **dict.fromkeys(("count", "num_rows", "num_samples", "shape"), "write len(data)"),
    **dict.fromkeys(("n_classes", "nclasses", "num_classes"), "write len(data.classes)"),
    "add_column": 'write data.with_columns({{"patient": values}})',
    "collate_fn": "batches are made here: change each sample by map=function, or each batch by augment=function",
    "device": "batches come in CPU memory: write batch = batch.to(device) in the loop",
    "download": "data is read where it lies, so leave download out",
    "filter": "write data.select(\"label == 'cat'\"), or data.take(mask) with a value for each sample",
    "generator": "the order is drawn from numbers: give seed=0 and epoch=0",
    **dict.fromkeys(
        ("from_csv", "from_folder", "from_name_func", "from_parquet"),
        'the format is recognised: write Dataset("photos")',
    ),
    **dict.fromkeys(
        ("from_dict", "from_generator", "from_list", "from_pandas"),
        'samples lie in files: write table.to_parquet("photos.parquet"), and Dataset("photos.parquet")',
    ),
    **dict.fromkeys(("color_mode", "is_training", "label_names"), "the data says it, so leave {name} out"),
    **dict.fromkeys(
        ("cache", "cache_limit", "keep_in_memory", "materialize", "max_cache_size", "persist"),
        "features and samples are kept between epochs by themselves; LoaderSettings(cache_bytes=...) bounds them",
    ),
    "head": "write data.take(5), or data.to_pandas()",
    "in_order": "write settings=LoaderSettings(max_reorder=None) to take samples as they arrive",
    "loader": "files are decoded by themselves, so leave loader out; transform=function takes the image of Pillow",
    **dict.fromkeys(
        ("map", "map_batches"),
        "a function changes samples as they are loaded: write loader(data, batch_size=32, map=function)",
    ),
    "cuda": 'write batch = batch.to("cuda")',
    "non_blocking": "write batch = batch.to(device) in the loop, which does not block",
    "verbose": "write print(job.explain()), or on_event=print for each event",
    "pin_memory": "batches for a model on a GPU are pinned by themselves, so leave pin_memory out; "
    "settings=LoaderSettings(pin_memory=True) forces it",
    **dict.fromkeys(
        ("predownload", "prefetch_batches", "prefetch_factor", "prefetch_size", "use_prefetcher"),
        "the window of what is read ahead tunes itself, so leave {name} out; "
        "settings=LoaderSettings(window_bytes=1 << 28) bounds its bytes",
    ),
    "sampler": "the order is drawn from shuffle=True, seed=0 and epoch=0; weights=[...] draws by weights, "
    "data=data.take(rows) gives rows in an order of your own, and "
    "torch.distributed or ranks=Ranks(...) shares an epoch",
    **dict.fromkeys(
        ("idx", "indices", "order", "permutation", "subset_indices"),
        "data=data.take(rows) gives rows in an order of your own, one several times too",
    ),
    **dict.fromkeys(
        ("storage_options", "client_kwargs"),
        "keys of a store come from the environment or its own files, as its other tools read them, so leave {name} out",
    ),
    "show_batch": "look at data[0], or at loader(data, batch_size=8)",
    **dict.fromkeys(
        ("stratify", "stratify_by_column"),
        "each class is divided by the share, so leave {name} out; balanced=False draws from all at once",
    ),
    **dict.fromkeys(
        ("push_to_hub", "save_to_disk", "write_parquet"),
        "write frostline ingest photos copy --format parquet on the command line",
    ),
    "set_transform": "write data.transform = transform, or data.with_transform(transform)",
    "shard": "ranks of torch.distributed share an epoch by themselves; others write ranks=Ranks(rank=0, world_size=2) "
    "of a loader, or data[0::2]",
    "skip": "write data[100:]",
    "sort": "write data.take(numpy.argsort(data.targets))",
    "split": 'splits are asked for by name: Dataset("photos")["train"]',
    "streaming": "data is read where it lies, so leave streaming out",
    **dict.fromkeys(
        ("preprocess", "transform"),
        "{name} is said where the data is named, as in offload(model, data, {name}=...); a loader has map=function for "
        "samples and augment=function for batches",
    ),
    "target_transform": "map=function changes a sample with its label",
    "unique": "write set(data.column(name).to_pylist()), or data.classes",
    "train": 'splits are asked for by name: Dataset("photos")["train"]',
}


# What other libraries have as methods of a job, a loader or a batch, or as functions, and the line to write; by what is
# asked for it. It comes before the table above.
_LOOP = "the loop is yours: write for x, y in job.loader(batch_size=32, shuffle=True); or run frostline train"
_EXTRACT = "run frostline extract --data photos --model NAME --until LAYER --out features.parquet"
_SCORED = "the loop is yours: write job.head(x).argmax(1) == y for x, y in job.loader(batch_size=32, data=held_out)"
_WATCHED = "write print(job.explain()) for what ran where, or job.statistics() for numbers"
_DEVICE = "write batch = batch.to(device) in the loop"
_BY_OWNER: Mapping[str, Mapping[str, str]] = {
    "Job": {
        **dict.fromkeys(
            ("backbone", "features", "model", "net", "network"),
            "the network is your own model; job.head is its trained part",
        ),
        **dict.fromkeys(
            ("named_parameters", "parameters", "trainable_parameters"),
            "write model.parameters(), or job.head.parameters()",
        ),
        **dict.fromkeys(("eval", "zero_grad"), "the head is the module: write job.head.{name}()"),
        **dict.fromkeys(
            ("save", "save_checkpoint", "save_pretrained", "state_dict"),
            'write torch.save(job.head.state_dict(), "head.pt")',
        ),
        "load_state_dict": 'write job.head.load_state_dict(torch.load("head.pt"))',
        **dict.fromkeys(
            ("class_names", "class_to_idx", "classes", "targets"), "write job.data.classes, or job.data.targets"
        ),
        **dict.fromkeys(("accuracy", "evaluate", "loss", "score", "test", "validate"), _SCORED),
        **dict.fromkeys(("history", "log", "logs", "metrics", "progress", "report"), _WATCHED),
        "compile": "write model.classifier.compile(), or another layer that is trained, before offload",
        **dict.fromkeys(
            ("batches", "dataloader", "get_train_dataloader", "iter", "train_dataloader", "train_loader"),
            "write job.loader(batch_size=32, shuffle=True)",
        ),
        **dict.fromkeys(
            ("eval_dataloader", "test_dataloader", "test_loader", "val_dataloader", "val_loader"),
            "write job.loader(batch_size=32, data=held_out), of train, held_out = job.data.split(0.2)",
        ),
        **dict.fromkeys(("embed", "embeddings", "encode", "extract"), _EXTRACT),
        **dict.fromkeys(
            ("batch_size", "drop_last", "epoch", "num_workers", "seed", "shuffle"),
            "it is a loader's: write job.loader(batch_size=32, shuffle=True)",
        ),
        **dict.fromkeys(("cpu", "cuda", "device", "to"), "the head runs where your network is: write model.to(device)"),
        **dict.fromkeys(("forward", "__call__"), "write job.head(batch.features)"),
        **dict.fromkeys(
            (
                "configure_optimizers",
                "current_epoch",
                "fit",
                "global_step",
                "optimizer",
                "run",
                "setup",
                "start",
                "trainer",
                "training_step",
                "wait",
            ),
            _LOOP,
        ),
        **dict.fromkeys(
            ("children", "modules", "named_modules", "num_parameters", "requires_grad_"),
            "the head is the module: write job.head, or your own model",
        ),
        "predict": "write job.head(batch.features), or run frostline predict --run RUN --data photos",
    },
    "Job.loader": {
        "epochs": "write for loader in job.epochs(32, range(10)), or epoch=0",
        "skip": "write itertools.islice(loader, 10, None), or loader.load_state_dict(state)",
        **dict.fromkeys(("split", "train"), 'write data=job.data["train"], where the data has such a split'),
    },
    "Job.train": dict.fromkeys(
        ("batch_size", "epochs", "learning_rate", "loss", "lr", "num_epochs", "optimizer"),
        'what is trained how is a recipe: write job.train(Recipe(epochs=3, optimizer="adamw", learning_rate=1e-3))',
    ),
    "Recipe": {
        **dict.fromkeys(
            ("criterion", "loss"),
            "the loss follows from the targets: write frostline train --loss, or a loop of your own",
        ),
    },
    "LoaderSettings": {
        "cache": "write cache_bytes=1 << 30 for memory, and cache_folder=folder for disk",
        "cache_size": "write cache_bytes=1 << 30",
        "cache_dir": "write cache_folder=folder",
        **dict.fromkeys(("timeout", "timeout_s"), "write deadline_s=120, or retry_for_s=60"),
        **dict.fromkeys(
            ("memory", "memory_bytes"), "write window_bytes=1 << 28 for what is in flight, and cache_bytes"
        ),
    },
    "NodeSettings": {
        **dict.fromkeys(
            ("host", "listen", "port"),
            "it is an option of the command: write frostline serve --listen 0.0.0.0:7070",
        ),
        **dict.fromkeys(("memory", "max_memory"), "write memory_bytes=4 << 30"),
        **dict.fromkeys(("num_workers", "threads", "workers"), "write decode_threads=4, or read_threads=64"),
    },
    "Dataset()": {
        **dict.fromkeys(
            ("batch_size", "drop_last", "shuffle"),
            "it is a loader's: write loader(data, batch_size=32, shuffle=True)",
        ),
    },
    "Dataset": {
        **dict.fromkeys(
            ("decode", "map_tuple", "padded_batch", "rename", "to_tuple", "window"),
            "samples come decoded, with their labels: write loader(data, batch_size=32, map=function)",
        ),
        **dict.fromkeys(
            ("apply", "batched", "compose", "enumerate", "prefetch", "unbatched", "zip"),
            "batches are a loader's: write loader(data, batch_size=32, shuffle=True)",
        ),
        **dict.fromkeys(
            ("filter_by", "loc", "query", "where"), "write data.select(\"label == 'cat'\"), or data.take(rows)"
        ),
        **dict.fromkeys(("iloc", "slice"), "write data[:100], or data.take(rows)"),
        **dict.fromkeys(("cardinality", "length", "with_length"), "write len(data)"),
        **dict.fromkeys(
            ("cache_files", "cleanup_cache_files", "dataset_size"),
            "data is read where it lies and not copied; its bytes are data.samples.encoded_bytes",
        ),
        **dict.fromkeys(("c", "find_classes", "vocab"), "write data.classes"),
        **dict.fromkeys(("int2str", "str2int"), 'write data.classes[0], or data.class_to_idx["cat"]'),
        **dict.fromkeys(("format", "reset_format"), "samples are arrays, and a loader's batches are tensors"),
        **dict.fromkeys(("k_fold", "kfold"), "write data.take(rows), of the rows that sklearn's StratifiedKFold gives"),
        **dict.fromkeys(
            ("add_item", "append"), 'samples lie in files: write one into the folder, and Dataset("photos") again'
        ),
        "sort_values": "write data.take(numpy.argsort(data.targets))",
        "with_epoch": "write for batches in loader(data, batch_size=32).epochs(range(10))",
        **dict.fromkeys(
            ("dataloader", "dataloaders", "get_dataloader", "loader", "to_dataloader", "to_torch"),
            "batches are a loader's: write loader(data, batch_size=32, shuffle=True)",
        ),
        **dict.fromkeys(("as_numpy", "as_numpy_iterator", "numpy"), "write offload(None, data).arrays(32)"),
        **dict.fromkeys(("random_sample", "sample"), "write data.shuffle(seed=0).take(5)"),
        **dict.fromkeys(("peek", "preview", "show"), "look at data[0], or at data.to_pandas()"),
        **dict.fromkeys(
            ("class_counts", "class_weights", "value_counts"),
            "write numpy.bincount(data.targets), and weights={{name: weight}} of a loader",
        ),
        **dict.fromkeys(("to_dict", "to_list"), "write data.to_pandas(), or data.column(name).to_pylist()"),
        **dict.fromkeys(("export", "save"), "write frostline ingest photos copy --format parquet on the command line"),
        **dict.fromkeys(("validate", "verify"), "run frostline doctor --data photos"),
        **dict.fromkeys(("get_label", "label"), "write data.targets[0], or data.classes[data.targets[0]]"),
        **dict.fromkeys(("id", "ids"), "write data.samples.ids"),
        "repartition": "data is read where it lies and has no partitions, so leave repartition out",
        "flatten_indices": "rows are taken without a copy, so leave flatten_indices out",
        "epochs": "write for batches in loader(data, batch_size=32).epochs(range(10))",
        "repeat": "write for batches in loader(data, batch_size=32).epochs(range(10))",
    },
    "BlockShuffle": dict.fromkeys(("block_size", "size"), "write samples=16, the neighbours that one request reads"),
    "FeatureMixup": dict.fromkeys(("p", "prob"), "write alpha=0.2, of the distribution Beta(alpha, alpha)"),
    "FeatureNoise": dict.fromkeys(("scale", "sigma", "std"), "write share=0.1, of each sample's own size"),
    "audio": dict.fromkeys(("rate", "sampling_rate", "sr"), "write sample_rate=16_000"),
    "TenantSettings": {
        **dict.fromkeys(("limit", "quota"), "write requests=4, work_bytes=1 << 30, or device_s_per_s=0.5"),
        "priority": "write weight=2.0",
    },
    "imagenet": dict.fromkeys(("is_training", "train", "training"), "write augment=True"),
    "loader": {"dtype": "write x = x.to(torch.float16), or torch.autocast, in the loop"},
    "Dataset.split": {
        **dict.fromkeys(("lengths", "test_size", "train_size"), "write data.split(0.2), the share to hold out"),
        "stratify": "each class is divided by the share, so leave stratify out",
    },
    "Dataset.shuffle": {"buffer_size": "all samples are shuffled, so leave buffer_size out"},
    "Dataset.train_test_split": {
        "shuffle": "the parts are drawn by the seed, so leave shuffle out; data[:80] and data[80:] divide in order"
    },
    "Batch.to": dict.fromkeys(
        ("dtype", "memory_format"), "write x = batch.features.to({name}=...), or torch.autocast in the loop"
    ),
    "freeze": dict.fromkeys(("image_size", "img_size", "input_size", "shape"), "write input_shape=(3, 224, 224)")
    | dict.fromkeys(("n_layers", "num_layers"), 'write until="layer4", the name of the last layer to freeze'),
    "offload": {
        **dict.fromkeys(
            ("batch_size", "drop_last", "seed", "shuffle"),
            "it is a loader's: write job.loader(batch_size=32, shuffle=True)",
        ),
        **dict.fromkeys(("freeze", "until"), 'write offload(freeze(model, until="layer4"), data)'),
        "device": "the trained layers run where your network is: write model.to(device) before",
        **dict.fromkeys(("criterion", "loss", "lr", "optimizer", "scheduler"), f"{_LOOP}"),
        **dict.fromkeys(
            ("eval_data", "test_data", "val_data", "valid_data"),
            "write job.loader(batch_size=32, data=held_out), of train, held_out = data.split(0.2)",
        ),
    },
    "Loader": {
        **dict.fromkeys(("map", "seed", "shuffle"), "it is an argument: write loader(data, batch_size=32, {name}=...)"),
        **dict.fromkeys(("cuda", "to"), _DEVICE),
        **dict.fromkeys(("repeat", "with_epoch"), "write for loader in loader.epochs(range(10))"),
        "as_numpy_iterator": "batches of NumPy come from job.arrays(32)",
        "batch": "write loader(data, batch_size=32)",
        **dict.fromkeys(("unbatch", "unbatched"), "write loader(data, batch_size=1), or data[0] for a sample"),
        "classes": "write data.classes, of data = Dataset(...)",
        "close": "a pass ends with its loop, and job.close() ends a job's loaders",
        "drop_last": "it is an argument: write loader(data, batch_size=32, drop_last=True)",
        "prefetch": "batches are read ahead by themselves, so leave prefetch out",
        "reset": "each for begins a pass at the loader's beginning, so leave reset out",
        **dict.fromkeys(("class_names", "vocab"), "write data.classes, of data = Dataset(...)"),
        **dict.fromkeys(("length", "n", "num_batches", "with_length"), "write len(loader), or len(loader.dataset)"),
        **dict.fromkeys(("features", "images", "x"), "it is a batch's: write for x, y in loader"),
        **dict.fromkeys(("get_next", "next", "one_batch"), "write batch = next(iter(loader))"),
        **dict.fromkeys(("labels", "targets"), "write data.targets, of data = Dataset(...)"),
        "skip": "write itertools.islice(loader, 10, None), or loader.load_state_dict(state)",
        **dict.fromkeys(("eval", "train"), "a loader has no mode: write model.{name}()"),
        "take": "write itertools.islice(loader, 10)",
    },
    "batch": {
        **dict.fromkeys(("items", "values"), "write x, y = batch, or batch.features and batch.labels"),
        **dict.fromkeys(("double", "float", "half"), "write batch.features.{name}()"),
        "cpu": 'write batch.to("cpu")',
        **dict.fromkeys(("shape", "size"), "write len(batch), or batch.features.shape"),
        **dict.fromkeys(
            ("filenames", "names", "paths"),
            "names are the data set's: write names = dict(zip(data.samples.ids.tolist(), data.names)), and then "
            "[names[number] for number in batch.ids.tolist()]",
        ),
        "numpy": "batches of NumPy come from job.arrays(32)",
    },
    "frostline": {
        **dict.fromkeys(("Trainer", "finetune", "fit", "train"), _LOOP),
        **dict.fromkeys(("embed", "extract"), _EXTRACT),
        **dict.fromkeys(
            ("Client", "connect", "init", "prepare"), 'write offload(model, "photos", near="http://store-1:7070")'
        ),
        **dict.fromkeys(("predict", "score"), "run frostline predict --run RUN --data photos --out predictions.csv"),
        **dict.fromkeys(
            ("DataPipeline", "MDSWriter", "SimpleShardList", "Stream", "WebLoader", "optimize"),
            'data is read in the format it has: write loader("s3://bucket/shards", batch_size=32)',
        ),
        **dict.fromkeys(
            ("CombinedStreamingDataset", "ParallelStreamingDataset", "interleave_datasets"),
            "write data=Mixture(parts=[cats, dogs], ratios=[3, 1]) of a loader",
        ),
        **dict.fromkeys(
            ("ConcatDataset", "concatenate_datasets", "merge_datasets"), "write cats + dogs, of data sets of one folder"
        ),
        "train_test_split": "write data.train_test_split(test_size=0.2)",
        **dict.fromkeys(
            ("augment", "augmentations"), "write transform=v2.Compose([...]) of Dataset, loader or offload"
        ),
        **dict.fromkeys(("copy", "ingest"), "run frostline ingest photos copy --format parquet"),
        **dict.fromkeys(("index", "list_files"), 'run frostline index --data photos, or write Dataset("photos")'),
        **dict.fromkeys(("near", "node_url", "set_node"), 'write offload(model, "photos", near="http://store-1:7070")'),
        **dict.fromkeys(
            ("logging", "set_log_level", "set_verbosity"),
            'write on_event=print for each event, or logging.getLogger("frostline")',
        ),
        **dict.fromkeys(("save", "save_model"), 'write torch.save(job.head.state_dict(), "head.pt")'),
        **dict.fromkeys(("from_pretrained", "list_models"), 'write timm.create_model("resnet18", pretrained=True)'),
        **dict.fromkeys(("evaluate", "test", "validate"), f"{_LOOP}, which scores held-out samples"),
        **dict.fromkeys(("Node", "NodeClient", "Server", "serve"), "run frostline serve --data-root /data"),
        **dict.fromkeys(("cost", "plan", "profile"), "run frostline plan --data photos --model NAME --until LAYER"),
        **dict.fromkeys(
            ("manual_seed", "seed_everything", "set_seed"),
            "write seed=0 of a loader, and torch.manual_seed(0) for the head",
        ),
        **dict.fromkeys(
            ("Config", "settings"), "write LoaderSettings(...) for a job, or NodeSettings(...) for its node"
        ),
        **dict.fromkeys(("cut", "split_model"), 'write offload(freeze(model, until="layer4"), "photos")'),
        **dict.fromkeys(("FrostlineError", "exceptions"), "write frostline.errors.FrostlineError"),
        **dict.fromkeys(("Model", "load_model"), "a network of PyTorch is one: write timm.create_model(...)"),
        "compile": "write torch.compile(model) before freeze",
        "embeddings": _EXTRACT,
        "load": 'write Dataset("photos") for data, and torch.load("head.pt") for a head',
        "split": "write train, held_out = data.split(0.2)",
        "create_model": 'write timm.create_model("resnet18", pretrained=True)',
        "unfreeze": "write layer.requires_grad_(True), and job.refreeze()",
    },
    "preprocess": dict.fromkeys(
        (
            "AutoAugment",
            "Compose",
            "Grayscale",
            "RandAugment",
            "RandomCrop",
            "RandomErasing",
            "clip",
            "compose",
            "random_crop",
            "timm",
            "torchvision",
            "transforms",
            "vit",
        ),
        "write preprocess.from_transform(transform), of one of torchvision or timm, or a processor of transformers",
    ),
}


_FILES = 'samples are read from files: write table.to_parquet("photos.parquet"), and give "photos.parquet"'
# What is given for a data set, by the name of its type.
_AS_DATA: Mapping[str, str] = {
    **dict.fromkeys(
        ("list", "set", "tuple"),
        'write their paths into list.csv, a line each below the line file_name, and give "list.csv"; or their folder',
    ),
    **dict.fromkeys(("DataFrame", "Table", "Tensor", "TensorDataset", "ndarray"), _FILES),
    "dict": "give each of its parts by itself, as a path or a Dataset",
    **dict.fromkeys(("BufferedReader", "BytesIO", "TextIOWrapper"), "give the name of the file"),
    **dict.fromkeys(("ArrayLoader", "DataLoader", "Loader"), "batches are made here, so give what the loader reads"),
    **dict.fromkeys(("DatasetDict", "IterableDataset"), 'write data.save_to_disk("photos"), and give "photos"'),
    "WebDataset": 'give the folder or bucket of its shards, such as "s3://bucket/shards"',
}


def data_hint(given: object) -> str:
    """End a sentence about what is no data set by what to give instead."""
    name, root = type(given).__name__, getattr(given, "root", None)
    if isinstance(root, str | Path):  # as torchvision's data sets have it
        transform = getattr(given, "transform", None) is not None
        return f": give its folder, {str(root)!r}{', and transform=data.transform' if transform else ''}"
    if hasattr(given, "forward"):
        return ": the network comes first, as in offload(model, data)"
    if hasattr(given, "save_to_disk"):
        name = "DatasetDict"
    return f": {_AS_DATA[name]}" if name in _AS_DATA else ""


def synonym(name: str, known: Iterable[str]) -> str:
    """Our own name for a word that other libraries have for the same thing; nothing where we have none."""
    names = set(known)
    return next((ours for ours in _SYNONYMS.get(name, ()) if ours in names), "")


def suggest_names(name: str, known: Iterable[str]) -> str:
    """End a sentence about an unknown name: ``"; did you mean a, b or c?"``, or nothing if none is near.

    Words that other libraries have for the same thing are near, however they are spelt.
    """
    known = list(dict.fromkeys(known))
    meant = synonym(name, known)
    matches = [meant] if meant else difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if not matches:
        return ""
    *others, last = matches
    return f"; did you mean {', '.join(others)} or {last}?" if others else f"; did you mean {last}?"


def _fields_of(function: Callable[..., Any], known: Collection[str]) -> dict[str, str]:
    """Lines to write for the fields of the settings that a function takes, by their own names and other libraries'.

    The settings are found by the function's own module, since the module of settings has hints itself.
    """
    lines: dict[str, str] = {}
    own = getattr(inspect.unwrap(function), "__globals__", {})
    for argument, kind in (("node", "NodeSettings"), ("settings", "LoaderSettings")):
        if argument in known and kind in own:
            lines |= {field: f"{argument}={kind}({field}=...)" for field in own[kind].__dataclass_fields__}
    lines |= {name: lines[ours] for name in _SYNONYMS if (ours := synonym(name, lines))}
    return {name: line for name, line in lines.items() if name not in known and not synonym(name, known)}


def hint_for(name: str, known: Iterable[str], owner: str = "", lines: Mapping[str, str] | None = None) -> str:
    """End a sentence about an unknown argument or attribute by the line to write, where other libraries have it.

    Args:
        name: name that was asked for.
        known: names that there are.
        owner: class, module or function that was asked for it; empty for none of those that have names of their own.
        lines: lines to write for further names, such as fields of settings.
    """
    known = list(known)
    if instead := _BY_OWNER.get(owner, {}).get(name) or _INSTEAD.get(name):
        return f": {instead.format(name=name)}"
    if lines and name in lines:
        return f"; write {lines[name]}"
    meant = synonym(name, known)
    return f"; write {_EXAMPLES[meant]}" if meant in _EXAMPLES else suggest_names(name, known)


F = TypeVar("F", bound=Callable[..., Any])


def add_hints(function: F) -> F:
    """Have a function refuse arguments that it does not know with the line to write instead."""
    name = function.__qualname__.removesuffix(".__init__").replace("KnownNames", "Dataset")
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for given in (name for name in kwargs if name not in known):  # the first that was written
            owner = "Dataset()" if name == "Dataset" else name  # whose attributes have other hints
            hint = hint_for(given, known, owner, _fields_of(function, known))
            raise TypeError(f"{name}() got an unexpected keyword argument {given!r}{hint}")
        if name in _CALLS:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}(): {error}; write {_CALLS[name]}") from None
        return function(*args, **kwargs)

    return cast(F, checked)


K = TypeVar("K")


def add_field_hints(kind: type[K]) -> type[K]:
    """Have a class of settings refuse fields that it does not have with the line to write instead."""
    kind.__init__ = add_hints(kind.__init__)  # type: ignore[method-assign]
    return kind


_CALLED = {
    "ArrayLoader": "Loader",
    "PartOfSamples": "SampleTable",
    "WholeSamples": "SampleTable",
    "_Epoch": "Loader",
}


class Hinting:
    """An object that refuses an attribute that it lacks with the line to write, where other libraries have it."""

    __slots__ = ()

    if not TYPE_CHECKING:  # which would take any name for one that there is

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # it is there, and what it computes lacks something: say that
                return object.__getattribute__(self, name)
            raise AttributeError(_refusal(type(self), name))


class HintingColumns(Hinting):
    """Columns of samples, which are asked for an index where other libraries have a list of pairs."""

    __slots__ = ()

    def __getitem__(self, _: object) -> NoReturn:
        raise TypeError(
            "samples are columns: write data[0] for a sample and its label, or data.names[0] and data.targets[0]"
        )


class HintingType(type):
    """The type of a class that does so itself, as for ``from_folder``."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(_refusal(cls, name))


def _refusal(kind: type, name: str) -> str:
    """The sentence for an attribute that an object of a class lacks."""
    owner, is_private = _CALLED.get(kind.__name__, kind.__name__), name[:1] == "_"
    hint = "" if is_private else hint_for(name, [known for known in dir(kind) if known[0] != "_"], owner)
    return f"a {owner} has no {name!r}{hint}"
