"""The engine as a local endpoint: Anthropic's and OpenAI's protocols over HTTP."""
