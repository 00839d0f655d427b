"""Data in tables over CQL, such as Cassandra."""
