"""A running server as an engine: answers the same requests with the same events, over HTTP.

Speaks Anthropic's Messages protocol as ds41 serve does. Owns the connection and the reading of its
stream; how far the prefill is comes from the server's status.
"""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from mlx_engine.answer import ReasoningDelta, TextDelta
from mlx_engine.cli.ps import ask_status, server_url
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import BadRequest, EngineError
from mlx_engine.prompt import Message
from mlx_engine.respond import End, Event, FinishReason, Progress, Request, Timings

# The server says something every few seconds.
_SILENCE_S = 60.0
# How late a Ctrl-C may be seen, and how often the server is asked for the prefill's progress.
_POLL_S = 0.05
_STATUS_S = 1.0
# A connection that is being made cannot be ended from outside.
_LEAVE_S = 1.0

Object = dict[str, Any]


class RemoteEngine:
    """Answers requests by the server at `url`. Raises BadRequest where there is none.

    Of a request it sends messages, system, effort, max_tokens and the sampling.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = server_url(url)
        self._api_key = api_key
        status = ask_status(self._url, api_key)
        self.is_loading: bool = status["state"] == "loading"
        self._model: str = status["model"]

    def save_piece(self) -> bool:
        """Nothing: the server sees to its disk cache itself."""
        return False

    def respond(
        self, request: Request, *, cancelled: Callable[[], bool] = lambda: False
    ) -> Generator[Event]:
        """Yield the events of the answer, the last one an End; `cancelled` closes the connection.

        Raises EngineError with what the server says, or with how the connection failed.
        """
        answer = _Answer()
        asked_s = answer.started_s
        with closing(_Stream(self._url, self._api_key, self._body(request))) as stream:
            while not answer.is_complete and not cancelled():
                event = stream.next_event(_POLL_S)
                if event is not None:
                    yield from answer.take(event)
                elif answer.has_begun or time.monotonic() - asked_s < _STATUS_S:
                    continue
                else:
                    asked_s = time.monotonic()
                    yield from self._progress(answer)
        yield answer.end()

    def _body(self, request: Request) -> Object:
        messages = [m for m in request.prompt or () if isinstance(m, Message)]
        sampling = request.sampling
        body: Object = {
            "model": self._model,
            "stream": True,
            "messages": [{"role": m.role, "content": _blocks(m)} for m in messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
        if request.effort == "off":
            body["thinking"] = {"type": "disabled"}
        else:
            body["output_config"] = {"effort": request.effort}
        given = {"system": request.system, "max_tokens": request.max_tokens, "seed": sampling.seed}
        return body | {name: value for name, value in given.items() if value is not None}

    def _progress(self, answer: "_Answer") -> Generator[Progress]:
        """Yield how far the prompt of this answer has been read, where that is known."""
        try:
            jobs: list[Object] = ask_status(self._url, self._api_key)["jobs"]
        except BadRequest:  # the stream tells what is wrong
            return
        elapsed_s = time.monotonic() - answer.started_s
        for job in jobs:
            if f"msg_{job['id']}" != answer.id:
                continue
            if job["state"] in ("queued", "waiting"):
                yield Progress("waiting", 0, answer.prompt_tokens, elapsed_s)
            elif job["prompt_tokens"] is not None:
                yield Progress("prefill", job["read_tokens"], job["prompt_tokens"], elapsed_s)


def _blocks(message: Message) -> list[Object]:
    """A message's content, with the reasoning of an answer, by which the server knows its turn."""
    blocks: list[Object] = [{"type": "text", "text": message.content}]
    if message.reasoning:
        thinking = {"type": "thinking", "thinking": message.reasoning, "signature": ""}
        blocks.insert(0, thinking)
    return blocks


class _Answer:
    """What the events of a stream have said so far."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.id = ""
        self.is_complete = False
        self._first_s: float | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._usage: Object = {}
        self._finish: FinishReason = "cancelled"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as far as the server has said."""
        kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        return sum(self._usage.get(kind, 0) for kind in kinds)

    @property
    def has_begun(self) -> bool:
        """Whether anything was answered."""
        return self._first_s is not None

    def take(self, event: Object) -> Generator[Event]:
        """Yield what an event of the protocol adds; raises what an error event says."""
        match event:
            case {"type": "message_start", "message": {"id": str(id), "usage": usage}}:
                self.id, self._usage = id, usage
            case {"type": "content_block_delta", "delta": {"thinking": str(text)}}:
                yield from self._add(self._reasoning, ReasoningDelta(text))
            case {"type": "content_block_delta", "delta": {"text": str(text)}}:
                yield from self._add(self._text, TextDelta(text))
            case {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}:
                self._usage = usage
                self._finish = "length" if reason == "max_tokens" else "stop"
            case {"type": "message_stop"}:
                self.is_complete = True
            case {"type": "error", "error": {"message": message}}:
                raise EngineError(f"the server ended the answer: {message}")
            case _:
                pass

    def end(self) -> End:
        """The whole of it, with the time that passed, also in the queue.

        One that was cancelled before has no account of its tokens.
        """
        cached_tokens = self._usage.get("cache_read_input_tokens", 0)
        completion_tokens = self._usage.get("output_tokens", 0)
        total_s = time.monotonic() - self.started_s
        prefill_s = total_s if self._first_s is None else self._first_s - self.started_s
        computed_tokens = self.prompt_tokens - cached_tokens
        return End(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
            timings=Timings.measure(computed_tokens, completion_tokens, prefill_s, total_s),
            engram=EngramStats(),
            finish_reason=self._finish,
        )

    def _add(self, parts: list[str], delta: ReasoningDelta | TextDelta) -> Generator[Event]:
        if delta.text:
            self._first_s = self._first_s or time.monotonic()
            parts.append(delta.text)
            yield delta


class _Stream:
    """The events of one answer, read in a thread of its own so that nobody has to wait for them."""

    def __init__(self, url: str, api_key: str | None, body: Object) -> None:
        self._url = url
        self._headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        if api_key is not None:
            self._headers["x-api-key"] = api_key
        self._connection = _connection(url)
        # The connection forgets it as soon as the header of an answer says that none comes after.
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._arrived = queue.SimpleQueue[Object | Exception]()
        self._thread = threading.Thread(target=self._run, args=(json.dumps(body),), daemon=True)
        self._thread.start()

    def next_event(self, timeout_s: float) -> Object | None:
        """The next event, None when there is none yet. Raises EngineError."""
        try:
            arrived = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    def close(self) -> None:
        """Leave, at whatever point the server is."""
        self._is_closed = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_LEAVE_S)

    def _run(self, body: str) -> None:
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            if self._is_closed:
                return
            path = f"{urlsplit(self._url).path}/v1/messages"
            self._connection.request("POST", path, body.encode(), self._headers)
            response = self._connection.getresponse()
            if response.status != 200:
                raise _refusal(response)
            with response:
                for line in response:
                    if line.startswith(b"data: "):
                        self._arrived.put(json.loads(line[len(b"data: ") :]))
            raise EngineError("the server closed the connection before the answer was complete")
        except EngineError as error:
            self._arrived.put(error)
        except OSError as error:
            reason = error.strerror or str(error)
            self._arrived.put(EngineError(f"the connection to {self._url} failed: {reason}"))
        except (HTTPException, ValueError, RecursionError):
            self._arrived.put(EngineError(f"{self._url} sent what is no answer: ask again"))
        finally:
            self._connection.close()


def _connection(url: str) -> HTTPConnection:
    parts: SplitResult = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_SILENCE_S)


def _refusal(response: HTTPResponse) -> EngineError:
    """What the server says of a request that it does not answer."""
    try:
        message = json.loads(response.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status}"
    return BadRequest(f"the server refused the message: {message}")
