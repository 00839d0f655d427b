"""Parts of a data set joined: their rows one part after the other, and a name for exactly these."""

import numpy as np
import pytest

import frostline as fl
from frostline.core.errors import SettingError
from support.images import image_folder


def test_joined_parts_have_the_samples_of_each_in_its_order(tmp_path):
    data = fl.Dataset(image_folder(tmp_path, per_class=5))
    some, others = data.select("label == 'noise'"), data.take(np.array([7, 0, 7]))
    joined = some.joined(others, data)
    assert len(joined) == 5 + 3 + 15
    ids = [*some.samples.ids.tolist(), *others.samples.ids.tolist(), *data.samples.ids.tolist()]
    assert joined.samples.ids.tolist() == ids
    assert joined.samples.take(np.array([6, 2, 22])).ids.tolist() == [ids[6], ids[2], ids[22]]
    assert list(joined.names)[5:8] == list(others.names)
    assert joined.classes == data.classes


def test_joined_parts_are_named_by_the_parts_in_their_order(tmp_path):
    data = fl.Dataset(image_folder(tmp_path, per_class=5))
    one, other = data.split(0.4, 0)
    digests = {one.joined(other).digest, other.joined(one).digest, one.joined(other, one).digest, data.digest}
    assert len(digests) == 4
    assert one.joined(other).digest == one.joined(other).digest


def test_parts_of_other_data_cannot_be_joined(tmp_path):
    one, other = (fl.Dataset(image_folder(tmp_path / name, per_class=2)) for name in ("one", "other"))
    with pytest.raises(SettingError, match="can be joined"):
        one.joined(other)
