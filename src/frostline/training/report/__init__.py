"""Reports, plans and their plots, as values and pages."""
