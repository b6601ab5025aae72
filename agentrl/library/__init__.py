"""agentrl as a library: `train` and its `Run`, progress in a script and in a notebook, the parts of a loop."""

import logging

# transformers loads it, and it speaks of a kernel that is not used here
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
