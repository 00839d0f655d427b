"""TLS of clients and servers: contexts that follow their files, and a small authority that makes these files.

Who renews a certificate writes its file anew, and the next connection has it: nothing is started again.
"""

import ipaddress
import re
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from frostline.core.config import ServerTls, TlsFiles
from frostline.core.errors import SettingError
from frostline.core.files import make_private_folder, replace_file, require_guarded, stamp_of, write_errors
from frostline.core.units import log_named

if TYPE_CHECKING:  # of the extra `tls`, which only who makes certificates needs
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

__all__ = ("Authority", "FollowedContext", "client_context", "server_context")

_LOG = log_named("frostline.tls")
_LIST = b"-----BEGIN X509 CRL-----"


class FollowedContext:
    """A context of TLS that is made again once one of its files has changed. Safe for threads.

    Where the new files make no sense, as while they are being written, the one before is kept, and the log says so.

    Raises:
        SettingError: The files make no sense.
    """

    def __init__(self, files: Sequence[str], make: Callable[[], ssl.SSLContext]) -> None:
        self._files = tuple(files)
        self._make = make
        self._lock = threading.Lock()
        self._marks = self._marked()
        self._context = make()

    def current(self) -> ssl.SSLContext:
        """The context for the next connection."""
        with self._lock:
            marks = self._marked()  # before the files are read: what changes after that is seen next time
            if marks != self._marks:
                self._marks = marks
                try:
                    self._context = self._make()
                except SettingError as error:
                    _LOG.warning("TLS goes on with the files that were read last: %s", error)
                else:
                    _LOG.info("read the files of TLS again: %s", ", ".join(self._files))
            return self._context

    def _marked(self) -> list[tuple[int, int, int] | None]:
        return [stamp_of(Path(file)) for file in self._files]


@lru_cache(maxsize=16)
def client_context(files: TlsFiles) -> FollowedContext:
    """The context of a client, the same for the same files.

    Raises:
        SettingError: A file cannot be read, or holds something else.
    """
    named = [file for file in (files.ca, files.cert, files.key) if file is not None]
    return FollowedContext(named, lambda: _client(files))


def server_context(files: ServerTls) -> FollowedContext:
    """The context of a server.

    Raises:
        SettingError: A file cannot be read, or holds something else.
    """
    named = [file for file in (files.cert, files.key, files.client_ca) if file is not None]
    return FollowedContext(named, lambda: _server(files))


def _client(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.ca is None:
        context.load_default_certs()
    else:
        _load_authorities(context, files.ca)
    if files.cert is not None:
        _load_certificate(context, files.cert, files.key)
    return context


def _server(files: ServerTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Every connection shows its certificates: none goes on from an earlier one whose own may have run out.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, files.cert, files.key)
    if files.client_ca is not None:
        _load_authorities(context, files.client_ca, of_clients=True)
        context.verify_mode = ssl.CERT_REQUIRED
        if _has_revocations(files.client_ca):
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


def _has_revocations(file: str) -> bool:
    try:
        return _LIST in Path(file).read_bytes()
    except OSError as error:
        raise SettingError(f"cannot read the authorities in {file}: {_why(error)}") from error


def _load_authorities(context: ssl.SSLContext, file: str, *, of_clients: bool = False) -> None:
    try:
        if of_clients:
            require_guarded(Path(file))
        context.load_verify_locations(file)
    except OSError as error:  # those of ssl too
        raise SettingError(f"cannot read the authorities in {file}: {_why(error)}") from error


def _load_certificate(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Load a certificate and its key, for which nobody is asked a password.

    Raises:
        SettingError: The certificate and its key do not fit each other; or every user of this machine may read the key,
            or another user change it.
    """
    holder = Path(key or cert)
    try:
        require_guarded(holder)
        mode = holder.stat().st_mode
        context.load_cert_chain(cert, key, password=lambda: b"")
    except OSError as error:
        what = f"{cert} with the key in {key}" if key else f"{cert} and its key"
        raise SettingError(f"cannot use the certificate in {what}: {_why(error)}") from error
    if mode & stat.S_IROTH:
        raise SettingError(f"every user may read the key in {holder}: take that right away (chmod o-rwx {holder})")


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is no PEM file of that").replace("_", " ").lower()
    return error.strerror or str(error)


_CA, _CA_KEY, _CLIENTS = "ca.pem", "ca-key.pem", "clients.pem"
# Clocks of machines differ.
_EARLIER = timedelta(hours=1)
_MAX_NAME = 64


class Authority:
    """An authority for the certificates of one cluster, in a folder: ``ca.pem``, ``ca-key.pem`` and ``clients.pem``.

    The last is there once a certificate was revoked: the authority, and the list of those that count no more.

    Who has the key can pretend to be any node or client of the cluster: it belongs on the machine where certificates
    are made, and nowhere else.

    Args:
        folder: folder of its files, which are made where there are none.
        days: days for which a new authority is valid.
        now: time of the clock.

    Raises:
        SettingError: The package ``cryptography`` is not there, or the files make no sense.
    """

    def __init__(
        self, folder: Path, *, days: int = 3650, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise SettingError("certificates are made with cryptography: pip install 'frostline[tls]'") from error
        self._folder = folder
        self._now = now
        with write_errors(folder):
            make_private_folder(folder)
        if (folder / _CA).exists() != (folder / _CA_KEY).exists():
            raise SettingError(
                f"{folder} has one of {_CA} and {_CA_KEY} alone: bring the other, or take another folder"
            )
        if not (folder / _CA).exists():
            self._make(days)
        self._certificate, self._key = self._read()

    @property
    def ca(self) -> Path:
        """The file of its own certificate, by which clients know servers and servers know clients."""
        return self._folder / _CA

    def issue(self, names: Sequence[str], *, is_client: bool = False, days: int = 365) -> tuple[Path, Path]:
        """Write a certificate and its key; those of the same name before are replaced.

        Args:
            names: names and addresses of a server, the first of which names the files; of a client its one name.
            is_client: True if it is a client's.
            days: days for which it is valid, at most as long as the authority.

        Returns:
            The file of the certificate and that of the key, which only this user may read.

        Raises:
            SettingError: A name is none.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        for name in names:
            if len(name) > _MAX_NAME or not re.fullmatch(r"[A-Za-z0-9*]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", name):
                raise SettingError(f"{name!r} is no name or address for a certificate")
        key = ec.generate_private_key(ec.SECP256R1())
        # A node's own health check is its client, so a server may be one too.
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *(() if is_client else (ExtendedKeyUsageOID.SERVER_AUTH,))]
        builder = (
            self._builder(names[0], key.public_key(), days, self._certificate)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
        )
        stem = _stem(names[0])
        cert_file, key_file = self._folder / f"{stem}.pem", self._folder / f"{stem}-key.pem"
        self._write(key_file, _key_pem(key))
        self._write(cert_file, self._signed(builder, self._key))
        return cert_file, key_file

    def revoke(self, name: str) -> Path:
        """Have a certificate of this folder, and all that were revoked before, count no more.

        Args:
            name: the first of its names.

        Returns:
            The file of the authority and of its list, which servers take in place of the authority's own for clients.

        Raises:
            SettingError: There is no certificate of that name, or the list makes no sense.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        clients, now = self._folder / _CLIENTS, self._now()
        try:
            found = x509.load_pem_x509_certificate((self._folder / f"{_stem(name)}.pem").read_bytes())
            before = [*x509.load_pem_x509_crl(clients.read_bytes())] if clients.exists() else []
        except (OSError, ValueError) as error:
            raise SettingError(f"cannot revoke {name} in {self._folder}: {error}") from error
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now - _EARLIER)
            .next_update(self._certificate.not_valid_after_utc)
        )
        revoked = {each.serial_number: each for each in before}
        one = x509.RevokedCertificateBuilder().serial_number(found.serial_number).revocation_date(now).build()
        revoked.setdefault(found.serial_number, one)
        for each in revoked.values():
            builder = builder.add_revoked_certificate(each)
        signed = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self._write(clients, self.ca.read_bytes() + signed)
        return clients

    def _make(self, days: int) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            self._builder("Frostline cluster", key.public_key(), days, None)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
        )
        self._write(self._folder / _CA_KEY, _key_pem(key))
        self._write(self._folder / _CA, self._signed(builder, key))

    def _read(self) -> "tuple[x509.Certificate, EllipticCurvePrivateKey]":
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

        try:
            certificate = x509.load_pem_x509_certificate((self._folder / _CA).read_bytes())
            key = serialization.load_pem_private_key((self._folder / _CA_KEY).read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise SettingError(f"cannot read the authority in {self._folder}: {error}") from error
        if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise SettingError(f"{_CA_KEY} in {self._folder} is not the key of {_CA} there")
        return certificate, key

    def _builder(
        self, name: str, public: "EllipticCurvePublicKey", days: int, issuer: "x509.Certificate | None"
    ) -> "x509.CertificateBuilder":
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), self._now()
        ends = now + timedelta(days=days)
        signer = public if issuer is None else self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _EARLIER)
            .not_valid_after(ends if issuer is None else min(ends, issuer.not_valid_after_utc))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        )

    @staticmethod
    def _signed(builder: "x509.CertificateBuilder", key: "EllipticCurvePrivateKey") -> bytes:
        from cryptography.hazmat.primitives import hashes, serialization

        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    @staticmethod
    def _write(file: Path, body: bytes) -> None:
        """Write a file whole or not at all: servers read it at any moment."""
        with write_errors(file):
            replace_file(file, body)


def _stem(name: str) -> str:
    return name.replace("*", "any").replace(":", "-")


def _usage(*, signs: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_pem(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
