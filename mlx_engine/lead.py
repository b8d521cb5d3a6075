"""Lead: sessions whose every step the other ranks take too, in the same order.

A session is deterministic, so ranks that are told the same calls run the same graphs, and their
exchanges meet. Decisions stay with rank 0: what is evicted, how long a chunk is, what the disk
cache has. Starting the processes is ranks's part, the other end follow's.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from weakref import finalize

import mlx.core as mx

from mlx_engine.calls import Call, Do, Plan, Start
from mlx_engine.checkpoint import Checkpoint as ModelFiles
from mlx_engine.devices import Devices, require_fitting
from mlx_engine.errors import BadRequest, DeviceError
from mlx_engine.hosts import Hosts
from mlx_engine.identity import different, identity, kernels, state_digest
from mlx_engine.joining import join, listen, reach
from mlx_engine.ops import launch
from mlx_engine.ranks import Rank, Ranks
from mlx_engine.session import Session
from mlx_engine.state import Checkpoint, SessionState
from mlx_engine.state_transfer import export_tail, send_state
from mlx_engine.token_ids import TokenIds, as_token_ids

# Calls that compute nothing of the model.
_WITHOUT_EXCHANGE = (
    *("reset", "rewind", "keep_checkpoint", "drop_checkpoint", "pause_at", "stop_reading"),
    "compare",
)
# Tokens of an answer after which ranks compare what they have computed, as after every prompt.
_COMPARED_TOKENS = 64

OnProgress = Callable[[int, int], None]


@contextmanager
def leading(hosts: Hosts, files: ModelFiles, plan: Plan, stall_s: float) -> "Generator[Lead]":
    """Start the other ranks and join them, for a checkpoint that is to be loaded by a plan.

    Raises BadRequest for a count that does not divide the model, a port that is taken, a peer that
    cannot be reached and ranks that differ; DeviceError for one that does not start.
    """
    require_fitting(files.config, hosts.count)
    own = identity(files, plan.dtype, plan.cache_dir)
    ranks = Ranks(hosts, stall_s)

    def start(rank: Rank) -> Start:
        directory = Path(rank.host.model) if rank.host.model else plan.directory
        environment = hosts.environment(rank.number)
        return Start(replace(plan, directory=directory), hosts.backend, environment, stall_s)

    try:
        ranks.send_each(start)
        ranks.did()
        for rank, theirs in zip(ranks.ranks, ranks.wait("identity"), strict=True):
            _require_same(rank, own, theirs)
        environment = hosts.environment(0)
        ranks.send(Do("listen"))
        with listen(environment.listens):
            ranks.did()
            ranks.wait("listen")
            ranks.send(Do("reach"))
            reach(environment.reaches)
            ranks.did()
            ranks.wait("reach")
        ranks.send(Do("join"))
        names = ", ".join(map(str, ranks.ranks))
        devices = join(environment, hosts.backend, f"the devices ({names}) did not join: one ended")
        ranks.did()
        ranks.wait("join")
        yield Lead(devices, ranks)
    finally:
        ranks.close()


def _require_same(rank: Rank, own: Mapping[str, str], theirs: Mapping[str, Any]) -> None:
    what = different(own, theirs)
    if what is not None:
        raise BadRequest(
            f"{rank} has another {what} than this machine: ranks need equal machines with the same "
            "installed and fetched"
        )


class Lead:
    """Tells the other ranks what this one, rank 0, does."""

    def __init__(self, devices: Devices, ranks: Ranks) -> None:
        self.devices = devices
        self._ranks = ranks
        self._depth = 0
        self._is_broken = False
        self._gone: deque[int] = deque()
        self._numbers = count(1)

    @contextmanager
    def loading(self, on_progress: OnProgress | None) -> Generator[OnProgress]:
        """Let the others load their parts too; gives what is to be told of this one's progress."""

        def went_on(done_bytes: int, total_bytes: int) -> None:
            self._ranks.went_on()
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)

        self._ranks.send(Do("load"))
        yield went_on
        self._ranks.did()
        own = kernels(launch.fast_paths())
        for rank, theirs in zip(self._ranks.ranks, self._ranks.wait("load"), strict=True):
            _require_same(rank, own, theirs)
        self._ranks.has_started = True

    def new_number(self, session: Session) -> int:
        """A number for a session, which the others forget when it is gone."""
        number = next(self._numbers)
        # Whenever and in whatever thread that is: told with the next call.
        finalize(session, self._gone.append, number).atexit = False
        return number

    def session(self, *args: Any, **options: Any) -> Session:
        """A session that the others have too; arguments as for Session."""
        return LedSession(self, *args, **options)

    def logits(self, *given: object) -> AbstractContextManager[None]:
        """`call` around `full_logits`."""
        return self.call(0, "logits", *given)

    @contextmanager
    def call(self, session: int, name: str, *args: object) -> Generator[None]:
        """Let the others do what is done inside; what it calls in turn is part of it.

        An error inside ends the run, for the others wait for what does not come.
        """
        if self._is_broken:
            # Where this one was interrupted the others went on: it may still keep what it has.
            if name not in _WITHOUT_EXCHANGE:
                raise DeviceError("the other devices were left in the middle of a step: load again")
            yield
            return
        self._depth += 1
        try:
            if self._depth == 1:
                gone = tuple(self._gone.popleft() for _ in range(len(self._gone)))
                self._ranks.send(Call(session, name, args, gone))
            yield
        except Exception as error:
            self._ranks.fail(error)
        except BaseException:
            self._is_broken = True
            raise
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._ranks.did()


class LedSession(Session):
    """A Session that has its like on every other rank."""

    def __init__(self, lead: Lead, *args: Any, **options: Any) -> None:
        self._lead = lead
        self.number = lead.new_number(self)
        self._like = args, options
        with lead.call(self.number, "new"):
            super().__init__(*args, **options)

    def _beside(self) -> Session:
        args, options = self._like
        return LedSession(self._lead, *args, **options)

    def _compare(self) -> None:
        """Let the others end the run where they have computed something else."""
        with self._call("compare", state_digest(self.state)):
            pass

    def _call(self, name: str, *args: object) -> Any:
        return self._lead.call(self.number, name, *args)

    def reset(self) -> None:
        with self._call("reset"):
            super().reset()

    def restore(self, token_ids: Sequence[int] | TokenIds, state: SessionState) -> None:
        tail = export_tail(state.checkpoint())
        with self._call("restore", as_token_ids(token_ids), len(tail)):
            send_state(state, tail, self._lead.devices)
            super().restore(token_ids, state)

    def fork(self, checkpoint: Checkpoint) -> Session:
        with self._call("fork", checkpoint.position):
            return super().fork(checkpoint)

    def read(
        self, token_ids: Sequence[int] | TokenIds, anchors: Sequence[int] = ()
    ) -> Generator[int, None, mx.array]:
        with self._call("read", as_token_ids(token_ids), tuple(anchors)):
            reading = super().read(token_ids, anchors)
            done = next(reading)
        logits: mx.array | None = None
        try:
            while logits is None:
                yield done
                with self._call("go_on", self.chunk_tokens):
                    try:
                        done = next(reading)
                    except StopIteration as end:
                        logits = end.value
            self._compare()
            return logits
        finally:
            reading.close()
            if logits is None:
                with self._call("stop_reading"):
                    pass

    def pause_at(self, position: int) -> None:
        with self._call("pause_at", position):
            super().pause_at(position)

    def step(self, token_id: int) -> mx.array:
        with self._call("step", token_id):
            return super().step(token_id)

    def draw(self, choose: Callable[[mx.array], mx.array]) -> int:
        with self._call("draw", choose):
            token = super().draw(choose)
        if self.position % _COMPARED_TOKENS == 0:
            self._compare()
        return token

    def rewind(self, position: int) -> None:
        with self._call("rewind", position):
            super().rewind(position)

    def keep_checkpoint(self) -> None:
        with self._call("keep_checkpoint"):
            super().keep_checkpoint()

    def keep_unfinished(self) -> None:
        with self._call("keep_unfinished"):
            super().keep_unfinished()

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        with self._call("drop_checkpoint", checkpoint.position):
            super().drop_checkpoint(checkpoint)
