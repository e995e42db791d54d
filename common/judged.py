"""Run the `--check` of a program, and leave its result as data for a program that judges it.

    python -m common.judged RESULT.json rpc_rl.main --world_size 3

RESULT.json holds `{"passed": 12}`, the number of comparisons; or `{"findings": [...]}`, those that
failed (`oracle.CheckFailedError`); or `{"failure": "rank 1 raised TypeError", "waited": false,
"traceback": "..."}` if a rank has failed (`launch.Failure`) or the program of a single process has
raised an exception. If there is no file, the program has ended in another way.
"""

import faulthandler
import importlib
import json
import signal
import sys
import traceback
from pathlib import Path

from common.launch import WAITED, RunFailedError
from common.oracle import CheckFailedError


def main(result: str, module: str, *flags: str) -> None:
    """Run, write the result, and end as the program does."""
    faulthandler.register(signal.SIGUSR1)  # on request, show where this process is
    found = {}
    try:
        differences = importlib.import_module(module).main(["--check", *flags])
        found = {"passed": len(differences)}
    except CheckFailedError as error:
        found = {"findings": error.findings}
        raise
    except RunFailedError as error:
        kind, rank, what, trace = error.failure
        found = {"failure": f"rank {rank} {what}", "waited": kind == WAITED, "traceback": trace}
        raise
    except Exception as error:
        found = {"failure": f"raised {type(error).__name__}", "waited": False,
                 "traceback": traceback.format_exc()}
        raise
    finally:
        if found:
            Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
