"""Long texts of many words, as the prompts of programs have them: instructions and definitions.

Owns a stock of words for each prompt, with sentences, markdown, schemas and notes made of it. They
make little sense, on purpose: nothing but their shape is to be known.
"""

from collections.abc import Callable, Sequence
from random import Random

from bench.demo_model.chat import Json
from bench.demo_model.reading import request_to_read
from bench.demo_model.tools import described
from bench.demo_model.words import (
    MATTERS,
    any_word,
    camel,
    capital,
    deep_path,
    file_name,
    kebab,
    letters_of,
    mixed,
    name_of,
    number_of,
    snake,
    url_of,
    word_of,
)

_NAMES = (
    "access action address agent amount answer area argument array aspect attempt author "
    "background batch behaviour block body boundary browser buffer caller case cause center chain "
    "chance character check choice client code collection command company component concern "
    "condition connection content context copy corner course credential data database date "
    "decision definition degree description design detail developer diagram difference digest "
    "directory discussion display edge editor effect effort element end entry environment "
    "evidence example exception expression extension failure feature feedback field figure filter "
    "finding flag flow form format fragment framework function gap generation guide half hand "
    "handler header heading history hook host idea identifier image impact index information "
    "input instance instruction interface interval item judgment kind knowledge layout length "
    "level library limit link list loop machine marker markdown matter meaning member mention "
    "method minute mode model moment network node notebook number object operation order origin "
    "outcome output overview owner pair panel paragraph parent part pass past path pattern period "
    "permission person phase picture piece pipeline platform point preference prefix problem "
    "procedure program prompt property proposal provider purpose quality question range rate "
    "reader reason reference region relation release reminder report repository research resource "
    "rest review risk root round routine row sample schema scope screen script search second "
    "sense sequence set shape side signature situation skill software source specification stage "
    "standard state statement storage string structure style subject success suggestion summary "
    "support syntax system target task template terminal term text theme thing thought title tone "
    "tool topic transcript tree turn type unit update usage variable variant view warning wave "
    "way web week window workflow workspace worktree year"
).split()
_VERBS = (
    "accept add adjust allow apply ask assume attach avoid begin break bring build call cancel "
    "carry catch change choose claim clear collect combine commit complete confirm consider "
    "contain continue copy correct cover create cut decide decline declare define delay deliver "
    "depend derive describe detect determine disable discard dispatch display divide draw drop "
    "edit emit enable end ensure enter escape estimate examine exclude execute exit expand expect "
    "explain expose extend fail fetch fill filter finish fit fix follow force format generate "
    "give group guard guess handle happen help hide hold ignore imply improve include indicate "
    "infer inform insert inspect install introduce invoke join judge jump keep know launch lead "
    "learn leave let limit listen look make manage mark match mean measure mention merge miss "
    "modify move name need note notice obey occur offer omit operate order override overwrite "
    "parse pass pause perform pick place point poll prefer prepare present preserve prevent "
    "produce promise protect prove provide publish pull push put quote raise reach recommend "
    "record redirect reduce refer refuse reject rely remain remember remove repeat replace reply "
    "report request require resolve respect rest restart resume retry return reveal revert review "
    "rewrite run save scan schedule select separate serve set skip sleep solve specify spend "
    "split stand start state stay stop store stream submit suggest summarize supply suppose "
    "surface switch take talk tell think track treat trigger trust try turn understand undo "
    "update use validate verify wait walk want watch wonder work worry wrap write yield"
).split()
_KINDS = (
    "able absolute accurate actual additional available bad basic best better brief broad cheap "
    "clean clear common complete complex concise concrete consistent correct current deep default "
    "different difficult direct distinct early easy effective empty enough entire equal exact "
    "explicit external extra fair false familiar far few final fine fresh full further future "
    "general generic good great hard harmful helpful idle important independent initial "
    "interactive internal irrelevant known large likely little long main major many minimal minor "
    "missing multiple narrow native natural necessary negative next normal obvious old only open "
    "optional other outer own partial particular permanent plain plausible positive possible "
    "precise previous primary private proper quick random rare ready real recent redundant "
    "related relative relevant reliable required rich right rough same secondary secure separate "
    "serious several similar specific stable static strict strong subtle such sufficient suitable "
    "sure technical temporary thorough tiny total true typical unclear unique unknown unrelated "
    "useful usual vague valid visible whole wide wrong"
).split()
_MANNERS = (
    "again almost already also always anyway away back carefully clearly correctly directly early "
    "elsewhere entirely even exactly explicitly first forever fully generally here immediately "
    "instead just largely later mostly never not often once only otherwise perhaps precisely "
    "quickly quietly rarely rather really safely seldom silently simply slowly sometimes soon "
    "still then there therefore together too usually verbatim well yet"
).split()
_STEMS = (
    "form port struct act press view tract duct spect fer mit pos ver gen clar cert graph log "
    "scrib cess gress ject lect pend solv tain tend vent vers voc cur fin grad leg mand merg migr "
    "nov oper part ped plic pon quir rupt sect sent serv sign simil sist sort spir stat strict "
    "sum tact temp termin test therm trans typ urb val vid vis viv volv"
).split()
_BEFORE = "re un pre de in over sub inter multi non auto mis con per pro dis out up ex".split()
_AFTER = (
    "ation ing ed er able ive ment ity al ly ness ize ion ance ful less s es ary or ic ism ant"
).split()
_ABBREVIATIONS = "API URL JSON HTML CLI SDK UI ID PDF HTTP SQL CSV PR IDE OS RAM CPU".split()

_PHRASES = (
    "Use this when the {n} is {k}",
    "if the {n} {v}s {m}, {v} it before the {n} does",
    "{v} {m}, not {m}",
    "a {k} {n} {v}s the {n} of each {n}",
    "do NOT {v} the {n} unless the user {v}s for it",
    "NEVER {v} {k} {n}s",
    "IMPORTANT: {v} the {n} {m}",
    "the {n} must be {k}, {k} or {k}",
    "each {n} is {v}ed by its {n} (e.g. {c}, {x})",
    "prefer {c} over {c} for {k} {n}s",
    "pass {c} to {v} the {n}",
    "set {c} to {u} when you {v} more than {u} {n}s",
    "returns the {k} {n}, or {c} where no {n} {v}s",
    "you can {v} {u} {n}s at once",
    "it's {k} to {v} — the {n} won't {v}",
    "what you {v} is {m} shown to the {n}; {v} it {m}",
    "this does not {v} {n}s that the {n} asked you to {v}",
    "for {k} {n}s (like {x} and {x}), {v} the {n} first",
    "when several {n}s {v}, they {v} {m} in one {n}",
    "a {n} that {v}s {m} can't {v} another",
    "{n}s, {n}s and {n}s",
    "the {x} {n} is {k} than the {k} one",
    "this is {m} a {n}: {v} {p} and {v} it",
    "there is no {n} in {p}",
    "the {n} lives in {p} and {v}s {u} {n}s",
    "only {v} what the {n} needs, and {v} nothing else",
    "with {c} the {n} {v}s up to {u} {n}s, otherwise {u}",
    "before you {v}, {v} whether the {n} is {m} {k}",
    "the user may {v} \"{q}\"",
    "some {n}s like {l} and {l} are {k}",
    "{x} {x} {n} {x}",
    "{v} the {n} → {v} the {n} → {v}",
    "never {v} an answer from {n} alone",
    "it {v}s {n}s by {n}, {n} or {n}",
    "that {n} was {v}ed in {u}.{u}",
    "see {w} for the {n}",
    "{A} {n}s {v} {m} with {A} {n}s",
    "they {v} it so that you do not have to {v} the {n} {m}",
    "you should {v} each {n} on its own, because {k} {n}s {v} {m}",
    "by default the {n} has {u} {n}s",
    "your {n} is {k}; theirs may be {k}",
    "what the {n} said about {x} is for {n}s only",
    "{v} {n}s by {t}, not by {t}",
    "use {t} to {v} the {n}, and {t} when the {n} is {k}",
    "call {t} with {c} before {t}",
    "{t} {v}s {p} {m}",
)  # fmt: skip
_JOINTS = (", and ", ", but ", "; ", " — ", ". ", ". ", ". ", ": ", " (", " so ", ", which ")
_ENDS = (".", ".", ".", ".", ".", "!", ":", "?", "")

_RARE: tuple[Callable[[Random], str], ...] = (
    word_of,
    letters_of,
    mixed,
    name_of,
    any_word,
    camel,
    snake,
    lambda rng: any_word(rng).upper(),
    lambda rng: letters_of(rng).upper(),
)


class Stock:
    """The words of one prompt, by a letter for each sort: `"{n}".format_map(stock)` draws one.

    `names` are of tools, of which its texts speak.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        rare = [rng.choice(_RARE)(rng) for _ in range(60)]
        made = [_made(rng) for _ in range(60)]
        code = [rng.choice((snake, camel, kebab, any_word))(rng) for _ in range(30)]
        self.names = [camel(rng), snake(rng)]
        self._words: dict[str, Sequence[str]] = {
            "n": [*rng.sample(_NAMES, 120), *rng.sample(MATTERS, 40), *made],
            "v": [*rng.sample(_VERBS, 100), *made[:10]],
            "k": [*rng.sample(_KINDS, 70), *made[10:20]],
            "m": _MANNERS,
            "x": [*rare, *made],
            "c": [f"`{word}`" for word in code] + code,
            "u": [number_of(rng) for _ in range(30)],
            "p": [deep_path(rng) for _ in range(6)] + [file_name(rng) for _ in range(4)],
            "q": [request_to_read(rng, deep_path(rng)) for _ in range(6)],
            "l": [letters_of(rng) for _ in range(20)],
            "w": [url_of(rng) for _ in range(4)],
            "A": _ABBREVIATIONS,
            "t": self.names,
        }

    def __getitem__(self, kind: str) -> str:
        words = self._words[kind]
        return words[int(self._rng.random() * len(words))]

    def sentence(self) -> str:
        """Up to four phrases."""
        rng = self._rng
        phrases = [rng.choice(_PHRASES) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
        joints = [rng.choice(_JOINTS) for _ in phrases[1:]] + [rng.choice(_ENDS)]
        text = "".join(map(str.__add__, phrases, joints)).format_map(self)
        return capital(text + ")." if " (" in joints else text)

    def passage(self, characters: int) -> str:
        """Sentences in markdown, of about so many characters."""
        parts: list[str] = []
        left = characters
        while left > 0:
            part = self._part(left)
            parts.append(part)
            left -= len(part) + 2
        return self._rng.choice(("\n", "\n\n", "\n\n")).join(parts)

    def _part(self, characters: int) -> str:
        rng, sentence = self._rng, self.sentence
        kind = rng.random()
        if characters < 120 or kind < 0.4:
            return " ".join(
                sentence() for _ in range(min(rng.randint(1, 6), 1 + characters // 150))
            )
        if kind < 0.5:
            return "#" * rng.randint(1, 4) + " " + "{k} {n}".format_map(self).capitalize()
        if kind < 0.75:
            mark = rng.choice(("- ", "- ", " - ", "* ", "  - ", "{}. "))
            bold = rng.choice(("", "", "{n}: ", "**{n}**: ", "{c} — ", "{x}: "))
            return "\n".join(
                mark.format(i + 1) + bold.format_map(self) + sentence()
                for i in range(min(rng.randint(2, 8), 1 + characters // 150))
            )
        if kind < 0.8:
            return "\n".join(self["c"].strip("`") for _ in range(rng.randint(3, 14)))
        if kind < 0.86:
            tag = rng.choice(("example", self["n"], f"{self['n']}-{self['n']}", self["l"]))
            return f"<{tag}>\n{sentence()}\n{sentence()}\n</{tag}>"
        if kind < 0.92:
            row = "| " + " | ".join(("{c}", "{n} {m}", "{x}")) + " |"
            return "\n".join(row.format_map(self) for _ in range(rng.randint(2, 6)))
        line = rng.choice(
            (
                "{n}_{n} = {v}({x}, {u})",
                "{v} --{n} {p} -{l}",
                "  {n}: {{ {v}: '{x}', {n}: {u} }},",
                "$ {v} {p} | {v} -{u}",
                "{n}: {x}",
                "const {n} = await {v}({{ {n}, {n} }})",
            )
        )
        lines = [line.format_map(self) for _ in range(rng.randint(1, 8))]
        return "```\n" + "\n".join(lines) + "\n```"

    def schema(self, depth: int = 0) -> Json:
        """What a parameter may be, nested up to four deep."""
        rng = self._rng
        about = self.sentence() if rng.random() < 0.8 else ""
        kind = rng.random()
        if kind < 0.45 or depth > 3:
            schema: Json = {"type": "string"}
            if rng.random() < 0.2:
                schema[rng.choice(("maxLength", "minLength"))] = rng.choice((1, 64, 256, 1000))
            if rng.random() < 0.1:
                schema["pattern"] = f"^{self['l']}_[a-z0-9-]{{{rng.randint(2, 9)},}}$"
        elif kind < 0.6:
            low = rng.choice(("minimum", "exclusiveMinimum"))
            schema = {"type": rng.choice(("number", "integer")), low: 0}
            if rng.random() < 0.5:
                schema["maximum"] = rng.choice((10, 60, 3600, 9007199254740991))
        elif kind < 0.7:
            schema = {"type": "boolean", "default": rng.random() < 0.5}
        elif kind < 0.82:
            schema = {"type": "string", "enum": [self["n"] for _ in range(rng.randint(2, 6))]}
        elif kind < 0.9:
            schema = {"type": "array", "items": self.schema(depth + 1)}
        elif kind < 0.94:
            schema = {"anyOf": [self.schema(depth + 1) for _ in range(2)]}
        else:
            schema = self.object(depth + 1)
        return described(rng, schema, about)

    def object(self, depth: int = 0) -> Json:
        """An object of a few parameters."""
        rng = self._rng
        named = {self._parameter(): self.schema(depth) for _ in range(rng.choice((0, 1, 2, 3, 5)))}
        schema: Json = {"type": "object", "properties": named}
        if named and rng.random() < 0.8:
            schema["required"] = list(named)[: rng.randint(1, len(named))]
        if rng.random() < 0.7:
            schema["additionalProperties"] = False
        return schema

    def _parameter(self) -> str:
        form = self._rng.choice(("{n}", "{n}_{n}", "{v}_{n}", "file_path", "path", "-{l}", "{x}"))
        return form.format_map(self)

    def tool(self, name: str, characters: int) -> Json:
        """A definition that is not called, described in about so many characters."""
        schema = self.object()
        if self._rng.random() < 0.7:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
        text = self.sentence()
        if characters > len(text):
            text += "\n\n" + self.passage(characters - len(text))
        return {"name": name, "description": text, "parameters": schema}

    def note(self, characters: int) -> str:
        """A text in tags."""
        tag = self._rng.choice(("system-note", "note", "context", "notice", self["n"]))
        return f"<{tag}>\n{self.passage(characters)}\n</{tag}>"

    def surroundings(self, folder: str, characters: int) -> str:
        """A text of the program about where it runs, which stands behind the request."""
        forms = (" - {k} {n}: {x}", " - {n}: {x}", " - Is {n}: false", " - {n} {A}: {u}")
        lines = [form.format_map(self) for form in self._rng.sample(forms, 3)]
        head = "\n".join([f"Working {self['n']}: {folder}", *lines]) if folder else self["n"]
        end = "\n\n{n} of today: {u}-{u}".format_map(self) if self._rng.random() < 0.5 else ""
        return f"{head}\n\n{self.passage(max(20, characters - len(head)))}{end}"


def _made(rng: Random) -> str:
    """A word as English makes them."""
    stem = rng.choice(_STEMS)
    if rng.random() < 0.5:
        stem = rng.choice(_BEFORE) + stem
    if rng.random() < 0.7:
        stem += rng.choice(_AFTER)
    return stem + rng.choice(_AFTER) if rng.random() < 0.3 else stem
