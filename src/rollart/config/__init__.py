"""What a run is configured with. Imports no torch, so that a config is checked before anything heavy is loaded."""
