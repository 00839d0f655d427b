"""The command line: verbs; the only place that prints or exits."""
