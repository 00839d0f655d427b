"""The demo: real photographs made into a data set, and the main job run on them."""
