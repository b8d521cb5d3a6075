"""Tools that people ask something: words, numbers, news, distances."""

from random import Random

from bench.demo_model.errands import CITY, free_text, may, number, one_of, service, text, whole
from bench.demo_model.particulars import (
    count_of,
    day_of,
    language_of,
    length_of,
    message_of,
    money_of,
    person_of,
    phone_of,
    symbol_of,
    title_of,
)
from bench.demo_model.prose import sentence
from bench.demo_model.words import (
    ANIMALS,
    COLOURS,
    COUNTRIES,
    an,
    any_word,
    city_of,
    name_of,
    phrase_of,
    spelling_of,
    word_of,
)


def _quantity(rng: Random) -> float:
    return rng.randint(2, 500) if rng.random() < 0.7 else rng.randrange(11, 5000) / 10


def _unit(rng: Random) -> str:
    units = (
        "km miles m cm feet inches yards kg pounds g ounces stones litres gallons pints ml celsius "
        "fahrenheit kelvin metres kilometres hours seconds days weeks watts knots acres joules"
    ).split()
    return rng.choice(units) if rng.random() < 0.8 else f"{word_of(rng)}s"


def _scene(rng: Random) -> str:
    return f"{an(rng.choice(COLOURS))} {rng.choice(ANIMALS)}"


def _zone(rng: Random) -> str:
    return f"UTC{rng.choice('+-')}{rng.randint(0, 12)}"


def _country(rng: Random) -> str:
    return rng.choice(COUNTRIES) if rng.random() < 0.5 else word_of(rng, 2).capitalize()


_SIGNS = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789-_"

ENQUIRIES = (
    service("get_distance distance getDistance DistanceBetween", "distance",
            ("Get the distance between two places.", "Calculate how far two places are apart.",
             "Use this for questions about how far it is."),
            (text("from origin place_a from_city", city_of, "The one place"),
             text("to target place_b to_city", city_of, "The other place")),
            """
            How far is it from {from} to {to}?
            What is the distance between {from} and {to}?
            Distance {from} {to}
            tell me how far {to} is from {from}
            How long is the way from {from} to {to}?
            """,
            ("{far}", "{from} - {to}: {far}"), "It is {far} from {from} to {to}.", far=length_of),
    service("get_forecast weatherForecast forecast GetForecast", "forecast",
            ("Get the weather forecast.", "Tell how the weather will be in the next days.",
             "Use this for the weather to come, not for the weather now."),
            (CITY, whole("days day_count n_days", 2, 14, "For how many days")),
            """
            What will the weather be in {city} for the next {days} days?
            {days} day forecast for {city}
            give me the forecast for {city}, {days} days
            How will the weather be the next {days} days in {city}?
            Forecast {city} {days} days
            """,
            ("{sky}", "Forecast: {sky}"), "In {city} it will be: {sky}.",
            sky=lambda rng: f"{rng.randint(-9, 30)} degrees and {any_word(rng)}"),
    service("translate translateText translate_text Translator", "text",
            ("Translate a text.", "Translate a text into another language.",
             "Use this when the user asks what something means in another language."),
            (free_text("text phrase input q", message_of, "What to translate"),
             text("language target to target_language targetLang", language_of, "Into which one"),
             may(text("source from source_language", language_of, "Out of which one"))),
            """
            translate "{text}" into {language}
            translate {text} to {language}
            How do you say "{text}" in {language}?
            What is {text} in {language}?
            "{text}" in {language}
            translate this from {source} to {language}: {text}
            say in {language}: {text}
            """,
            ("{words}", "Translation: {words}"), "In {language} it is: {words}",
            words=lambda rng: " ".join(word_of(rng) for _ in range(3))),
    service("convert_units convertUnits unit_converter UnitConverter units", "conversion",
            ("Convert a value to another unit.", "Convert between units of measurement.",
             "Use this for lengths, weights, temperatures and the like."),
            (number("value amount quantity", _quantity, "How much"),
             text("from from_unit unit fromUnit", _unit, "Its unit"),
             text("to to_unit target_unit toUnit", _unit, "The unit wanted")),
            """
            convert {value} {from} to {to}
            How many {to} are {value} {from}?
            What is {value} {from} in {to}?
            {value} {from} in {to}
            {value} {from} to {to}
            How much is {value} {from} in {to}
            """,
            ("{result}", "{result} {to}"), "{value} {from} are {result} {to}.", result=_quantity),
    service("get_stock_price stockPrice stock_quote GetQuote quote", "stock",
            ("Get the price of a stock.", "Look up what a share costs at the moment.",
             "Use this for questions about shares and the stock market."),
            (text("symbol ticker stock", symbol_of, "The letters of the stock"),),
            """
            What is the stock price of {symbol}?
            Price of {symbol}
            How is {symbol} doing today?
            How much is a share of {symbol}?
            {symbol} stock
            check the {symbol} share price
            look up {symbol} on the stock market
            """,
            ("{price}", "{symbol}: {price}"), "{symbol} is at {price}.", price=money_of),
    service("get_news news latestNews NewsHeadlines news-search", "news",
            ("Get the latest news.", "Find today's headlines about a topic.",
             "Use this if the user asks what is new in the world."),
            (free_text("topic subject about category", title_of),
             may(whole("limit count max_results", 2, 20, "How many headlines"))),
            """
            What's new about {topic}?
            give me the news about {topic}
            Any news on {topic}?
            Latest {limit} headlines on {topic}
            show me {limit} news items about {topic}
            What is happening with {topic}?
            """,
            ("{headline}", "Headline: {headline}"), "The news: {headline}", headline=sentence),
    service("define_word dictionary defineWord lookup_definition Define", "word",
            ("Define a word.", "Look up a word in the dictionary.",
             "Use this when somebody does not know what a word means."),
            (text("word term entry", spelling_of, "The word"),),
            """
            What does {word} mean?
            define {word}
            What's the meaning of the word "{word}"?
            Definition of {word}
            look up the word {word} in the dictionary
            I don't know the word {word}. What is it?
            """,
            ("{meaning}", "{word}: {meaning}"), "{word} means: {meaning}", meaning=title_of),
    service("check_spelling spellcheck checkSpelling SpellCheck", "word",
            ("Check the spelling of a word.", "Tell whether a word is spelled right.",
             "Use this when the user is not sure how a word is written."),
            (text("word text input", spelling_of, "As the user writes it"),),
            """
            Is {word} spelled right?
            check the spelling of {word}
            How do you spell {word}?
            Did I spell "{word}" correctly?
            spellcheck {word}
            """,
            ("{spelling}", "It should be: {spelling}"), "It is spelled {spelling}.",
            spelling=word_of),
    service("tell_joke joke getJoke random_joke TellJoke", "joke",
            ("Tell a joke.", "Get a random joke.", "Use this when the user wants to laugh."), (),
            """
            tell me a joke
            Make me laugh!
            Do you know a joke?
            A joke
            Something funny, please.
            I need a laugh
            """,
            ("{joke}", "Joke: {joke}"), "{joke}", joke=sentence),
    service("random_number randomNumber get_random RandomInt rand", "range",
            ("Draw a random number.", "Pick a random whole number between two numbers.",
             "Use this if a number has to be left to chance."),
            (whole("min low from minimum", 0, 99, "The least"),
             whole("max high to maximum", 100, 9999, "The most")),
            """
            give me a random number between {min} and {max}
            Random number from {min} to {max}
            pick a number between {min} and {max}
            A number from {min} to {max}, any.
            Choose any number, at least {min} and at most {max}
            """,
            ("{number}", "The number is {number}."), "The number is {number}.",
            {"number": lambda rng, given: rng.randint(given["min"], given["max"])}),
    service("find_contact getContact contact_lookup ContactSearch phone_book", "contact",
            ("Find a contact.", "Look up somebody's phone number in the contacts.",
             "Use this if the user needs to know how to reach somebody."),
            (text("name person contact who", person_of),),
            """
            What's the phone number of {name}?
            find {name} in my contacts
            How can I reach {name}?
            {name}'s number
            look up the contact {name}
            Do I have a number for {name}?
            """,
            ("{phone}", "{name}: {phone}"), "The number of {name} is {phone}.", phone=phone_of),
    service("generate_image generateImage create_image draw ImageGenerator", "image",
            ("Generate an image.", "Draw a picture of what is described.",
             "Use this when the user asks for a picture, a drawing or a photo."),
            (free_text("prompt description text", _scene, "What it shows"),
             may(one_of("style look", "photo sketch cartoon painting")),
             may(whole("size width resolution", 64, 2048))),
            """
            draw {prompt}
            generate an image of {prompt}
            I'd love a picture of {prompt}.
            make a {style} of {prompt}
            Picture of {prompt}, {style} style, {size} pixels
            show me what {prompt} looks like
            """,
            ("Saved as {file}", "{file}"), "The picture is in {file}.",
            file=lambda rng: f"{any_word(rng)}.png"),
    service("generate_password generatePassword password_generator NewPassword", "password",
            ("Generate a password.", "Make a random password of some length.",
             "Use this if the user needs a new secret."),
            (whole("length characters size chars", 6, 64, "How many characters"),),
            """
            generate a password with {length} characters
            I need a new password, {length} characters long
            {length} character password
            make me a safe password of length {length}
            Password, {length} letters and signs
            """,
            ("{password}", "Password: {password}"), "Your new password is {password}.",
            {"password": lambda rng, given: "".join(rng.choices(_SIGNS, k=given["length"]))}),
    service("get_time_zone timeZone time_zone TimezoneLookup", "time zone",
            ("Get the time zone of a place.", "Look up in which time zone a city lies.",
             "Use this for questions about time zones, not for the time."), (CITY,),
            """
            Which time zone is {city} in?
            Time zone of {city}
            What's the timezone in {city}?
            find the time zone for {city}
            Is {city} in another time zone?
            """,
            ("{zone}", "{city}: {zone}"), "{city} is in the time zone {zone}.", zone=_zone),
    service("count_words wordCount word_count WordCounter", "text",
            ("Count the words of a text.", "Tell how many words a text has.",
             "Use this when the length of a text matters."),
            (free_text("text content input", message_of, "What is counted"),),
            """
            How many words are in "{text}"?
            count the words in: {text}
            Word count of "{text}"
            Words in this: {text}
            How long is this in words: {text}
            """,
            ("{count}", "words: {count}"), "Number of words: {count}.",
            {"count": lambda _, given: len(given["text"].split())}),
    service("summarize summarise_text summarizeText Summarizer summary", "text",
            ("Summarise a text.", "Make a text shorter.",
             "Use this if something is too long to read."),
            (free_text("text content input document",
                       lambda rng: " ".join(sentence(rng) for _ in "ab"), "What is too long"),
             may(whole("max_words limit length", 5, 200, "How many words at most"))),
            """
            summarise this: {text}
            Sum this up: {text}
            Too long for me: {text}
            summarize in {max_words} words: {text}
            give me the short version of "{text}"
            What is the gist of this? {text}
            """,
            ("{short}", "In short: {short}"), "In short: {short}", short=title_of),
    service("days_between daysBetween date_difference DateDiff", "date",
            ("Count the days between two dates.", "Calculate how many days lie between two days.",
             "Use this for questions about how long it is until a day."),
            (text("start from first start_date", day_of, "The first day"),
             text("end to second end_date", day_of, "The last day")),
            """
            How many days are there from {start} to {end}?
            Days between {start} and {end}
            count the days from {start} until {end}
            How long is it from {start} to {end}?
            {start} to {end}, how many days?
            """,
            ("{days}", "{days} days"), "There are {days} days from {start} to {end}.",
            days=count_of),
    service("get_holidays publicHolidays holidays HolidayList", "country",
            ("List the public holidays of a country.", "Find out when a country has days off.",
             "Use this before something is planned in another country."),
            (text("country country_name nation", _country, "Which country"),
             whole("year in_year", 2000, 2050, "In which year")),
            """
            What holidays are there in {country} in {year}?
            Public holidays {country} {year}
            list the holidays of {country} for {year}
            When are the days off in {year} in {country}?
            {country} holidays {year}
            """,
            ("{holiday}", "{year}: {holiday}"), "In {country} there is: {holiday}.",
            holiday=lambda rng: f"{name_of(rng)} Day"),
    service("recommend_book bookSearch find_book BookFinder", "book",
            ("Find a book.", "Recommend a book about a topic.",
             "Use this when the user wants to read something."),
            (free_text("topic subject query about", title_of),
             may(text("author writer by", person_of))),
            """
            find me a book about {topic}
            What can I read about {topic}?
            Any good books on {topic}?
            A book on {topic} by {author}
            recommend something to read about {topic}
            search for books by {author} on {topic}
            """,
            ("{book}", "Book: {book}"), "You could read {book}.",
            book=lambda rng: phrase_of(rng, 3)),
)  # fmt: skip
