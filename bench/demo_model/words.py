"""The demo model's vocabulary: everyday words, invented names, and every kind of spelling.

Owns what single words and values look like; sentences are made of them elsewhere.
"""

from collections.abc import Callable
from random import Random

COLOURS = (
    "red blue green yellow white black brown pink grey purple orange silver golden violet beige"
).split()
ANIMALS = (
    "fox cat dog owl bear mouse horse rabbit frog duck goat crow wolf hen bee otter fish hedgehog "
    "squirrel turtle lion tiger elephant monkey pig cow sheep bird snake spider dolphin whale"
).split()
THINGS = (
    "lamp key box book coin ring boat cup drum bell map hat stone rope clock basket mirror candle "
    "feather letter chair ladder bucket kettle table door window phone camera pen bag bottle knife "
    "spoon plate shirt shoe coat umbrella bicycle car train ball doll guitar piano picture flower"
).split()
PLACES = (
    "forest river village mountain garden harbour tower island bridge market valley lake castle "
    "mill cave field school kitchen library station park street beach shop office hotel museum farm"
).split()
FOODS = (
    "bread soup apples cheese honey rice plums cake beans carrots pears nuts pizza pasta salad "
    "eggs milk butter bananas oranges potatoes tomatoes chocolate tea coffee fish chicken cookies"
).split()
JOBS = (
    "baker miller sailor teacher painter farmer doctor tailor gardener singer smith cook nurse "
    "pilot driver writer student engineer lawyer actor"
).split()
MOODS = "happy sad tired brave quiet hungry proud curious shy merry angry calm lonely busy".split()
SIZES = "small big old new tiny tall heavy light round long short warm cold fast slow".split()
VERBS = "found lost carried hid painted cleaned opened broke washed sold bought made saw".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
WEATHERS = "sunny cloudy rainy windy snowy foggy stormy clear hot cold mild wet dry".split()
FIRST_NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Nina Oscar Paul Rosa Sam "
    "Tom Vera Will Zoe Alice Bob Carol Daniel Eva Frank George Hannah Ivan Julia Karl Laura Max "
    "Nora Otto Peter Rex Sarah Tim Lily Mia Noah John Mary James Linda Alex Chris"
).split()
CITIES = (
    "London Paris Berlin Rome Madrid Vienna Tokyo Oslo Cairo Lima Boston Chicago Dublin Athens "
    "Prague Lisbon Munich Sydney Delhi Toronto Milan Hamburg Zurich Warsaw Seoul Moscow Beijing"
).split()
COUNTRIES = (
    "Germany France Italy Spain Japan Norway Egypt Peru Ireland Greece Poland Canada India China "
    "Brazil Mexico Sweden England"
).split()
# What a machine's tools and files are about.
MATTERS = (
    "file folder page user account message email note task event order price weather report image "
    "song video game score result test build branch commit issue comment project server service "
    "backup log record table row column query index cache token session job queue alarm meeting "
    "contact address route ticket invoice payment product customer device sensor door light room "
    "temperature speed size version status owner title summary password license setting option "
    "language country currency balance stock recipe movie calendar reminder document section line "
    "word symbol function class module package library key label tag group team member role rule "
    "policy schedule budget plan goal step timer signal channel stream camera printer network port "
    "domain certificate request response error warning metric trace process thread memory disk"
).split()
KINDS_OF_WORK = (
    "read write list search find check copy move delete create update start stop open close send "
    "show count sort compare merge split load save print build run test format parse render export "
    "import convert verify sign lock unlock enable disable add remove rename restore download "
    "upload"
).split()
QUALITIES = (
    "important simple local remote public private active empty full hidden shared safe broken open "
    "closed early late valid invalid default custom final first last next current previous daily "
    "main common special single whole exact careful clean ready strong weak deep high low"
).split()
LINKS = "because when after before while until unless so and but".split()
EXTENSIONS = "txt py md json log csv yaml toml html js ts c h rs go sh xml ini cfg".split()
PLAIN_WORDS = [*ANIMALS, *THINGS, *PLACES, *FOODS, *JOBS]
ALL_WORDS = sorted(
    {
        *(PLAIN_WORDS + COLOURS + MOODS + SIZES + VERBS + WEATHERS + MATTERS),
        *(KINDS_OF_WORK + QUALITIES),
    }
)

_ROOTS = (
    "/",
    "/",
    "/tmp/",
    "/tmp/",
    "/tmp/",
    "/home/",
    "/opt/",
    "/var/",
    "/Users/",
    "/data/",
    "/mnt/",
)

_ONSETS = "b d f g h j k l m n p r s t v w z br dr gr kl pl st tr sh ch th c fl qu y".split()
_VOWELS = "a e i o u a e i o ai ea ou ee y".split()
_CODAS = ["", "", "", "", "n", "r", "l", "s", "m", "t", "nd", "ck", "x", "ng"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FOREIGN = "ä ö ü ß é è ñ ç å ø ł ş ж и п ω λ 猫 山 水 日 本 한 글 😀 🐱 🌍 ✓ €".split()


def word_of(rng: Random, syllables: int = 0) -> str:
    """An invented word of one to three syllables, or as many as are asked for."""
    count = syllables or rng.choice((1, 2, 2, 2, 3))
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)]
    coda = rng.choice(_CODAS)
    return "".join(parts) + (coda or ("n" if count == 1 else ""))


def name_of(rng: Random, syllables: int = 0) -> str:
    """A name, capitalised: an invented one, or one that people have."""
    if not syllables and rng.random() < 0.25:
        return rng.choice(FIRST_NAMES)
    return word_of(rng, syllables or rng.choice((2, 2, 3))).capitalize()


def city_of(rng: Random) -> str:
    """A city, a real one or an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.5 else word_of(rng, 2).capitalize()


def number_of(rng: Random) -> str:
    """A number of one to five digits."""
    return str(rng.randrange(10 ** rng.randint(1, 5)))


def any_word(rng: Random) -> str:
    """A word in small letters: an everyday one, or an invented one."""
    return rng.choice(ALL_WORDS) if rng.random() < 0.5 else word_of(rng)


def letters_of(rng: Random) -> str:
    """Letters that form no word."""
    return "".join(rng.choices(_LETTERS, k=rng.randint(2, 9)))


def mixed(rng: Random) -> str:
    """Letters and digits without a sense."""
    alphabet = rng.choice((_LETTERS + "0123456789", "0123456789abcdef", _LETTERS.upper() + "0123"))
    if rng.random() < 0.3:
        alphabet = _LETTERS + _LETTERS.upper() + "0123456789"
    return "".join(rng.choices(alphabet, k=rng.randint(3, 10)))


def _foreign(rng: Random) -> str:
    word = list(any_word(rng))
    for _ in range(rng.randint(1, 2)):
        word[rng.randrange(len(word))] = rng.choice(_FOREIGN)
    return "".join(word)


def snake(rng: Random) -> str:
    """Two or three words joined by underscores."""
    return "_".join(any_word(rng) for _ in range(rng.choice((2, 2, 3))))


def camel(rng: Random) -> str:
    """Two or three words joined by capitals."""
    text = "".join(any_word(rng).capitalize() for _ in range(rng.choice((2, 2, 3))))
    return text if rng.random() < 0.5 else text[0].lower() + text[1:]


def file_name(rng: Random) -> str:
    """A file's name."""
    stem = rng.choice((any_word, any_word, snake, camel, kebab))(rng)
    return f"{stem}.{rng.choice(EXTENSIONS)}"


def path_of(rng: Random) -> str:
    """A path in one of the usual forms."""
    depth = rng.choice((0, 1, 1, 2, 2, 3, 4))
    folders = [any_word(rng) for _ in range(depth)]
    root = rng.choice(("/", "/", "/home/", "/tmp/", "./", "", "~/"))
    return root + "/".join([*folders, file_name(rng)])


def deep_path(rng: Random) -> str:
    """An absolute path of up to eight levels, with parts that are no words and parts twice."""
    root = rng.choice(_ROOTS)
    folders: list[str] = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 4, 6))):
        kind = rng.random()
        if folders and kind < 0.15:
            folders.append(rng.choice(folders) + rng.choice(("", "2", "_old", mixed(rng))))
        elif kind < 0.4:
            parts = (any_word, letters_of, mixed)
            joint = rng.choice(("", "", "_", "-", "."))
            folders.append(joint.join(rng.choice(parts)(rng) for _ in range(rng.randint(2, 3))))
        else:
            folders.append(rng.choice((any_word, any_word, mixed, snake, kebab, name_of))(rng))
    if root == "/tmp/" and rng.random() < 0.5:
        made = "".join(rng.choices(_LETTERS + "0123456789_", k=rng.randint(6, 12)))
        folders.insert(0, rng.choice(("tmp", "tmp", "tmp_", "tmp.", "t")) + made)
    return root + "/".join([*folders, file_name(rng)])


def any_path(rng: Random) -> str:
    """A path as people write them, or a deep one."""
    return rng.choice((path_of, deep_path))(rng)


def kebab(rng: Random) -> str:
    """Two words joined by a hyphen."""
    return f"{any_word(rng)}-{any_word(rng)}"


def url_of(rng: Random) -> str:
    """An address in the web."""
    return f"https://{any_word(rng)}.{rng.choice(('com', 'org', 'net'))}/{any_word(rng)}"


def email_of(rng: Random) -> str:
    """An electronic address."""
    return f"{any_word(rng)}@{any_word(rng)}.{rng.choice(('com', 'org', 'net'))}"


def date_of(rng: Random) -> str:
    """A day, a date or a time."""
    return rng.choice(
        (
            f"{rng.randint(2020, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            f"{rng.randint(0, 23):02}:{rng.randrange(60):02}",
            f"{rng.choice(DAYS)} {rng.randint(1, 30)}",
            f"{rng.choice(MONTHS)} {rng.randint(1, 30)}",
        )
    )


_SPELLINGS: tuple[tuple[Callable[[Random], str], int], ...] = (
    (any_word, 24),
    (word_of, 14),
    (name_of, 12),
    (letters_of, 7),
    (mixed, 7),
    (number_of, 6),
    (snake, 5),
    (camel, 5),
    (kebab, 4),
    (city_of, 4),
    (lambda rng: any_word(rng).upper(), 3),
    (date_of, 3),
    (lambda rng: f"{any_word(rng)}{rng.randrange(100)}", 2),
    (lambda rng: ".".join(str(rng.randrange(20)) for _ in range(rng.randint(2, 4))), 2),
    (email_of, 1),
    (_foreign, 2),
)
_DRAWN = [spelling for spelling, weight in _SPELLINGS for _ in range(weight)]


def spelling_of(rng: Random) -> str:
    """One value without spaces in any spelling that people use."""
    return rng.choice(_DRAWN)(rng)


def phrase_of(rng: Random, most: int = 4) -> str:
    """One to so many values, as a title or a search has them."""
    return " ".join(spelling_of(rng) for _ in range(rng.randint(1, most)))


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def an(word: str) -> str:
    """The word behind its article."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def listed(items: list[str], link: str = "and") -> str:
    """Items as a sentence lists them: a, b and c."""
    return f"{', '.join(items[:-1])} {link} {items[-1]}" if len(items) > 1 else items[0]
