"""Tools that do something for people: the calendar, the home, messages, bookings."""

from random import Random

from bench.demo_model.errands import CITY, free_text, may, one_of, service, several, text, whole
from bench.demo_model.particulars import (
    chore_of,
    clock_of,
    day_of,
    length_of,
    message_of,
    person_of,
    phone_of,
    spot_of,
    symbol_of,
    title_of,
)
from bench.demo_model.words import FOODS, any_word, city_of, name_of


def _room(rng: Random) -> str:
    rooms = "kitchen bedroom bathroom office hall garage cellar garden attic nursery".split()
    return rng.choice(rooms) if rng.random() < 0.5 else any_word(rng)


def _titles(rng: Random) -> str:
    return ", ".join(title_of(rng) for _ in range(rng.randint(1, 3)))


def _dish(rng: Random) -> str:
    return rng.choice(FOODS) if rng.random() < 0.4 else f"{any_word(rng)} {rng.choice(FOODS)}"


def _while(rng: Random) -> str:
    return f"{rng.randint(2, 59)} minutes"


_DATE = text("date day when on_date", day_of, "The day, as the user says it")
_TIME = text("time at start_time startTime", clock_of, "The time of the day")
SERVICES = (
    service("create_event createEvent add_event CreateCalendarEvent calendar-add", "event",
            ("Create an event in the calendar.", "Add an appointment to the user's calendar.",
             "Schedule a meeting or another event on a day. Use it when something gets a date."),
            (free_text("title name summary subject", title_of, "What it is called"), _DATE,
             may(_TIME), may(text("place location where", spot_of))),
            """
            create an event called {title} on {date} at {time}
            add {title} to my calendar for {date}
            put "{title}" in my calendar on {date}
            schedule {title} for {date} at {time}
            New event: {title}, {date}, {time}, {place}
            I have {title} on {date} at {time}. Put it in the calendar.
            book a meeting "{title}" on {date} in {place}
            """,
            ("Event created.", "Created: {title} ({date})"), "I put {title} on {date}."),
    service("list_events listEvents get_calendar GetAgenda calendar_events", "calendar",
            ("List the events of a day.", "Show what is in the calendar on a given day.",
             "Get the user's appointments. Use it for questions about their day."),
            (_DATE,),
            """
            What's on my calendar on {date}?
            What do I have on {date}?
            Am I busy on {date}?
            show my appointments for {date}
            Do I have any meetings on {date}?
            My schedule for {date}
            What am I doing on {date}?
            """,
            ("{events}", "On {date}: {events}"), "On {date} you have: {events}.", events=_titles),
    service("set_reminder setReminder create_reminder remind AddReminder", "reminder",
            ("Set a reminder.", "Remind the user of something at a time.",
             "Use this when the user wants to be reminded of something later."),
            (free_text("text task message what", chore_of, "What to be reminded of"),
             text("time at remind_at remindAt", clock_of, "When to remind"), may(_DATE)),
            """
            remind me to {text} at {time}
            remind me at {time} to {text}
            set a reminder for {time}: {text}
            Reminder at {time}, {text}
            Don't let me forget to {text} at {time}.
            I must {text} at {time} on {date}, remind me!
            {time} reminder: {text}
            """,
            ("Reminder set for {time}.", "I will remind you."),
            "I will remind you at {time} to {text}."),
    service("add_todo addTodo add_task create_task todo-add AddTask", "task",
            ("Add a task to the to-do list.", "Put something that has to be done on the list.",
             "Use this when the user names something that they have to do."),
            (free_text("task title item todo", chore_of, "What has to be done"),
             may(one_of("priority importance", "low medium high urgent")),
             may(text("due due_date due_by", day_of, "The day by which it is due"))),
            """
            add {task} to my to-do list
            put {task} on my list
            Todo: {task}
            I need to {task} by {due}, add it to my tasks.
            add a task with {priority} priority: {task}
            New task: {task}, due {due}, priority {priority}
            """,
            ("Task added.", "Added: {task}"), "I put it on your list: {task}."),
    service("complete_todo completeTask mark_done finish_task TaskDone", "task",
            ("Mark a task as done.", "Tick off a task on the to-do list.",
             "Use this once the user has finished a task."),
            (free_text("task title name todo", chore_of, "What is done"),),
            """
            mark {task} as done
            I'm done with: {task}
            tick off {task}
            {task} is done
            Finished! {task} can go off my list.
            complete the task {task}
            """,
            ("Marked as done.", "{task}: done"), "The task is done: {task}."),
    service("add_to_shopping_list addGroceries shopping_list_add BuyList", "shopping list",
            ("Add items to the shopping list.", "Put what is to be bought on the list.",
             "Use this if the user runs out of something or wants to buy groceries."),
            (several("items products things", _dish, "What to buy"),),
            """
            add {items} to the shopping list
            put {items} on my shopping list
            We need {items}.
            We're out of {items}, put that on the shopping list
            Shopping list: {items}
            I have to buy {items} at the shop
            """,
            ("Added.", "On the list: {items}"), "On the shopping list now: {items}."),
    service("set_timer setTimer start_timer StartCountdown countdown", "timer",
            ("Set a timer.", "Start a timer that rings after some minutes.",
             "Start a countdown. Use it when the user cooks or wants to wait a while."),
            (whole("minutes duration duration_minutes mins", 2, 120, "How many minutes"),
             may(text("label name title", any_word, "What the timer is for"))),
            """
            set a timer for {minutes} minutes
            {minutes} minute timer
            start a {minutes} minute timer called {label}
            Timer, {minutes} min
            count down {minutes} minutes
            Tell me when {minutes} minutes are over.
            set a timer of {minutes} minutes for the {label}
            """,
            ("Timer started.", "Timer: {minutes} min"), "The timer is set for {minutes} minutes."),
    service("set_alarm setAlarm alarm_clock wake_up WakeUser", "alarm",
            ("Set an alarm.", "Set the alarm clock to a time.",
             "Use this when somebody wants to be woken."),
            (_TIME, may(text("day date weekday", day_of))),
            """
            wake me at {time}
            set an alarm for {time}
            Alarm {time}
            I have to get up at {time} on {day}.
            set my alarm to {time} for {day}
            Wake me up at {time}, will you?
            """,
            ("Alarm set.", "Alarm: {time}"), "The alarm is set for {time}."),
    service("play_music playMusic play_song PlayTrack music-play", "music",
            ("Play music.", "Play a song, an album or an artist.",
             "Start music on the loudspeaker. Use it when the user wants to hear something."),
            (free_text("song title query track", title_of, "What to play"),
             may(text("artist singer by", person_of)),
             may(text("device speaker room", _room, "Where to play it"))),
            """
            play {song}
            play {song} by {artist}
            put on {song}
            I want to hear {song}.
            Some {song} by {artist}, please!
            play "{song}" in the {device}
            start the song {song}
            """,
            ("Playing.", "Now playing: {song}"), "Now you hear {song}."),
    service("pause_music pausePlayback stop_music StopPlayback", "playback",
            ("Pause the music.", "Stop what is playing at the moment.",
             "Use this when the user wants silence."), (),
            """
            pause the music
            stop the music
            Music off
            Silence, please!
            stop playing
            Enough music for now.
            """,
            ("Paused.", "Nothing is playing now."), "I paused the music."),
    service("set_volume setVolume volume change_volume SetLoudness", "volume",
            ("Set the volume.", "Change how loud the loudspeaker is, from 0 to 100.",
             "Use this when it is too loud or too quiet."),
            (whole("level volume percent value", 0, 100, "From 0 to 100"),
             may(text("device speaker room", _room, "Which loudspeaker"))),
            """
            set the volume to {level}
            Volume {level}
            turn it up to {level}
            turn the volume down to {level} percent
            Make it {level}% loud in the {device}.
            set the {device} speaker to {level}
            """,
            ("Volume: {level}", "The volume is now {level}."), "The volume is {level} now."),
    service("switch_light switchLight set_lights lights LightSwitch control_light", "light",
            ("Switch a light.", "Turn the light in a room on or off.",
             "Control the lamps of the home. Use it when it is too dark or too bright."),
            (text("room area location", _room, "In which room"),
             one_of("state action status", "on off"),
             may(whole("brightness level", 1, 100, "In percent"))),
            """
            turn {state} the light in the {room}
            turn the {room} light {state}
            {room} lights {state}
            switch {state} the lamp in the {room} at {brightness} percent
            Lights {state} in the {room}!
            I want the light in the {room} {state}.
            """,
            ("The light is {state}.", "{room}: {state}"), "The light in the {room} is {state}."),
    service("control_lock setLock door_lock DoorLock lock-control", "lock",
            ("Lock or unlock a door.", "Control the lock of a door.",
             "Use this when the user leaves, comes home or asks for a door to be locked."),
            (text("door name entrance", _room, "Which door"),
             one_of("action command mode", "lock unlock", "What to do with it")),
            """
            {action} the {door} door
            Could somebody {action} the {door} door?
            {door} door: {action}
            {action} the door of the {door}
            I'd like to {action} the {door} door
            """,
            ("done", "The {door} door: {action}, done."), "Done: {action} the {door} door."),
    service("get_directions getDirections plan_route route Directions", "route",
            ("Find the way from one place to another.", "Get directions between two places.",
             "Plan a route. Use it if the user asks how to get somewhere."),
            (text("origin from start from_place", spot_of, "Where the way begins"),
             text("destination to end to_place", spot_of, "Where the way ends"),
             may(one_of("mode travel_mode by", "car bike train bus foot"))),
            """
            How do I get from {origin} to {destination}?
            Directions from {origin} to {destination} by {mode}
            find a route from {origin} to {destination}
            Way to {destination} from {origin}
            show me the way to {destination} from {origin} by {mode}
            I'm at {origin} and need to go to {destination}
            """,
            ("{steps}", "Follow this: {steps}"),
            "From {origin} to {destination}: {steps}",
            steps=lambda rng: f"{length_of(rng)} on {name_of(rng)} Street, then {length_of(rng)}"),
    service("search_flights searchFlights find_flights FlightSearch flights", "flight",
            ("Search for flights.", "Find flights from one city to another on a day.",
             "Use this when the user wants to fly somewhere."),
            (text("from origin departure from_city", city_of, "Where to start"),
             text("to destination arrival to_city", city_of, "Where to land"), _DATE,
             may(whole("passengers travellers seats", 2, 9))),
            """
            find flights from {from} to {to} on {date}
            Flights {from} to {to} {date}
            I want to fly from {from} to {to} on {date}.
            Is there a flight to {to} from {from} on {date}?
            search flights from {from} to {to} for {passengers} people on {date}
            We are {passengers} and need to get from {from} to {to} by plane on {date}
            """,
            ("{flight}", "Flight {flight}"), "There is the flight {flight} to {to}.",
            flight=lambda rng: f"{symbol_of(rng)[:2]} {rng.randrange(9999)}"),
    service("book_hotel bookHotel hotel_booking reserve_room HotelBooking", "hotel",
            ("Book a hotel.", "Reserve a hotel room in a city.",
             "Use this if the user needs a bed for some nights."),
            (CITY, text("date check_in checkin arrival", day_of, "The first day"),
             whole("nights night_count stay", 2, 21, "How many nights"),
             may(whole("guests people adults", 2, 6))),
            """
            book a hotel in {city} for {nights} nights from {date}
            I need a room in {city} from {date} for {nights} nights.
            Hotel in {city}, {date}, {nights} nights, {guests} guests
            reserve a hotel room in {city} on {date}, {nights} nights
            We are {guests} people and stay {nights} nights in {city} from {date}, find us a hotel
            """,
            ("Booked: {hotel}", "Your room is at {hotel}."),
            "You have a room in {city} at {hotel}.", hotel=lambda rng: f"Hotel {name_of(rng)}"),
    service("book_table reserveTable restaurant_reservation BookRestaurant", "reservation",
            ("Book a table in a restaurant.", "Reserve a table for some people at a time.",
             "Use this when the user wants to eat out."),
            (free_text("restaurant name place", title_of), whole("people guests party_size seats",
             2, 12, "For how many people"), _TIME, may(_DATE)),
            """
            book a table for {people} at {restaurant} at {time}
            reserve a table at {restaurant} for {people} people, {time}
            Table for {people} at {restaurant}, {date} {time}
            We want to eat at {restaurant} on {date} at {time}, {people} of us.
            get us a table for {people} at {time} in {restaurant}
            """,
            ("Reserved.", "Table for {people} at {time}"),
            "A table for {people} is reserved at {restaurant} for {time}."),
    service("find_restaurants findRestaurants restaurant_search RestaurantFinder", "restaurant",
            ("Find restaurants.", "Search for restaurants in a city.",
             "Use this if somebody is hungry and asks where to eat."),
            (CITY, may(text("cuisine food kind", _dish, "What they serve"))),
            """
            Where can I eat {cuisine} in {city}?
            find a restaurant in {city}
            Good restaurants in {city}?
            {cuisine} restaurants in {city}
            Any place with {cuisine} in {city}?
            I'm hungry. What restaurants are there in {city}?
            """,
            ("{name}", "Open now: {name}"), "In {city} there is {name}.", name=person_of),
    service("order_food orderFood food_order FoodDelivery", "order",
            ("Order food.", "Have a meal brought to an address.",
             "Use this when the user wants food delivered."),
            (text("dish item meal food", _dish), whole("quantity count amount", 1, 12),
             may(text("address deliver_to to", spot_of))),
            """
            order {quantity} {dish}
            get me {quantity} {dish} to {address}
            I'd like {quantity} {dish}.
            {quantity} {dish} to {address}
            have {quantity} {dish} delivered to {address}
            We want {quantity} x {dish}, order it
            """,
            ("Ordered, {wait}", "It comes in {wait}."),
            "I ordered {quantity} {dish}. It takes {wait}.", wait=_while),
    service("create_note createNote add_note save_note NewNote take-note", "note",
            ("Save a note.", "Write a note that the user can read later.",
             "Use this when the user wants something to be written down."),
            (free_text("content text body note", message_of),
             may(free_text("title name heading", title_of))),
            """
            make a note: {content}
            note that {content}
            write down "{content}"
            Note to self: {content}
            save a note called {title} that says {content}
            take a note with the title {title}: {content}
            """,
            ("Saved.", "Note saved: {content}"), "I wrote down: {content}"),
    service("send_message sendMessage text_message send_sms SendText", "message",
            ("Send a message.", "Send somebody a text message on their phone.",
             "Use this when the user wants to tell somebody something. It is not for emails."),
            (text("to recipient contact person", person_of, "Who gets it"),
             free_text("message text body content", message_of, "What it says")),
            """
            text {to}: {message}
            send {to} a message: {message}
            tell {to} that {message}
            message {to} "{message}"
            send a text to {to} saying {message}
            Let {to} know that {message}.
            """,
            ("Sent.", "Message to {to} sent."), "I told {to}: {message}"),
    service("make_call makeCall phone_call call_contact Dial", "call",
            ("Call somebody on the phone.", "Start a phone call with a person or a number.",
             "Use this when the user wants to talk to somebody."),
            (text("who contact number person to",
             lambda rng: rng.choice((person_of, phone_of))(rng), "A name or a number"),),
            """
            call {who}
            ring {who}
            phone {who} now
            dial {who}
            I want to talk to {who}.
            Get me {who} on the phone.
            """,
            ("Calling.", "Calling {who}"), "I am calling {who}."),
)  # fmt: skip
