"""Object stores, local folders and web servers."""
