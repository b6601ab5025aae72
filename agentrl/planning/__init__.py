"""Plans of trainings before they are begun: memory, time, and how GPUs are divided."""
