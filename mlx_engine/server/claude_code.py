"""What Claude Code needs to know of a server, as environment variables.

The names are Claude Code's own, from its public documentation of gateways and variables.
"""

from collections.abc import Mapping

# A long prompt is read for minutes, while the stream carries pings.
_PATIENCE_MS = 30 * 60 * 1000


def environment(
    address: str, model_id: str, context_tokens: int, token: str = "ds41"
) -> dict[str, str]:
    """The variables for a server at `address`; `token` is its API key, or any word without one."""
    return {
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_AUTH_TOKEN": token,
        "ANTHROPIC_MODEL": model_id,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model_id,
        # A larger window than there is would put off the compaction for too long; versions that
        # do not heed the first heed the second, from 100,000 tokens up.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context_tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(context_tokens),
        # Otherwise a stream that failed is sent once more, and a tool may run twice.
        "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_PATIENCE_MS),
        "API_TIMEOUT_MS": str(_PATIENCE_MS),
    }


def shell_lines(variables: Mapping[str, str]) -> str:
    """Lines for a shell that set them."""
    return "\n".join(f"export {name}={value}" for name, value in variables.items())
