"""For the fork server only: it imports the script that is run, once for all of its workers."""

import atexit
import gc
import multiprocessing.spawn
import os
import shutil
import signal
import time
import warnings
from multiprocessing import forkserver, util
from pathlib import Path

from common.launcher.environment import LAUNCHER, MAIN_PATH, quiet, wake_with_parent
from common.launcher.worker import exit_now

# The launcher has blocked these for the start. From here on the workers, which inherit this, end by
# them in silence.
# The launcher may be dead by now: then another process is our parent.
launcher = int(os.environ.pop(LAUNCHER, os.getppid()))
signal.signal(signal.SIGINT, signal.SIG_DFL)
wake_with_parent()
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
# At its end Python does not collect what is frozen, and C++ that counts its objects then, as triton
# in a CUDA build does, would print that they are leaked. So the server ends as its workers do; this
# comes last, for multiprocessing's own exit function was registered before anybody else's.
util.Finalize(None, exit_now, args=(0,), exitpriority=-1000)


@atexit.register
def remove_socket() -> None:
    """Remove the folder of the server's socket, where the launcher was killed and cannot."""
    for _ in range(100):  # the system closes its end of our pipe a moment before it is gone
        if os.getppid() != launcher:
            break
        time.sleep(0.01)
    else:
        return  # it lives, and will start another server
    # Without this private name, the folder would stay.
    address = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_address", None)
    folder = Path(address or "").parent
    if folder.name.startswith("pymp-"):
        shutil.rmtree(folder, ignore_errors=True)
