from reverse_word.taskset import ReverseWordTaskset

__all__ = ["ReverseWordTaskset"]
