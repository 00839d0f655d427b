"""What is changed at a control plane while it runs, and what happened there and why."""
