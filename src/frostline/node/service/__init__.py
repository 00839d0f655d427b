"""The node itself: what it serves, and the profiles, listings and trainings that it runs."""
