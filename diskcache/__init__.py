"""The session state on disk: immutable objects under a hard limit, a miss or right."""
