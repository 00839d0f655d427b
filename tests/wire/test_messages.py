"""Requests as JSON and back: versions of samples and views that come again travel; what makes no sense is refused."""

import numpy as np
import pytest

from frostline.core import Samples, View
from frostline.core.errors import BadRequest
from frostline.wire.messages import FeatureRequest, ProfileRequest


def message(**fields):
    samples = Samples(
        ids=np.array([1, 2]),
        objects=["a", "b"],
        offsets=np.zeros(2, np.int64),
        lengths=np.array([5, 6]),
        labels=np.full(2, -1),
        versions=fields.pop("versions", ()),
    )
    return FeatureRequest(data="s3://x", samples=samples, prefix=None, cut=1, preprocess={}, **fields)


@pytest.mark.parametrize("versions", [(), ("e1", ""), ('W/"1"', "ü")])
def test_versions_travel_and_may_be_unknown(versions):
    assert list(FeatureRequest.from_json(message(versions=versions).to_json()).samples.versions) == list(versions)


@pytest.mark.parametrize("view", [None, View(seed=1, epoch=2), View(seed=1, epoch=2, recurs=True)])
def test_a_view_travels_with_whether_it_comes_again(view):
    assert FeatureRequest.from_json(message(view=view).to_json()).view == view


def test_a_request_of_an_older_client_names_no_versions_and_no_view_that_comes_again():
    value = message(view=View(seed=1, epoch=2)).to_json()
    del value["view"]["recurs"]
    assert "versions" not in value["samples"]
    assert FeatureRequest.from_json(value).view == View(seed=1, epoch=2)


@pytest.mark.parametrize("versions", [["e1"], ["e1", 2], ["e1", "x" * 257], ["e1", "a\0b"], "e1", {"a": "b"}])
def test_versions_that_make_no_sense_are_refused_naming_them(versions):
    value = message().to_json()
    value["samples"]["versions"] = versions
    with pytest.raises(BadRequest, match="samples"):
        FeatureRequest.from_json(value)


@pytest.mark.parametrize("recurs", [1, "true", None])
def test_a_view_comes_again_or_it_does_not(recurs):
    value = message(view=View(seed=1, epoch=2)).to_json()
    value["view"]["recurs"] = recurs
    with pytest.raises(BadRequest, match=r"view\.recurs"):
        FeatureRequest.from_json(value)


def test_the_reading_travels_and_is_objects_where_an_older_client_names_none():
    assert FeatureRequest.from_json(message(reading="cells").to_json()).reading == "cells"
    value = message().to_json()
    del value["reading"]
    assert FeatureRequest.from_json(value).reading == "objects"


@pytest.mark.parametrize("reading", ["pickles", "", None, 1, ["cells"]])
def test_an_unknown_reading_is_refused_naming_it(reading):
    with pytest.raises(BadRequest, match="reading"):
        FeatureRequest.from_json({**message().to_json(), "reading": reading})


def test_a_profile_request_says_whether_its_job_stops_at_a_single_cut():
    value = ProfileRequest(features=message(), only_here=True).to_json()
    assert ProfileRequest.from_json(value).only_here
    del value["only_here"]
    assert not ProfileRequest.from_json(value).only_here
    with pytest.raises(BadRequest, match="only_here"):
        ProfileRequest.from_json({**value, "only_here": 1})


def test_a_profile_request_says_what_its_job_may_spend_on_trials():
    wanted = ProfileRequest(features=message(), accuracy="float32", trial_s=12.5, samples_left=1041)
    again = ProfileRequest.from_json(wanted.to_json())
    assert (again.accuracy, again.trial_s, again.samples_left) == ("float32", 12.5, 1041)
    again = ProfileRequest.from_json(ProfileRequest(features=message()).to_json())
    assert (again.trial_s, again.samples_left) == (None, None)
    for changes in ({"trial_s": -1}, {"trial_s": "1"}, {"samples_left": -1}, {"samples_left": 1.5}):
        with pytest.raises(BadRequest, match=next(iter(changes))):
            ProfileRequest.from_json({**wanted.to_json(), **changes})
