"""A real Cassandra for tests: one node or a ring on loopback, in a folder of its own, stopped by process id."""

import contextlib
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cassandra import ConsistencyLevel, DriverException
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
from cassandra.policies import RetryPolicy, RoundRobinPolicy
from cassandra.protocol import ErrorMessage
from cassandra.query import SimpleStatement

from support.servers import free_ports, wait_until

__all__ = ("KEYSPACE", "PASSWORD", "USER", "Cassandra", "cassandra", "decay", "why_no_cassandra")

HOME = Path(__file__).resolve().parents[2] / "build" / "cassandra"
KEYSPACE = "photos"
_AGAIN_S = 10
USER, PASSWORD = "cassandra", "cassandra"
"""The superuser that a new server with passwords makes by itself."""

_PROTOCOL = 3  # the newest that this server speaks
_LOG = """<configuration>
  <appender name="STDOUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%-5level %date{HH:mm:ss,SSS} %logger{0}: %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="STDOUT"/></root>
</configuration>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cassandra:
    """A running server, or ring of servers.

    Attributes:
        hosts: addresses.
        port: of CQL, the same on each.
        secured: only who has a name and password is served; else everybody.
        certificate: PEM file by which clients know the server, where it speaks TLS only; else None.
        processes: by address.
    """

    hosts: tuple[str, ...]
    port: int
    secured: bool
    certificate: Path | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(repr=False)

    @property
    def place(self) -> str:
        """What stands in a URL for it."""
        return f"{','.join(self.hosts)}:{self.port}"

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        """Statements in the superuser's name, to prepare data with."""
        auth = PlainTextAuthProvider(USER, PASSWORD) if self.secured else None
        profile = ExecutionProfile(RoundRobinPolicy(), request_timeout=200, retry_policy=_Patient())
        cluster = Cluster(
            self.hosts,
            port=self.port,
            protocol_version=_PROTOCOL,
            auth_provider=auth,
            execution_profiles={EXEC_PROFILE_DEFAULT: profile},
            ssl_context=None if self.certificate is None else _trusting(self.certificate),
        )
        try:
            yield cluster.connect()
        finally:
            cluster.shutdown()

    def execute(self, *statements: str) -> None:
        """Run some statements, one after another."""
        with self.session() as session:
            for statement in statements:
                session.execute(statement)

    def make_table(self, statement: str) -> None:
        """Make a table that may be there already; asked again where a server of a ring was too busy."""
        for left in (2, 1, 0):
            try:
                self.execute(statement)
            except (NoHostAvailable, DriverException, ErrorMessage):
                if not left:
                    raise
                time.sleep(_AGAIN_S)
            else:
                return

    def kill(self, host: str) -> None:
        """Take a server away, as a machine that breaks would be."""
        self.processes[host].kill()
        self.processes[host].wait()


def why_no_cassandra() -> str | None:
    """Why none can be started here; None where one can."""
    if shutil.which("java") is None:
        return "there is no java program"
    return None if (HOME / "opens.args").exists() else "there is no Cassandra: scripts/cassandra.sh fetches it"


class _Patient(RetryPolicy):
    """Asks again where a replica of a young ring, on a busy machine, did not answer in time: all that is asked of
    `Cassandra.session` may be asked twice.
    """

    def on_read_timeout(self, query, consistency, required_responses, received_responses, data_retrieved, retry_num):
        return self._again(consistency, retry_num)

    def on_write_timeout(self, query, consistency, write_type, required_responses, received_responses, retry_num):
        return self._again(consistency, retry_num)

    def _again(self, consistency, retry_num):
        return (self.RETRY if retry_num < 5 else self.RETHROW), consistency


@contextlib.contextmanager
def cassandra(
    folder: Path,
    *,
    host: str | None = None,
    nodes: int = 1,
    replicas: int = 1,
    secured: bool = False,
    encrypted: bool = False,
    heap_mb: int = 256,
    ready_within_s: float = 200.0,
) -> Iterator[Cassandra]:
    """Run servers that keep their data in ``folder`` until the block ends, with the keyspace ``KEYSPACE``.

    They are stopped with SIGKILL: nobody wants their data afterwards.

    Args:
        folder: empty.
        host: the address at which one server listens; None for as many of loopback as there are servers.
        nodes: how many; more than one make a ring.
        replicas: of each row of the keyspace.
        secured: ask clients for a name and password.
        encrypted: speak TLS only.
        heap_mb: Java's heap of each.
        ready_within_s: gives up after that.

    Raises:
        RuntimeError: they were not ready in time.
    """
    hosts = (host,) if host else tuple(f"127.0.0.{number + 1}" for number in range(nodes))
    # Asked of the first address; the others are hardly ever anybody's.
    storage, port = free_ports(2, hosts[0])
    keys = _made_keys(folder) if encrypted else None
    with contextlib.ExitStack() as stack:
        server = Cassandra(
            hosts=hosts, port=port, secured=secured, certificate=folder / "server.pem" if keys else None, processes={}
        )
        for host in hosts:
            place = folder / host
            place.mkdir()
            for part in _FOLDERS:
                (place / part).mkdir()
            settings = _settings(place, host, hosts, storage, port)
            settings |= _SECURED if secured else {}
            settings |= {"client_encryption_options": keys} if keys else {}
            (place / "cassandra.yaml").write_text(json.dumps(settings), encoding="utf-8")
            (place / "logback.xml").write_text(_LOG, encoding="utf-8")
            words = stack.enter_context((place / "words.log").open("wb"))
            process = stack.enter_context(subprocess.Popen(_command(place, heap_mb), stdout=words, stderr=words))
            stack.callback(process.kill)
            server.processes[host] = process
        _wait_until_ready(server, folder, replicas, ready_within_s)
        yield server


_FOLDERS = ("data", "log", "caches")
_SECURED = {"authenticator": "PasswordAuthenticator", "authorizer": "CassandraAuthorizer"}


def _settings(place: Path, host: str, hosts: tuple[str, ...], storage: int, port: int) -> dict[str, object]:
    # Every server is a seed, and none bootstraps: a ring without data starts at once that way.
    seeds = {
        "class_name": "org.apache.cassandra.locator.SimpleSeedProvider",
        "parameters": [{"seeds": ",".join(hosts)}],
    }
    timeouts = ("read_request", "write_request", "counter_write_request", "request")
    return {
        "cluster_name": "tests",
        "num_tokens": 16,
        "auto_bootstrap": False,
        "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
        "endpoint_snitch": "SimpleSnitch",
        "seed_provider": [seeds],
        "listen_address": host,
        "rpc_address": host,
        "start_rpc": False,
        "start_native_transport": True,
        "storage_port": storage,
        "native_transport_port": port,
        "data_file_directories": [str(place / "data")],
        "commitlog_directory": str(place / "log"),
        "saved_caches_directory": str(place / "caches"),
        "commitlog_sync": "periodic",
        "commitlog_sync_period_in_ms": 10_000,
        "commitlog_segment_size_in_mb": 8,
        "disk_failure_policy": "stop",
        "hinted_handoff_enabled": True,
        "memtable_allocation_type": "heap_buffers",
        "auto_snapshot": False,
        "permissions_validity_in_ms": 0,
        **{f"{name}_timeout_in_ms": 20_000 for name in timeouts},
        # A server that asked a dead one gives up while its client, who waits for 20 s, can still ask another.
        "range_request_timeout_in_ms": 8_000,
    }


def decay(session: Session, table: str, name: str, column: str = "data") -> None:
    """Change a byte of a sample in a table as a broken disk would: its row does not look as if somebody wrote to it."""
    place = f"{KEYSPACE}.{table}"
    rows = session.execute(f"SELECT id, name, {column}, writetime({column}) FROM {place}")
    (found,) = [row for row in rows if row[1] == name]
    key, data, written = found[0], bytearray(found[2]), found[3]
    data[-1] ^= 1
    session.execute(f"UPDATE {place} USING TIMESTAMP {written + 1} SET {column} = %s WHERE id = %s", (bytes(data), key))


def _command(place: Path, heap_mb: int) -> list[str]:
    options = {
        "java.net.preferIPv4Stack": "true",
        "java.io.tmpdir": str(place),
        "logback.configurationFile": f"file:{place}/logback.xml",
        "cassandra.config": f"file:{place}/cassandra.yaml",
        "cassandra.storagedir": str(place),
        "cassandra.triggers_dir": str(place),
        "cassandra-foreground": "yes",
        "cassandra.ring_delay_ms": "2000",
        "cassandra.skip_wait_for_gossip_to_settle": "0",
        "cassandra.superuser_setup_delay_ms": "0",
    }
    return [
        "java", f"@{HOME}/opens.args", f"-javaagent:{HOME}/lib/jamm-0.2.6.jar",
        f"-Xms{heap_mb}m", f"-Xmx{heap_mb}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
        *(f"-D{name}={value}" for name, value in options.items()),
        "-cp", f"{place}:{HOME}/lib/*", "org.apache.cassandra.service.CassandraDaemon",
    ]  # fmt: skip


def _made_keys(folder: Path) -> dict[str, object]:
    store = folder / "server.jks"
    common = ["-keystore", str(store), "-storepass", PASSWORD, "-alias", "server"]
    names = "san=ip:127.0.0.1,dns:localhost"
    made = [
        "-genkeypair",
        "-keyalg",
        "RSA",
        "-keypass",
        PASSWORD,
        "-storetype",
        "JKS",
        "-dname",
        "CN=test",
        "-ext",
        names,
    ]
    subprocess.run(["keytool", *made, *common], check=True, capture_output=True)
    exported = ["-exportcert", "-rfc", "-file", str(folder / "server.pem")]
    subprocess.run(["keytool", *exported, *common], check=True, capture_output=True)
    suites = ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"]
    return {"enabled": True, "keystore": str(store), "keystore_password": PASSWORD, "cipher_suites": suites}


def _trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def _make_keyspace(server: Cassandra, replicas: int) -> None:
    replication = f"{{'class': 'SimpleStrategy', 'replication_factor': {replicas}}}"
    with server.session() as session:
        if len(session.cluster.metadata.all_hosts()) < len(server.hosts):
            raise ConnectionError("the servers do not know each other")
        session.execute(f"CREATE KEYSPACE IF NOT EXISTS {KEYSPACE} WITH replication = {replication}")
        session.execute(f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.ready (id uuid PRIMARY KEY)")
        for host in session.cluster.metadata.all_hosts():
            everywhere = SimpleStatement(f"SELECT id FROM {KEYSPACE}.ready", consistency_level=ConsistencyLevel.ALL)
            session.execute(everywhere, host=host)


def _wait_until_ready(server: Cassandra, folder: Path, replicas: int, within_s: float) -> None:
    """Ready means that every server knows all the others as up, and that a keyspace could be made."""
    said = ""

    def is_ready() -> bool:
        nonlocal said
        try:
            _make_keyspace(server, replicas)
        except (NoHostAvailable, DriverException, ErrorMessage, OSError) as error:
            said = str(error)
            return False
        return True

    if wait_until(is_ready, next(iter(server.processes.values())), within_s):
        return
    words = "\n".join((folder / host / "words.log").read_text(errors="replace")[-2000:] for host in server.hosts)
    raise RuntimeError(f"Cassandra was not ready within {within_s} s ({said}):\n{words}")
