"""What jobs say of themselves to a control plane, and what that comes to for each job and for all."""
