"""Phalanx plans, runs and checks the training of transformers over tensor, pipeline and data axes."""

__version__ = "0.1.0"

__all__ = ["__version__"]
