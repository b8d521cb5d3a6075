"""The host's memory, and what the control groups around this process leave of it.

Knows Linux's files; what a model needs of it is memory's part.
"""

import os
from collections.abc import Iterator
from pathlib import Path


def host_memory(proc: Path, cgroup: Path) -> tuple[int, int]:
    """Bytes in all, and what the operating system gives this process, within its groups' limits."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        # Not Linux: only the total is told.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
    total, usable = fields["MemTotal"], fields["MemAvailable"]
    for limit, used in _control_groups(proc, cgroup):
        total, usable = min(total, limit), min(usable, max(0, limit - used))
    return total, usable


def _control_groups(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each memory control group around this process, of either version.

    Pages of files are given back under pressure, so the idle ones do not count as used.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, names, idle = cgroup, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            base, idle = cgroup / "memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.strip("/")
        # In a container the path may be the host's; the mount's root then holds the limit.
        for folder in (group, *(f for f in group.parents if f.is_relative_to(base))):
            try:
                limit, used = ((folder / name).read_text().strip() for name in names)
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
            except OSError:
                continue
            if limit != "max":
                yield int(limit), int(used) - int(stat.get(idle, 0))
