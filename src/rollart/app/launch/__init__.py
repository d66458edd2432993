"""Starts of a run elsewhere: on Kubernetes, on Slurm, as a Ray Job."""
