"""Stores around stores: retry, rate limit, hedging and faults."""
