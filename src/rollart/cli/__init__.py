"""Commands, and the only place that knows every package: the composition root."""
