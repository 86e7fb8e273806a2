"""`OutputConstraint`: the form that a client asks of an answer, with the client's name of the field."""

from __future__ import annotations

from typing import NamedTuple

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.structured_outputs import FIELD, StructuredOutputsParams


class OutputConstraint(NamedTuple):
    """A constraint of the output's form."""

    params: StructuredOutputsParams | None = None
    """None: no constraint."""
    field: str = FIELD
    """The client's name of the field, for error messages."""

    def forced(self, by_tools: StructuredOutputsParams | None) -> OutputConstraint:
        """This constraint together with that of `tool_choice`, if there is one. Raises: InvalidRequest if both constrain."""
        if by_tools is None:
            return self
        if self.params is None:
            return OutputConstraint(by_tools, "tools")
        if self.params.constraints:
            raise InvalidRequest("tool_choice forces a call, so that no other form can be asked for", "tool_choice")
        return OutputConstraint(by_tools.with_options_of(self.params), "tools")

    def verify(self) -> None:
        """Check size and shape; an engine checks whether it compiles. Raises: InvalidRequest naming the client's field."""
        if self.params is None:
            return
        try:
            self.params.verify()
        except InvalidRequest as error:
            told = error.message if self.field == FIELD else f"{self.field}: {error.message}"
            raise InvalidRequest(told, self.field) from None
