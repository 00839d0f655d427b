"""The trainer's side of a job that trains beside the store."""
