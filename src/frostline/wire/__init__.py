"""Messages, framing and refusals between trainer and node."""
