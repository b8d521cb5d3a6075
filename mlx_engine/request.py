"""What to answer, and how: a request with its checks, and its prompt.

Owns the two forms of a request, messages of our own for programs and a whole conversation of the
vendor's package for the server, and the tool call that the prompt may open. The course of an
answer is respond's part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import deepseek_recipe as recipe

from mlx_engine import prompt as chat
from mlx_engine.errors import BadRequest
from mlx_engine.sampling import Sampling
from mlx_engine.tokenizer import SPELLINGS, Tokenizer, check_unicode
from mlx_engine.tool_calls import ANY_TOOL
from mlx_engine.turns import TurnRecord

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Request:
    """What to answer, and how.

    prompt: one user message, or a conversation; with `raw` the text to continue, without chat
    format. system: put before the conversation. effort: how long to reason first. max_tokens: of
    reasoning and answer together, None for the vendor's default within the context. stop: the
    answer ends before the first of these.

    conversation: in place of prompt, system and effort; here max_tokens is lowered to the room in
    the context, and a last message of the assistant is continued where it has `prefix`.
    signatures: what came back with each message of the assistant, "" for none. signature: given
    out with this answer's reasoning, so that its turn is found again. parses_tools: calls of the
    conversation's tools are told from the text; where its tool_choice is "none" calls are left
    out. starts_in_call: the answer is a call, of this tool or of ANY_TOOL; without thinking only.
    parallel_calls: the answer may hold more than one. logprobs: each delta says how likely its
    tokens were, and this many of the most likely ones, up to MAX_LOGPROBS; None for neither.

    Raises BadRequest for what cannot be answered.
    """

    prompt: str | Sequence[chat.Message] | None = None
    system: str | None = None
    effort: chat.Effort = "high"
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    raw: bool = False
    conversation: recipe.Conversation | None = None
    signatures: Sequence[str] = ()
    signature: str = ""
    parses_tools: bool = True
    starts_in_call: str | None = None
    parallel_calls: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.conversation is None):
            raise BadRequest("give a prompt or a conversation, and one of them only")
        if self.prompt is not None and isinstance(self.prompt, str):
            check_unicode(self.prompt)
            if not self.prompt.strip():
                raise BadRequest("the prompt is empty: give some text to answer")
        if self.raw and (self.system is not None or not isinstance(self.prompt, str)):
            raise BadRequest(
                "raw continues one text without chat format: leave out system and messages"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequest(f"max_tokens is {self.max_tokens}, it must be at least 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise BadRequest(f"logprobs is {self.logprobs}, it must be from 0 to {MAX_LOGPROBS}")
        if isinstance(self.stop, str):
            raise BadRequest("stop is one string, it must be a list of strings")
        if not all(self.stop):
            raise BadRequest("a stop string is empty, it must have at least one character")
        if self.conversation is None:
            self._of_messages()  # has checks of its own
        else:
            self._check_conversation(self.conversation)
        if self.starts_in_call not in (None, ANY_TOOL, *self.tools):
            raise BadRequest(f"the tool to call, {self.starts_in_call!r}, is not among the tools")
        if self.starts_in_call == ANY_TOOL and not self.tools:
            raise BadRequest("a call is asked for without any tool: declare one")

    @property
    def tools(self) -> frozenset[str]:
        """The names of the tools that may be called."""
        if self.conversation is None or self.conversation.tool_choice == "none":
            return frozenset()
        of_messages = (
            m.tools or () for m in self.conversation.messages if isinstance(m, recipe.SystemMessage)
        )
        declared = [*self.conversation.tools, *(tool for tools in of_messages for tool in tools)]
        return frozenset(tool.name for tool in declared)

    @property
    def drops_calls(self) -> bool:
        """Whether a call is left out of the answer: none was wanted."""
        return self.conversation is not None and self.conversation.tool_choice == "none"

    def encode(
        self,
        tokenizer: Tokenizer,
        turns: TurnRecord | None = None,
        bounds: chat.Bounds | None = None,
    ) -> chat.Prompt:
        """The prompt as token ids; earlier answers that `turns` knows with their own.

        Raises TooManyTokens and Cancelled by `bounds`.
        """
        if self.raw and isinstance(self.prompt, str):
            return chat.encode_raw(self.prompt, tokenizer, bounds)
        if self.conversation is None:
            signatures = [m.signature for m in self._messages() if m.role == "assistant"]
            return chat.encode(self._of_messages(), tokenizer, turns, signatures, bounds)
        prompt = chat.encode(self.conversation, tokenizer, turns, self.signatures, bounds)
        opening = _opening(self.starts_in_call, tokenizer)
        return replace(prompt, token_ids=prompt.token_ids + opening, opening=opening)

    def answer_tokens(self, prompt_tokens: int, context_tokens: int) -> int:
        """How many tokens the answer may have: `max_tokens`, or the vendor's default."""
        if self.conversation is not None:
            # A prompt beyond the context is for the engine to refuse.
            room = max(context_tokens - prompt_tokens, 1)
            default = chat.default_conversation_tokens(
                self.conversation, prompt_tokens, context_tokens
            )
            return default if self.max_tokens is None else min(self.max_tokens, room)
        if self.max_tokens is not None:
            return self.max_tokens
        effort = "off" if self.raw else self.effort
        return chat.default_max_tokens(effort, prompt_tokens, context_tokens)

    def _of_messages(self) -> recipe.Conversation:
        return chat.conversation(self._messages(), self.effort)

    def _messages(self) -> list[chat.Message]:
        messages = [] if self.system is None else [chat.Message("system", self.system)]
        if isinstance(self.prompt, str):
            return [*messages, chat.Message("user", self.prompt)]
        return [*messages, *(self.prompt or ())]

    def _check_conversation(self, conversation: recipe.Conversation) -> None:
        if self.system is not None or self.raw:
            raise BadRequest("a conversation holds its system text: leave out system and raw")
        messages = conversation.messages
        if not messages or (messages[-1].role == "assistant" and not messages[-1].prefix):
            raise BadRequest("the conversation must end with a message of the user: add one")
        n_answers = sum(message.role == "assistant" for message in messages)
        if self.signatures and len(self.signatures) != n_answers:
            raise BadRequest(
                f"there are {len(self.signatures)} signatures for {n_answers} messages of the "
                "assistant: give one for each, empty where there is none"
            )
        if conversation.tool_choice == "required":
            raise BadRequest("tool_choice required is said by starts_in_call: leave it at auto")
        if self.starts_in_call is not None and conversation.thinking_mode:
            raise BadRequest("an answer that starts in a call has no reasoning: turn thinking off")


def _opening(tool: str | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that open a block of calls, and where the tool is named a call of it."""
    if tool is None:
        return ()
    texts = ["\n\n<", " calls>\n"]
    if tool != ANY_TOOL:
        texts = [*texts[:-1], " calls>\n<", f' invoke name="{tool}">\n']
    token_ids = tokenizer.encode_text(texts[0])
    for text in texts[1:]:
        token_ids += [tokenizer.special_id(SPELLINGS["dsml"]), *tokenizer.encode_text(text)]
    return tuple(token_ids)
