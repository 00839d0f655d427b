"""The window and its driver: what to ask for now, what may be handed out."""
