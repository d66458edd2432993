"""rollart: reinforcement learning of LLM agents on disaggregated hardware."""

__version__ = "0.1.0"
