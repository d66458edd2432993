"""Configuration of a run. Imports no torch, so that a config is checked before anything heavy is loaded."""
