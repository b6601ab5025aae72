"""agentrl as a library: `train` and its `Run`, progress in a script and in a notebook, the parts of a loop."""

import logging

logging.getLogger("bitsandbytes").setLevel(
    logging.ERROR
)  # transformers loads it, and it speaks of a kernel not used here
