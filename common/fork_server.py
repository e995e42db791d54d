"""For the fork server only, which imports this after all else that its ranks share."""

import atexit
import gc
import os

# It ends at once: taking torch apart would take a second, in which it holds the output open.
atexit.register(os._exit, 0)
# What was imported stays. The ranks' garbage collectors need not look at it, and copy no pages.
gc.collect()
gc.freeze()
