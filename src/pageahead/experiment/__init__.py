"""Measuring it: cells, protocol, evidence. Uses every other part of the package; none uses it."""
