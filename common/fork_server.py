"""The last import of the fork server, after all modules that its ranks share."""

import atexit
import gc
import os

# The fork server ends at once: taking torch apart takes a second and holds the output open.
atexit.register(os._exit, 0)
# The garbage collectors of the ranks skip what was imported, so they do not copy its memory.
gc.collect()
gc.freeze()
