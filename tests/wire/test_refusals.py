import json

import pytest

from frostline.core import errors
from frostline.core.errors import FrostlineError, Overloaded, Refused, StoreError, Unavailable
from frostline.wire.messages import STATUS_OF_ERROR, error_from_answer, error_to_json, retry_after, status_of

pytestmark = pytest.mark.promise("data")


def family(*roots):
    kinds = [getattr(errors, name) for name in errors.__all__]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, roots)]


def made(kind):
    return Overloaded("wait", retry_after_s=2.5) if kind is Overloaded else kind("a sentence")


def test_every_error_that_may_travel_is_in_the_table():
    assert set(family(Refused, Unavailable, StoreError)) == set(STATUS_OF_ERROR)


@pytest.mark.parametrize("kind", family(Refused, Unavailable, StoreError))
def test_an_error_crosses_the_wire_and_stays_itself(kind):
    sent = made(kind)
    got = error_from_answer(status_of(sent), json.dumps(error_to_json(sent)).encode())
    assert type(got) is kind
    assert str(got) == str(sent)
    assert getattr(got, "retry_after_s", None) == getattr(sent, "retry_after_s", None)


@pytest.mark.parametrize(
    ("status", "kind"), [(502, Unavailable), (500, Unavailable), (429, Unavailable), (404, Refused)]
)
def test_an_answer_that_no_node_wrote_is_judged_by_its_status(status, kind):
    got = error_from_answer(status, b"<html>Bad gateway")
    assert type(got) is kind
    assert str(status) in str(got)


@pytest.mark.parametrize(
    "body", [b"", b"[" * 100_000, b'{"error": "OSError", "message": "x"}', b'{"error": [], "message": 1}']
)
def test_an_unknown_body_never_chooses_the_exception_class(body):
    assert type(error_from_answer(400, body)) is Refused


def test_a_wait_that_makes_no_sense_is_replaced():
    got = error_from_answer(429, b'{"error": "Overloaded", "message": "x", "retry_after_s": 1e99}')
    assert isinstance(got, Overloaded)
    assert got.retry_after_s == 1.0


def test_only_errors_worth_another_try_carry_retry_after():
    assert retry_after(Overloaded("x", retry_after_s=2.5)) == {"Retry-After": "3"}
    assert retry_after(errors.StoreUnavailable("x")) == {"Retry-After": "1"}
    assert retry_after(errors.BadRequest("x")) == {}
    assert status_of(FrostlineError("x")) == 500
