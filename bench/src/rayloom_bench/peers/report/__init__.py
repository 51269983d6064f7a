"""Medians, ratios and goals of a run, and their page, plots and JSON document."""
