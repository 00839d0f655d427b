"""S3, Google Cloud Storage, Azure and web servers: where their servers and credentials are read from.

Credentials and addresses come from the variables that each ecosystem uses, of which the driver reads most by itself;
what it does not read is read here. Options of the URL go before them.
"""

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from frostline.config import environment
from frostline.errors import SettingError
from frostline.stores.base.timeouts import PREFIX, Waits
from frostline.stores.base.urls import Root
from frostline.stores.objects.obstore import DriverStore
from frostline.stores.objects.web import WebStore
from frostline.stores.wrappers.retry import PatientSections

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, RetryConfig, S3Store
    from obstore.store import ObjectStore as Client

__all__ = ("azure_settings", "cloud_store", "google_settings", "s3_settings")

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
    patience_s: float | None = None,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> PatientSections:
    """The objects of a bucket, a container or a web server. Nothing is looked at until it is used.

    Args:
        url: canonical.
        root: the same taken apart.
        deadline_s: how long it may be silent, or be tried again, where the environment does not say less.
        patience_s: how long a call may be refused before its caller is told; None for what the environment says.
        now: what time it is.
        wait: lets time pass.
    """
    waits = Waits.of(environment(PREFIX)).within(deadline_s)
    patience_s = waits.patience_s if patience_s is None else patience_s
    # Redirects are judged where the web is read; the driver follows them wherever they lead.
    is_web = root.scheme in ("http", "https")
    store = (
        WebStore(url, root, waits.timeout_s)
        if is_web
        else DriverStore(url, partial(_client, root, waits.timeout_s), root.path)
    )
    return PatientSections(store, patience_s=patience_s, requests_per_s=waits.requests_per_s, now=now, wait=wait)


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

    from frostline.stores.objects.aws_profiles import profile_of, signed

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
