"""Service: what every protocol needs of the engine behind the server.

Owns the model's name to the outside, and the way of a request from its prompt's length into the
queue, as far as there is room. Protocols know the worker through it.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from mlx_engine.job import Overloaded
from mlx_engine.prompt import Bounds, TooManyTokens
from mlx_engine.respond import Request
from mlx_engine.server.body import (
    BODY_S,
    BODY_SILENCE_S,
    MAX_BODIES_BYTES,
    MAX_BODY_BYTES,
    SMALL_BODY_BYTES,
    Intake,
    json_object,
    received,
)
from mlx_engine.server.errors import PromptTooLong, request_id
from mlx_engine.server.fields import Object
from mlx_engine.server.sse import (
    KEEP_ALIVE_S,
    WHOLE_SILENCE_S,
    Answer,
    EventStream,
    WholeAnswer,
    Writer,
)
from mlx_engine.server.ticket import Encoded, Ticket
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.worker import Worker

log = logging.getLogger(__name__)

# Clients take a name that begins with "claude-" for one of Anthropic's, and its window with it.
MODEL_ID = "ds41"
MODEL_NAME = "DeepSeek-V4.1-Flash"

T = TypeVar("T")


# How long an answer waits for the count of its prompt before it begins: what is refused by then has
# a status of its own.
COUNT_S = 0.5

# Bodies that wait for a thread, or have one.
_MAX_READING = 64


@dataclass(frozen=True)
class Service:
    """The worker, and what can be said of its model before it is loaded.

    keep_alive_s: the longest silence of a stream. whole_silence_s: the longest before the first
    byte of an answer that is not streamed. body_silence_s: the longest in the middle of a body.
    body_s: how long a whole body may take. count_s: how long any answer waits for its prompt's
    count.
    """

    worker: Worker
    tokenizer: Tokenizer
    context_tokens: int
    model_id: str = MODEL_ID
    model_name: str = MODEL_NAME
    keep_alive_s: float = KEEP_ALIVE_S
    whole_silence_s: float = WHOLE_SILENCE_S
    max_body_bytes: int = MAX_BODY_BYTES
    body_silence_s: float = BODY_SILENCE_S
    body_s: float = BODY_S
    count_s: float = COUNT_S
    _intake: Intake = field(
        default_factory=lambda: Intake(MAX_BODIES_BYTES), init=False, repr=False
    )
    _reading: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_MAX_READING), init=False, repr=False
    )
    # Apart from asyncio's own: long prompts hold up neither the status nor bodies that come.
    _counters: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(thread_name_prefix="counting"),
        init=False,
        repr=False,
    )

    def check_room(self) -> None:
        """Refuse, before its body is read, what could not be answered then.

        Raises Overloaded, Stopped.
        """
        self.worker.check_room()

    async def body(self, http: HttpRequest) -> Object:
        """A request's body. Raises BadRequest, ApiError, ClientGone, Overloaded."""
        with self._intake.body() as take:
            try:
                data = await received(
                    http,
                    self.max_body_bytes,
                    take,
                    silence_s=self.body_silence_s,
                    whole_s=self.body_s,
                )
            except Overloaded:
                self.worker.counts.refused += 1
                raise
            # A larger one is parsed in a thread: until it is, no other client would be answered.
            if len(data) <= SMALL_BODY_BYTES:
                return json_object(data)
            return await self.read(lambda: json_object(data))

    async def read(self, work: Callable[[], T], threads: ThreadPoolExecutor | None = None) -> T:
        """What `work` makes of a body, in another thread: one of asyncio's, if not of `threads`.

        Raises what it does, and Overloaded.
        """
        if self._reading.locked():
            self.worker.counts.refused += 1
            raise Overloaded(f"{_MAX_READING} prompts are being read already: try again later")
        async with self._reading:
            return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def encode(self, request: Request, bounds: Bounds | None = None) -> Encoded:
        """Count the tokens of a request's prompt, in another thread.

        Raises Overloaded, and by `bounds` TooManyTokens and Cancelled.
        """
        return await self.read(lambda: self._encode(request, bounds), self._counters)

    def _encode(self, request: Request, bounds: Bounds | None) -> Encoded:
        engine = self.worker.engine
        prompt = request.encode(self.tokenizer, engine.turns if engine else None, bounds)
        head_tokens = prompt.anchors[-1] if prompt.anchors else 0
        return Encoded(len(prompt.token_ids), head_tokens)

    async def take(self, request: Request) -> Ticket:
        """Put a request into the queue when its prompt is counted, for which it waits `count_s`.

        What fails by then is raised, and told by the ticket later: PromptTooLong when the prompt
        leaves no room for an answer, Overloaded, Stopped.
        """
        ticket = Ticket(request)
        ticket.placing = asyncio.create_task(self._place(ticket))
        try:
            done, _ = await asyncio.wait((ticket.placing,), timeout=self.count_s)
            for placing in done:
                placing.result()
        except BaseException:  # nobody waits for it any more
            ticket.cancel()
            raise
        return ticket

    async def _place(self, ticket: Ticket) -> None:
        request = ticket.request
        # The message that tells how much to leave out wants the whole number, but not at any cost.
        bounds = Bounds(2 * self.context_tokens, ticket.is_cancelled.is_set)
        try:
            encoded = await self.encode(request, bounds)
            prompt_tokens = encoded.prompt_tokens
        except TooManyTokens as error:
            encoded, prompt_tokens = None, error.least_tokens
        room = self.context_tokens - prompt_tokens
        if encoded is None or room < 1:
            raise PromptTooLong(prompt_tokens, self.context_tokens - 1)
        if request.max_tokens is not None:
            request = replace(request, max_tokens=min(request.max_tokens, room))
        ticket.encoded = encoded
        ticket.job = self.worker.submit(request, ticket.id)
        position = self.worker.position(ticket.job)
        if position and len(self.worker.jobs()) > 1:
            log.info("%s waits, as %d. in the queue", ticket.id, position)

    def stream(self, ticket: Ticket, writer: Writer) -> EventStream:
        """An answer as a stream of events."""
        return EventStream(ticket, writer, self.keep_alive_s)

    def whole(self, ticket: Ticket, answer: Answer, http: HttpRequest) -> WholeAnswer:
        """An answer as a whole."""
        return WholeAnswer(
            ticket,
            answer,
            path=http.url.path,
            request_id=request_id(http),
            silence_s=self.whole_silence_s,
            keep_alive_s=self.keep_alive_s,
        )
