"""Endpoints that speak the dialects of agent programs and chat clients."""
