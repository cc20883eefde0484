"""The one tree of exceptions. Each class has a stable code; each instance says what happened and what to do.

A service turns any ShoalError into JSON `{code, message, hint}`, the command line into one sentence. Anything that is not
a ShoalError is a bug and keeps its traceback.
"""


class ShoalError(Exception):
    """Base of every error that a user or another role may see."""

    code = "error"
    permanent = False
    """Whether the same command would end the same way: a supervisor does not start the role again."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ConfigError(ShoalError):
    """A run file, a flag or a value that cannot be used."""

    code = "config"
    permanent = True


class KeyFileError(ShoalError):
    """A key file that is missing, unreadable or not a key."""

    code = "key_file"
    permanent = True


class SignatureError(ShoalError):
    """A signature that does not belong to the bytes and the key it is shown with."""

    code = "bad_signature"
    permanent = False


class IntegrityError(ShoalError):
    """Bytes whose digest is not the promised one, or that break the limits of their format."""

    code = "integrity"
    permanent = False


class UnavailableError(ShoalError):
    """Somebody did not answer before the deadline; the message names whom and how long."""

    code = "unavailable"
    permanent = False


class RefusedError(ShoalError):
    """The other side answered with a refusal; `code`, `status` and `permanent` are its own."""

    permanent = False

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "",
        status: int = 0,
        permanent: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.permanent = permanent
        self.status = status
        self.retry_after_s = retry_after_s
        """When asking again makes sense, if the other side said so."""


def one_line(error: Exception) -> str:
    """What another library says, short and without its last full stop, to quote inside a sentence."""
    return " ".join(str(error).split())[:300].rstrip(".")


def first_line(error: BaseException) -> str:
    """What a foreign exception says, short enough for one sentence; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
