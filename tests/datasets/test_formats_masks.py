"""Images and masks that lie side by side: the layouts that people have, and what the manifest says of them."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from frostline.core.errors import DataError
from frostline.datasets import Dataset
from frostline.datasets.check import check
from frostline.datasets.formats.folders import pairs_of
from frostline.datasets.formats.known import format_of
from frostline.datasets.manifest import nobody
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry

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
        ("images/1.jpg", "images/2.jpg"),
        ("images/1.jpg", "masks/2.png"),
        ("labels/1.jpg", "things/2.jpg"),
    ],
)
def test_class_folders_stay_class_folders(names):
    assert format_of(entries(*names)).name == "folders"


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
    found = {item.object: item.reason for item in check(data, nobody, progress=tmp_path / "progress").unreadable}
    assert found.keys() == {"images/1.tif", "images/2.tif", "images/3.tif"}
    assert found["images/1.tif"].startswith("masks/1.tif: the mask has 5 x 5 pixels and its image 6 x 5")
    assert found["images/2.tif"].startswith("masks/2.tif: not an image")
    assert found["images/3.tif"] == "it has no mask"
