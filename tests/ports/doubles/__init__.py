"""Implementations that break one promise each, to show that the suites notice: a correct one, bent in one place."""
