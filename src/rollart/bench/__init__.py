"""Benchmarks, each a command of `rollart bench`."""
