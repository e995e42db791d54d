"""Imported by the fork server only: the script that is run, so that its workers need not import it once more."""

import multiprocessing.spawn
import os
import signal
import warnings

from common.worker_env import MAIN_PATH, quiet

# The launcher has blocked these for the start. From here on the workers, which inherit this, end by them in silence.
signal.signal(signal.SIGINT, signal.SIG_DFL)
quiet()
if main_path := os.environ.pop(MAIN_PATH, ""):
    # What `forkserver.set_forkserver_preload(["__main__"])` is for, and does only since Python 3.12.9.
    multiprocessing.spawn.import_main_path(main_path)
# numpy's threads are not used by anyone while the server forks.
warnings.filterwarnings("ignore", message="This process .* is multi-threaded, use of fork", category=DeprecationWarning)
