"""Tokens: two valid at a time, until they run out, few guesses for each address, and files that are followed."""

import hashlib
import hmac
import logging
import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.config import TokenHolder, with_ends
from frostline.core.errors import Overloaded, SettingError, Unauthenticated
from frostline.core.tokens import FollowedFile, TokenTable

pytestmark = pytest.mark.promise("secret")


def digest(token):
    return hashlib.sha256(token.encode()).hexdigest()


class Clock:
    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


def table(*holders, clock=None, monotonic=None):
    return TokenTable("this node", holders, clock or Clock(), monotonic or Clock())


def holder(name, token, **fields):
    return TokenHolder(name=name, token_sha256=digest(token), **fields)


def test_both_tokens_of_a_holder_are_valid_while_one_takes_the_place_of_the_other():
    tokens = table(holder("ann", "old", next_token_sha256=digest("new")), holder("bob", "bobs"))
    assert [tokens.owner(token, "10.0.0.1") for token in ("old", "new", "bobs")] == ["ann", "ann", "bob"]
    tokens.renew([holder("ann", "new"), holder("bob", "bobs")])
    assert tokens.owner("new", "10.0.0.1") == "ann"
    with pytest.raises(Unauthenticated, match="does not know that token"):
        tokens.owner("old", "10.0.0.1")


def test_each_token_runs_out_at_its_time():
    clock = Clock()
    tokens = table(
        holder("ann", "old", expires_at_s=1010.0, next_token_sha256=digest("new"), next_expires_at_s=1020.0),
        clock=clock,
    )
    for now_s, old, new in ((1009.9, True, True), (1010.0, False, True), (1019.9, False, True), (1020.0, False, False)):
        clock.now_s = now_s
        for token, is_valid in (("old", old), ("new", new)):
            if is_valid:
                assert tokens.owner(token, "10.0.0.1") == "ann"
            else:
                with pytest.raises(Unauthenticated, match="of tenant ann has expired"):
                    tokens.owner(token, "10.0.0.1")


def outcome(tokens, token, address):
    try:
        return tokens.owner(token, address)
    except (Unauthenticated, Overloaded) as error:
        return type(error).__name__


def test_a_log_names_few_of_many_addresses_that_guess_in_a_minute(caplog):
    clock = Clock()
    tokens = table(holder("ann", "anns"), monotonic=clock)
    for minute in range(2):
        for number in range(300):
            outcome(tokens, "guess", f"127.{minute}.{number >> 8}.{number & 255}")
        clock.now_s += 60.0
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 * 17
    assert said[0] == "wrong tokens from 127.0.0.0: 1 since the last such line"
    assert said[16] == "wrong tokens from more addresses than are named in a minute: 17 in all"
    assert said[33] == "wrong tokens from more addresses than are named in a minute: 317 in all"


def test_an_address_that_guesses_is_told_little_and_whoever_was_known_there_goes_on(caplog):
    clock = Clock()
    tokens = table(holder("ann", "anns"), holder("bob", "bobs"), monotonic=clock)
    assert outcome(tokens, "anns", "10.0.0.1") == "ann"
    said = [outcome(tokens, f"guess {number}", "10.0.0.1") for number in range(1000)]
    assert said.count("Unauthenticated") == 10
    assert said.count("Overloaded") == 990
    assert tokens.wrong_tokens() == (1000, 1)
    assert outcome(tokens, "bobs", "10.0.0.1") == "Overloaded", "else a right guess would be told"
    assert outcome(tokens, "anns", "10.0.0.1") == "ann"
    assert outcome(tokens, "bobs", "10.0.0.2") == "bob", "others are not kept out"
    clock.now_s += 6.1
    assert outcome(tokens, "bobs", "10.0.0.1") == "bob"
    assert tokens.wrong_tokens() == (1001, 0), "the one of bob's was not looked at, and the address may ask again"
    caplog.clear()
    clock.now_s += 60
    outcome(tokens, "guess", "10.0.0.1")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "wrong tokens from 10.0.0.1: 1001 since the last such line"


def test_whoever_has_a_network_of_ipv6_has_no_more_guesses():
    tokens = table(holder("ann", "anns"))
    said = [outcome(tokens, f"guess {number}", f"2001:db8:0:1::{number:x}") for number in range(100)]
    assert said.count("Unauthenticated") == 10
    assert outcome(tokens, "anns", "2001:db8:0:2::1") == "ann"


def test_an_address_of_ipv4_that_is_written_as_one_of_ipv6_is_that_address_alone():
    tokens = table(holder("ann", "anns"))
    for number in range(20):
        outcome(tokens, f"guess {number}", "::ffff:10.0.0.1")
    assert outcome(tokens, "anns", "10.0.0.1") == "Overloaded"
    assert outcome(tokens, "anns", "::ffff:10.0.0.2") == "ann"


@given(st.lists(st.floats(0, 30), max_size=60))
def test_wrong_tokens_are_answered_ten_at_once_and_then_ten_a_minute(pauses):
    clock = Clock()
    tokens = table(holder("ann", "anns"), monotonic=clock)
    answered_at = []
    for number, pause in enumerate(pauses):
        clock.now_s += pause
        if outcome(tokens, f"guess {number}", "10.0.0.1") == "Unauthenticated":
            answered_at.append(clock.now_s)
    for first, since_s in enumerate(answered_at):
        for count, until_s in enumerate(answered_at[first:], 1):
            assert count <= 10 + (until_s - since_s) / 6 + 1e-6


def test_addresses_that_guess_take_bounded_memory():
    tokens = table(holder("ann", "anns"))
    for number in range(20_000):
        outcome(tokens, "guess", f"10.{number >> 16}.{(number >> 8) & 255}.{number & 255}")
    assert len(vars(tokens)["_wrong"]) == 4096


@pytest.mark.parametrize(
    "fields",
    [{"token_sha256": "abc"}, {"token_sha256": digest("a"), "next_token_sha256": "abc"}, {"token_sha256": None}],
)
def test_what_is_no_digest_is_refused(fields):
    with pytest.raises((SettingError, TypeError)):
        TokenHolder(name="ann", **fields)


@pytest.mark.parametrize("said", ["2030-01-31", 5, True])
def test_an_end_that_is_no_time_is_refused(said):
    with pytest.raises(SettingError, match="expires_at must be a date and time"):
        with_ends({"expires_at": said})


def test_a_changed_file_is_read_again_and_an_invalid_one_changes_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "frostline.tokens")
    clock, path, read = Clock(), tmp_path / "tenants.toml", []

    def take():
        if path.read_text() == "nonsense":
            raise SettingError("it makes no sense")
        read.append(path.read_text())

    path.write_text("one")
    file = FollowedFile(path, take, clock, lambda: path.stat().st_mtime + 2)
    file.look()
    path.write_text("three")
    file.look()
    assert read == [], "it is looked at once a second"
    clock.now_s += 1
    file.look()
    assert read == ["three"]
    path.write_text("nonsense")
    for _ in range(3):
        clock.now_s += 1
        file.look()
    assert sum("makes no sense" in record.getMessage() for record in caplog.records) == 1
    file.distrust()
    path.write_text("whole")
    file.look()
    file.look()
    assert read == ["three", "whole"]


def test_a_file_that_is_being_written_is_not_read_before_it_is_whole(tmp_path):
    """The first half of a file makes sense too: of a tenant that has roots it says that it has all."""
    monotonic, clock, path, read = Clock(), Clock(2_000_000_000.0), tmp_path / "tenants.toml", []
    path.write_text("old")
    file = FollowedFile(path, lambda: read.append(path.read_text()), monotonic, clock)

    def look_after(seconds):
        monotonic.now_s += seconds
        clock.now_s += seconds
        file.look()
        return read

    def write(text, ago_s=0.0):
        path.write_text(text)
        os.utime(path, (clock.now_s - ago_s,) * 2)

    for length in range(1, 5):
        write("a tenant"[:length])
        assert look_after(1.0) == [], "somebody writes to it"
    write("a tenant and its roots")
    assert look_after(0.5) == []
    assert look_after(1.0) == ["a tenant and its roots"]
    write("put in place", ago_s=60)
    assert look_after(1.0)[1:] == ["put in place"], "at once"
    write("from a clock that is ahead", ago_s=-3600)
    assert look_after(1.0)[2:] == []
    assert look_after(1.0)[2:] == ["from a clock that is ahead"]
    write("whole, as SIGHUP says")
    file.distrust()
    assert look_after(0.0)[3:] == ["whole, as SIGHUP says"]
    path.unlink()
    with pytest.raises(FileNotFoundError):
        look_after(1.0)


def test_a_token_is_compared_with_all_that_there_are(monkeypatch):
    """Each by a comparison whose time says nothing: not even at which place one was found."""
    holders = [holder(f"t{number}", f"token {number}", next_token_sha256=digest(f"n{number}")) for number in range(5)]
    tokens, compared, compare = table(*holders), [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: compared.append(1) or compare(one, other))
    for token in ("token 0", "n4", "wrong"):
        compared.clear()
        with suppress(Unauthenticated):
            tokens.owner(token, "10.0.0.1")
        assert len(compared) == 10
