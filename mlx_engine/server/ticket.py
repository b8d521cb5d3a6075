"""Ticket: a request on its way into the queue, while its prompt's tokens are counted.

Owns what is known of it there, and its end when the client leaves; service counts and submits.
"""

import asyncio
import secrets
from dataclasses import dataclass, field
from threading import Event

from mlx_engine.job import Job
from mlx_engine.request import Request


@dataclass(frozen=True)
class Encoded:
    """The length of a request's prompt.

    head_tokens: of them, those up to where the answer's header begins, which are kept for later
    prompts.
    """

    prompt_tokens: int
    head_tokens: int


@dataclass(eq=False)
class Ticket:
    """A request with what comes of it: `encoded` and `job` are there once `placing` has ended.

    id: the job's, known before it. placing: raises why the request has no place in the queue.
    """

    request: Request
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    encoded: Encoded | None = None
    job: Job | None = None
    placing: asyncio.Task[None] | None = None
    is_cancelled: Event = field(default_factory=Event)

    def cancel(self) -> None:
        """End the counting, or the answer."""
        self.is_cancelled.set()
        if self.placing is not None and not self.placing.cancel() and not self.placing.cancelled():
            self.placing.exception()  # nobody else may have asked, and asyncio would complain
        if self.job is not None:
            self.job.cancel()
