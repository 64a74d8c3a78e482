"""Every error moonvit raises on purpose, each with the answer it deserves.

MoonvitError                      500 server_error           exit 1
├── InvalidInputError             400 invalid_request_error  exit 2   also a ValueError
│   ├── EmptyInputError               empty_input
│   ├── GridError                     invalid_grid
│   ├── ImageError                    invalid_image
│   │   ├── UnsupportedMediaError     unsupported_media
│   │   └── MediaFetchError           media_fetch_failed
│   ├── PromptError                   invalid_prompt
│   ├── RequestError                  invalid_request
│   ├── NotFoundError             404 not_found
│   ├── AuthenticationError       401 invalid_api_key
│   ├── SlowRequestError          408 request_timeout
│   └── TooLargeError             413 request_too_large
├── BudgetError                   400 budget_exceeded        exit 3
├── ConfigError                   500 invalid_config         exit 4
│   └── CheckpointError               invalid_checkpoint
├── MissingDependencyError        500 missing_dependency     exit 5   also an ImportError
├── NonFiniteError                500 non_finite_features    exit 6
├── DivergenceError               500 diverged               exit 9
├── OverloadedError               429 overloaded             exit 7
└── EngineError                   503 engine_unavailable     exit 8

The server and the command line hold no mapping of their own: they read ``status``, ``type``, ``code`` and
``exit_code`` from the class.
"""

from __future__ import annotations

from typing import Any, ClassVar


class MoonvitError(Exception):
    """Base of the tree.

    Args:
        message: One sentence that names the value and the limit.
        param: The request field, image index or option that is at fault, if there is one.

    Attributes:
        rank: Which of several ranks it happened on, where that is known.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.rank: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The error in the shape of the OpenAI API.

        Returns:
            ``{"error": {"message", "type", "param", "code"}}``.
        """
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidInputError(MoonvitError, ValueError):
    """The caller can mend this by sending something else."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_input"
    exit_code = 2


class EmptyInputError(InvalidInputError):
    """Nothing was given where at least one item is needed."""

    code = "empty_input"


class GridError(InvalidInputError):
    """A patch grid is out of range, odd, or does not match its patches."""

    code = "invalid_grid"


class ImageError(InvalidInputError):
    """A picture cannot be read, or is over a limit."""

    code = "invalid_image"


class UnsupportedMediaError(ImageError):
    """The content is of a format that is not on the allow-list."""

    code = "unsupported_media"


class MediaFetchError(ImageError):
    """A picture could not be brought from its address."""

    code = "media_fetch_failed"


class PromptError(InvalidInputError):
    """The messages cannot be rendered for this model family."""

    code = "invalid_prompt"


class RequestError(InvalidInputError):
    """A field of the request is wrong, or is one this server does not honour."""

    code = "invalid_request"


class NotFoundError(InvalidInputError):
    """The model or the address asked for is not served here."""

    status = 404
    code = "not_found"


class AuthenticationError(InvalidInputError):
    """The request carries no key, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class SlowRequestError(InvalidInputError):
    """The body of the request did not arrive in time."""

    status = 408
    code = "request_timeout"


class TooLargeError(InvalidInputError):
    """The request is larger than what this process accepts."""

    status = 413
    code = "request_too_large"


class BudgetError(MoonvitError):
    """An image needs more workspace than the budget allows."""

    status = 400
    type = "invalid_request_error"
    code = "budget_exceeded"
    exit_code = 3


class ConfigError(MoonvitError):
    """A model configuration contradicts itself or names something unknown."""

    code = "invalid_config"
    exit_code = 4


class CheckpointError(ConfigError):
    """A checkpoint lacks tensors, has unexpected ones, or holds wrong shapes."""

    code = "invalid_checkpoint"


class MissingDependencyError(MoonvitError, ImportError):
    """An optional package is needed; the message holds the pip command that brings it."""

    code = "missing_dependency"
    exit_code = 5


class NonFiniteError(MoonvitError):
    """The encoder produced NaN or infinity for an image."""

    code = "non_finite_features"
    exit_code = 6


class DivergenceError(MoonvitError):
    """A stage of the tower differs from the reference by more than the gate."""

    code = "diverged"
    exit_code = 9


class OverloadedError(MoonvitError):
    """The queue is full; the same request may succeed later."""

    status = 429
    code = "overloaded"
    exit_code = 7


class EngineError(MoonvitError):
    """The engine is not there, or has stopped."""

    status = 503
    code = "engine_unavailable"
    exit_code = 8
