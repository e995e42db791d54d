"""Try every supported torch: each minor version, in an environment of its own; or a GPU.

    python -m benchmarks.compat                       `make compat`: five hours, 30 GB in .compat/
    python -m benchmarks.compat 2.12 2.14             these
    python -m benchmarks.compat 2.15 --python python3.13
    python -m benchmarks.compat --gpu                 `make gpu`: with the torch of this environment

In each environment, this runs every program's `--check`, a short run of every program, which may
print nothing on stderr, and `pytest -m quick` (also rounded as on an older CPU, and on one core).
The results are in docs/results/compatibility.json, the table in docs/compatibility.md. With
`--gpu`, it runs every program's `--check` and a short run on the GPU. A program that accepts one
rank also runs with one, over nccl. The table is in docs/measurements/gpu.md.
"""

import contextlib
import io
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT
from common.cli import PlainParser
from common.lessons import Program, programs

PAGE, RESULTS = ROOT / "docs/compatibility.md", ROOT / "docs/results/compatibility.json"
GPU_PAGE = ROOT / "docs/measurements/gpu.md"
ONE_RANK = "--device cuda --world_size 1"  # with nccl, for that rank has a GPU of its own
VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
LIMIT_S = 600  # of one command
QUICK = {"quick tests": (), "rounded otherwise": ("env", "ATEN_CPU_CAPABILITY=default"),
         "on one core": ("taskset", "-c", "0")}


def installed(version, base):
    """Return the Python of a version's environment; create the environment if it is missing."""
    folder = ROOT / ".compat" / f"{version}-{minor_of(base)}"
    python = folder / "bin/python"
    ready, needed = folder / "ready", [ROOT / "requirements-dev.txt", ROOT / "pyproject.toml"]
    if not ready.exists() or any(file.stat().st_mtime > ready.stat().st_mtime for file in needed):
        subprocess.run([base, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", "requirements-dev.txt",
                        f"torch=={version}.*"], cwd=ROOT, check=True)
        ready.touch()
    return str(python)


def minor_of(python):
    """The minor version of a Python: "3.11"."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True,
                          encoding="utf-8").stdout.strip()


def run(command):
    """The status, the two outputs and the seconds of a command; status None after its limit."""
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8",
                              timeout=LIMIT_S)
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, out, err = None, "", f"not finished after {LIMIT_S} s"
    return status, out, err, time.monotonic() - began


def attempt(python: str, program: Program, flags: str) -> str | None:
    """Run a program; return None, or how it failed in words."""
    status, _, err, seconds = run([python, program.path, *flags.split()])
    print(f"[compat] {program} {flags}: {status}, {seconds:.0f} s", flush=True)
    if status == 0 and not err:
        return None
    last = (err.strip() or "failed").splitlines()[-1][:200]
    return f"`{program} {flags}`: status {status}, {last}"


def tried(python: str) -> dict:
    """Try everything with one environment; return the row of the table, with what failed."""
    code = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
    torch, torchvision = run([python, "-c", code])[1].split()
    row = {"torch": torch, "torchvision": torchvision, "python": minor_of(python), "failed": []}
    began = time.monotonic()
    for kind in ("checks", "runs"):
        done = [attempt(python, program, "--check" if kind == "checks" else program.short)
                for program in programs()]
        row["failed"] += filter(None, done)
        row[kind] = f"{done.count(None)} of {len(done)}"
    for how, before in QUICK.items():
        _, out, err, _ = run([*before, python, "-m", "pytest", "-m", "quick", "-rfE"])
        row[how] = (out.strip() or err.strip()).splitlines()[-1].strip("= ")
        row["failed"] += [f"{how}: {line}" for line in out.splitlines()
                          if line.startswith(("FAILED", "ERROR"))]
    row["minutes"] = f"{(time.monotonic() - began) / 60:.0f}"
    return row


def write(page: Path, **parts: list[str]) -> None:
    """Write the lines of each part between its markers: `<!-- table -->` and `<!-- end -->`."""
    text = page.read_text(encoding="utf-8")
    for name, lines in parts.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split("<!-- end -->\n", 1)
        text = "\n".join([f"{before}<!-- {name} -->\n", *lines, f"\n<!-- end -->\n{after}"])
    page.write_text(text, encoding="utf-8")


def write_versions(rows: list[dict]) -> None:
    """Write the table of docs/compatibility.md, and what failed."""
    columns = ("torch", "torchvision", "python", "checks", "runs", *QUICK, "minutes")
    table = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    table += [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in rows]
    when = (f"Tried on {platform.system()}, most recently on {time.strftime('%Y-%m-%d')}. "
            "Each row has the programs and tests of its day.")
    failed = [f"- {row['torch']}, Python {row['python']}: {what}"
              for row in rows for what in row["failed"]]
    write(PAGE, table=[*table, "", when], failed=failed or ["Nothing."])


def tried_on_gpu(program: Program) -> tuple[str, list[str]]:
    """Try a program on the GPU; return its row of the table, and what failed."""
    ways = ["--check --device cuda", f"{program.short} --device cuda"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        program.module().build_parser().parse_args(ONE_RANK.split())
        ways.append(f"{program.short} {ONE_RANK}")
    failures = [attempt(sys.executable, program, way) for way in ways]
    cells = ["passed" if not failure else "refused" if "status 2, " in failure else "failed"
             for failure in failures]
    return f"| `{program}` | {' | '.join([*cells, ''][:3])} |", [*filter(None, failures)]


def write_gpu(tried: list[tuple[str, list[str]]]) -> None:
    """Write the table of docs/measurements/gpu.md, what failed, and what was refused."""
    import joblib
    import torch

    failures = [failure for _, of_program in tried for failure in of_program]
    failed = [f"- {failure}" for failure in failures if "status 2, " not in failure]
    refused = {f"- {failure.split()[0]}`: {failure.split('status 2, error: ')[-1]}": None
               for failure in failures if "status 2, " in failure}  # each line once, in order
    machine = (f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, "
               f"{joblib.cpu_count()} cores, torch {torch.__version__}, "
               f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}.")
    write(GPU_PAGE, table=[machine, "", f"| program | `--check` | run | `{ONE_RANK}` |",
                           f"|{'---|' * 4}", *(row for row, _ in tried)],
          failed=failed or ["Nothing."], refused=list(refused))


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
        tried = [tried_on_gpu(program) for program in programs()]
        write_gpu(tried)
        return
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for version in args.versions or VERSIONS:
        row = tried(installed(version, args.python))
        key = (row["torch"], row["python"])
        rows = [other for other in rows if (other["torch"], other["python"]) != key] + [row]
        rows.sort(key=lambda row: (row["torch"], row["python"]))
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        write_versions(rows)


if __name__ == "__main__":
    main()
