"""What every benchmark prints about itself, and its tables."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "numpy", "onnxruntime", "onnx", "jax", "transformers")


def machine():
    """Return one line on the processor, the threads and the system."""
    return f"{_processor()}, {os.cpu_count()} cores, threads used: {torch.get_num_threads()}, {platform.platform()}"


def versions():
    """Return one line with the version of Python and of each package that is installed."""
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Interference:
    """How busy other processes keep the machine while this one measures: they spoil it."""

    def __init__(self):
        self._start, self._busy, self._own = time.perf_counter(), _busy_seconds(), time.process_time()

    def __str__(self):
        if self._busy is None:
            return "How busy other processes were is not known on this system."
        busy, own = _busy_seconds() - self._busy, time.process_time() - self._own
        share = max(0, busy - own) / (os.cpu_count() * (time.perf_counter() - self._start))
        return f"Other processes used {share:.0%} of the cores meanwhile" + (
            ": measure again." if share > 0.1 else "."
        )


def _busy_seconds():
    """Return the seconds that all cores together have worked since the start of the system, or None."""
    try:
        with open("/proc/stat", encoding="utf8") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(
                int, file.readline().split()[1:9]
            )
    except OSError:
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def print_table(head, rows):
    """Print rows of strings under a head, numbers to the right of their column and words to the left."""
    columns = []
    for column in zip(head, *rows):
        width = max(map(len, column))
        is_words = column[-1][:1].isalpha()
        columns.append([text.ljust(width) if is_words else text.rjust(width) for text in column])
    for row in zip(*columns):
        print("  ".join(row).rstrip())
    print(flush=True)


def duration(seconds):
    """Return seconds as text in milliseconds, to three digits."""
    return f"{seconds * 1e3:.3g} ms"


def goal(what, got, *, at_least=None, at_most=None):
    """Return a row for `print_goals`: a number that was measured, its bound, and whether it is kept."""
    bound, kept = (
        (f">= {at_least:.3g}", got >= at_least) if at_most is None else (f"<= {at_most}", got <= at_most)
    )
    return [what, f"{got:.3g}", bound, "yes" if kept else "no"]


def print_goals(goals):
    print_table(["goal", "measured", "wanted", "kept"], goals)
