"""Conversations to token ids, in the vendor's chat format.

`deepseek-recipe` renders the text and says which parts of it are special tokens; the parts between
are encoded here, without the added vocabulary, which gives the ids of the package's own encoder in
a fraction of its time. Puts the sampled tokens of earlier turns in the place of rendered ones, and
says where a later prompt may depart from this one. Owns the message type and the efforts; sampling
and output are not here, and turns knows which turn is which.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import deepseek_recipe as recipe
import numpy as np
from numpy.typing import NDArray

from mlx_engine.errors import BadRequest, Cancelled, ContextTooLong
from mlx_engine.tokenizer import SPELLINGS, Tokenizer, check_unicode, parts
from mlx_engine.turns import Shown, Turn, TurnRecord

Effort = Literal["off", "low", "high", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; of an assistant's, what came back of `reasoning` and `signature`.

    Raises BadRequest for another role, or a text that is not Unicode.
    """

    role: Role
    content: str
    reasoning: str = ""
    signature: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise BadRequest(f"role is {self.role!r}, it must be one of {', '.join(ROLES)}")
        check_unicode(self.content)
        check_unicode(self.reasoning)


@dataclass(frozen=True)
class Piece:
    """A part of a rendered prompt: the spelling of one special token, or plain text."""

    text: str
    is_special: bool


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it; `starts_in_reasoning` when the answer goes on from `<think>`.

    anchors: how many tokens precede each role token but the first, ascending: first system text
    and tools, then the earlier turns, answers included. A prompt that drops or changes what
    follows still begins with these tokens. turn_prefix: the digest of the tokens up to the role
    token of the answer, which the answer is recorded with; empty where no turn begins. opening: the
    last tokens, where they are of the answer's turn. turns: where each turn begins, and whose it
    is.
    """

    token_ids: tuple[int, ...]
    starts_in_reasoning: bool
    anchors: tuple[int, ...] = ()
    turn_prefix: bytes = b""
    opening: tuple[int, ...] = ()
    turns: tuple[tuple[int, str], ...] = ()


class TooManyTokens(ContextTooLong):
    """A prompt passes what it may have; `least_tokens` is as far as it was counted."""

    def __init__(self, least_tokens: int, most_tokens: int) -> None:
        super().__init__(
            f"at least {least_tokens} tokens of prompt pass the context of {most_tokens} tokens: "
            "shorten it, or load with a longer context"
        )
        self.least_tokens = least_tokens


_SPECIAL_TOKENS = recipe.SpecialTokens(image=SPELLINGS["image"])
_ENCODING = recipe.DeepseekV41Encoding().with_special_tokens(_SPECIAL_TOKENS)

_ASSISTANT = Piece(SPELLINGS["assistant"], True)
_THINK_START = Piece(SPELLINGS["think_start"], True)
_THINK_END = Piece(SPELLINGS["think_end"], True)
_EOS = Piece(SPELLINGS["eos"], True)
_ROLES = {
    _ASSISTANT: "assistant",
    Piece(SPELLINGS["system"], True): "system",
    Piece(SPELLINGS["user"], True): "user",
    Piece(_SPECIAL_TOKENS.token(recipe.SpecialToken.LatestReminder), True): "latest reminder",
}

_MEMO_BYTES = 64 * 2**20


def conversation(messages: Sequence[Message], effort: Effort = "high") -> recipe.Conversation:
    """Put messages into the package's form; effort "off" turns thinking off.

    Raises BadRequest when no message asks for an answer, or for an unknown effort.
    """
    if effort not in EFFORTS:
        raise BadRequest(f"effort is {effort!r}, it must be one of {', '.join(EFFORTS)}")
    if not messages or messages[-1].role == "assistant":
        raise BadRequest("the conversation must end with a message of the user: add one")
    return _conversation([_message(message) for message in messages], effort)


def _conversation(messages: list[recipe.Message], effort: Effort) -> recipe.Conversation:
    if effort == "off":
        return recipe.Conversation(messages, thinking_mode=False)
    return recipe.Conversation(messages, reasoning_effort=effort)


def _message(message: Message) -> recipe.Message:
    match message.role:
        case "system":
            return recipe.SystemMessage(message.content)
        case "user":
            return recipe.UserMessage(message.content)
        case "assistant":
            return recipe.AssistantMessage(message.content, message.reasoning or None)


def render(conversation: recipe.Conversation) -> list[Piece]:
    """Render a conversation up to where the model goes on."""
    rendered = _ENCODING.render_conversation(conversation)
    text = rendered.prompt
    pieces: list[Piece] = []
    end_of_last = 0
    for start, end in rendered.special_ranges:
        pieces += [Piece(text[end_of_last:start], False), Piece(text[start:end], True)]
        end_of_last = end
    pieces.append(Piece(text[end_of_last:], False))
    return [piece for piece in pieces if piece.text]


def encode(
    conversation: recipe.Conversation,
    tokenizer: Tokenizer,
    turns: TurnRecord | None = None,
    signatures: Sequence[str] = (),
    bounds: "Bounds | None" = None,
) -> Prompt:
    """Encode a conversation; special tokens are only those that the format itself writes.

    An earlier turn of the assistant that `turns` knows gets the tokens that were sampled, between
    its header and its end mark; where one of the two has no reasoning, only those that follow it.
    signatures: what came back with each message of the assistant, "" for none. A part of a text
    that was encoded lately is not encoded again. Raises TooManyTokens and Cancelled by `bounds`.
    """
    pieces = render(conversation)
    bounds = bounds or Bounds()
    bounds.check_text([piece.text for piece in pieces if not piece.is_special], tokenizer)
    answers = [message for message in conversation.messages if message.role == "assistant"]
    signed = zip(answers, signatures or [""] * len(answers), strict=True)
    finished = [(message, signature) for message, signature in signed if not message.prefix]
    tokens = _Tokens(tokenizer, bounds)
    done = 0
    for (message, signature), (first, end) in zip(finished, _bodies(pieces), strict=True):
        tokens.add(pieces[done:first])
        done = end
        rendered = pieces[first:end]
        has_reasoning = pieces[first - 1] == _THINK_START
        turn = None
        if turns is not None:
            turn = turns.find(tokens.turn_prefix, _shown(message, has_reasoning, signature))
        sampled = turn and _sampled(turn, has_reasoning, tokenizer.special.think_end)
        if turn is None or sampled is None:
            tokens.add(rendered)
        else:
            if has_reasoning and not turn.starts_in_reasoning:
                tokens.add(rendered[: rendered.index(_THINK_END) + 1])
            tokens.extend(sampled)
    tokens.add(pieces[done:])
    begins_turn = pieces[-2:-1] == [_ASSISTANT]
    header = next(piece for piece in reversed(pieces) if piece.is_special)
    return Prompt(
        tuple(tokens.ids),
        starts_in_reasoning=header == _THINK_START,
        anchors=tuple(tokens.anchors),
        turn_prefix=tokens.turn_prefix if begins_turn else b"",
        turns=tuple(tokens.turns),
    )


def _bodies(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Where the finished turns of the assistant are: after each header, before its end mark."""
    first = 0
    for i, piece in enumerate(pieces):
        if piece == _ASSISTANT:
            first = i + 2
        elif piece == _EOS:
            yield first, i


def _shown(message: recipe.Message, has_reasoning: bool, signature: str) -> Shown:
    # A reasoning that the format drops cannot make a difference.
    reasoning = (message.reasoning_content or "") if has_reasoning else ""
    call_ids = [call.id for call in message.tool_calls or ()]
    return Shown(message.content, reasoning, call_ids, signature)


def _sampled(turn: Turn, has_reasoning: bool, think_end: int) -> NDArray[np.uint32] | None:
    """The tokens of a turn that can stand in a prompt with or without its reasoning."""
    if has_reasoning or not turn.starts_in_reasoning:
        return turn.token_ids
    ends = np.flatnonzero(turn.token_ids == think_end)
    # The model may have called a tool, or stopped, without ending its reasoning.
    return turn.token_ids[ends[0] + 1 :] if ends.size else None


@dataclass(frozen=True)
class Bounds:
    """What ends an encoding before its time: more than `most_tokens`, or that it is `cancelled`.

    A text of many megabytes takes tens of seconds.
    """

    most_tokens: int | None = None
    cancelled: Callable[[], bool] = lambda: False

    def check(self, n_tokens: int) -> None:
        """Raise TooManyTokens or Cancelled where that is so."""
        if self.most_tokens is not None and n_tokens > self.most_tokens:
            raise TooManyTokens(n_tokens, self.most_tokens)
        if self.cancelled():
            raise Cancelled("the answer was cancelled before its prompt was encoded")

    def check_text(self, texts: Iterable[str], tokenizer: Tokenizer) -> None:
        """As `check`, by what texts have at least: no token stands for more than some bytes."""
        if self.most_tokens is None:
            return
        n_bytes = sum(len(text.encode()) for text in texts)
        if n_bytes > self.most_tokens:
            self.check(-(-n_bytes // tokenizer.longest_token_bytes))


class _Tokens:
    """The token ids of a prompt as it grows, with its anchors and its digest."""

    def __init__(self, tokenizer: Tokenizer, bounds: Bounds) -> None:
        self.ids: list[int] = []
        self.anchors: list[int] = []
        self.turns: list[tuple[int, str]] = []
        self.turn_prefix = b""  # of the last role token of the assistant
        self._digest = hashlib.sha256()
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._memo = _MEMOS.setdefault(tokenizer, _Memo())

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if not piece.is_special:
                for part in parts(piece.text):
                    self.extend(self._memo.encode(part, self._tokenizer))
                continue
            if piece in _ROLES:
                self.turns.append((len(self.ids), _ROLES[piece]))
                if len(self.ids) > 1:  # BOS alone is no prefix to keep
                    self.anchors.append(len(self.ids))
            self.extend(np.array([self._tokenizer.special_id(piece.text)], np.uint32))
            if piece == _ASSISTANT:
                self.turn_prefix = self._digest.digest()

    def extend(self, token_ids: NDArray[np.uint32]) -> None:
        self.ids += token_ids.tolist()
        self._bounds.check(len(self.ids))
        self._digest.update(token_ids.tobytes())


class _Memo:
    """The token ids of texts, up to `_MEMO_BYTES`; what was unused longest goes first."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ids: dict[str, NDArray[np.uint32]] = {}  # in the order of their last use
        self._n_bytes = 0

    def encode(self, text: str, tokenizer: Tokenizer) -> NDArray[np.uint32]:
        with self._lock:
            known = self._ids.pop(text, None)
            if known is not None:
                self._ids[text] = known
                return known
        token_ids = np.array(tokenizer.encode_text(text), np.uint32)
        with self._lock:
            if text not in self._ids:
                self._ids[text] = token_ids
                self._n_bytes += _entry_bytes(text, token_ids)
            while self._n_bytes > _MEMO_BYTES:
                oldest = next(iter(self._ids))
                self._n_bytes -= _entry_bytes(oldest, self._ids.pop(oldest))
        return token_ids


def _entry_bytes(text: str, token_ids: NDArray[np.uint32]) -> int:
    return sys.getsizeof(text) + token_ids.nbytes + 200


_MEMOS: WeakKeyDictionary[Tokenizer, _Memo] = WeakKeyDictionary()


def encode_raw(text: str, tokenizer: Tokenizer, bounds: Bounds | None = None) -> Prompt:
    """Encode text to be continued, without chat format: BOS and the plain text.

    Raises as `encode` does.
    """
    bounds = bounds or Bounds()
    bounds.check_text([text], tokenizer)
    tokens = _Tokens(tokenizer, bounds)
    tokens.ids.append(tokenizer.special.bos)
    tokens.add([Piece(text, False)])
    return Prompt(tuple(tokens.ids), False)


def default_max_tokens(effort: Effort, prompt_tokens: int, context_tokens: int) -> int:
    """The vendor's length of an answer, capped by the room in the context, at least 1."""
    return default_conversation_tokens(_conversation([], effort), prompt_tokens, context_tokens)


def default_conversation_tokens(
    conversation: recipe.Conversation, prompt_tokens: int, context_tokens: int
) -> int:
    """As `default_max_tokens`, for the effort of a conversation."""
    request = recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV41Flash)
    # A prompt beyond the context is for the engine to refuse.
    return request.resolve_max_tokens(min(prompt_tokens, context_tokens), context_tokens)
