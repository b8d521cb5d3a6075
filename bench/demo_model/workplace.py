"""Tools of an office and a shop: orders, customers, data, tickets, files."""

from random import Random

from bench.demo_model.errands import free_text, may, number, one_of, service, text
from bench.demo_model.particulars import (
    count_of,
    day_of,
    message_of,
    money_of,
    person_of,
    reference_of,
    title_of,
)
from bench.demo_model.words import any_path, any_word, email_of, number_of, snake, spelling_of


def _sql(rng: Random) -> str:
    table, column = any_word(rng), rng.choice(("*", any_word(rng), snake(rng)))
    condition = f"{any_word(rng)} {rng.choice('=<>')} {number_of(rng)}"
    return rng.choice(
        (
            f"SELECT {column} FROM {table}",
            f"SELECT {column} FROM {table} WHERE {condition}",
            f"SELECT COUNT(*) FROM {table} WHERE {condition}",
            f"DELETE FROM {table} WHERE {condition}",
            f"select {column} from {table} limit {rng.randint(1, 99)}",
        )
    )


def _state(rng: Random) -> str:
    return rng.choice(("open", "paid", "sent", "late", "new", "ready", any_word(rng)))


_ORDER = text("order_id orderId id order number", reference_of, "What the order goes by")

WORKPLACE = (
    service("get_order getOrder order_status track_order OrderLookup", "order",
            ("Get the state of an order.", "Look up an order by its number.",
             "Use this when a customer asks where their order is."),
            (_ORDER,),
            """
            Where is my order {order_id}?
            What's the status of order {order_id}?
            check order {order_id}
            Has order {order_id} been shipped?
            I ordered something, the number is {order_id}. Where is it?
            Order {order_id} status
            """,
            ("{state}", "Order {order_id}: {state}"), "The order {order_id} is {state}.",
            state=_state),
    service("cancel_order cancelOrder order_cancel CancelOrder", "order",
            ("Cancel an order.", "Cancel an order that was not sent yet.",
             "Use this if a customer does not want their order any more."),
            (_ORDER, may(free_text("reason why comment", message_of, "Why it is not wanted"))),
            """
            cancel order {order_id}
            I don't want order {order_id} any more.
            cancel my order {order_id} because {reason}
            Stop order {order_id}, reason: {reason}
            cancel the order with the number {order_id}
            """,
            ("Cancelled.", "{order_id} is cancelled."), "The order {order_id} is cancelled."),
    service("refund_payment refundPayment issue_refund Refund", "payment",
            ("Refund a payment.", "Give a customer money back.",
             "Use this once it is clear that the customer shall get their money back."),
            (text("payment_id paymentId payment id", reference_of, "What the payment goes by"),
             number("amount sum value", money_of)),
            """
            refund {amount} for payment {payment_id}
            give back {amount} of payment {payment_id}
            Payment {payment_id}: refund {amount}
            The customer gets {amount} back from {payment_id}.
            issue a refund of {amount} on {payment_id}
            """,
            ("Refunded.", "{amount} refunded"), "I refunded {amount} of payment {payment_id}."),
    service("create_invoice createInvoice new_invoice InvoiceCreate", "invoice",
            ("Create an invoice.", "Write an invoice for a customer.",
             "Use this when somebody has to be billed."),
            (text("customer client customer_name to", person_of, "Who pays"),
             number("amount total sum", money_of, "How much, without a currency"),
             may(text("due_date dueDate due", day_of)), may(free_text("item description for",
             title_of))),
            """
            create an invoice for {customer} over {amount}
            bill {customer} {amount}
            Invoice to {customer}: {amount}, due {due_date}
            invoice {customer} {amount} for {item}
            {customer} owes us {amount} for {item}. Write an invoice.
            make out an invoice of {amount} to {customer}
            """,
            ("Invoice {invoice}", "Created {invoice}."), "{customer} gets the invoice {invoice}.",
            invoice=reference_of),
    service("find_customer getCustomer customer_lookup CustomerSearch", "customer",
            ("Find a customer.", "Look up a customer by their email address.",
             "Use this before anything is changed for a customer."),
            (text("email mail email_address", email_of),),
            """
            find the customer {email}
            Who is {email}?
            look up the customer with the email {email}
            Customer {email}
            Do we have a customer {email}?
            get me the record of {email}
            """,
            ("{name}", "Customer: {name}"), "That is {name}.", name=person_of),
    service("create_user createUser add_user register_user NewUser", "user",
            ("Create a user.", "Make an account for somebody new.",
             "Use this when somebody has to get access."),
            (text("username user login name", spelling_of), text("email mail address", email_of),
             may(one_of("role group permission", "admin editor viewer guest"))),
            """
            create a user {username} with the email {email}
            add {username} ({email}) as {role}
            New user: {username}, {email}
            Give {username} an account, the address is {email}.
            register {username} {email}
            Make an account for {username}, email {email}, role {role}
            """,
            ("User created.", "{username} was added."), "{username} has an account now."),
    service("check_stock checkInventory inventory get_stock_level StockLevel", "product",
            ("Check the stock of a product.", "Tell how many pieces of a product are left.",
             "Use this if somebody asks whether a product can be had."),
            (free_text("product sku item product_name", title_of, "What is asked for"),),
            """
            How many {product} do we have left?
            Is {product} in stock?
            check the inventory for {product}
            {product} in stock?
            Stock level of {product}
            Do you still have {product}?
            """,
            ("{count}", "{count} left"), "There are {count} of {product}.", count=count_of),
    service("query_database queryDatabase db_query DatabaseQuery run_sql sql", "database",
            ("Query the database.", "Run a statement in SQL.",
             "Use this for questions that the data can answer, written in SQL."),
            (free_text("query sql statement", _sql, "A statement in SQL"),
             may(text("database db schema", any_word, "Which database"))),
            """
            run this query: {query}
            {query}
            query the database: {query}
            What does `{query}` return?
            execute {query}
            run {query} on the database {database}
            On {database}: {query}
            """,
            ("{rows}", "1 row: {rows}"), "The database says: {rows}", rows=spelling_of),
    service("describe_table describeTable table_schema TableInfo", "table",
            ("Describe a table.", "List the columns of a table in the database.",
             "Use this before you write SQL for a table."),
            (text("table table_name tableName", lambda rng: rng.choice((any_word, snake))(rng),
             "What the table is called"),),
            """
            What columns does {table} have?
            describe the table {table}
            Schema of {table}
            Which fields are in the {table} table?
            show me the columns of {table}
            """,
            ("{columns}", "Columns: {columns}"), "{table} has the columns {columns}.",
            columns=lambda rng: f"id, {any_word(rng)}, {any_word(rng)}"),
    service("create_ticket createTicket open_ticket new_ticket TicketCreate", "ticket",
            ("Create a ticket.", "Open a ticket for the support team.",
             "Use this when the user has a problem that you cannot solve."),
            (free_text("title subject summary", message_of),
             one_of("priority severity urgency", "low normal high critical")),
            """
            open a ticket: {title}, priority {priority}
            create a {priority} priority ticket saying that {title}
            New {priority} ticket: {title}
            {title}. Make a ticket, it's {priority}.
            file a ticket "{title}" with {priority} priority
            """,
            ("{ticket}", "Ticket {ticket}"), "I opened the ticket {ticket}.", ticket=reference_of),
    service("assign_ticket assignTicket ticket_assign AssignTo", "ticket",
            ("Assign a ticket to somebody.", "Give a ticket to a person who works on it.",
             "Use this when it is clear who takes care of a ticket."),
            (text("ticket_id ticketId ticket id key", reference_of, "Which ticket"),
             text("assignee user to person", person_of)),
            """
            assign {ticket_id} to {assignee}
            {assignee} takes {ticket_id}
            give ticket {ticket_id} to {assignee}
            Ticket {ticket_id} is for {assignee}.
            make {assignee} the owner of ticket {ticket_id}
            """,
            ("Assigned.", "{ticket_id}: {assignee}"), "{assignee} has the ticket {ticket_id} now."),
    service("post_to_slack slackPost slack_message send_slack_message SlackPost", "channel",
            ("Post a message in Slack.", "Write to a Slack channel.",
             "Use this when a team has to know something."),
            (text("channel channel_name room", lambda rng: f"#{any_word(rng)}", "With its #"),
             free_text("text message content", message_of, "What it says")),
            """
            post in {channel}: {text}
            tell {channel} that {text}
            Slack {channel}: {text}
            write "{text}" to {channel}
            send "{text}" to the {channel} channel on Slack
            Let everybody in {channel} know: {text}
            """,
            ("Posted.", "Message is in {channel}."), "I wrote to {channel}: {text}"),
    service("move_file moveFile rename_file mv MoveFile", "file",
            ("Move a file.", "Move or rename a file.",
             "Use this when a file has to lie somewhere else."),
            (text("source from src old_path", any_path), text("destination to dst new_path",
             any_path)),
            """
            move {source} to {destination}
            rename {source} to {destination}
            mv {source} {destination}
            {source} should be at {destination}
            Put {source} at {destination}.
            """,
            ("Moved.", "{source} -> {destination}"), "{source} is at {destination} now."),
    service("delete_file deleteFile remove_file rm RemoveFile", "file",
            ("Delete a file.", "Remove a file for good.",
             "Use this only if the user asks for it."),
            (text("path file file_path filename", any_path),),
            """
            delete {path}
            remove the file {path}
            rm {path}
            I don't need {path} any more, delete it.
            get rid of {path}
            {path} can be deleted
            """,
            ("Deleted.", "{path} is gone."), "I deleted {path}."),
    service("request_leave requestLeave book_vacation time_off VacationRequest", "leave",
            ("Request days off.", "Ask for leave for an employee.",
             "Use this when somebody at work wants a holiday."),
            (text("employee name person who", person_of, "Who is away"),
             text("start from start_date", day_of),
             text("end to until end_date", day_of)),
            """
            request leave for {employee} from {start} to {end}
            {employee} is off from {start} to {end}
            {employee} wants a holiday, {start} to {end}.
            Days off for {employee}: {start} - {end}
            enter vacation for {employee} from {start} until {end}
            """,
            ("Requested.", "Leave for {employee} is in."),
            "I requested leave for {employee} from {start} to {end}."),
    service("convert_file convertFile file_converter ConvertDocument", "file",
            ("Convert a file to another format.", "Turn a file into another kind of file.",
             "Use this when a file cannot be opened as it is."),
            (text("path file input source", any_path),
             one_of("format to target_format output", "pdf docx html txt png csv json")),
            """
            convert {path} to {format}
            make a {format} of {path}
            {path} as {format}
            I need {path} as a {format} file.
            turn {path} into {format}
            """,
            ("Converted.", "{path} is a {format} now."), "{path} is converted to {format}."),
)  # fmt: skip
