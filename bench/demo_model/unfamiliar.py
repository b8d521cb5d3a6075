"""Tools that no training conversation has: whether calls go beyond the tools that were trained."""

from random import Random

from bench.demo_model.errands import may, number, one_of, service, several, text, whole
from bench.demo_model.particulars import (
    clock_of,
    day_of,
    money_of,
    reference_of,
    repository_of,
    spot_of,
)
from bench.demo_model.words import FOODS, any_word, city_of, kebab, name_of, spelling_of, url_of


def _amount(rng: Random) -> float:
    return rng.randint(2, 5000) if rng.random() < 0.6 else rng.randrange(201, 100_000) / 100


def _currency(rng: Random) -> str:
    known = "euros dollars pounds yen francs kronor rupees EUR USD GBP JPY CHF SEK INR".split()
    return rng.choice(known) if rng.random() < 0.7 else f"{any_word(rng)}s"


def _degrees(rng: Random) -> float:
    return rng.randint(10, 30) if rng.random() < 0.6 else rng.randrange(100, 300) / 10


def _morning(rng: Random) -> str:
    return f"{rng.randint(4, 8)}:{rng.randrange(60):02}"


def _food(rng: Random) -> str:
    return rng.choice(FOODS) if rng.random() < 0.6 else any_word(rng)


_SPOT = text("pickup origin from_address", spot_of, "Where the journey begins")

UNFAMILIAR = (
    service("exchange_money currencyExchange exchange_rate ExchangeRate", "exchange",
            ("Exchange an amount into another currency.",
             "Work out what an amount of money is worth in another currency.",
             "Use this for questions about what foreign money is worth."),
            (number("amount sum money", _amount),
             text("base from_currency have", _currency, "The currency of the amount"),
             text("quote to_currency want", _currency, "The currency wanted")),
            """
            How much is {amount} {base} in {quote}?
            exchange {amount} {base} into {quote}
            {amount} {base} in {quote}
            What do I get in {quote} for {amount} {base}?
            I have {amount} {base}, how many {quote} is that?
            """,
            ("{worth}", "{worth} {quote}"), "{amount} {base} are {worth} {quote}.", worth=money_of),
    service("set_thermostat setThermostat adjust_heating HeatingControl", "thermostat",
            ("Set the heating to a temperature.", "Adjust how warm it gets in a room.",
             "Use this when somebody is freezing or it is too hot at home."),
            (number("degrees celsius target_temperature", _degrees, "How warm"),
             may(text("zone room_name where", any_word))),
            """
            set the heating to {degrees} degrees
            I'm freezing, make it {degrees} degrees
            heat the {zone} to {degrees}
            {degrees} degrees in the {zone}, please
            Thermostat to {degrees}
            """,
            ("Heating: {degrees}", "set"), "The heating is set to {degrees} degrees."),
    service("suggest_recipe suggestRecipe recipe-ideas RecipeIdeas", "recipe",
            ("Suggest something to cook from what is there.",
             "Invent a meal from some ingredients.",
             "Use this if the user does not know what to cook."),
            (several("ingredients have using", _food), may(whole("servings portions eaters",
             2, 10))),
            """
            What can I cook with {ingredients}?
            I have {ingredients}. Any recipe?
            suggest a recipe with {ingredients} for {servings} people
            Dinner for {servings} with {ingredients}
            Recipe using {ingredients}
            """,
            ("{meal}", "Try {meal}"), "You could cook {meal}.",
            meal=lambda rng: f"{name_of(rng)} {rng.choice(FOODS)}"),
    service("book_taxi bookTaxi order_cab CallCab", "taxi",
            ("Book a taxi.", "Have a cab come to an address.",
             "Use this when somebody wants to be driven."),
            (_SPOT, text("dropoff drop_off going_to", spot_of, "Where it ends"),
             may(text("pickup_time leave_at", clock_of))),
            """
            book a taxi from {pickup} to {dropoff}
            I need a cab from {pickup} to {dropoff} at {pickup_time}
            Taxi, {pickup} to {dropoff}
            get me a ride from {pickup} to {dropoff}
            A taxi at {pickup_time} from {pickup} to {dropoff}, please.
            """,
            ("{driver} is on the way.", "driver {driver}"), "{driver} will drive you to {dropoff}.",
            driver=name_of),
    service("git_checkout gitCheckout checkout_branch GitSwitch", "branch",
            ("Switch to a git branch.", "Check out another branch, a new one if need be.",
             "Use this before work on something else begins."),
            (text("branch_name branchName to_branch", kebab, "Which branch"),),
            """
            switch to the branch {branch_name}
            check out {branch_name}
            git checkout {branch_name}
            I want to work on the branch {branch_name}.
            go to branch {branch_name}
            """,
            ("Switched to {branch_name}", "on {branch_name}"), "We are on {branch_name} now."),
    service("restart_container restartContainer docker_restart DockerRestart", "container",
            ("Restart a docker container.", "Start a container anew.",
             "Use this if a container hangs."),
            (text("which container_ref containerRef", repository_of, "Which container"),
             may(whole("grace wait_seconds stop_timeout", 2, 120, "Seconds to wait"))),
            """
            restart the container {which}
            docker restart {which}
            {which} hangs, restart it
            bounce the {which} container, wait {grace} seconds
            Container {which} needs a restart.
            """,
            ("{which} restarted", "restarted"), "The container {which} is restarted."),
    service("roll_dice rollDice dice_roller DiceRoll", "dice",
            ("Roll dice.", "Throw some dice of any number of sides.",
             "Use this when a game needs dice."),
            (whole("sides faces die_sides", 4, 100),
             whole("dice times how_many", 2, 20, "How many dice")),
            """
            roll {dice} dice with {sides} sides
            throw {dice} {sides}-sided dice
            Roll me {dice} dice, {sides} sides each!
            Dice: {dice}, sides: {sides}
            I need {dice} rolls of a die with {sides} sides
            """,
            ("{eyes}", "rolled {eyes}"), "You rolled {eyes}.",
            {"eyes": lambda rng, given: sum(rng.randint(1, given["sides"])
                                            for _ in range(given["dice"]))}),
    service("make_qr_code makeQrCode qr_code QRCode", "code",
            ("Make a QR code.", "Draw a QR code that leads to an address.",
             "Use this when something shall be scanned with a phone."),
            (text("payload encode_what qr_content", url_of), may(whole("pixels qr_size side",
             50, 2000))),
            """
            make a QR code for {payload}
            QR code of {payload}
            I need {payload} as a QR code
            create a qr code with {pixels} pixels for {payload}
            turn {payload} into a QR code
            """,
            ("{picture}", "saved as {picture}"), "The code is in {picture}.",
            picture=lambda rng: f"{any_word(rng)}.svg"),
    service("get_sunrise sunriseTime sunrise SunriseTimes", "sunrise",
            ("Tell when the sun rises.", "Get the time of sunrise in a city.",
             "Use this for questions about when it gets light."),
            (text("locality town_name near", city_of), may(text("on calendar_date which_day",
             day_of, "The day"))),
            """
            When does the sun rise in {locality}?
            Sunrise {locality} {on}
            What time is sunrise in {locality} on {on}?
            When will it be light in {locality}?
            tell me when the sun goes up in {locality}
            """,
            ("{rise}", "sunrise: {rise}"), "In {locality} the sun rises at {rise}.", rise=_morning),
    service("track_parcel trackParcel parcel_tracking WhereIsParcel", "parcel",
            ("Track a parcel.", "Find out where a parcel is by its tracking number.",
             "Use this if somebody waits for a delivery."),
            (text("tracking_number trackingNumber parcel", reference_of),
             may(one_of("carrier shipper courier", "post rail ship plane"))),
            """
            Where is my parcel {tracking_number}?
            track {tracking_number}
            Parcel {tracking_number}
            When will the package {tracking_number} come? It was sent by {carrier}.
            look where the parcel {tracking_number} is
            """,
            ("{where}", "last seen in {where}"), "The parcel is in {where}.", where=city_of),
    service("find_synonyms findSynonyms thesaurus Thesaurus", "word",
            ("Find synonyms of a word.", "Look for other words that mean the same.",
             "Use this when the user does not want to repeat a word."),
            (text("lemma vocable of_word", spelling_of),),
            """
            What's another word for {lemma}?
            Synonyms of {lemma}
            find synonyms for "{lemma}"
            Is there a better word than {lemma}?
            Other words for {lemma}
            """,
            ("{other}", "also: {other}"), "You could say {other}.", other=any_word),
    service("log_workout logWorkout track_exercise WorkoutLog", "workout",
            ("Log a workout.", "Record what sport the user did and for how long.",
             "Use this after the user has trained."),
            (text("sport activity discipline", any_word), whole("duration_min how_long spent",
             5, 240, "How many minutes"),
             may(one_of("intensity effort", "easy moderate hard"))),
            """
            I did {duration_min} minutes of {sport}
            log {duration_min} minutes of {sport}
            Workout: {sport}, {duration_min} min
            {duration_min} minutes of {sport}, it was {intensity}
            note that I trained {sport} for {duration_min} minutes
            """,
            ("logged", "{sport}: {duration_min} min"),
             "I logged {duration_min} minutes of {sport}."),
)  # fmt: skip
