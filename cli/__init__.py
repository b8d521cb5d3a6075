"""The ds41 command: Typer commands, each a few lines over the library."""
