"""vLLM: in this process, or as servers."""
