"""S3, Google Cloud Storage, Azure and web servers: where their servers and credentials are read from.

Credentials and addresses come from the variables that each ecosystem uses, of which the driver reads most by itself;
what it does not read is read here. Options of the URL go before them.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostline.config import environment
from frostline.errors import AccessDenied, SettingError
from frostline.stores.base.limits import PREFIX, Waits
from frostline.stores.base.urls import Root
from frostline.stores.objects.obstore import DriverStore
from frostline.stores.objects.web import WebStore
from frostline.stores.wrappers.retry import RetryingSections

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, RetryConfig, S3Credential, S3Store
    from obstore.store import ObjectStore as Client

__all__ = ("azure_settings", "cloud_store", "google_settings", "profile_of", "s3_settings", "signed")

_OTHER_WAYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
# The other profiles of that file are only used where they are named.
_DEFAULT = re.compile(r"^\[\s*(?:profile\s+)?default\s*\]", re.MULTILINE)
_ASKED_AGAIN_AFTER = timedelta(minutes=5)


def profile_of(options: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """The profile to read; None where credentials come without one, as AWS's own tools decide.

    A URL's ``profile`` goes before everything, then come keys and roles of the environment, ``AWS_PROFILE``, and the
    profile ``default`` of the user's files of credentials and of settings.
    """
    if "profile" in options:
        return options["profile"]
    if any(name in environment for name in _OTHER_WAYS) or environment.get("AWS_SKIP_SIGNATURE") == "true":
        return None
    if "AWS_PROFILE" in environment:
        return environment["AWS_PROFILE"]
    file = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    said = Path(environment.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
    is_there = file.is_file() or (said.is_file() and _DEFAULT.search(said.read_text(errors="replace")) is not None)
    return "default" if is_there and find_spec("botocore") else None


def signed(
    profile: str, config: Mapping[str, str], environment: Mapping[str, str]
) -> "tuple[dict[str, str], Callable[[], S3Credential]]":
    """The driver's settings with what a profile says of server and region, and what gives its credentials.

    Raises:
        SettingError: there is no such profile, or botocore is not installed.
        AccessDenied: the profile gives no credentials.
    """
    if not find_spec("botocore"):
        raise SettingError("AWS profiles are read by botocore: pip install 'frostline[aws]'")
    with _translated(profile):
        from botocore.session import Session

        session = Session(profile=profile)
        credentials = session.get_credentials()
        told = _told(session, environment)
        if credentials is not None:
            credentials.get_frozen_credentials()
    if credentials is None:
        raise AccessDenied(f"the AWS profile {profile} holds no credentials")
    return {**told, **config}, _provider(profile, credentials)


def _told(session: Any, environment: Mapping[str, str]) -> dict[str, str]:
    about: Mapping[str, Any] = session.get_scoped_config()
    services: Mapping[str, Any] = session.full_config.get("services", {}).get(about.get("services", ""), {})
    address = services.get("s3", {}).get("endpoint_url") or about.get("endpoint_url")
    told = {}
    if address and not {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"} & environment.keys():
        told["endpoint"] = str(address)
        told |= {"allow_http": "true"} if told["endpoint"].startswith("http://") else {}
    if about.get("region") and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environment.keys():
        told["region"] = str(about["region"])
    return told


def _provider(profile: str, credentials: Any) -> "Callable[[], S3Credential]":
    def credential() -> "S3Credential":
        # The driver asks for them again before that time; botocore renews those that end.
        with _translated(profile):
            frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _ASKED_AGAIN_AFTER,
        }

    return credential


@contextmanager
def _translated(profile: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    try:
        yield
    except ProfileNotFound as error:
        raise SettingError(f"there is no AWS profile {profile}: `aws configure list-profiles` shows them") from error
    except BotoCoreError as error:
        # Its sentence may hold what stands in the files.
        raise AccessDenied(f"the AWS profile {profile} gave no credentials ({type(error).__name__})") from error


_CONNECT_S = 5.0
_PLAIN = {"allow_http": "true"}
_CONNECTION_STRING = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "BlobEndpoint": "endpoint",
    "SharedAccessSignature": "sas_key",
    "UseDevelopmentStorage": "use_emulator",
}
# Of other services and of copies that are not asked, and what addresses are made of.
_BESIDE = ("DefaultEndpointsProtocol", "EndpointSuffix", "BlobSecondaryEndpoint")
_OF_OTHERS = ("Queue", "Table", "File")


def cloud_store(
    url: str,
    root: Root,
    *,
    deadline_s: float = math.inf,
    retry_for_s: float | None = None,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> RetryingSections:
    """The objects of a bucket, a container or a web server. Nothing is looked at until it is used.

    Args:
        url: canonical.
        root: the same taken apart.
        deadline_s: how long it may be silent, or be tried again, where the environment does not say less.
        retry_for_s: how long a call may be refused before its caller is told; None for what the environment says.
        now: clock.
        wait: lets time pass.
    """
    waits = Waits.of(environment(PREFIX)).within(deadline_s)
    retry_for_s = waits.retry_for_s if retry_for_s is None else retry_for_s
    # Redirects are judged where the web is read; the driver follows them wherever they lead.
    is_web = root.scheme in ("http", "https")
    store = (
        WebStore(url, root, waits.timeout_s)
        if is_web
        else DriverStore(url, partial(_client, root, waits.timeout_s), root.path)
    )
    return RetryingSections(store, retry_for_s=retry_for_s, requests_per_s=waits.requests_per_s, now=now, wait=wait)


def s3_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:  # noqa: ARG001
    """What the driver is told beside what it reads from ``AWS_*`` by itself, profiles aside."""
    told = {name: options[name] for name in ("endpoint", "region") if name in options}
    if "endpoint" in options:
        # It goes before the address of the environment, also before the one for S3 alone.
        told["aws_endpoint_url_s3"] = options["endpoint"]
    return {**told, **_plain(options.get("endpoint", "")), **_anonymous(options)}


def google_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """What the driver is told beside what it reads from ``GOOGLE_*`` by itself."""
    address = options.get("endpoint", "") or _emulator(environment.get("STORAGE_EMULATOR_HOST", ""))
    told = {"base_url": address} if address else {}
    return {**told, **_plain(address), **_anonymous(options)}


def azure_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """What the driver is told beside what it reads from ``AZURE_*`` by itself.

    Raises:
        SettingError: ``AZURE_STORAGE_CONNECTION_STRING`` is none.
    """
    told = _connection(environment.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    told |= {"account_name": options["account"]} if "account" in options else {}
    told |= {"endpoint": options["endpoint"]} if "endpoint" in options else {}
    return {**told, **_plain(told.get("endpoint", "")), **_anonymous(options)}


def _connection(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(";") if part]
    if any(not mark for _, mark, _ in pairs):
        raise SettingError("AZURE_STORAGE_CONNECTION_STRING is written name=value;name=value")
    given = {name: value for name, _, value in pairs}
    unknown = [
        name for name in given if name not in (*_CONNECTION_STRING, *_BESIDE) and not name.startswith(_OF_OTHERS)
    ]
    if unknown:
        raise SettingError(f"AZURE_STORAGE_CONNECTION_STRING says {unknown[0][:40]!a}, which Frostline does not know")
    told = {ours: given[theirs] for theirs, ours in _CONNECTION_STRING.items() if theirs in given}
    if "sas_key" in told:
        told["sas_key"] = told["sas_key"].removeprefix("?")
    if "EndpointSuffix" in given and "AccountName" in given:
        protocol = given.get("DefaultEndpointsProtocol", "https")
        told.setdefault("endpoint", f"{protocol}://{given['AccountName']}.blob.{given['EndpointSuffix']}")
    return told


def _emulator(host: str) -> str:
    return host if not host or "://" in host else f"http://{host}"


def _plain(address: str) -> dict[str, str]:
    # Whoever writes the address out with http:// means it.
    return _PLAIN if address.startswith("http://") else {}


def _anonymous(options: Mapping[str, str]) -> dict[str, str]:
    return {"skip_signature": "true"} if "anonymous" in options else {}


def _tries(retries: int) -> "RetryConfig":
    # Short tries: whoever asks decides how long it is worth trying, and must be able to say so.
    return {"max_retries": retries, "retry_timeout": timedelta(seconds=20)}


def _times(timeout_s: float) -> dict[str, str]:
    # Not as the driver's client options: those put aside what AWS_ALLOW_HTTP and its like say. The limit for a whole
    # answer is one that nothing reaches, as there is none: what counts is that bytes keep coming.
    connect_ms, read_ms = (f"{round(1000 * seconds)}ms" for seconds in (min(_CONNECT_S, timeout_s), timeout_s))
    return {"connect_timeout": connect_ms, "read_timeout": read_ms, "timeout": "365days"}


def _client(root: Root, timeout_s: float, retries: int) -> "Client":
    match root.scheme:
        case "s3":
            return _s3(root, retries, _times(timeout_s))
        case "gs":
            return _google(root, retries, _times(timeout_s))
        case _:
            return _azure(root, retries, _times(timeout_s))


def _s3(root: Root, retries: int, times: dict[str, str]) -> "S3Store":
    from obstore.store import S3Store

    from frostline.stores.objects.clouds import profile_of, signed

    options, said = dict(root.options), environment("AWS_")
    config: dict[str, Any] = {**times, **s3_settings(options, said)}
    profile = None if "anonymous" in options else profile_of(options, said)
    if profile is None:
        return S3Store(root.place, retry_config=_tries(retries), config=config)  # type: ignore[arg-type]
    config, credentials = signed(profile, config, said)
    return S3Store(root.place, retry_config=_tries(retries), config=config, credential_provider=credentials)  # type: ignore[arg-type]


def _google(root: Root, retries: int, times: dict[str, str]) -> "GCSStore":
    from obstore.store import GCSStore

    settings: Any = {**times, **google_settings(dict(root.options), environment("STORAGE_"))}
    return GCSStore(root.place, retry_config=_tries(retries), config=settings)


def _azure(root: Root, retries: int, times: dict[str, str]) -> "AzureStore":
    from obstore.store import AzureStore

    settings: Any = {**times, **azure_settings(dict(root.options), environment("AZURE_"))}
    return AzureStore(root.place, retry_config=_tries(retries), config=settings)
