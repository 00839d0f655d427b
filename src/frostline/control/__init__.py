"""The control plane: what jobs that share a store may use of it, decided in one place and obeyed in each."""
