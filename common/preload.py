"""For the fork server only: it imports the script that is run, once for all of its workers."""

import atexit
import gc
import multiprocessing.spawn
import os
import shutil
import signal
import tempfile
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path

from common.worker_env import MAIN_PATH, quiet, run_prefix

# The launcher has blocked these for the start. From here on the workers, which inherit this, end by
# them in silence.
launcher = os.getppid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
quiet()
if main_path := os.environ.pop(MAIN_PATH, ""):
    # What `forkserver.set_forkserver_preload(["__main__"])` does, but only since Python 3.12.9.
    multiprocessing.spawn.import_main_path(main_path)
# numpy's threads are not used by anyone while the server forks.
warnings.filterwarnings("ignore", message="This process .* is multi-threaded, use of fork",
                        category=DeprecationWarning)
# All that was imported stays: the workers' garbage collectors need not look at it, and so do not
# copy its pages.
gc.collect()
gc.freeze()


@atexit.register
def clean_up():
    """Remove what a launcher leaves behind when it is killed."""
    for _ in range(100):  # the system closes its end of our pipe a moment before it is gone
        if os.getppid() != launcher:
            break
        time.sleep(0.01)
    else:
        return  # it lives, and will start another server
    address = Path(forkserver._forkserver._forkserver_address or "")
    folders = [address.parent] if address.parent.name.startswith("pymp-") else []
    for folder in [*folders, *Path(tempfile.gettempdir()).glob(f"{run_prefix(launcher)}*")]:
        shutil.rmtree(folder, ignore_errors=True)
