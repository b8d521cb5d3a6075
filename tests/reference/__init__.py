"""An independent numpy float64 model of DeepSeek-V4.1-Flash, written from the spec alone.

It shares no code with the engine: tests hold the engine against it.
"""
