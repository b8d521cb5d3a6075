"""Races against a definition: two accesses that nothing orders, one of them a write."""

from dataclasses import dataclass
from itertools import combinations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.msl.emulator import EmulatedKernel, Order, using
from tests.msl.faults import KernelFault, Kind

N_THREADS, CELLS, STEPS = 64, 2, 4
# Three threads of either simdgroup take part; the others only meet them at the barriers.
THREADS = (0, 1, 31, 32, 33, 63)
READ, WRITE = 1, 2
# The last keeps the threads together and orders nothing.
NO_BARRIER, SIMDGROUP, THREADGROUP, NO_FENCE = 0, 1, 2, 3

# Every thread follows its column of the program: three times the cell, plus what to do with it.
INTERPRETER = f"""
    threadgroup uint cells[{CELLS}];
    const uint i = thread_index_in_threadgroup;
    if (i == 0) for (uint c = 0; c < {CELLS}; c++) cells[c] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint seen = 0;
    for (uint s = 0; s < {STEPS}; s++) {{
        const uint what = program[s * {N_THREADS} + i], cell = what / 3;
        if (what % 3 == {READ}) seen += cells[cell];
        if (what % 3 == {WRITE}) cells[cell] = i;
        if (barriers[s] == {SIMDGROUP}) simdgroup_barrier(mem_flags::mem_threadgroup);
        if (barriers[s] == {THREADGROUP}) threadgroup_barrier(mem_flags::mem_threadgroup);
        if (barriers[s] == {NO_FENCE}) threadgroup_barrier(mem_flags::mem_none);
    }}
    out[i] = seen;
"""


@dataclass(frozen=True)
class Access:
    step: int
    thread: int
    action: int  # READ or WRITE
    cell: int


def is_race(a: Access, b: Access, barriers: list[int]) -> bool:
    """Whether two accesses meet unordered; barriers[i] ends step i."""
    first, second = sorted((a.step, b.step))
    between = barriers[first:second]
    in_one_simdgroup = a.thread // 32 == b.thread // 32
    is_ordered = THREADGROUP in between or (in_one_simdgroup and SIMDGROUP in between)
    is_write = WRITE in (a.action, b.action)
    return a.cell == b.cell and a.thread != b.thread and is_write and not is_ordered


# Few accesses, so that most races are the only one of their program.
ACCESSES = st.lists(
    st.builds(
        Access,
        step=st.integers(0, STEPS - 1),
        thread=st.sampled_from(THREADS),
        action=st.sampled_from([READ, READ, WRITE]),
        cell=st.integers(0, CELLS - 1),
    ),
    min_size=2,
    max_size=6,
    # One action for a thread at a step.
    unique_by=lambda access: (access.step, access.thread),
)
BARRIERS = st.lists(
    st.sampled_from([NO_BARRIER, SIMDGROUP, THREADGROUP, NO_FENCE]),
    min_size=STEPS,
    max_size=STEPS,
)


def run(accesses: list[Access], barriers: list[int], order: Order) -> set[Kind]:
    program = np.zeros((STEPS, N_THREADS), np.uint32)
    for access in accesses:
        program[access.step, access.thread] = 3 * access.cell + access.action
    kernel = EmulatedKernel("program", ["program", "barriers"], ["out"], INTERPRETER)
    try:
        with using(order=order):
            kernel(
                inputs=[mx.array(program), mx.array(barriers, dtype=mx.uint32)],
                grid=(N_THREADS, 1, 1),
                threadgroup=(N_THREADS, 1, 1),
                output_shapes=[(N_THREADS,)],
                output_dtypes=[mx.uint32],
            )
    except KernelFault as fault:
        return fault.kinds
    return set()


@pytest.mark.usefixtures("emulated_kernel")
# The write comes after two of the reads it could race with, not after the third.
@example(
    accesses=[
        Access(0, 0, READ, 0),
        Access(0, 1, READ, 0),
        Access(0, 33, READ, 0),
        Access(2, 31, WRITE, 0),
    ],
    barriers=[NO_FENCE, SIMDGROUP, NO_BARRIER, NO_BARRIER],
    order=Order.FORWARD,
)
@given(accesses=ACCESSES, barriers=BARRIERS, order=st.sampled_from(Order))
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_reported_exactly_when_there_is_one(
    accesses: list[Access], barriers: list[int], order: Order
) -> None:
    expected = any(is_race(a, b, barriers) for a, b in combinations(accesses, 2))
    assert run(accesses, barriers, order) == ({Kind.RACE} if expected else set())
