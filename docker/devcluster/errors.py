"""The one exception that the program turns into a message and exit code 2."""


class DevClusterError(Exception):
    """Something that the reader of the message can mend."""
