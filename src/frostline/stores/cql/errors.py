"""What the exceptions of the CQL driver mean: the one place that knows them, and the sentence that each becomes."""

from collections.abc import Iterator
from contextlib import contextmanager

from frostline.errors import (
    AccessDenied,
    FrostlineError,
    SettingError,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)

__all__ = ("error_of_cql", "translated")

# By name: the driver has several classes of one name, in its modules of exceptions and of messages.
_REFUSED = ("AuthenticationFailed", "BadCredentials", "Unauthorized", "UnauthorizedErrorMessage")
_BUSY = ("ConnectionBusy", "NoConnectionsAvailable", "OverloadedErrorMessage")
_WILL_NOT = (
    "AlreadyExists",
    "AlreadyExistsException",
    "ConfigurationException",
    "FunctionFailure",
    "FunctionFailureMessage",
    "InvalidRequest",
    "InvalidRequestException",
    "PreparedQueryNotFound",
    "RequestValidationException",
    "SyntaxException",
    "TraceUnavailable",
    "UserTypeDoesNotExist",
)
_PROTOCOL = (
    "NotSupportedError",
    "ProtocolError",
    "ProtocolException",
    "ProtocolVersionUnsupported",
    "UnsupportedOperation",
)
_NOT_ENOUGH = ("Unavailable", "UnavailableErrorMessage")
_LATE = (
    "OperationTimedOut",
    "ReadTimeout",
    "ReadTimeoutErrorMessage",
    "Timeout",
    "WriteTimeout",
    "WriteTimeoutErrorMessage",
)


def error_of_cql(error: BaseException, url: str, name: str) -> FrostlineError:
    """What an exception of the driver means for the object of that key, or for the table where ``name`` is empty.

    The sentence is Frostline's own: the driver's may hold statements and addresses.
    """
    what = f"{name} of {url}" if name else url
    kinds = tuple(_kinds(error))
    if any(kind in _REFUSED for kind in kinds):
        return AccessDenied(
            f"the servers refused access to {what}: check its user, FROSTLINE_CQL_PASSWORD and the user's rights; or "
            "have a node beside the data list it (Dataset(url, near=...), --near)"
        )
    # A server that is much older than the driver answers the first question in words alone.
    if any(kind in _PROTOCOL for kind in kinds) or "transport.ProtocolException" in str(error):
        return SettingError(f"the servers of {url} speak another protocol: give one that they know, such as protocol=3")
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return SettingError(
            f"the certificate of a server of {url} is not trusted: name its authority in FROSTLINE_CQL_CA; where only "
            "its host name is wrong, tls=chain leaves that out"
        )
    if "UnresolvableContactPoints" in kinds:
        return StoreUnavailable(f"none of the host names of {url} is known")
    if any(kind in _WILL_NOT for kind in kinds):
        return StoreError(f"the servers will not do this with {what} ({kinds[0]})")
    return _passing(kinds, what)


@contextmanager
def translated(url: str, name: str) -> Iterator[None]:
    """What goes wrong inside becomes one of Frostline's errors, in the name of that object or table.

    Raises:
        SettingError: the driver is not installed.
    """
    try:
        from frostline.stores.cql.connect import ERRORS
    except ModuleNotFoundError as error:
        raise SettingError("tables of Cassandra are read by its driver: pip install 'frostline[cassandra]'") from error
    try:
        yield
    except ERRORS as error:
        raise error_of_cql(error, url, name) from error


def _passing(kinds: tuple[str, ...], what: str) -> StoreUnavailable:
    if any(kind in _BUSY for kind in kinds):
        return StoreThrottled(f"the servers have more requests than they take: {what} must wait")
    if any(kind in _NOT_ENOUGH for kind in kinds):
        return StoreUnavailable(
            f"too few replicas are up for {what}: wait for them, or ask for fewer by consistency=ONE"
        )
    if any(kind in _LATE for kind in kinds):
        return StoreUnavailable(f"the servers did not answer for {what} in time")
    if "NoHostAvailable" in kinds:
        return StoreUnavailable(f"no server answered for {what}")
    return StoreUnavailable(f"the servers did not give {what} ({kinds[0]})")


def _kinds(error: BaseException) -> Iterator[str]:
    """Names of the exception's classes that are the driver's, and of those that it gathered from single servers."""
    yield from (kind.__name__ for kind in type(error).__mro__ if kind not in (Exception, BaseException, object))
    gathered = getattr(error, "errors", None)
    for problem in gathered.values() if isinstance(gathered, dict) else ():
        if isinstance(problem, BaseException):
            yield from _kinds(problem)
    if isinstance(error.__cause__, BaseException):
        yield from _kinds(error.__cause__)
