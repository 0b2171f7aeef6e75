"""The batched step against other ways to do it: time, memory, and what the memory bus allows.

    python benchmarks/batched_step.py           the whole grid, about 10 minutes
    python benchmarks/batched_step.py --quick   four cells, under a minute
    python benchmarks/batched_step.py --only Q=1 M=4096 --allocator reused

Everything is measured twice, in processes of their own: with the allocator as it comes, and with
freed memory reused, for which glibc is told to keep what is freed.
"""

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time

import torch

import grid
import memory
import peers
import timing
from peers import ours
from report import duration, machine, print_table, versions

ALLOCATORS = {
    "default": {},
    "reused": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)},
}
QUIET = {"KINETO_LOG_LEVEL": "6"}  # else torch's profiler says on stderr when it starts and stops


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure a few cells for a moment each")
    parser.add_argument("--only", nargs="+", default=[], help="parts of a cell's name: Q=1 D=64 32/8")
    parser.add_argument("--allocator", choices=ALLOCATORS, help="one of the two tables only")
    parser.add_argument("--seconds", type=float, help="about how long to measure a cell (default 6, quick 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every library (default: all)")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        cells = [cell for cell in (grid.QUICK if options.quick else grid.FULL) if _chosen(cell, options.only)]
        return run(cells, options.allocator, options.seconds or (1 if options.quick else 6), options.threads)
    for name in [options.allocator] if options.allocator else ALLOCATORS:
        if name == "reused" and platform.libc_ver()[0] != "glibc":
            print("Left out: the table with freed memory reused, which needs glibc.")
            continue
        command = [sys.executable, __file__, *sys.argv[1:], "--in-this-process", "--allocator", name]
        subprocess.run(command, env=os.environ | QUIET | ALLOCATORS[name], check=True)


def _chosen(cell, parts):
    return set(parts) <= set(str(cell).split())


def run(cells, allocator, seconds, threads):
    """Measure cells in this process, and print the tables."""
    torch.set_num_threads(threads)
    contenders, missing = peers.installed()
    bandwidth, fresh = timing.copy_bandwidth()
    _introduce(allocator, contenders, missing, bandwidth, fresh)
    start, taken, extra = time.perf_counter(), {}, {}
    for number, cell in enumerate(cells, 1):
        print(f"{time.perf_counter() - start:4.0f} s  {number} of {len(cells)}: {cell}", file=sys.stderr, flush=True)
        taken[cell] = measure(cell, contenders, seconds)
        extra[cell] = extra_memory(cell)
    for base in (ours.FUNCTIONAL, ours.BARE):
        print_ratios(taken, contenders, bandwidth, base)
    print_memory(extra)


def _introduce(allocator, contenders, missing, bandwidth, fresh):
    settings = " ".join(f"{name}={value}" for name, value in ALLOCATORS[allocator].items())
    print(f"\n== The batched step, {'freed memory reused: ' + settings if settings else 'default allocator'} ==\n")
    print(machine(), versions(), sep="\n")
    print(f"float32. {grid.RAGGED} Seed {grid.SEED}.")
    print(f"Copying into warm memory: {bandwidth / 1e9:.1f} GB/s read and written; into fresh memory {fresh:.1f}x as long.")
    for package in missing:
        print(f"Left out: what needs {package}, which is not installed.")
    print()
    print_table(["", "returns", "how"], [[peer.name, peer.returns, peer.how] for peer in contenders])


def measure(cell, contenders, seconds):
    """Return the seconds that each contender takes, one number a round, once each has proven to be one."""
    args = grid.draw(cell)
    expected = ours.FUNCTIONAL.prepare(args)[0]()
    steps = {}
    with torch.no_grad():
        for peer in contenders:
            _spoil(args)
            steps[peer.name], read = peer.prepare(args)
            peers.check(peer, read, steps[peer.name](), expected)
        return timing.interleave(steps, seconds)


def _spoil(args):
    """Put NaN where new slots go, so that a contender has to write them."""
    Q = args["query"].shape[2]
    for row, length in enumerate(args["lengths"].tolist()):
        for name in ("key_cache", "value_cache"):
            args[name][row, :, length : length + Q] = torch.nan


def extra_memory(cell):
    """Return the peak of the functional step over its outputs, and that of the in-place step over its caches.

    The first is the peak of all tensors made during the call over the bytes of those returned;
    the second, without and with weights, what is made beyond those returned over the bytes of the caches.
    """
    args = grid.draw(cell)
    with torch.no_grad():
        peak, result = memory.peak(ours.FUNCTIONAL.prepare(args)[0])
        functional = peak / memory.new_bytes(result, args)
        in_place = []
        for peer in (ours.BARE, ours.WITH_WEIGHTS):
            peak, result = memory.peak(peer.prepare(args)[0])
            in_place.append((peak - memory.new_bytes(result, args)) / cell.cache_bytes)
    return functional, *in_place


def print_ratios(taken, contenders, bandwidth, base):
    """Print a row for every cell: the time of `base`, and what it is compared with.

    These are the time of each peer that leaves its caches in the same place, over that of ours
    which returns the same in place, or weights anyway as a function; the fastest of them; and the
    time of `base` over what the memory bus needs.
    """
    rivals = [peer for peer in contenders if peer.cache == base.cache and peer not in ours.PEERS]
    over_ours, over_limit = {}, {}
    for cell, times in taken.items():
        over_ours[cell] = [timing.ratio(times, peer.name, ours.counterpart(peer).name) for peer in rivals]
        least = grid.least_bytes(cell, grid.draw(cell)["lengths"])[base.cache] / bandwidth
        over_limit[cell] = statistics.median(times[base.name]) / least

    columns = {peer.name: [ratios[at] for ratios in over_ours.values()] for at, peer in enumerate(rivals)}
    columns["fastest"] = [min(ratios, default=math.nan) for ratios in over_ours.values()]
    columns["limit"] = list(over_limit.values())
    print(f"{base.cache.capitalize()}: the time of {base.name}, and as multiples of ours: each peer, the fastest peer.")
    print(f"Last, {base.name} as a multiple of the bandwidth limit.")
    print_table(
        ["cell", base.name, *columns],
        [
            [str(cell), duration(statistics.median(times[base.name])), *(f"{number:.2f}" for number in numbers)]
            for (cell, times), *numbers in zip(taken.items(), *columns.values())
        ]
        + [["geometric mean", "", *(f"{timing.geometric_mean(column):.2f}" for column in columns.values())]],
    )
    for name, column in columns.items():
        worst, cell = (max if name == "limit" else min)(zip(column, map(str, taken)))
        print(f"worst cell, {name}: {worst:.2f} at {cell}")
    print(flush=True)


def print_memory(extra):
    print("Peak of tensors during a call: functional, over its outputs; in place, beyond its outputs, over the caches")
    rows = [
        [str(cell), f"{functional:.3f}", *(f"{fraction:.2%}" for fraction in in_place)]
        for cell, (functional, *in_place) in extra.items()
    ]
    print_table(["cell", *(peer.name for peer in (ours.FUNCTIONAL, ours.BARE, ours.WITH_WEIGHTS))], rows)


if __name__ == "__main__":
    main()
