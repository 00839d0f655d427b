"""Amounts on a command line: what is understood, and what is refused in a sentence."""

import click
import pytest

from frostline.cli import commands
from frostline.cli.options import settings_of
from frostline.cli.units import ACCURACY, BANDWIDTH, BYTES, SHARES, TIMES, in_binary


@pytest.mark.parametrize(
    ("text", "count"),
    [("1000000", 10**6), ("512MiB", 512 << 20), ("2G", 2 * 10**9), ("1.5 kB", 1500), ("2gib", 2 << 30)],
)
def test_parses_and_formats_bytes(text, count):
    assert BYTES.convert(text, None, None) == count


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("1Gbit", 125e6),
        ("100Mbit", 12.5e6),
        ("100 Mbits/s", 12.5e6),
        ("10Gbps", 1.25e9),
        ("0.05gbit/s", 6.25e6),
        ("12MB", 12e6),
        ("12MB/s", 12e6),
        ("1MiB/s", 1 << 20),
        ("800bit", 100.0),
        ("5B/s", 5.0),
    ],
)
def test_bandwidths_in_bits_and_in_bytes(text, bytes_per_s):
    assert BANDWIDTH.convert(text, None, None) == pytest.approx(bytes_per_s)


def test_shares_have_names():
    assert SHARES.convert("train=0.8, val=.2", None, None) == {"train": 0.8, "val": 0.2}


@pytest.mark.parametrize("text", ["", "0.8", "train=", "=0.8", "train=much", "a=0.5,a=0.5", "a=0.5,"])
def test_refuses_invalid_shares(text):
    with pytest.raises(click.BadParameter, match="write it like train="):
        SHARES.convert(text, None, None)


@pytest.mark.parametrize(("text", "accuracy"), [("exact", "exact"), ("int8", "int8"), ("0.01", 0.01), ("0", 0.0)])
def test_parses_accuracies(text, accuracy):
    assert ACCURACY.convert(text, None, None) == accuracy


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        (BYTES, "lots", "is no number of bytes"),
        (BYTES, "-1", "is no number of bytes"),
        (BANDWIDTH, "100Mb", "is no bandwidth"),
        (BANDWIDTH, "100", "is no bandwidth"),
        (BANDWIDTH, "0Mbit", "is no bandwidth"),
        (BANDWIDTH, "fast", "1Gbit, 100Mbit or 12MB"),
        (TIMES, "0", "is no factor"),
        (TIMES, "-2", "is no factor"),
        (TIMES, "nan", "is no factor"),
        (TIMES, "inf", "is no factor"),
        (TIMES, "twice", "0.5 or 2"),
        (ACCURACY, "fp8", "exact, float32, fp16, bf16, int8 or a relative error"),
        (ACCURACY, "-0.1", "is no accuracy"),
        (ACCURACY, "nan", "is no accuracy"),
        (ACCURACY, "1", "is no accuracy"),
    ],
)
def test_refuses_an_unknown_expression_with_an_example(kind, text, sentence):
    with pytest.raises(click.BadParameter, match=sentence):
        kind.convert(text, None, None)


def verbs():
    """Each verb below ``frostline`` by its words."""
    for name, verb in commands.verbs.commands.items():
        if isinstance(verb, click.Group):
            yield from ((f"{name} {below}", command) for below, command in verb.commands.items())
        else:
            yield name, verb


SETTING_OPTIONS = [
    pytest.param(param, id=f"{name} {param.opts[0]}")
    for name, verb in verbs()
    for param in verb.params
    if hasattr(param, "of")
]


def set_by(option, *words):
    """The fields that an option sets, given so."""
    with click.Command("verb", params=[option]).make_context("verb", list(words)) as context:
        options = {**context.params}
        found = settings_of(option.of, options)
    assert options == {}, "taken out of the verb's options"
    return found


@pytest.mark.parametrize("option", SETTING_OPTIONS)
def test_an_option_of_a_setting_has_the_default_of_its_field_and_sets_it(option):
    given = (
        7 if isinstance(option.type, type(BYTES) | click.types.IntParamType | click.types.FloatParamType) else "fair"
    )
    value = True if option.is_flag else (given,) if option.multiple else given
    words = [option.opts[0]] if option.is_flag else [option.opts[0], str(given)]
    assert set_by(option, *words) == {option.field: value}
    assert option.of(**set_by(option)) == option.of()


def test_the_settings_of_nodes_are_options_of_serve():
    assert len([option for option in SETTING_OPTIONS if option.id.startswith("serve ")]) >= 25


@pytest.mark.parametrize(("nbytes", "text"), [(64 << 10, "64KiB"), (10 << 30, "10GiB"), (3 << 29, "1536MiB")])
def test_bytes_are_written_as_they_are_read(nbytes, text):
    assert in_binary(nbytes) == text
    assert BYTES.convert(text, None, None) == nbytes
