"""AWS profiles: the files and logins that AWS's own tools read and the driver does not, through botocore."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frostline.errors import AccessDenied, SettingError

if TYPE_CHECKING:
    from obstore.store import S3Credential

__all__ = ("profile_of", "signed")

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
        AccessDenied: it gives no credentials.
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
