"""Every implementation of every port in this repository, behind the harness of its conformance suite.

Each entry builds a fresh harness: a suite's cases share nothing.
"""
