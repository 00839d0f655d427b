"""Values of another type than a setting's are refused by its name; secrets are not shown."""

import numpy as np
import pytest

from frostline.core.config import IoSettings, LoaderSettings, NodeSettings, TenantSettings, check_type
from frostline.core.errors import SettingError
from frostline.core.hints import Hinting


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LoaderSettings(window_bytes=1.5), r"window_bytes takes a whole number, not 1\.5"),
        (lambda: LoaderSettings(window_bytes=True), "window_bytes takes a whole number, not True"),
        (lambda: LoaderSettings(requests_in_flight="8"), "requests_in_flight takes a whole number or None, not '8'"),
        (lambda: LoaderSettings(retry_for_s="long"), "retry_for_s takes a number, not 'long'"),
        (lambda: LoaderSettings(ramp=1), "ramp takes True or False, not 1"),
        (lambda: LoaderSettings(cache_folder=b"here"), "cache_folder takes a text or None, not bytes"),
        (lambda: NodeSettings(read_threads=2.0), "read_threads takes a whole number"),
        (lambda: IoSettings(max_connections=None), "max_connections takes a whole number, not NoneType"),
        (lambda: TenantSettings(name="a", token_sha256="0" * 64, requests=0.5), "requests takes a whole number or"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_its_name(make, said):
    with pytest.raises(SettingError, match=said):
        make()


def test_numbers_of_numpy_whole_numbers_of_seconds_and_paths_are_taken(tmp_path):
    settings = LoaderSettings(
        window_bytes=np.int64(7), retry_for_s=3, hedge_quantile=np.float32(0.5), cache_folder=tmp_path
    )
    assert (settings.window_bytes, settings.retry_for_s, settings.hedge_quantile) == (7, 3, 0.5)


def test_a_sentence_names_each_type_that_is_taken():
    with pytest.raises(SettingError, match=r"^data takes LoaderSettings or a text, not dict$"):
        check_type("data", {}, LoaderSettings, str)


def test_settings_show_what_differs_from_the_defaults_and_no_secret():
    assert repr(LoaderSettings()) == "LoaderSettings()"
    assert repr(LoaderSettings(max_reorder=None, token="secret")) == "LoaderSettings(max_reorder=None)"
    assert repr(NodeSettings(device_batch=8)) == "NodeSettings(device_batch=8)"


class Lacking(Hinting):
    """One of its attributes is computed from what is not there."""

    @property
    def size(self):
        return self.folder.missing

    folder = None


def test_what_an_attribute_lacks_to_be_computed_is_not_said_of_the_attribute():
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'missing'"):
        _ = Lacking().size
    with pytest.raises(AttributeError, match="a Lacking has no 'sise'; did you mean size"):
        _ = Lacking().sise
