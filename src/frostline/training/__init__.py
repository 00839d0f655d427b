"""The main job: train a head, evaluate, save, report."""
