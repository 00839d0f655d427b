"""Images with masks: which belongs to which, the same in every format.

Images and masks that lie side by side: the layouts that people have, and what the manifest says of them.

Masks in shards, Parquet files and lists, and copies that take them along from any format into any other.
"""

import io
import json
import uuid
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import DataError, EmptyDataset, SettingError
from frostline.datasets import Dataset
from frostline.datasets.check import check
from frostline.datasets.copy.layout import PACKERS
from frostline.datasets.copy.ready import ingest
from frostline.datasets.copy.repack import repack
from frostline.datasets.dataset import roots_of
from frostline.datasets.formats.folders import pairs_of
from frostline.datasets.formats.known import format_of
from frostline.datasets.formats.tables import columns_of_schema
from frostline.datasets.manifest import null_observer
from frostline.datasets.reading import open_samples
from frostline.preprocess import Applied, CenterCrop, Decode, Normalize, Preprocess, Resize, imagenet
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry
from support.formats import tar_of


def test_masks_of_images_that_are_turned_are_checked_as_they_are_read(tmp_path):
    """Both lie on their side, in the way in which Hugging Face's datasets turns both."""
    exif = Image.Exif()
    exif[0x0112] = 6
    columns = {}
    for name, mode in (("image", "RGB"), ("mask", "L")):
        file = BytesIO()
        Image.new(mode, (60, 40)).save(file, "PNG", exif=exif)
        columns[name] = [{"bytes": file.getvalue(), "path": None}]
    features = {name: {"_type": "Image"} for name in columns}
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, tmp_path / "a.parquet")
    data = Dataset(tmp_path)
    pixels, mask = data.with_transform(imagenet(24))[0]
    assert (pixels.shape, mask.shape) == ((3, 24, 24), (24, 24))
    assert not check(data, null_observer, progress=tmp_path / "progress").unreadable


LAYOUTS = {
    "two folders": ("images/1.jpg", "masks/1.png", ""),
    "an array": ("images/1.npy", "masks/1.npy", ""),
    "folders of parts within": ("images/train/1.jpg", "annotations/train/1.png", "train"),
    "folders of parts around": ("train/images/1.tif", "train/masks/1.tif", "train"),
    "large letters": ("Images/1.JPG", "Masks/1.PNG", ""),
    "ends within folders": ("imgs/1.jpg", "masks/1_mask.png", ""),
    "ends alone": ("case 7/1.tif", "case 7/1_mask.tif", "case 7"),
    "ends alone, at the top": ("ISIC_0000001.jpg", "ISIC_0000001_segmentation.png", ""),
    "both ends": ("train/1_sat.jpg", "train/1_mask.png", "train"),
    "a folder beside": ("train/1.jpg", "train_masks/1_mask.png", "train"),
    "Pascal VOC": ("VOC2012/JPEGImages/2007_000032.jpg", "VOC2012/SegmentationClass/2007_000032.png", "VOC2012"),
    "Cityscapes": (
        "leftImg8bit/train/bonn/bonn_1_2_leftImg8bit.png",
        "gtFine/train/bonn/bonn_1_2_gtFine_labelIds.png",
        "train",
    ),
    "equal names with an end of images": ("images/scan_1_image.png", "masks/scan_1_image.png", ""),
    "equal names with an end of masks": ("images/1_mask.png", "masks/1_mask.png", ""),
    "an end of images alone": ("images/1_image.png", "masks/1.png", ""),
    "Carvana": ("train/car0_01.jpg", "train_masks/car0_01_mask.gif", "train"),
    "Supervisely": ("ds/img/1.jpg", "ds/ann/1.png", "ds"),
    "short names": ("imgs/1.jpg", "lbls/1.png", ""),
    "CamVid": ("train/1.png", "trainannot/1.png", "train"),
    "mmseg": ("img_dir/train/1.png", "ann_dir/train/1.png", "train"),
    "LoveDA": ("Train/Rural/images_png/1.png", "Train/Rural/masks_png/1.png", "Train"),
    "both folders say it": ("train_images/1.png", "train_masks/1.png", "train"),
    "splits behind the words": ("images_val/1.png", "masks_val/1.png", "val"),
    "words apart by a hyphen": ("val-images/1.png", "val-labels/1.png", "val"),
    "machine masks": ("ds/img/1.png", "ds/masks_machine/1.png", "ds"),
    "inputs and targets": ("Inputs/1.png", "Targets/1.png", ""),
    "pets": ("images/Abyssinian_1.jpg", "annotations/trimaps/Abyssinian_1.png", ""),
}


def entries(*names):
    return [Entry(name, 9, f"etag of {name}") for name in names]


def paired(*names):
    return [(item.image.object, item.mask and item.mask.object) for item in pairs_of(entries(*names))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_common_layouts_are_known_by_their_names(layout):
    image, mask, folder = LAYOUTS[layout]
    listing = entries(image, mask, "README.md", "notes/list.txt")
    assert format_of(listing).name == "masks"
    (pair,) = pairs_of(listing)
    assert (pair.image.object, pair.mask.object, pair.folder) == (image, mask, folder)


@pytest.mark.parametrize(
    "names",
    [
        ("cat/1.jpg", "dog/1.jpg"),
        ("with_mask/1.jpg", "without_mask/1.jpg"),
        ("mask/1.jpg", "no_mask/1.jpg"),
        ("target/1.jpg", "non_target/1.jpg"),
        ("ann_lee/1.jpg", "bob_lee/1.jpg"),
        ("cannot/1.jpg", "can/1.jpg"),
        ("gas_mask/1.jpg", "gas/1.jpg"),
        ("images/1.jpg", "images/2.jpg"),
        ("labels/1.jpg", "things/2.jpg"),
        ("ann/1.jpg", "bob/1.png", "eve/1.png"),
        ("cat/1.jpg", "dog/1.jpg", "cat/2.png", "dog/2.png"),
        ("cat/1.png", "dog/1.png"),
    ],
)
def test_class_folders_stay_class_folders(names):
    assert format_of(entries(*names)).name == "folders"


@pytest.mark.parametrize(
    "names",
    [
        ("images/1.jpg", "masks/2.png"),
        ("x1/images/x1.png", "x1/masks/m1.png", "x1/masks/m2.png"),
        ("train/Images/a.jpg", "train/Labels/b_color.png"),
        ("train_images/a.png", "train_masks/b.png"),
    ],
)
def test_images_beside_masks_of_other_names_are_refused(names):
    store = open_store(f"memory://{uuid.uuid4()}")
    for name in names:
        store.write(name, b"P5 1 1 255\n\0")
    with pytest.raises(EmptyDataset, match=f"{names[0]} and {names[1]} do not belong together by their names"):
        _ = Dataset(store.url).samples
    assert len(Dataset(store.url, format="folders")) == len(names), "who names them takes them all"


@pytest.mark.parametrize("second", ["y/{}.png", "y/{}.gif", "a/b/{}.bmp", "y/{}_segmentation.png"])
def test_two_folders_of_the_same_names_are_no_classes_unless_their_user_says_so(second):
    store = open_store(f"memory://{uuid.uuid4()}")
    for number in range(3):
        for name in ("x/{}.jpg", second):
            store.write(name.format(number), b"P5 1 1 255\n\0")
    folder = second.rpartition("/")[0]
    with pytest.raises(EmptyDataset, match=rf"x and {folder} at .*: call the folders images and masks"):
        _ = Dataset(store.url).samples
    assert Dataset(store.url, format="folders").classes == tuple(sorted(("x", folder[0])))
    store.write("x/3.jpg", b"P5 1 1 255\n\0")
    assert len(Dataset(store.url)) == 7, "a photograph without a namesake"


def test_of_several_files_beside_an_image_the_mask_is_taken():
    ends = ("color", "instanceIds", "labelIds", "labelTrainIds")
    image = "leftImg8bit/val/a/a_leftImg8bit.png"
    masks = [f"gtFine/val/a/a_gtFine_{end}.png" for end in ends]
    assert paired(image, *masks) == [(image, masks[3])]
    assert paired(image, *masks[:3]) == [(image, masks[2])]
    assert paired("JPEGImages/1.jpg", "SegmentationObject/1.png", "SegmentationClass/1.png") == [
        ("JPEGImages/1.jpg", "SegmentationClass/1.png")
    ]


def test_an_image_without_a_mask_stays_but_for_that_of_another_task():
    assert paired("images/1.jpg", "images/2.jpg", "masks/1.png", "masks/3.png") == [
        ("images/1.jpg", "masks/1.png"),
        ("images/2.jpg", None),
    ]
    voc = ("JPEGImages/1.jpg", "JPEGImages/2.jpg", "SegmentationClass/1.png")
    assert paired(*voc) == [("JPEGImages/1.jpg", "SegmentationClass/1.png")]


def test_a_mask_that_is_called_as_an_image_goes_before_others():
    image, other = "images/1_image.png", "images/1.png"
    assert paired(image, "masks/1_image.png", "masks/1_mask.png") == [(image, "masks/1_image.png")]
    assert paired(image, other, "masks/1_image.png", "masks/1.png") == [
        (other, "masks/1.png"),
        (image, "masks/1_image.png"),
    ]
    assert paired(image, other, "masks/1_mask.png") == [(other, "masks/1_mask.png"), (image, None)]


def test_two_masks_of_one_image_are_refused_by_name():
    with pytest.raises(DataError, match=r"masks/1\.npy and masks/1\.png would both be the mask of one image"):
        pairs_of(entries("images/1.jpg", "masks/1.png", "masks/1.npy"))
    with pytest.raises(DataError, match=r"images/1\.jpg and images/1\.png would both be the images of one sample"):
        pairs_of(entries("images/1.jpg", "images/1.png", "masks/1.png"))


def tiff(width, height, big=False):
    file = BytesIO()
    # Its directory stands at the end, behind more than what is read first.
    side = 10 if big else 1
    Image.fromarray(np.zeros((height * side, width * side), np.uint8)).save(file, "TIFF")
    return file.getvalue()


@pytest.mark.parametrize("layout", ["{kind}/{split}/{rest}", "{split}/{kind}/{rest}", "{split}{end}/{rest}"])
@pytest.mark.parametrize("classes", [("",), ("cat/", "dog/")])
@pytest.mark.parametrize("splits", [("train",), ("Train", "val"), ("train", "validation", "test")])
def test_folders_around_images_and_masks_that_are_called_as_splits_are_splits(tmp_path, layout, classes, splits):
    store, number = open_store(str(tmp_path)), 0
    for split in splits:
        for folder in classes:
            number += 1
            for kind, end in (("images", ""), ("masks", "_masks")):
                name = layout.format(kind=kind, split=split, end=end, rest=f"{folder}{number}.tif")
                store.write(name, tiff(6, 5))
    data = Dataset(tmp_path)
    assert data.splits == tuple(split.lower() for split in splits)
    assert [len(data[split]) for split in data.splits] == [len(classes)] * len(splits)
    assert data.classes == tuple(folder.removesuffix("/") for folder in classes if folder)
    assert data.has_targets
    assert sorted(data.samples.labels.tolist()) == sorted(
        [*range(len(classes))] * len(splits) if classes[0] else [-1] * number
    )


def test_the_manifest_says_where_masks_are_and_how_large_images(tmp_path):
    store = open_store(str(tmp_path))
    store.write("images/1.tif", tiff(6, 5))
    store.write("images/2.tif", tiff(9, 8, big=True))
    store.write("images/3.tif", b"broken" * 1000)
    for number in (1, 3):
        store.write(f"masks/{number}.tif", tiff(6, 5))
    data = Dataset(tmp_path)
    assert data.has_targets
    table = {name: data.column(name).to_pylist() for name in data.columns}
    assert table["target_object"] == ["masks/1.tif", "", "masks/3.tif"]
    assert table["target_length"] == [len(tiff(6, 5)), 0, len(tiff(6, 5))]
    assert [bool(etag) for etag in table["target_etag"]] == [True, False, True]
    assert (table["target_width"], table["target_height"]) == ([6, 90, 0], [5, 80, 0])
    assert data.samples.labels.tolist() == [-1] * 3
    assert list(data.select("target_length > 0").samples.objects) == ["images/1.tif", "images/3.tif"]
    again = Dataset(tmp_path)
    assert again.manifest.found
    assert again.samples.take(np.array([2, 0])).targets.objects == ["masks/3.tif", "masks/1.tif"]
    assert again.take(np.array([2, 0])).samples.take(np.array([1])).targets.objects == ["masks/1.tif"]


def test_a_mask_that_changes_makes_a_new_manifest(tmp_path):
    store = open_store(str(tmp_path))
    store.write("images/1.tif", tiff(6, 5))
    store.write("masks/1.tif", tiff(6, 5))
    before = Dataset(tmp_path).digest
    store.write("masks/1.tif", tiff(6, 5) + b"!")
    assert Dataset(tmp_path).digest != before


def test_class_folders_have_no_masks(tmp_path):
    open_store(str(tmp_path)).write("cat/1.tif", tiff(6, 5))
    assert not Dataset(tmp_path).has_targets


def test_a_check_reads_the_masks_too(tmp_path):
    store = open_store(str(tmp_path))
    for number in range(4):
        store.write(f"images/{number}.tif", tiff(6, 5))
    store.write("masks/0.tif", tiff(6, 5))
    store.write("masks/1.tif", tiff(5, 5))
    store.write("masks/2.tif", b"broken")
    data = Dataset(tmp_path)
    found = {item.object: item.reason for item in check(data, null_observer, progress=tmp_path / "progress").unreadable}
    assert found.keys() == {"images/1.tif", "images/2.tif", "images/3.tif"}
    assert found["images/1.tif"].startswith("masks/1.tif: the mask has 5 x 5 pixels and its image 6 x 5")
    assert found["images/2.tif"].startswith("masks/2.tif: not an image")
    assert found["images/3.tif"] == "it has no mask"


SQUARE = Preprocess(steps=(Decode(), Resize(48), CenterCrop(48), Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)))


def quiet(_):
    pass


def png(number, width=9, height=6, mode="L"):
    out = io.BytesIO()
    Image.new(mode, (width, height), number).save(out, "PNG")
    return out.getvalue()


def array(number, width=9, height=6):
    out = io.BytesIO()
    np.save(out, np.full((height, width), number, np.uint16))
    return out.getvalue()


def opened(encoded):
    return Image.open(io.BytesIO(encoded))


@pytest.fixture
def pairs(tmp_path):
    """Five images: of two classes and of none, with masks of two kinds, one without."""
    store = open_store(str(tmp_path / "pairs"))
    store.create()
    for number, folder in enumerate(("a/", "b/", "a/", "", "b/")):
        store.write(f"images/{folder}{number}.png", png(10 * number, mode="RGB" if number % 2 else "L"))
        if number != 4:
            suffix, made = ("png", png) if number % 2 else ("npy", array)
            store.write(f"masks/{folder}{number}.{suffix}", made(number))
    return fl.Dataset(tmp_path / "pairs")


def contents(data):
    """Class, image and mask of every sample, in no order, with the size that the manifest says the image has."""
    samples, store = (
        data.samples.take(np.arange(len(data))),
        open_samples(data.url, data.manifest.reading, roots=roots_of(data)),
    )
    rows, masks = samples.masks
    found = {
        int(row): bytes(store.read(masks.objects[place], int(masks.offsets[place]), int(masks.lengths[place])))
        for place, row in enumerate(rows)
    }
    return sorted(
        (
            data.classes[samples.labels[row]] if samples.labels[row] >= 0 else "",
            bytes(store.read(samples.objects[row], int(samples.offsets[row]), int(samples.lengths[row]))),
            found.get(row, b""),
            (samples.targets.widths[row], samples.targets.heights[row]) if row in found else (),
        )
        for row in range(len(samples))
    )


@pytest.mark.parametrize("format", PACKERS)
def test_masks_go_along_into_every_format_and_out_of_it(pairs, tmp_path, format):
    repack(pairs, tmp_path / "copy", format, part_bytes=200, on_event=quiet)
    copy = fl.Dataset(tmp_path / "copy")
    assert copy.has_targets
    assert contents(copy) == contents(pairs)
    again = "webdataset" if format == "parquet" else "parquet"
    repack(copy, tmp_path / "again", again, on_event=quiet)
    assert contents(fl.Dataset(tmp_path / "again")) == contents(pairs)


@pytest.mark.parametrize("format", PACKERS)
def test_masks_are_scaled_down_with_their_images(pairs, tmp_path, format):
    repack(pairs, tmp_path / "copy", format, shorter_side=3, on_event=quiet)
    copy = fl.Dataset(tmp_path / "copy")
    found = [(opened(image), opened(mask), size) for _, image, mask, size in contents(copy) if mask]
    assert all(image.size == mask.size == size == (4, 3) for image, mask, size in found)
    assert sorted(np.unique(np.asarray(mask)).tolist() for _, mask, _ in found) == [[0], [1], [2], [3]]


def test_a_mask_that_cannot_be_read_leaves_its_sample_out_of_a_copy(pairs, tmp_path):
    _ = pairs.samples  # listed before it changes
    open_store(pairs.url).write("masks/a/0.npy", array(9, 3, 3))
    done = repack(pairs, tmp_path / "copy", "webdataset", max_skipped_fraction=0.5, on_event=quiet)
    assert [sample.object for sample in done.skipped] == ["masks/a/0.npy"]
    assert len(fl.Dataset(tmp_path / "copy")) == 4


def test_a_class_that_would_be_taken_for_a_folder_of_masks_is_refused(tmp_path):
    store = open_store(f"memory://{uuid.uuid4()}")
    store.write("x.tar", tar_of([("gt/1.png", png(1)), ("gt/1.mask.png", png(2))]))
    with pytest.raises(SettingError, match="class 'gt' cannot be the name of a folder"):
        repack(fl.Dataset(store.url, cache=tmp_path), tmp_path / "copy", "original", on_event=quiet)


def kept(source, to, applied=None, **options):
    options = {"object_bytes": 1 << 12, "on_event": quiet, **options}
    return ingest(source, to, applied or Applied.to(imagenet(32), "uint8"), **options)


def targets_of(data, preprocess, **options):
    """The masks that a loader hands out, by id."""
    with fl.offload(
        None, data, preprocess=preprocess, settings=LoaderSettings(max_skipped_fraction=1.0), **options
    ) as job:
        batches = list(job.loader(2, shuffle=True, seed=1))
    return {int(id): mask.tolist() for batch in batches for id, mask in zip(batch.ids, batch.targets, strict=True)}


@pytest.mark.parametrize("declared", [imagenet(32), imagenet(32, augment=True)])
@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_ready_format_hands_out_the_masks_of_its_images_to_the_bit(pairs, tmp_path, store, declared):
    url = str(tmp_path / "ready") if store == "local" else f"memory://{uuid.uuid4()}"
    square = Preprocess(steps=(*declared.steps[:-1], declared.steps[-1]))
    done = kept(pairs, url, Applied.to(SQUARE if declared.is_random else square, "uint8"))
    ready = fl.Dataset(url)
    assert (done.samples, done.objects, ready.has_targets) == (5, 5, True)
    steps = Preprocess(steps=(*SQUARE.steps[:-1], *declared.steps[1:])) if declared.is_random else declared
    found = targets_of(ready, steps)
    assert len(found) == 4
    assert found == targets_of(pairs, steps)


def test_masks_of_16_bit_formats_are_the_same(pairs, tmp_path):
    kept(pairs, tmp_path / "half", Applied.to(imagenet(32), "fp16"))
    half = fl.Dataset(tmp_path / "half")
    assert targets_of(half, imagenet(32), accuracy="fp16") == targets_of(pairs, imagenet(32))


def test_keeps_a_complete_ready_format_with_masks_and_mends_an_incomplete_one(pairs, tmp_path):
    assert kept(pairs, tmp_path / "ready").made == 5
    assert kept(pairs, tmp_path / "ready", verify=True).made == 0
    before = {path: path.read_bytes() for path in (tmp_path / "ready" / "masks").iterdir()}
    assert len(before) == 4  # one has none
    first, second, *_ = sorted(before)
    first.unlink()
    second.chmod(0o644)
    second.write_bytes(before[second][::-1])
    with pytest.raises(DataError, match=r"masks/\d+\.ready of the ready format .* is gone or cut off"):
        _ = fl.Dataset(tmp_path / "ready").samples
    assert kept(pairs, tmp_path / "ready").made == 1
    assert kept(pairs, tmp_path / "ready", verify=True).made == 1
    assert {path: path.read_bytes() for path in before} == before


def test_a_mask_that_cannot_be_read_leaves_its_sample_out_of_a_ready_format(pairs, tmp_path):
    _ = pairs.samples  # listed before it changes
    open_store(pairs.url).write("masks/a/0.npy", array(9, 3, 3))
    done = kept(pairs, tmp_path / "ready", max_skipped_fraction=0.5)
    assert [(sample.object, sample.changed) for sample in done.skipped] == [("masks/a/0.npy", True)]
    assert len(targets_of(fl.Dataset(tmp_path / "ready"), imagenet(32))) == 3


def test_a_check_reads_the_masks_of_a_ready_format(pairs, tmp_path):
    kept(pairs.select("target_length > 0"), tmp_path / "ready")
    assert not check(fl.Dataset(tmp_path / "ready"), on_event=quiet).unreadable


def test_members_of_one_key_are_image_and_mask(tmp_path):
    store = open_store(f"memory://{uuid.uuid4()}")
    about = json.dumps({"width": 1, "target_object": "x"}).encode()
    first = [("1.png", png(1)), ("1.seg.npy", array(5)), ("1.json", about), ("2.png", png(2)), ("2.mask.txt", b"x")]
    store.write("a.tar", tar_of(first))
    store.write("b.tar", tar_of([("3.png", png(3)), ("3.json", about)]))
    data = fl.Dataset(store.url, cache=tmp_path)
    found = [("", png(1), array(5), (9, 6)), ("", png(2), b"", ()), ("", png(3), b"", ())]
    assert contents(data) == sorted(found)
    assert data.column("width").to_pylist() == [1, None, 1]
    store.write("c.tar", tar_of([("4.png", png(4)), ("4.mask.png", png(7))]))
    more = fl.Dataset(store.url, cache=tmp_path)
    assert contents(more) == sorted([*found, ("", png(4), png(7), (9, 6))])
    store.write("d.tar", tar_of([("5.png", png(4)), ("5.mask.png", png(7)), ("5.mask.npy", array(7))]))
    with pytest.raises(DataError, match=r"'5\.mask\.png' and '5\.mask\.npy' in d\.tar would both be the mask of '5'"):
        _ = fl.Dataset(store.url, cache=tmp_path).samples


def table_of(**columns):
    cells = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.table({
        name: pa.array([item and {"bytes": item, "path": None} for item in column], cells)
        for name, column in columns.items()
    })  # fmt: skip


@pytest.mark.parametrize("name", ["mask", "segmentation", "annotation", "label"])
def test_a_second_column_of_images_is_that_of_masks(tmp_path, name):
    store = open_store(f"memory://{uuid.uuid4()}")
    # The masks stand first: it is the names that tell them apart.
    table = table_of(**{name: [png(1), None, png(3)], "image": [png(10), png(20), png(30)]})
    said = {"info": {"features": {name: {"_type": "Image"} for name in table.schema.names}}}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(said)}), sink, row_group_size=2)
    store.write("x.parquet", sink.getvalue().to_pybytes())
    data = fl.Dataset(store.url, cache=tmp_path)
    found = [("", png(10), png(1), (9, 6)), ("", png(20), b"", ()), ("", png(30), png(3), (9, 6))]
    assert contents(data) == sorted(found)


def test_takes_no_single_column_of_images_for_masks():
    found = columns_of_schema(table_of(mask=[png(1)]).schema)
    assert (found.image, found.mask) == ("mask.bytes", None)


def test_a_list_says_where_masks_are(tmp_path):
    store, away = open_store(f"memory://{uuid.uuid4()}"), open_store(str(tmp_path / "away"))
    away.create()
    for number in range(3):
        store.write(f"i/{number}.png", png(number))
    store.write("m/0.png", png(7))
    away.write("1.npy", array(8))
    rows = ["i/0.png,m/0.png,a", f"i/1.png,{away.url}/1.npy,b", "i/2.png,,a"]
    store.write("list.csv", "\n".join(["url,mask,label", *rows]).encode())
    data = fl.Dataset(store.url, format="urls", cache=tmp_path / "cache")
    found = [("a", png(0), png(7), (9, 6)), ("a", png(2), b"", ()), ("b", png(1), array(8), (9, 6))]
    assert contents(data) == sorted(found)
    assert set(roots_of(data)) == {store.url, "file:///"}
    repack(data, tmp_path / "copy", "original", on_event=quiet)
    assert contents(fl.Dataset(tmp_path / "copy")) == contents(data)
