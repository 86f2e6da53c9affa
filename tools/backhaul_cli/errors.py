"""The error of a command."""


class CommandError(Exception):
    """A command cannot do what it was told. The message is one line; `detail` may be more, such as the end of a log."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail
