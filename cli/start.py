"""The program's entry: imports the command line where a Ctrl-C already ends it quietly."""


def main() -> None:
    """Run `ds41`; its exit code for a Ctrl-C that comes before a command could see it is 130."""
    try:
        from mlx_engine.cli.main import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
