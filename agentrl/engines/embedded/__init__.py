"""The embedded engine: continuous batching over any transformers causal LM."""
