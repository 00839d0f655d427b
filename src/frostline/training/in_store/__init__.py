"""The process that trains a head beside the store."""
