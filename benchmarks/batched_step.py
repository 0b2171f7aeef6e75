"""The batched step against other ways to do it: time, memory, and what the memory bus allows.

    python benchmarks/batched_step.py           the whole grid, about 11 minutes on 2 idle cores
    python benchmarks/batched_step.py --quick   three cells, about 40 seconds
    python benchmarks/batched_step.py --only Q=1 M=4096 --allocator reused

Everything is measured twice, in processes of their own: with the allocator as it comes, and with
freed memory reused, for which glibc is told to keep what is freed.
"""

import argparse
import os
import platform
import subprocess
import sys

ALLOCATORS = {
    "default": {},
    "reused": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(2**26),
    },
}
QUIET = {"KINETO_LOG_LEVEL": "6"}  # else torch's profiler says on stderr when it starts and stops


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure a few cells for a moment each")
    parser.add_argument("--only", nargs="+", default=[], help="parts of a cell's name: Q=1 D=64 32/8")
    parser.add_argument("--allocator", choices=ALLOCATORS, help="only one of the two")
    parser.add_argument(
        "--seconds", type=float, help="about how long to measure a cell (default 4, quick 0.4)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of every library (default: all)"
    )
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        measure_here(options)
        return
    for name in [options.allocator] if options.allocator else ALLOCATORS:
        if name == "reused" and platform.libc_ver()[0] != "glibc":
            print("Left out: the table with freed memory reused, which needs glibc.")
            continue
        command = [sys.executable, __file__, *sys.argv[1:], "--in-this-process", "--allocator", name]
        if subprocess.run(command, check=False, env=os.environ | QUIET | ALLOCATORS[name]).returncode:
            sys.exit(1)  # it has said why


def measure_here(options):
    """Print the tables for the allocator that this process was started with."""
    import batched_tables
    import grid

    cells = grid.QUICK if options.quick else grid.FULL
    chosen = [cell for cell in cells if set(options.only) <= set(str(cell).split())]
    if not chosen:
        sys.exit(
            f"--only was {' '.join(options.only)}; it must be parts of one of: {', '.join(map(str, cells))}"
        )
    settings = " ".join(f"{name}={value}" for name, value in ALLOCATORS[options.allocator].items())
    allocator = f"freed memory reused: {settings}" if settings else "default allocator"
    print(f"\n== The batched step, {allocator} ==\n")
    batched_tables.run(chosen, options.seconds or (0.4 if options.quick else 4), options.threads)


if __name__ == "__main__":
    main()
