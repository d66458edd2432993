"""Protocols between the control plane and the world. Each has a conformance suite in `ports.conformance`."""
