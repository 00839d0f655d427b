"""As whom servers of CQL are asked: the password and the certificates, from the environment alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from frostline.errors import SettingError

__all__ = ("CqlAccess",)

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
            SettingError: the file of the password cannot be read.
        """
        said = {name: environment.get(_PREFIX + name, "") for name in ("PASSWORD", "CA", "CERTIFICATE", "KEY")}
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
