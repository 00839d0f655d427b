"""Decides which options a store's URL may carry: where its server is and as whom to ask, never a secret."""

import re
from collections.abc import Callable, Collection
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from frostline.errors import SettingError

__all__ = ("Options", "named_values", "options_text", "parse_options")

Options = tuple[tuple[str, str], ...]
"""Names and values, ordered by name."""

_OF_SCHEME = {
    "s3": ("anonymous", "endpoint", "profile", "region"),
    "gs": ("anonymous", "endpoint"),
    "az": ("account", "anonymous", "endpoint"),
}
_WORD = re.compile(r"[\w.@/ +=-]{1,128}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")


def parse_options(scheme: str, text: str) -> Options:
    """What stands after the question mark of a store's URL.

    Raises:
        SettingError: an option is unknown, stands there twice or has a value that makes no sense. The sentence repeats
            no value: somebody may have put a secret there.
    """
    values = named_values(scheme, text, _OF_SCHEME.get(scheme, ()), "secrets go into environment variables or profiles")
    return tuple(sorted((name, _CHECKED[name](name, value)) for name, value in values.items()))


def named_values(scheme: str, text: str, known: Collection[str], secrets: str) -> dict[str, str]:
    """The values of what stands after a question mark, by name, as they are.

    Args:
        scheme: scheme of the URL.
        text: ``name=value&name=value``.
        known: names that there are.
        secrets: where secrets go instead, for the sentence about a name that is not known.

    Raises:
        SettingError: see ``parse_options``.
    """
    try:
        pairs = parse_qsl(text, strict_parsing=True, errors="strict")
    except ValueError as error:
        raise SettingError(f"the options of a {scheme}:// URL are written name=value&name=value") from error
    unknown = [name for name, _ in pairs if name not in known]
    if unknown:
        raise SettingError(
            f"a {scheme}:// URL has no option {unknown[0]!a}; it has {', '.join(known) or 'none'}, and {secrets}"
        )
    values = dict(pairs)
    if len(values) < len(pairs):
        raise SettingError(f"an option of a {scheme}:// URL stands there twice")
    return values


def options_text(options: Options) -> str:
    """The options as they end a canonical URL, with their question mark; empty where there are none."""
    return "?" + urlencode(options, quote_via=quote, safe=":/") if options else ""


def _endpoint(name: str, value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise SettingError(f"the option {name} is the address of a server, such as https://store.example:9000")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _word(name: str, value: str) -> str:
    if not _WORD.fullmatch(value):
        raise SettingError(f"the option {name} is a name of at most 128 plain characters")
    return value


def _true(name: str, value: str) -> str:
    if value != "true":
        raise SettingError(f"the option {name} is true or not there")
    return value


_CHECKED: dict[str, Callable[[str, str], str]] = {
    "account": _word,
    "anonymous": _true,
    "endpoint": _endpoint,
    "profile": _word,
    "region": _word,
}
