"""Tools of those who program: versions, issues, builds, containers, servers."""

from random import Random

from bench.demo_model.errands import flag, free_text, may, one_of, service, several, text, whole
from bench.demo_model.particulars import (
    count_of,
    message_of,
    repository_of,
)
from bench.demo_model.prose import code_line
from bench.demo_model.words import (
    any_path,
    any_word,
    kebab,
    mixed,
    phrase_of,
    spelling_of,
    url_of,
    word_of,
)


def _image(rng: Random) -> str:
    tag = rng.choice(("latest", f"{rng.randint(1, 20)}.{rng.randrange(20)}", any_word(rng)))
    return f"{repository_of(rng)}:{tag}" if rng.random() < 0.6 else repository_of(rng)


def _version(rng: Random) -> str:
    return f"{rng.choice(('v', ''))}{rng.randrange(12)}.{rng.randrange(30)}.{rng.randrange(30)}"


def _line(rng: Random) -> str:
    return code_line(rng).strip() or phrase_of(rng)


def _host(rng: Random) -> str:
    return f"{kebab(rng)}.{rng.choice(('com', 'org', 'net', 'local'))}"


_REPOSITORY = text("repo repository project repo_name", repository_of, "Which repository")
_CONTAINER = text("container name container_id containerName", repository_of, "Which container")
_SERVICE = text("service app service_name component", repository_of, "Which service")
_ENVIRONMENT = one_of("environment env target stage", "production staging test dev")

PROGRAMMING = (
    service("git_commit gitCommit commit commit_changes GitCommit", "commit",
            ("Commit the changes.", "Make a git commit of everything that was changed.",
             "Use this once a piece of work is done."),
            (free_text("message msg commit_message", message_of, "What the commit says"),
             may(flag("amend amend_last", "Change the last commit instead"))),
            """
            commit with the message "{message}"
            commit everything: {message}
            Git commit, message: {message}
            commit this as "{message}"
            make a commit that says {message}
            Commit message {message}, amend {amend}
            """,
            ("[main {commit}] {message}", "{commit}"), "I made the commit {commit}.", commit=mixed),
    service("git_log gitLog list_commits commit_history GitLog", "history",
            ("List the last commits.", "Show the last commits of a repository.",
             "Use this for questions about who changed what and when."),
            (whole("count limit n max_count", 2, 50, "How many commits"),),
            """
            show the last {count} commits
            What were the last {count} commits?
            Git log, {count} entries
            list {count} commits
            Last {count} changes, please
            """,
            ("{commit}", "{commit} by somebody"), "The last commit is {commit}.", commit=mixed),
    service("create_issue createIssue open_issue new_issue IssueCreate", "issue",
            ("Create an issue.", "Open an issue in a repository.",
             "Use this when somebody reports a bug or wishes for something."),
            (_REPOSITORY, free_text("title subject name", message_of, "One line"),
             may(several("labels tags", any_word))),
            """
            create an issue in {repo}: {title}
            open an issue "{title}" in {repo}
            New issue for {repo}: {title}
            file a bug against {repo}: {title}
            In {repo}: {title}. Open an issue with the labels {labels}.
            report "{title}" in {repo}, labels {labels}
            """,
            ("#{issue}", "Issue {issue} opened."), "I opened the issue {issue} in {repo}.",
            issue=count_of),
    service("list_issues listIssues get_issues IssueList", "issues",
            ("List the issues of a repository.", "Show which issues a repository has.",
             "Use this when the user asks what there is to be fixed."),
            (_REPOSITORY, may(one_of("state status filter", "open closed all"))),
            """
            What issues does {repo} have?
            list the {state} issues of {repo}
            show me issues in {repo}
            {state} issues in {repo}?
            Any bugs in {repo}?
            get the issues for {repo}
            """,
            ("{issue}", "1. {issue}"), "In {repo} there is: {issue}.", issue=message_of),
    service("create_pull_request createPullRequest open_pr pull_request CreatePR", "pull request",
            ("Create a pull request.", "Open a pull request for a branch.",
             "Use this when a branch is ready to be reviewed."),
            (text("branch head source head_branch", kebab),
             free_text("title subject name", message_of), may(text("base target into", any_word)),
             may(flag("draft is_draft", "Whether it is a draft"))),
            """
            open a pull request from {branch}: {title}
            create a PR for {branch} titled "{title}"
            PR {branch} into {base}: {title}
            make a pull request of {branch} against {base} called {title}
            {branch} is ready. Pull request title: {title}
            open a pr for {branch}, title {title}, draft {draft}
            """,
            ("#{pull}", "Pull request {pull}"), "I opened the pull request {pull}.", pull=count_of),
    service("merge_pull_request mergePullRequest merge_pr MergePR", "pull request",
            ("Merge a pull request.", "Merge a pull request that was approved.",
             "Use this after a review only."),
            (whole("number pr pull_number id", 1, 9999), may(one_of("method strategy",
             "squash rebase merge"))),
            """
            merge PR {number}
            merge pull request #{number}
            Pull request {number} can go in.
            merge #{number} with {method}
            {method} pull request {number}
            PR {number} is approved, merge it
            """,
            ("Merged.", "{number} merged"), "I merged the pull request {number}."),
    service("run_build runBuild start_build trigger_build BuildStart trigger_pipeline", "build",
            ("Start a build.", "Run the build of a branch.",
             "Use this when the continuous integration has to run again."),
            (text("branch ref git_ref", kebab), may(_REPOSITORY)),
            """
            start a build of {branch}
            build {branch}
            run the CI for {branch}
            kick off the pipeline on {branch} in {repo}
            Build of {branch} in {repo}, please.
            rebuild {branch}
            """,
            ("Build {build} started.", "{build}"), "The build {build} of {branch} runs.",
            build=count_of),
    service("get_build_status buildStatus build_status ci_status CheckBuild", "build",
            ("Get the state of a build.", "Tell whether a build passed.",
             "Use this if somebody asks whether the build is green."),
            (whole("build_id buildId build number", 1, 99_999, "Which build"),),
            """
            Did build {build_id} pass?
            Status of build {build_id}
            Is build {build_id} green?
            check build {build_id}
            How is build #{build_id} doing?
            What happened to build {build_id}
            """,
            ("{state}", "Build {build_id}: {state}"), "Build {build_id} is {state}.",
            state=lambda rng: rng.choice(("green", "red", "running", any_word(rng)))),
    service("run_tests runTests test_runner pytest RunTests", "tests",
            ("Run the tests.", "Run the tests of a file or folder.",
             "Use this after code was changed."),
            (text("path file target test_path", any_path),
             may(flag("verbose is_verbose", "Whether to say more"))),
            """
            run the tests in {path}
            test {path}
            Do the tests in {path} pass?
            Tests of {path}, verbose {verbose}
            run tests for {path}
            """,
            ("{count} passed", "all {count} tests passed"), "In {path} {count} passed.",
             count=count_of),
    service("docker_run dockerRun run_container start_container DockerRun", "container",
            ("Run a docker container.", "Start a container from an image.",
             "Use this when the user wants an image to run."),
            (text("image image_name imageName", _image), may(whole("port host_port publish",
             80, 9999)),
             may(text("name container_name", any_word))),
            """
            run the image {image}
            docker run {image}
            start a container from {image} on port {port}
            spin up {image} and call it {name}
            Container from {image}, port {port}, name {name}
            I need {image} running on {port}
            """,
            ("{container}", "Started {container}"), "The container {container} runs {image}.",
            container=mixed),
    service("stop_container stopContainer docker_stop DockerStop", "container",
            ("Stop a docker container.", "Stop a container that runs.",
             "Use this when a container is no longer needed."),
            (_CONTAINER,),
            """
            stop the container {container}
            docker stop {container}
            shut down container {container}
            Container {container} can be stopped.
            kill the {container} container
            """,
            ("{container}", "Stopped."), "The container {container} is stopped."),
    service("get_logs getLogs fetch_logs read_logs LogViewer tail_logs", "log",
            ("Get the logs of a service.", "Read the last lines of what a service wrote.",
             "Use this to find out why a service fails."),
            (_SERVICE, may(whole("lines limit tail n", 2, 1000)),
             may(one_of("level severity", "debug info warning error"))),
            """
            show me the logs of {service}
            Last {lines} log lines of {service}
            What do the logs of {service} say?
            Logs {service}
            get the {level} logs for {service}
            tail {lines} lines from {service}, level {level}
            """,
            ("{line}", "log: {line}"), "The log of {service} says: {line}", line=_line),
    service("deploy deploy_service deployApp release DeployService", "service",
            ("Deploy a service.", "Bring a version of a service to an environment.",
             "Use this when something has to go live."),
            (_SERVICE, _ENVIRONMENT, may(text("version tag release", _version))),
            """
            deploy {service} to {environment}
            ship {service} {version} to {environment}
            {service} to {environment}, version {version}
            Bring {service} to {environment}.
            roll out {version} of {service} on {environment}
            release {service} in {environment}
            """,
            ("Deployed.", "{service} runs in {environment}."),
             "{service} is deployed to {environment}."),
    service("server_status serverStatus check_server health_check PingServer ping", "server",
            ("Check whether a server is up.", "Ping a server.",
             "Use this if something does not answer."),
            (text("host server hostname address", _host, "Which server"),),
            """
            Is {host} up?
            ping {host}
            check the server {host}
            Status of {host}
            I can't reach {host}. Is it down?
            How is the server {host} doing?
            """,
            ("{state}", "{host}: {state}"), "{host} is {state}.",
            state=lambda rng: rng.choice(("up", "down", any_word(rng)))),
    service("http_get httpGet fetch fetch_url http_request WebFetch", "page",
            ("Fetch a page from the web.", "Send an HTTP request to an address.",
             "Use this when the user names an address in the web."),
            (text("url uri address link", url_of, "The whole address"),
             may(one_of("method verb http_method", "GET POST PUT DELETE HEAD"))),
            """
            fetch {url}
            What does {url} say?
            get me the page {url}
            send a {method} request to {url}
            {method} {url}
            open {url}
            Read {url} and tell me what it says.
            """,
            ("{body}", "200: {body}"), "The page says: {body}", body=phrase_of),
    service("hash_text hashText compute_hash checksum HashString", "hash",
            ("Compute the hash of a text.", "Calculate a checksum.",
             "Use this if the user needs a digest."),
            (free_text("text input data string", spelling_of, "What is hashed"),
             may(one_of("algorithm algo method", "md5 sha1 sha256 sha512"))),
            """
            hash {text} with {algorithm}
            What is the {algorithm} of {text}?
            {algorithm} of {text}
            compute the hash of "{text}"
            Hash of {text}?
            checksum {text}
            """,
            ("{digest}", "digest: {digest}"), "The hash is {digest}.", digest=mixed),
    service("base64 base64_encode encodeBase64 Base64 base64-tool", "text",
            ("Encode or decode base64.", "Turn a text into base64, or back.",
             "Use this for base64 only."),
            (free_text("text input data value", spelling_of, "What to encode or decode"),
             one_of("mode action operation", "encode decode", "What to do with it")),
            """
            Base64 {mode} {text}
            {mode} {text} in base64
            Please {mode} "{text}" (base64)
            Base64: {mode} {text}
            I have to {mode} {text} with base64.
            """,
            ("{output}", "output: {output}"), "That gives {output}.", output=mixed),
    service("install_package installPackage pip_install add_dependency PackageInstall", "package",
            ("Install a package.", "Add a package to the project.",
             "Use this if something is missing that a package has."),
            (text("package name package_name module", repository_of, "Which package"),
             may(text("version release", _version))),
            """
            install {package}
            add {package} {version} to the project
            I need the package {package}.
            install version {version} of {package}
            {package} is missing, install it
            We need {package} in version {version}
            """,
            ("Installed.", "{package} is installed."), "I installed {package}."),
    service("search_code searchCode grep code_search GrepTool find_in_files", "code",
            ("Search in the code.", "Find where a pattern stands in the files.",
             "Use this to find where something is used."),
            (free_text("pattern query regex term", spelling_of), may(text("path folder directory",
             any_path))),
            """
            Where is {pattern} used?
            grep for {pattern}
            find {pattern} in {path}
            search the code for {pattern}
            Which files contain "{pattern}"?
            look for {pattern} in {path}
            """,
            ("{place}", "found in {place}"), "It is in {place}.", place=any_path),
    service("create_uuid uuid generateUuid new_id GenerateId", "id",
            ("Generate a unique id.", "Make a new id that nothing else has.",
             "Use this if something needs a name of its own."), (),
            """
            generate a unique id
            I need a new uuid.
            A fresh uuid
            make a new id
            Give me an id that nobody else has
            """,
            ("{uuid}", "id: {uuid}"), "The new id is {uuid}.",
            uuid=lambda rng: f"{mixed(rng)}-{mixed(rng)}-{word_of(rng)}"),
)  # fmt: skip
