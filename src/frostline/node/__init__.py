"""The server beside the store: fetch, decode, batch, run, encode, stream."""
