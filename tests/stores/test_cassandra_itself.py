"""The servers that the tests of CQL stand on do what those tests take for granted."""

import uuid

import pytest
from cassandra import ConsistencyLevel
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import Cluster, NoHostAvailable

from support.cassandra import KEYSPACE, USER, cassandra, why_no_cassandra


def test_who_gives_a_wrong_password_is_not_served(cql):
    wrong = PlainTextAuthProvider(USER, "wrong")
    with (
        Cluster(cql.hosts, port=cql.port, protocol_version=3, auth_provider=wrong) as cluster,
        pytest.raises(NoHostAvailable, match="incorrect"),
    ):
        cluster.connect()


@pytest.mark.skipif(why_no_cassandra() is not None, reason=str(why_no_cassandra()))
def test_every_row_of_a_ring_is_still_there_when_one_of_its_servers_is_killed(tmp_path):
    ids = [uuid.UUID(int=number) for number in range(50)]
    with cassandra(tmp_path, nodes=3, replicas=2) as ring, ring.session() as session:
        session.execute(f"CREATE TABLE {KEYSPACE}.rows (id uuid PRIMARY KEY)")
        insert = session.prepare(f"INSERT INTO {KEYSPACE}.rows (id) VALUES (?)")
        insert.consistency_level = ConsistencyLevel.ALL
        for one in ids:
            session.execute(insert, (one,))
        select = session.prepare(f"SELECT id FROM {KEYSPACE}.rows WHERE id = ?")
        select.is_idempotent = True
        ring.kill(ring.hosts[1])
        assert [session.execute(select, (one,)).one().id for one in ids] == ids
