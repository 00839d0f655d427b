"""The control plane that a node serves for its own tenants, and the process of such a node."""
