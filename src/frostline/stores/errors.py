"""What the exceptions of obstore mean: the one place that knows them, and the sentence that each becomes."""

import re

from frostline.core.errors import (
    AccessDenied,
    BadRequest,
    DataError,
    DataNotFound,
    FrostlineError,
    ObjectNotFound,
    OutOfSpace,
    SettingError,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from frostline.stores.protocols import TIMEOUT
from frostline.stores.urls import object_url, parse_url

__all__ = ("NOWHERE", "OddName", "error_of_driver", "error_of_status")

NOWHERE = "127.255.255.254:1"
"""A place where nothing listens, to which the driver goes instead of to another host than its endpoint's."""


class OddName(DataError):
    """An object's name is none of the driver's, which then lists none of those beside it.

    Args:
        sentence: sentence for people.
        name: name of the object, from the start of its bucket; empty where it is not known.
    """

    def __init__(self, sentence: str, name: str = "") -> None:
        super().__init__(sentence)
        self.name = name


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_ODD_NAME = re.compile(r'Path "(.{1,1024}?)"(?: contained|: Encountered)', re.DOTALL)
_WHOLE_ONLY = ("Received non-partial response", "Range request not supported")
_NO_ROOT = ("NoSuchBucket", "ContainerNotFound")
_THROTTLED = ("SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded", "Throttling")
# Where drivers look for the credentials of a cloud's own machines, when they were given none.
_ASKED_FOR_CREDENTIALS = ("169.254.", "CredentialsProvider", "metadata.google", "InstanceCredential", "oauth2/token")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_ROOT = {"s3": "bucket", "gs": "bucket", "az": "container"}
_ADDRESS = {"s3": "AWS_REGION and AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "az": "AZURE_STORAGE_ENDPOINT"}


def error_of_driver(error: Exception, url: str, name: str) -> FrostlineError:
    """What an exception of obstore means for an object, or for the root where ``name`` is empty.

    The sentence is Frostline's own: the driver's may hold addresses with credentials.
    """
    what = object_url(url, name) if name else url
    text = str(error)
    if any(f"<Code>{code}</Code>" in text for code in _NO_ROOT):
        return _no_root(url, name)
    if any(mark in text for mark in _WHOLE_ONLY):
        return StoreError(f"the server of {what} gives whole objects only: it must answer requests for ranges")
    if not name and type(error).__name__ == "InvalidPathError" and (odd := _ODD_NAME.search(text)):
        sentence = f"{url} holds an object {odd[1]!a}, a name that cannot be read: rename it, or read a folder"
        return OddName(sentence, odd[1])
    made = _by_kind(type(error).__name__, what, name)
    return made if made is not None else _by_text(text, url, name)


def _by_kind(kind: str, what: str, name: str) -> FrostlineError | None:
    match kind:
        case "FileNotFoundError" | "NotFoundError":
            return _absent(what, name)
        case "PermissionDeniedError" | "UnauthenticatedError" | "PermissionError":
            return _refused(what)
        case "InvalidPathError" | "ValueError" | "UnicodeEncodeError":
            return BadRequest(f"the store cannot name an object of {what}")
        case "UnknownConfigurationKeyError":
            return SettingError(f"a setting of the store of {what} is unknown to its driver")
        case "NotSupportedError" | "AlreadyExistsError" | "PreconditionError" | "NotModifiedError":
            return StoreError(f"the store will not do this with {what} ({kind})")
        case _:
            return None


def _by_text(text: str, url: str, name: str) -> FrostlineError:
    # obstore has one class for everything else; the answer's status tells them apart.
    what, scheme = object_url(url, name) if name else url, parse_url(url).scheme
    if any(mark in text for mark in _ASKED_FOR_CREDENTIALS):
        needed = _CREDENTIALS.get(scheme, "those of the store")
        return AccessDenied(
            f"no credentials for {url}: set {needed}; or have a node beside the data list it "
            "(Dataset(url, near=...), --near)"
        )
    if "Invalid range:" in text or "Wanted range starting at" in text:
        return _cut_short(what)
    if f"{NOWHERE}," in text:
        return StoreError(
            f"the server of {url} redirects to another host, which is not followed: name what lies there by its own URL"
        )
    if "kind: Timeout" in text:
        return StoreUnavailable(
            f"nothing came from the store for {what} within {TIMEOUT} (30 s unless set), or the job's deadline_s"
        )
    if "builder error" in text:
        return SettingError(_plain_http(scheme))
    found = _STATUS.search(text)
    code = _CODE.search(text)
    said = " ".join([*found.groups(), *(code.groups() if code else ())]) if found else ""
    return error_of_status(int(found[1]) if found else 0, said, url, name)


def error_of_status(status: int, said: str, url: str, name: str) -> FrostlineError:
    """What the status of an answer means for an object, or for the root where ``name`` is empty.

    Args:
        status: The number; 0 where there was no answer.
        said: reason and the code that came with it, for the sentence.
        url: The canonical URL of the root.
        name: The object.
    """
    what, scheme = object_url(url, name) if name else url, parse_url(url).scheme
    # A 503 without a code comes from what stands before stores, such as a proxy with a limit of its own.
    throttled = status in (429, 503) or any(code in said for code in _THROTTLED)
    match status:
        case _ if throttled:
            return StoreThrottled(f"the store has more requests than it takes ({said}): {what} must wait")
        case 404:
            return _absent(what, name)
        case 401 | 403:
            return _refused(what, f" ({said})")
        case 405 | 501 if scheme in ("http", "https") and not name:
            return StoreError(f"the server of {url} lists nothing: that takes WebDAV, or a list of URLs as data set")
        case 410 if scheme in ("http", "https"):
            return _absent(what, name)
        case 405 | 501:
            return StoreError(f"the store does not do this with {what} ({said}): see what its server allows")
        case 416:
            return _cut_short(what)
        case 507:
            return OutOfSpace(f"the store is full: {what} was not written")
        case 301 | 400:
            hint = _ADDRESS.get(scheme, "its address")
            return StoreError(f"the store did not accept the request for {what} ({said}): check {hint}")
        case _:
            return StoreUnavailable(f"the store did not give {what}" + (f" ({said})" if said else ": no answer"))


def _refused(what: str, said: str = "") -> AccessDenied:
    return AccessDenied(f"the store refused access to {what}: check its credentials and their rights{said}")


def _cut_short(what: str) -> ObjectNotFound:
    return ObjectNotFound(f"{what} ends before the bytes that were asked for: it has changed")


def _absent(what: str, name: str) -> FrostlineError:
    return ObjectNotFound(f"there is no object {what}") if name else DataNotFound(f"there is nothing at {what}")


def _no_root(url: str, name: str) -> FrostlineError:
    # Not as an object that is missing: those are skipped one by one, and this is the whole data set.
    root = parse_url(url)
    place, address = _ROOT.get(root.scheme, "root"), _ADDRESS.get(root.scheme, "its address")
    sentence = f"there is nothing at {url}, for there is no {place} {root.place}: check its name, and {address}"
    return StoreError(sentence) if name else DataNotFound(sentence)


def _plain_http(scheme: str) -> str:
    known = {"s3": "AWS_ALLOW_HTTP=true beside AWS_ENDPOINT_URL", "az": "AZURE_ALLOW_HTTP=true beside its endpoint"}
    return f"the store's address cannot be used: plain http needs {known.get(scheme, 'to be in the URL')}"
