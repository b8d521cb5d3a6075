"""An engine that says what a script tells it, for tests of the server.

It comes back between chunks of the prompt as well as between tokens, honours max_tokens, knows what
earlier prompts and answers have in common with the next one, and notes who used it and how.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mlx_engine.errors import BadRequest
from mlx_engine.progress import Prefilled
from mlx_engine.tokenizer import Tokenizer
from tests.fake_engine import Call, EngineDouble, Steps, scored, with_special_tokens

Answer = str | Sequence[int] | Exception
Script = Callable[[Call], Answer]


@dataclass
class Course:
    """What became of one call of `generate`."""

    call: Call
    cached_tokens: int
    chunks_done: int = 0
    said: list[int] = field(default_factory=list[int])
    is_closed: bool = False


class ScriptedEngine(EngineDouble):
    """Says the answers in their order, the last one again and again.

    An answer is text, in which spellings of special tokens stand for those, or token ids, and ends
    at its end or at an EOS in it; an exception is raised in place of the first token. A script is
    called for the answer to what was asked. `before_step` is called ahead of every chunk and token,
    and may wait or raise. `courses` are the calls.
    """

    def __init__(
        self,
        *answers: Answer | Script,
        tokenizer: Tokenizer | None = None,
        context_tokens: int = 100_000,
        chunk_tokens: int = 64,
        before_step: Callable[[Course], None] = lambda course: None,
    ) -> None:
        super().__init__(tokenizer, context_tokens)
        self.courses: list[Course] = []
        self.threads: set[int] = set()
        self._answers = list(answers) or [""]
        self._chunk_tokens = chunk_tokens
        self._before_step = before_step
        self._known: list[tuple[int, ...]] = []
        self._work = threading.Lock()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.is_closed = True

    def _begin(self, call: Call, logprobs: int | None) -> Steps:
        answer = self._answers[min(len(self.courses), len(self._answers) - 1)]
        if callable(answer):
            answer = answer(call)
        course = Course(call, self._cached_tokens(call.token_ids))
        self.courses.append(course)
        return self._generate(course, answer, logprobs)

    def _generate(self, course: Course, answer: Answer, logprobs: int | None) -> Steps:
        prompt = course.call.token_ids
        done_tokens = course.cached_tokens
        try:
            yield Prefilled(done_tokens, len(prompt))
            while done_tokens < len(prompt):
                with self._alone(course):
                    done_tokens = min(done_tokens + self._chunk_tokens, len(prompt))
                    course.chunks_done += 1
                yield Prefilled(done_tokens, len(prompt))
            for token_id in self._token_ids(answer):
                if token_id == self.tokenizer.special.eos:
                    return "stop"
                if len(course.said) == course.call.max_tokens:
                    return "length"
                with self._alone(course):
                    course.said.append(token_id)
                yield token_id if logprobs is None else scored(token_id, logprobs)
            return "stop"
        finally:
            course.is_closed = True
            self._known.append((*prompt[:done_tokens], *course.said))

    def _token_ids(self, answer: Answer) -> Sequence[int]:
        if isinstance(answer, Exception):
            raise answer
        return with_special_tokens(answer, self.tokenizer) if isinstance(answer, str) else answer

    def _cached_tokens(self, token_ids: Sequence[int]) -> int:
        """What a known sequence has in common with a prompt, without the prompt's last token."""
        longest = 0
        for known in self._known:
            pairs = zip(known, token_ids, strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            longest = max(longest, min(len(known), len(token_ids)) if shared is None else shared)
        return min(longest, len(token_ids) - 1)

    @contextmanager
    def _alone(self, course: Course) -> Generator[None]:
        """One step: from one thread at a time, as the engine has it."""
        if self.is_closed or not self._work.acquire(blocking=False):
            raise BadRequest("the engine is closed, or at work for another call")
        try:
            self.threads.add(threading.get_ident())
            self._before_step(course)
            yield
        finally:
            self._work.release()
