"""Options that several commands have, each with one name, one help and one meaning."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_engine.prompt import Effort

if TYPE_CHECKING:
    from mlx_engine.sampling import Sampling


def folder(named: str) -> Path:
    """A folder as an option names it; an empty name would mean the current one."""
    if not named:
        raise typer.BadParameter("it is empty, name a folder.")
    return Path(named)


ModelOption = Annotated[
    Path | None,
    typer.Option(
        parser=folder,
        metavar="DIR",
        envvar="DS41_MODEL",
        help="The checkpoint's folder; without it a very small stand-in answers.",
    ),
]
TinyRandomOption = Annotated[
    bool,
    typer.Option(
        "--tiny-random",
        help="Take a tiny model of random weights, whatever is named; its words mean nothing.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(help="Tokens of prompt and answer together.", show_default="the model's"),
]
DtypeOption = Annotated[
    Literal["bfloat16", "float32"], typer.Option(help="Numbers between the layers.")
]
PrefillOption = Annotated[
    Literal["short", "full"],
    typer.Option(help="full runs all layers on all of the prompt, for comparison."),
]
DiskDirOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|none",
        help="Keep on disk what reading prompts has computed, so that conversations go on "
        "at once after a restart; private to you, but it can be turned back into the text.",
        show_default="kv in the cache folder",
    ),
]
DiskSpaceOption = Annotated[
    str, typer.Option(metavar="SIZE", help="The most that all files of that folder may take.")
]

SystemOption = Annotated[str | None, typer.Option(help="The system text.")]
EffortOption = Annotated[Effort, typer.Option(help="How long to reason before the answer.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(help="Tokens of reasoning and answer.", show_default="by effort, the vendor's"),
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 takes the most likely token.", show_default="1")
]
TopPOption = Annotated[
    float | None,
    typer.Option(help="Draw from the likeliest tokens of this share.", show_default="1"),
]
TopKOption = Annotated[
    int | None,
    typer.Option(help="Draw from so many of the likeliest tokens.", show_default="0, all"),
]
MinPOption = Annotated[
    float | None,
    typer.Option(help="Drop tokens below this share of the likeliest.", show_default="0"),
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="The same seed gives the same answer.", show_default="a new one"),
]


def sampling(**given: float | None) -> "Sampling":
    """How tokens are drawn: what was given, and the vendor's values for the rest.

    Raises BadRequest for impossible values.
    """
    from mlx_engine.sampling import Sampling

    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Sampling(**values)
