"""Composition root: a run from request to report, its folder, and the Python API."""
