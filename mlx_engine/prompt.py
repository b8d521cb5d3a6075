"""Conversations to token ids, in the vendor's chat format.

`deepseek-recipe` renders the text and says which parts of it are special tokens; the parts between
are encoded here, without the added vocabulary, which gives the ids of the package's own encoder in
a fraction of its time. Owns the message type and the efforts; sampling and output are not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import deepseek_recipe as recipe

from mlx_engine.errors import BadRequest
from mlx_engine.tokenizer import SPELLINGS, Tokenizer, check_unicode

Effort = Literal["off", "low", "high", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; an assistant's without its reasoning, which prompts leave out.

    Raises BadRequest for another role, or a text that is not Unicode.
    """

    role: Role
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise BadRequest(f"role is {self.role!r}, it must be one of {', '.join(ROLES)}")
        check_unicode(self.content)


@dataclass(frozen=True)
class Piece:
    """A part of a rendered prompt: the spelling of one special token, or plain text."""

    text: str
    is_special: bool


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it; `starts_in_reasoning` when it ends with `<think>`."""

    token_ids: tuple[int, ...]
    starts_in_reasoning: bool


_ENCODING = recipe.DeepseekV41Encoding().with_special_tokens(
    recipe.SpecialTokens(image=SPELLINGS["image"])
)


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
            return recipe.AssistantMessage(message.content)


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


def encode(conversation: recipe.Conversation, tokenizer: Tokenizer) -> Prompt:
    """Encode a conversation; special tokens are only those that the format itself writes."""
    token_ids: list[int] = []
    for piece in render(conversation):
        if piece.is_special:
            token_ids.append(tokenizer.special_id(piece.text))
        else:
            token_ids += tokenizer.encode_text(piece.text)
    return Prompt(tuple(token_ids), token_ids[-1] == tokenizer.special.think_start)


def encode_raw(text: str, tokenizer: Tokenizer) -> Prompt:
    """Encode text to be continued, without chat format: BOS and the plain text."""
    return Prompt((tokenizer.special.bos, *tokenizer.encode_text(text)), False)


def default_max_tokens(effort: Effort, prompt_tokens: int, context_tokens: int) -> int:
    """The vendor's length of an answer, capped by the room in the context, at least 1."""
    request = recipe.ConversationRequest(
        _conversation([], effort), recipe.ModelVersion.DeepseekV41Flash
    )
    # A prompt beyond the context is for the engine to refuse.
    return request.resolve_max_tokens(min(prompt_tokens, context_tokens), context_tokens)
