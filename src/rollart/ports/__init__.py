"""Protocols between the control plane and its backends. Each has a conformance suite in `rollart.conformance`."""
