"""The node itself: what it serves, profiles and does beside."""
