"""The journal of a run, and reports derived from it alone."""
