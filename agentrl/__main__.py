"""``python -m agentrl`` is ``agentrl``."""

import sys

from agentrl.cli import main

if __name__ == "__main__":  # a worker's process imports this module too
    sys.exit(main())
