"""Examines a set-up before a job runs: machine, data, nodes, link and network, each in a sentence with its mend."""

from frostline.doctor.findings import FINE, PROBLEM, WARNING, Finding, worst

__all__ = ("FINE", "PROBLEM", "WARNING", "Finding", "worst")
