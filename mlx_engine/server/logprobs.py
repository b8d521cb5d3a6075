"""Log probabilities as OpenAI's protocols write them.

Owns how many a body asks for, and the two forms: a list of tokens, and for text completions the
older one of parallel lists. The numbers are the engine's.
"""

from collections.abc import Sequence

from mlx_engine.answer import TokenLogprob
from mlx_engine.errors import BadRequest
from mlx_engine.request import MAX_LOGPROBS
from mlx_engine.server.fields import Object, as_list, integer, is_true

# The protocol's own.
_MOST_OF_TEXT = 5

# JSON has no minus infinity.
_LEAST = -9999.0

# What stands in the `include` of Responses for them.
OF_OUTPUT = "message.output_text.logprobs"


def of_chat(body: Object) -> int | None:
    """How many alternatives a chat asks for, None for no log probabilities. Raises BadRequest."""
    n = _number(body, "top_logprobs", MAX_LOGPROBS)
    if is_true(body, "logprobs"):
        return n
    if n:
        raise BadRequest("top_logprobs: it needs logprobs to be true")
    return None


def of_responses(body: Object) -> int | None:
    """As `of_chat`, for Responses."""
    n = _number(body, "top_logprobs", MAX_LOGPROBS)
    is_included = OF_OUTPUT in as_list(body.get("include") or [], "include")
    return n if is_included or n else None


def of_text(body: Object) -> int | None:
    """As `of_chat`, for text completions, where one number says it all."""
    if body.get("logprobs") is None or body["logprobs"] is False:
        return None
    n = _number(body, "logprobs", _MOST_OF_TEXT)
    if is_true(body, "echo"):
        raise BadRequest("logprobs: there are none of the prompt: leave out echo, or logprobs")
    return n


def _number(body: Object, name: str, most: int) -> int:
    n = integer(body, name) or 0
    if not 0 <= n <= most:
        raise BadRequest(f"{name} is {n}, it must be from 0 to {most}")
    return n


def entries(tokens: Sequence[TokenLogprob]) -> list[Object]:
    """The tokens of a part of the answer, each with its alternatives."""
    return [
        _entry(each.token, each.logprob) | {"top_logprobs": [_entry(*other) for other in each.top]}
        for each in tokens
    ]


def _entry(token: bytes, logprob: float) -> Object:
    return {"token": _text(token), "logprob": max(logprob, _LEAST), "bytes": list(token)}


class TextLogprobs:
    """The parallel lists of a text completion, for each of its parts and for the whole."""

    def __init__(self, n_alternatives: int) -> None:
        self.whole = self._lists()
        self._has_alternatives = n_alternatives > 0
        self._n_characters = 0

    def add(self, text: str, tokens: Sequence[TokenLogprob]) -> Object:
        """The lists for the next part of the text."""
        part = self._lists()
        offset = self._n_characters
        for each in tokens:
            part["tokens"].append(_text(each.token))
            part["token_logprobs"].append(max(each.logprob, _LEAST))
            top = [(each.token, each.logprob), *each.top]
            top_logprobs = {_text(token): max(logprob, _LEAST) for token, logprob in top}
            part["top_logprobs"].append(top_logprobs if self._has_alternatives else None)
            part["text_offset"].append(offset)
            offset += len(_text(each.token))
        self._n_characters += len(text)
        for name, values in part.items():
            self.whole[name] += values
        return part

    def _lists(self) -> Object:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _text(token: bytes) -> str:
    return token.decode(errors="replace")
