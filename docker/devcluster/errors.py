"""The exception that the program converts to a message and exit code 2."""


class DevClusterError(Exception):
    """An error that the user can fix."""
