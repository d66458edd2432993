"""What runs in an interpreter of its own (`interpreter`): environments in threads, and messages about them.

These modules, and those that they import, travel as source and run without rollart, msgspec or numpy, on Python 3.10 or
newer. `shipping` lists them; a test holds them to it.
"""
