"""As whom servers of CQL are asked, and what the exceptions of their driver mean, in a sentence each.

As whom servers of CQL are asked: the password and the certificates, from the environment alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from frostline.core.config import refuse_variables
from frostline.core.errors import (
    AccessDenied,
    FrostlineError,
    SettingError,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)

__all__ = (
    "CqlAccess",
    "error_of_cql",
    "translate_errors",
)


_PREFIX = "FROSTLINE_CQL_"


@dataclass(frozen=True, slots=True, kw_only=True)
class CqlAccess:
    """Secrets, and where the files lie that TLS takes. It is never written anywhere.

    Attributes:
        password: password of the URL's user.
        authority: file with the certificates of those who sign servers' ones; empty takes the system's.
        certificate: file with a certificate of one's own, where servers ask for it.
        key: file with its key; empty where the certificate's file holds it.
    """

    password: str = field(default="", repr=False)
    authority: str = ""
    certificate: str = ""
    key: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "CqlAccess":
        """What the variables that begin with ``FROSTLINE_CQL_`` say.

        Raises:
            SettingError: the file of the password cannot be read, or a variable is none that is read.
        """
        said = {name: environment.get(_PREFIX + name, "") for name in ("PASSWORD", "CA", "CERTIFICATE", "KEY")}
        refuse_variables(environment, _PREFIX, [_PREFIX + name for name in (*said, "PASSWORD_FILE")])
        file = environment.get(_PREFIX + "PASSWORD_FILE", "")
        return cls(
            password=said["PASSWORD"] or (_password_in(file) if file else ""),
            authority=said["CA"],
            certificate=said["CERTIFICATE"],
            key=said["KEY"],
        )


def _password_in(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise SettingError(f"{_PREFIX}PASSWORD_FILE names a file that cannot be read as text") from error


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
def translate_errors(url: str, name: str) -> Iterator[None]:
    """What goes wrong inside becomes one of Frostline's errors, in the name of that object or table.

    Raises:
        SettingError: the driver is not installed.
    """
    try:
        errors = _driver_errors()
    except ModuleNotFoundError as error:
        raise SettingError("tables of Cassandra are read by its driver: pip install 'frostline[cassandra]'") from error
    try:
        yield
    except errors as error:
        raise error_of_cql(error, url, name) from error


def _driver_errors() -> tuple[type[BaseException], ...]:
    """What the driver may raise where a server or the way to it is at fault."""
    from cassandra import DriverException
    from cassandra.cluster import NoHostAvailable
    from cassandra.connection import ConnectionBusy, ConnectionException, ProtocolError
    from cassandra.pool import NoConnectionsAvailable
    from cassandra.protocol import ErrorMessage

    return (
        ConnectionBusy,
        ConnectionException,
        DriverException,
        ErrorMessage,
        NoConnectionsAvailable,
        NoHostAvailable,
        OSError,
        ProtocolError,
    )


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
