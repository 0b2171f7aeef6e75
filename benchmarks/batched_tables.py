"""The tables of the batched step: run by `batched_step`, in a process for each allocator."""

import math
import statistics
import sys
import time

import grid
import memory
import peers
import timing
import torch
from peers import ours
from report import duration, machine, print_table, versions


def run(cells, seconds, threads):
    """Measure cells for about so many seconds each, and print the tables."""
    torch.set_num_threads(threads)
    contenders, missing = peers.installed()
    bandwidth, fresh = timing.copy_bandwidth()
    introduce(contenders, missing, bandwidth, fresh)
    start, taken, extra = time.perf_counter(), {}, {}
    for number, cell in enumerate(cells, 1):
        print(
            f"{time.perf_counter() - start:4.0f} s  {number} of {len(cells)}: {cell}",
            file=sys.stderr,
            flush=True,
        )
        taken[cell] = measure(cell, contenders, seconds)
        extra[cell] = extra_memory(cell)
    for base in (ours.FUNCTIONAL, ours.BARE):
        print_ratios(taken, contenders, bandwidth, base)
    print_memory(extra)


def introduce(contenders, missing, bandwidth, fresh):
    """Say what is measured, on what, and what each contender returns."""
    print(machine(), versions(), sep="\n")
    print(f"float32. {grid.RAGGED} Seed {grid.SEED}.")
    print(
        f"A copy into warm memory reads and writes {bandwidth / 1e9:.1f} GB/s; into fresh memory it takes {fresh:.1f}x as long."
    )
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
        over_ours[cell] = [
            timing.ratio(times, peer.name, ours.counterpart(peer).name) for peer in rivals
        ]
        least = grid.least_bytes(cell, grid.draw(cell)["lengths"])[base.cache] / bandwidth
        over_limit[cell] = statistics.median(times[base.name]) / least

    columns = {
        peer.name: [ratios[at] for ratios in over_ours.values()] for at, peer in enumerate(rivals)
    }
    columns["fastest"] = [min(ratios, default=math.nan) for ratios in over_ours.values()]
    columns["limit"] = list(over_limit.values())
    print(
        f"{base.cache.capitalize()}: the time of {base.name}, and as multiples of ours: each peer, the fastest peer."
    )
    print(f"Last, {base.name} as a multiple of the bandwidth limit.")
    print_table(
        ["cell", base.name, *columns],
        [
            [
                str(cell),
                duration(statistics.median(times[base.name])),
                *(f"{number:.2f}" for number in numbers),
            ]
            for (cell, times), *numbers in zip(taken.items(), *columns.values())
        ]
        + [
            [
                "geometric mean",
                "",
                *(f"{timing.geometric_mean(column):.2f}" for column in columns.values()),
            ]
        ],
    )
    for name, column in columns.items():
        worst, cell = (max if name == "limit" else min)(zip(column, map(str, taken)))
        print(f"worst cell, {name}: {worst:.2f} at {cell}")
    print(flush=True)


def print_memory(extra):
    print(
        "Peak of tensors during a call: functional, over its outputs; in place, beyond its outputs, over the caches"
    )
    rows = [
        [str(cell), f"{functional:.3f}", *(f"{fraction:.2%}" for fraction in in_place)]
        for cell, (functional, *in_place) in extra.items()
    ]
    print_table(["cell", *(peer.name for peer in (ours.FUNCTIONAL, ours.BARE, ours.WITH_WEIGHTS))], rows)
