"""Try every supported torch: each minor version, in an environment of its own; or a GPU.

    python -m benchmarks.compat                       `make compat`: five hours, 30 GB in .compat/
    python -m benchmarks.compat 2.12 2.14             these
    python -m benchmarks.compat 2.15 --python python3.13
    python -m benchmarks.compat --gpu                 `make gpu`: with the torch of this environment

In each: every program's `--check`, `pytest -m quick` (also rounded as on an older CPU, and on one
core), and a short run of every program, which may print nothing on stderr. docs/compatibility.md
has the table, docs/results/compatibility.json what it is made of. With `--gpu`: every program's
`--check` and a short run there, also of one rank, with nccl, where it can be alone;
docs/measurements/gpu.md has the table.
"""

import contextlib
import importlib
import io
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

from common.cli import PlainParser

from tests.test_checks import CHECKS

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs/compatibility.md", ROOT / "docs/results/compatibility.json"
GPU_PAGE = ROOT / "docs/measurements/gpu.md"
ONE_RANK = "--device cuda --world_size 1"  # with nccl, for that rank has a GPU of its own
VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
LIMIT_S = 600  # of one command
QUICK = {"quick tests": (), "rounded otherwise": ("env", "ATEN_CPU_CAPABILITY=default"),
         "on one core": ("taskset", "-c", "0")}
SHORT = {  # flags of a short run; every other program is short with its defaults
    "batch_rl.": "--observers 2 --num_episode 1",
    "batch_rl.until_solved": "--max_episodes 2",
    "ddp_basic.elastic": "--epochs 2",
    "ddp_basic.pitfalls": "--mended",
    "ddp_rpc_hybrid.": "--epochs 2",
    "model_parallel_resnet.": "--arch resnet18 --batch_size 8 --image_size 33 --num_batches 1",
    "model_parallel_resnet.single_machine": "--image_size 33 --num_repeat 2",
    "p2p_collectives.deadlock": "--mended",
    "p2p_collectives.train": "--epochs 1",
    "param_server.": "--epochs 1",
    "param_server.batch_update": "--arch resnet18 --image_size 32 --num_updates 2",
    "rpc_rl.": "--max_episodes 3",
    "rpc_rnn.": "--epochs 1",
}


def short(program):
    """The flags of a short run: of the longest name that fits."""
    fitting = [name for name in SHORT if program.startswith(name)]
    return SHORT[max(fitting, key=len)].split() if fitting else []


def installed(version, base):
    """The Python of the environment of a version; it is made unless it is there."""
    folder = ROOT / ".compat" / f"{version}-{minor_of(base)}"
    python = folder / "bin/python"
    ready, needed = folder / "ready", [ROOT / "requirements.txt", ROOT / "pyproject.toml"]
    if not ready.exists() or any(file.stat().st_mtime > ready.stat().st_mtime for file in needed):
        subprocess.run([base, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", "requirements.txt",
                        f"torch=={version}.*"], cwd=ROOT, check=True)
        ready.touch()
    return str(python)


def minor_of(python):
    """The minor version of a Python: "3.11"."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True,
                          text=True).stdout.strip()


def run(command):
    """The status, the two outputs and the seconds of a command; status None after its limit."""
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, out, err = None, "", f"no end within {LIMIT_S} s"
    return status, out, err, time.monotonic() - began


def attempt(python, program, flags):
    """The seconds of a run of a program, and how it failed in words, or None."""
    status, _, err, seconds = run([python, f"{program.replace('.', '/')}.py", *flags])
    print(f"[compat] {program} {' '.join(flags)}: {status}, {seconds:.0f} s", flush=True)
    if status == 0 and not err:
        return seconds, None
    last = (err.strip() or "failed").splitlines()[-1][:200]
    return seconds, f"`{program} {' '.join(flags)}`: status {status}, {last}"


def tried(python):
    """All that is tried with one environment: the row of the table, and what failed in words."""
    code = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
    torch, torchvision = run([python, "-c", code])[1].split()
    row = {"torch": torch, "torchvision": torchvision, "python": minor_of(python), "failed": []}
    began = time.monotonic()
    for kind, flags_of in (("checks", lambda _: ["--check"]), ("runs", short)):
        done = [attempt(python, program, flags_of(program)) for program in CHECKS]
        failures = [failure for _, failure in done if failure]
        row["failed"] += failures
        row[kind] = f"{len(CHECKS) - len(failures)} of {len(CHECKS)}"
    for how, before in QUICK.items():
        _, out, err, _ = run([*before, python, "-m", "pytest", "-m", "quick", "-rfE"])
        row[how] = (out.strip() or err.strip()).splitlines()[-1].strip("= ")
        row["failed"] += [f"{how}: {line}" for line in out.splitlines()
                          if line.startswith(("FAILED", "ERROR"))]
    row["minutes"] = f"{(time.monotonic() - began) / 60:.0f}"
    return row


def page(rows):
    """The text of docs/compatibility.md."""
    columns = ("torch", "torchvision", "python", "checks", "runs", *QUICK, "minutes")
    lines = ["# Supported versions of torch, and what was tried with each", "",
             "`make compat` (`benchmarks/compat.py`) installs each minor version of "
             "`requirements.txt`'s range in an environment of its own, runs the",
             "`--check` and a short training of every program, and `make quick`: as it is, rounded "
             "as on an older CPU (`ATEN_CPU_CAPABILITY=default`), and on one core.",
             "A program has *passed* that ends with status 0 and prints nothing on stderr.",
             "A version without `+cpu` is the CUDA build that `pip install torch` gives on Linux, "
             "run on a CPU.", "",
             f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in rows]
    failures = [f"- {row['torch']}, Python {row['python']}: {what}"
                for row in rows for what in row["failed"]]
    lines += ["", f"Tried on {platform.system()}, each row with the programs and tests of its day; "
              f"last on {time.strftime('%Y-%m-%d')}.", ""]
    return "\n".join(lines + ["## What failed", "", *(failures or ["Nothing."]), ""])


def tried_on_gpu(program):
    """All that is tried with the GPU for one program: its row of the table, and what failed."""
    ways = [["--check", "--device", "cuda"], [*short(program), "--device", "cuda"]]
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        importlib.import_module(program).build_parser().parse_args(ONE_RANK.split())
        ways.append([*short(program), *ONE_RANK.split()])
    failures = [attempt(sys.executable, program, way)[1] for way in ways]
    cells = ["passed" if not failure else "refused" if "status 2, " in failure else "failed"
             for failure in failures]
    return f"| `{program}` | {' | '.join([*cells, ''][:3])} |", [*filter(None, failures)]


def gpu_page(tried):
    """The text of docs/measurements/gpu.md."""
    import joblib
    import torch

    failures = [failure for _, of_program in tried for failure in of_program]
    failed = [failure for failure in failures if "status 2, " not in failure]
    refused = {f"{failure.split()[0]}`: {failure.split('status 2, error: ')[-1]}": None
               for failure in failures if failure not in failed}  # each line once, in order
    return "\n".join([
        "# On a GPU", "",
        "`make gpu` (`benchmarks/compat.py`): the `--check` and a short run of every program with "
        "`--device cuda`, whose ranks share the GPUs, and a run of one rank, with nccl.",
        "What *passed* ended with status 0 and printed nothing on stderr.", "",
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {joblib.cpu_count()} "
        f"cores, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}.", "",
        f"| program | `--check` | run | `{ONE_RANK}` |", f"|{'---|' * 4}",
        *(row for row, _ in tried), "",
        "## What failed", "", *([f"- {what}" for what in failed] or ["Nothing."]), "",
        "## What a program refuses, in one line", "", *(f"- {what}" for what in refused), ""])


def build_parser():
    """The flags of this program."""
    parser = PlainParser(__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", choices=[[], *VERSIONS],
                        help="minor versions of torch; all, if none is given")
    parser.add_argument("--python", default=sys.executable, help="that makes the environments")
    parser.add_argument("--gpu", action="store_true", help="try the GPU of this machine instead")
    return parser


def main(argv=None):
    """Try the versions, and write the page."""
    args = build_parser().parse_args(argv)
    if args.gpu:
        GPU_PAGE.write_text(gpu_page([tried_on_gpu(program) for program in CHECKS]))
        return
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for version in args.versions or VERSIONS:
        row = tried(installed(version, args.python))
        key = (row["torch"], row["python"])
        rows = [other for other in rows if (other["torch"], other["python"]) != key] + [row]
        rows.sort(key=lambda row: (row["torch"], row["python"]))
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
