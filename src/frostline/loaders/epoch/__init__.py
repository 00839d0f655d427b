"""The stream of an epoch's samples, for every framework."""
