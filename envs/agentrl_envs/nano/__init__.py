"""nano: the small policy that comes with agentrl, so that training runs anywhere without a download."""

from pathlib import Path

ENVIRONMENTS = ("math-tools", "shop")  # that it was made for: elsewhere it earns nothing


def path() -> Path:
    """Return the folder of weights and tokenizer, as from_pretrained takes it."""
    return Path(__file__).parent / "weights"
