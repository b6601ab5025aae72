"""The names of TRL, verl and vLLM: one table, and what stands for each of them here."""
