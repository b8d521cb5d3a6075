"""Service: what every protocol needs of the engine behind the server.

Owns the model's name to the outside, and the way of a request from its prompt's length into the
queue. Protocols know the worker through it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mlx_engine.job import Job
from mlx_engine.respond import Request
from mlx_engine.server.body import MAX_BODY_BYTES
from mlx_engine.server.errors import PromptTooLong
from mlx_engine.server.sse import KEEP_ALIVE_S
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.worker import Worker

# Clients take a name that begins with "claude-" for one of Anthropic's, and its window with it.
MODEL_ID = "ds41"
MODEL_NAME = "DeepSeek-V4.1-Flash"


@dataclass(frozen=True)
class Encoded:
    """A request with the length of its prompt.

    head_tokens: of them, those up to where the answer's header begins, which are kept for later
    prompts.
    """

    request: Request
    prompt_tokens: int
    head_tokens: int


@dataclass(frozen=True)
class Service:
    """The worker, and what can be said of its model before it is loaded.

    keep_alive_s: the longest silence of a stream.
    """

    worker: Worker
    tokenizer: Tokenizer
    context_tokens: int
    model_id: str = MODEL_ID
    keep_alive_s: float = KEEP_ALIVE_S
    max_body_bytes: int = MAX_BODY_BYTES

    async def encode(self, make: Request | Callable[[], Request]) -> Encoded:
        """Count the tokens of a request's prompt, in another thread; `make` may make it there.

        Raises what it does.
        """
        return await asyncio.to_thread(self._encode, make)

    def _encode(self, make: Request | Callable[[], Request]) -> Encoded:
        request = make if isinstance(make, Request) else make()
        engine = self.worker.engine
        prompt = request.encode(self.tokenizer, engine.turns if engine else None)
        prompt_tokens = len(prompt.token_ids)
        head_tokens = prompt.anchors[-1] if prompt.anchors else 0
        return Encoded(request, prompt_tokens, head_tokens)

    def submit(self, encoded: Encoded) -> Job:
        """Put a request into the queue.

        Raises PromptTooLong when its prompt leaves no room for an answer, Overloaded, Stopped.
        """
        if encoded.prompt_tokens >= self.context_tokens:
            raise PromptTooLong(encoded.prompt_tokens, self.context_tokens - 1)
        return self.worker.submit(encoded.request)
