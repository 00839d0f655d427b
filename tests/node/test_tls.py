"""TLS between real clients and servers: who is trusted and who is not, files that change, and the same numbers."""

import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.x509 import load_pem_x509_certificate

import frostline as fl
from frostline.client.http import HttpTransport
from frostline.control.app import ControlPlane, make_control_app
from frostline.control.reporter import ControlLink
from frostline.control.settings import ControlSettings
from frostline.control.shares import Amounts
from frostline.control.state import ControlState
from frostline.control.store import RecordStore
from frostline.core.config import LoaderSettings, NodeSettings, ServerTls, TlsFiles
from frostline.core.errors import FrostlineError, NodeUnreachable, Refused, SettingError, Untrusted
from frostline.node import Node
from frostline.node.http.connection_guard import ConnectionLimits, Rounds
from frostline.node.http.server import AppServer, listen
from frostline.node.process import start_node
from frostline.wire.connection import address_of
from frostline.wire.node_lists import NodeList
from frostline.wire.tls import Authority, FollowedContext, server_context
from support.commands import run, run_json
from support.images import image_folder, tiny_preprocess
from support.nodes import joined, make_images, request, same, served, until
from support.trainings import assignment_for, frozen, training

pytestmark = pytest.mark.promise("secret")

MEMORY = 96 << 20


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), 8)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority):
    """A server's files: of the loopback, its name, and that of a service."""
    cert, key = authority.issue(["127.0.0.1", "localhost", "nodes.test"])
    return ServerTls(cert=str(cert), key=str(key))


def known(authority, client=None, ca=None):
    """How a client trusts an authority, and shows a certificate where it has one."""
    cert, key = (None, None) if client is None else map(str, client)
    return TlsFiles(ca=str(ca or authority.ca), cert=cert, key=key)


@contextmanager
def node_with(images, tls, *, limits=None, **settings):
    settings = NodeSettings(memory_bytes=MEMORY, tls=tls, **settings)
    with Node(settings, (images.as_uri(),)) as node, served(node, limits=limits) as url:
        yield url


def transport_to(url, tls, **settings):
    return closing(HttpTransport(url, LoaderSettings(deadline_s=20, tls=tls, **settings)))


def test_an_encrypted_answer_has_the_bits_of_a_plain_one(images, authority, files):
    with node_with(images, None) as plain, transport_to(plain, TlsFiles()) as transport:
        expected = joined(transport.features(request(images, 1)))
    with node_with(images, files) as url, transport_to(url, known(authority)) as transport:
        assert url.startswith("https://127.0.0.1:")
        assert same(joined(transport.features(request(images, 1))), expected)
        assert same(joined(transport.features(request(images, 1))), expected), "and on the same connection"
        moved = transport.statistics()
        assert moved.bytes_received > sum(tensor.nbytes for tensor in expected[1])
        assert moved.bytes_sent > 1000


def test_a_large_body_is_sent_once_the_node_says_that_it_takes_it(images, authority, files):
    body = bytes(3 << 20)  # which is no prefix, as the node says after all of it came
    with node_with(images, files) as url, transport_to(url, known(authority)) as transport:
        for _ in range(2):
            with pytest.raises(Refused) as caught:
                transport.put_prefix("0" * 64, body)
            assert not isinstance(caught.value, Untrusted)
        assert transport.statistics().bytes_sent > 2 * len(body)


def other_authority(folder, **options):
    return Authority(folder / "other", **options)


def case_of_wrong_ca(folder, authority, files):
    return files, known(authority, ca=other_authority(folder).ca), "not trusted: unable to get local issuer"


def case_of_the_systems_authorities(folder, authority, files):
    return files, TlsFiles(ca=None), "not trusted: .*FROSTLINE_TLS_CA"


def case_of_an_expired_certificate(folder, authority, files):
    earlier = Authority(folder / "earlier", now=lambda: datetime.now(UTC) - timedelta(days=10))
    cert, key = earlier.issue(["127.0.0.1"], days=5)
    return ServerTls(cert=str(cert), key=str(key)), known(earlier), "not trusted: certificate has expired"


def case_of_another_host(folder, authority, files):
    cert, key = authority.issue(["store-1.test", "10.0.0.9"])
    return ServerTls(cert=str(cert), key=str(key)), known(authority), "not trusted: .*127.0.0.1"


def case_of_a_client_that_poses_as_a_server(folder, authority, files):
    cert, key = authority.issue(["127.0.0.1"], is_client=True)
    copies = [shutil.copy(path, folder / path.name) for path in (cert, key)]
    authority.issue(["127.0.0.1", "localhost", "nodes.test"])  # as it was
    return ServerTls(cert=str(copies[0]), key=str(copies[1])), known(authority), "not trusted: .*purpose"


def case_of_a_client_without_a_certificate(folder, authority, files):
    return replace(files, client_ca=str(authority.ca)), known(authority), "trusts no certificate of this client"


def case_of_a_clients_other_authority(folder, authority, files):
    client = other_authority(folder).issue(["trainer"], is_client=True)
    wants = replace(files, client_ca=str(authority.ca))
    return wants, known(authority, client), "trusts no certificate of this client"


def case_of_a_clients_expired_certificate(folder, authority, files):
    earlier = Authority(folder / "earlier", now=lambda: datetime.now(UTC) - timedelta(days=10))
    client = earlier.issue(["trainer"], is_client=True, days=5)
    wants = replace(files, client_ca=str(earlier.ca))
    return wants, known(authority, client), "trusts no certificate of this client"


def case_of_a_server_that_does_not_encrypt(folder, authority, files):
    return None, known(authority), "does not speak TLS"


CASES = [value for name, value in sorted(globals().items()) if name.startswith("case_of_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_of_"))
def test_whoever_is_not_trusted_gets_nothing_and_is_told_why_at_once(tmp_path, images, authority, files, case):
    serves, trusts, sentence = case(tmp_path, authority, files)
    with node_with(images, serves) as url:
        url = url.replace("http:", "https:")
        for _ in range(3):
            began = time.monotonic()
            with transport_to(url, trusts) as transport, pytest.raises(Refused, match=sentence):
                transport.health()
            assert time.monotonic() - began < 5
        with transport_to(url, trusts) as transport, pytest.raises(Refused, match=sentence):
            transport.put_prefix("0" * 64, bytes(3 << 20))


def test_a_client_that_does_not_encrypt_gets_nothing(images, files, caplog):
    caplog.set_level(logging.WARNING, "frostline.node")
    with node_with(images, files) as url:
        for _ in range(20):
            with (
                transport_to(url.replace("https:", "http:"), TlsFiles()) as transport,
                pytest.raises(NodeUnreachable),
            ):
                transport.health()
    lines = [record.getMessage() for record in caplog.records if "whose TLS failed" in record.getMessage()]
    assert len(lines) == 1, "whoever reaches the port can cause a line a minute"


def test_a_client_with_a_certificate_is_answered_where_one_is_asked_for(images, authority, files):
    client = authority.issue(["trainer"], is_client=True)
    wants = replace(files, client_ca=str(authority.ca))
    with node_with(images, wants) as url, transport_to(url, known(authority, client)) as transport:
        assert len(joined(transport.features(request(images, 1)))[0]) == 8


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize(
    ("version", "is_answered"),
    [(ssl.TLSVersion.TLSv1, False), (ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (None, True)],
)
def test_versions_before_1_2_are_refused_by_both_sides(images, authority, files, version, is_answered):
    context = ssl.create_default_context(cafile=str(authority.ca))
    if version is not None:
        context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")  # else it is this side's library that does not try
    with (
        node_with(images, files) as url,
        socket.create_connection(address_of(url), timeout=20) as plain,
        nullcontext() if is_answered else pytest.raises(ssl.SSLError),
        context.wrap_socket(plain, server_hostname="127.0.0.1") as peer,
    ):
        assert peer.version() in ("TLSv1.2", "TLSv1.3")


def old_server(files, version):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_a_client_does_not_go_below_1_2_for_an_old_server(authority, files):
    context = old_server(files, ssl.TLSVersion.TLSv1_1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"

        def serve():
            peer, _ = listening.accept()
            with pytest.raises(ssl.SSLError), peer:
                context.wrap_socket(peer, server_side=True)

        thread = threading.Thread(target=serve)
        thread.start()
        with transport_to(url, known(authority)) as transport, pytest.raises(FrostlineError, match="encrypted"):
            transport.health()
        thread.join(60)


def serial_at(url, authority, name="127.0.0.1"):
    context = ssl.create_default_context(cafile=str(authority.ca))
    with (
        socket.create_connection(address_of(url), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=name) as peer,
    ):
        return peer.getpeercert()["serialNumber"]


def test_a_renewed_certificate_counts_from_the_next_connection_on_and_breaks_nothing(tmp_path, images):
    own = Authority(tmp_path / "own")
    cert, key = map(str, own.issue(["127.0.0.1"]))
    renewals, ended, failures, answers = 12, threading.Event(), [], []

    def ask(url):
        """Ask over a kept connection and over new ones."""
        with transport_to(url, known(own)) as kept:
            while not ended.is_set():
                try:
                    with transport_to(url, known(own)) as new:
                        for transport in (kept, new):
                            answers.append(len(joined(transport.features(request(images, 0)))[0]))
                except FrostlineError as error:
                    failures.append(error)

    with node_with(images, ServerTls(cert=cert, key=key, client_ca=None)) as url:
        threads = [threading.Thread(target=ask, args=[url]) for _ in range(2)]
        for thread in threads:
            thread.start()
        serials = {serial_at(url, own)}
        for _ in range(renewals):
            own.issue(["127.0.0.1"])
            serials.add(serial_at(url, own))
        began = len(answers)
        until(lambda: len(answers) > began + 8)
        ended.set()
        for thread in threads:
            thread.join(60)
    assert not failures
    assert len(serials) == renewals + 1, "each renewal was seen at once"
    assert set(answers) == {8}


def test_another_certificate_authority_counts_from_the_next_connection_on(tmp_path, images):
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    place = tmp_path / "served"
    place.mkdir(mode=0o700)

    def install(authority):
        for source, name in zip(authority.issue(["127.0.0.1"]), ("tls.crt", "tls.key"), strict=True):
            shutil.copy(source, place / name)
        shutil.copy(authority.ca, place / "ca.crt")

    install(first)
    trusted = tmp_path / "trusted.pem"
    shutil.copy(first.ca, trusted)
    old, new = (authority.issue(["trainer"], is_client=True) for authority in (first, second))
    tls = ServerTls(cert=str(place / "tls.crt"), key=str(place / "tls.key"), client_ca=str(place / "ca.crt"))
    with (
        node_with(images, tls) as url,
        transport_to(url, known(first, old, trusted)) as kept,
        transport_to(url, known(second, new, trusted)) as late,
    ):
        kept.health()
        with pytest.raises(Untrusted):
            late.health()
        install(second)
        kept.health()  # over the connection that it has
        with pytest.raises(Untrusted):
            late.health()  # which trusts the first authority still
        trusted.write_bytes(second.ca.read_bytes())
        late.health()
        kept.close()
        with pytest.raises(Untrusted):
            kept.health()


@pytest.mark.parametrize("spoiled", [b"", b"-----BEGIN CERTIFICATE-----\nMIIB", None])
def test_files_that_make_no_sense_while_they_are_written_leave_those_before_in_force(tmp_path, images, caplog, spoiled):
    own = Authority(tmp_path / "own")
    cert, key = own.issue(["127.0.0.1"])
    whole = cert.read_bytes()
    with node_with(images, ServerTls(cert=str(cert), key=str(key))) as url:
        before = serial_at(url, own)
        if spoiled is None:
            cert.unlink()
        else:
            cert.write_bytes(spoiled)
        for _ in range(3):
            assert serial_at(url, own) == before
        assert sum("TLS goes on with the files" in record.getMessage() for record in caplog.records) == 1
        cert.write_bytes(whole)
        own.issue(["127.0.0.1"])
        assert serial_at(url, own) != before


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda cert, key: key.chmod(0o644), "every user may read the key"),
        (lambda cert, key: key.chmod(0o602), "others may write to .*-key.pem"),
        (lambda cert, key: key.parent.chmod(0o777), "others may write to .*own, the folder of .*-key.pem"),
        (lambda cert, key: key.write_bytes(b"no key"), "cannot use the certificate"),
        (lambda cert, key: cert.unlink(), "No such file"),
        (lambda cert, key: key.write_bytes(b""), "cannot use the certificate"),
    ],
)
def test_a_server_does_not_start_with_files_that_make_no_sense(tmp_path, spoil, sentence):
    cert, key = Authority(tmp_path / "own").issue(["127.0.0.1"])
    spoil(cert, key)
    with pytest.raises(SettingError, match=sentence):
        server_context(ServerTls(cert=str(cert), key=str(key)))


def test_who_may_connect_is_not_said_by_a_file_that_others_may_write_to(tmp_path, authority, files):
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(authority.ca.read_bytes())
    checked = replace(files, client_ca=str(trusted))
    server_context(checked)
    trusted.chmod(0o666)
    with pytest.raises(SettingError, match=r"others may write to .*clients\.pem"):
        server_context(checked)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path):
    from cryptography.hazmat.primitives import serialization

    cert, key = Authority(tmp_path / "own").issue(["127.0.0.1"])
    held = serialization.load_pem_private_key(key.read_bytes(), None)
    closed = serialization.BestAvailableEncryption(b"secret")
    key.write_bytes(held.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, closed))
    with pytest.raises(SettingError, match="cannot use the certificate"):
        server_context(ServerTls(cert=str(cert), key=str(key)))


def is_closed(peer):
    try:
        return peer.recv(65_536) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x40\x00" + bytes(900)])
def test_a_connection_on_which_tls_does_not_begin_is_closed_in_time(images, authority, files, begun):
    with node_with(images, files, limits=ConnectionLimits(head_s=0.3)) as url:
        with socket.create_connection(address_of(url), timeout=20) as peer:
            peer.sendall(begun)
            began = time.monotonic()
            while not is_closed(peer):  # an alert may come first
                pass
            assert time.monotonic() - began < 10
        with transport_to(url, known(authority)) as transport:
            transport.health()


def test_a_connection_that_says_nothing_after_tls_began_is_closed_in_time(images, authority, files):
    context = ssl.create_default_context(cafile=str(authority.ca))
    with (
        node_with(images, files, limits=ConnectionLimits(head_s=0.3)) as url,
        socket.create_connection(address_of(url), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as peer,
    ):
        assert peer.recv(65_536).startswith(b"HTTP/1.1 408 ")


def test_what_waits_for_its_round_is_answered_though_its_connection_has_ended(images, authority, files, monkeypatch):
    monkeypatch.setattr(Rounds, "take", lambda self, asker: False)  # so that all that comes waits
    came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context(cafile=str(authority.ca)).wrap_bio(came, goes, server_hostname="127.0.0.1")
    with node_with(images, files) as url, socket.create_connection(address_of(url), timeout=20) as peer:

        def done(call):
            while True:
                try:
                    return call()
                except ssl.SSLWantReadError:
                    peer.sendall(goes.read())
                    came.write(peer.recv(65_536))

        done(tls.do_handshake)
        tls.write(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with suppress(ssl.SSLWantReadError):
            tls.unwrap()
        assert done(lambda: tls.read(65_536)).startswith(b"HTTP/1.1 200 ")
        with transport_to(url, known(authority)) as transport:
            assert len(joined(transport.features(request(images, 1)))[0]) == 8
            with pytest.raises(Refused):
                transport.put_prefix("0" * 64, bytes(3 << 20))


def test_many_connections_without_tls_do_not_shut_out_others(images, authority, files):
    limits = ConnectionLimits(max_unknown=8, max_connections=16, young_s=0)
    with node_with(images, files, limits=limits) as url, ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(address_of(url), timeout=20)) for _ in range(40)]
        with transport_to(url, known(authority)) as transport:
            assert len(joined(transport.features(request(images, 0)))[0]) == 8
        assert all(is_closed(peer) for peer in peers[:24])


def test_an_exchange_that_is_broken_off_frees_whoever_waits_for_it(images, authority, files):
    context = server_context(files).current()
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        begun = threading.Event()

        def serve():
            peer = stack.enter_context(context.wrap_socket(listening.accept()[0], server_side=True))
            peer.recv(65_536)
            begun.set()

        threading.Thread(target=serve, daemon=True).start()
        with transport_to(url, known(authority)) as transport:
            threading.Thread(target=lambda: begun.wait(60) and transport.break_off(), daemon=True).start()
            began = time.monotonic()
            with pytest.raises(NodeUnreachable):
                transport.health()
            assert begun.is_set()
            assert time.monotonic() - began < 15


def test_an_idle_connection_that_the_node_closed_meanwhile_is_made_anew(images, authority, files):
    settings = NodeSettings(memory_bytes=MEMORY, tls=files)
    with Node(settings, (images.as_uri(),)) as node, ExitStack() as stack:
        with served(node) as url:
            transport = stack.enter_context(transport_to(url, known(authority)))
            transport.health()
        with served(node, port=address_of(url)[1]) as again:
            assert again == url
            transport.health()


def test_a_name_of_several_nodes_is_what_their_certificates_are_for(images, authority, files, monkeypatch):
    lists = NodeList(url="dns+https://nodes.test:7443")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 7443)) for address in ("127.0.0.1", "10.0.0.7")]
    found.append((socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 7443, 0, 0)))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert lists.nodes() == (
        "https://10.0.0.7:7443#nodes.test",
        "https://127.0.0.1:7443#nodes.test",
        "https://[fd00::1]:7443#nodes.test",
    )
    monkeypatch.undo()
    with node_with(images, files) as url:
        with transport_to(f"{url}#nodes.test", known(authority)) as transport:
            transport.health()
        with transport_to(f"{url}#other.test", known(authority)) as transport, pytest.raises(Untrusted, match="other"):
            transport.health()


def losses(folder, url, loader):
    with fl.offload(frozen(), fl.Dataset(folder), preprocess=tiny_preprocess(), near=url, settings=loader) as job:
        return [
            float(job.head(batch.features).detach().sum())
            for epoch in range(2)
            for batch in job.loader(4, shuffle=True, seed=3, epoch=epoch)
        ]


def test_losses_are_those_of_a_plain_connection_and_of_no_node(tmp_path, authority, files):
    folder = image_folder(tmp_path / "data", per_class=6)
    client = authority.issue(["trainer"], is_client=True)
    settings = NodeSettings(memory_bytes=1 << 28, device_batch=8, trial_s=0)
    wants = replace(settings, tls=replace(files, client_ca=str(authority.ca)))
    loader = LoaderSettings(device_batch=8, trial_s=0, tls=known(authority, client))
    expected = losses(folder, None, loader)
    assert len(expected) > 4
    for each in (settings, wants):
        with start_node((str(folder),), each) as process:
            assert process.url.startswith("https:" if each is wants else "http:")
            assert losses(folder, process.url, loader) == expected


def test_a_head_is_trained_beside_a_node_that_asks_for_certificates(tmp_path, authority, files):
    folder = image_folder(tmp_path / "data", per_class=6)
    client = authority.issue(["trainer"], is_client=True)
    settings = NodeSettings(
        memory_bytes=1 << 28, device_batch=8, trial_s=0, allow_training=True, training_memory_bytes=1 << 30
    )
    wants = replace(settings, tls=replace(files, client_ca=str(authority.ca)))
    results = []
    for each in (settings, wants):
        with (
            start_node((str(folder),), each) as process,
            training(
                process.url, assignment_for(folder), settings=LoaderSettings(tls=known(authority, client))
            ) as running,
        ):
            told = list(running)
            assert told[-1]["event"] == "trained", told
            results.append((told[-1]["digest"], [line["loss"] for line in told if "loss" in line]))
    assert results[0] == results[1]


def test_a_control_plane_speaks_tls_and_takes_reports_from_whom_it_trusts(tmp_path, authority, files):
    client = authority.issue(["trainer"], is_client=True)
    wants = replace(files, client_ca=str(authority.ca))
    with closing(RecordStore(tmp_path / "plane.state")) as store:
        state = ControlState(ControlSettings(capacity=Amounts()), now_s=time.time())
        server = AppServer(make_control_app(ControlPlane(state, store)), listen("127.0.0.1", 0), tls=wants)
        ready = threading.Event()
        thread = threading.Thread(target=server.run, args=[ready.set])
        thread.start()
        try:
            assert ready.wait(60)
            for tls, is_known in ((known(authority, client), True), (known(authority), False)):
                with closing(ControlLink(f"{server.url}?job=night", None, tls)) as link:
                    if is_known:
                        link.check()
                    else:
                        with pytest.raises(Untrusted):
                            link.check()
        finally:
            server.stop()
            thread.join(60)


def test_a_context_is_made_anew_only_where_a_file_changed(tmp_path):
    file, made = tmp_path / "file", []
    file.write_text("a")
    context = FollowedContext([str(file)], lambda: made.append(file.read_text()) or made[-1])
    assert [context.current(), context.current()] == ["a", "a"]
    file.write_text("bc")
    assert [context.current(), context.current()] == ["bc", "bc"]
    assert made == ["a", "bc"]


def test_the_verb_makes_certificates_that_a_node_and_its_jobs_take(tmp_path, capsys):
    folder = image_folder(tmp_path / "data", per_class=3)
    out = tmp_path / "certificates"
    server = run_json(capsys, "cert", "--out", out, "127.0.0.1", "store-1")
    authority = (out / "ca.pem").read_bytes()
    client = run_json(capsys, "cert", "--out", out, "--client", "trainer", "--days", "7")
    assert (out / "ca.pem").read_bytes() == authority, "one for all"
    for path in out.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert out.stat().st_mode & 0o777 == 0o700
    ends = load_pem_x509_certificate(Path(client["cert"]).read_bytes()).not_valid_after_utc
    assert timedelta(days=6) < ends - datetime.now(UTC) < timedelta(days=8)
    serve = ("serve", "--data-root", folder, "--listen", "127.0.0.1:0", "--json", "--tls-client-ca", server["ca"])
    with started(*serve, "--tls-cert", server["cert"], "--tls-key", server["key"]) as process:
        url = json.loads(process.stdout.readline())["url"]
        assert url.startswith("https://")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FROSTLINE_TLS_CA", client["ca"])
            code, _, err = run(capsys, "index", "--data", folder, "--near", url)
            assert code == 2
            assert "trusts no certificate of this client" in err
        with pytest.MonkeyPatch.context() as patch:
            for name in ("ca", "cert", "key"):
                patch.setenv(f"FROSTLINE_TLS_{name.upper()}", client[name])
            assert run_json(capsys, "index", "--data", folder, "--near", url)["samples"] == 9


def test_a_revoked_certificate_counts_no_more_from_the_next_connection_on(tmp_path, images, capsys):
    authority = Authority(tmp_path / "authority")
    cert, key = authority.issue(["127.0.0.1"])
    clients = {name: authority.issue([name], is_client=True) for name in ("ann", "bob", "eve")}
    listed = tmp_path / "authority" / "clients.pem"
    shutil.copy(authority.ca, listed)  # no list yet
    with node_with(images, ServerTls(cert=str(cert), key=str(key), client_ca=str(listed))) as url, ExitStack() as stack:
        transports = {
            name: stack.enter_context(transport_to(url, known(authority, client))) for name, client in clients.items()
        }

        def answered():
            found = set()
            for name, transport in transports.items():
                transport.close()  # the connection that it has stays as it is
                try:
                    transport.health()
                    found.add(name)
                except Untrusted:
                    pass
            return found

        assert answered() == {"ann", "bob", "eve"}
        listed.unlink()
        for name, left in (("eve", {"ann", "bob"}), ("bob", {"ann"}), ("bob", {"ann"})):
            assert run_json(capsys, "cert", "--out", tmp_path / "authority", "--revoke", name) == {
                "clients": str(listed)
            }
            assert answered() == left
        renewed = authority.issue(["bob"], is_client=True)
        with transport_to(url, known(authority, renewed)) as again:
            again.health()
    code, _, err = run(capsys, "cert", "--out", tmp_path / "authority", "--revoke", "nobody")
    assert code == 2
    assert "cannot revoke nobody" in err


@pytest.mark.parametrize("names", [["a b"], ["-x"], ["../up"], ["x" * 65], [""], ["--client", "a", "b"]])
def test_the_verb_refuses_what_is_no_name(tmp_path, capsys, names):
    code, _, err = run(capsys, "cert", "--out", tmp_path / "out", *(["--"] if names[0] == "-x" else []), *names)
    assert code == 2
    assert "Traceback" not in err


@contextmanager
def started(*arguments):
    """A verb in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", "from frostline.cli import main; main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_goes_on_in_another_connection(authority, files, version):
    """Else a client whose certificate was revoked meanwhile would be known by its session."""
    wants = server_context(replace(files, client_ca=str(authority.ca))).current()
    shows = ssl.create_default_context(cafile=str(authority.ca))
    shows.minimum_version = shows.maximum_version = version
    shows.load_cert_chain(*authority.issue(["trainer"], is_client=True))

    def connected(session):
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = shows.wrap_bio(to_client, to_server, server_hostname="127.0.0.1", session=session)
        server = wants.wrap_bio(to_server, to_client, server_side=True)
        waiting = [client, server]
        while waiting:
            for side in waiting[:]:
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                    waiting.remove(side)
        server.write(b"x")
        assert client.read(1) == b"x"  # behind which a session would have come
        return client

    first = connected(None)
    for _ in range(3):
        assert not connected(first.session).session_reused
    assert wants.session_stats()["number"] == 0, "and none is kept, which strangers could fill memory with"
