"""Repair of small modules with verified bugs: candidates to choose from (`choose`), and Harbor task folders."""

from rollart.tasks.repair.harbor import generate

__all__ = ["generate"]
