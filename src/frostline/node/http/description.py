"""Describes an HTTP service in OpenAPI 3.1, from what its routes say of themselves and the types of its messages."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from frostline.core.declared import Amount, OneOf, Schemas, Within
from frostline.core.errors import BadRequest, FrostlineError, Overloaded, StoreUnavailable, Unauthenticated, Unavailable
from frostline.node.http.requests import check_parameters
from frostline.wire.messages import STATUS_OF_ERROR

__all__ = (
    "BINARY",
    "Body",
    "DescribedRoute",
    "Endpoint",
    "Parameter",
    "describe",
    "first_of_page",
    "openapi_route",
    "page_parameter",
)

BINARY = "application/octet-stream"
"""Media type of bytes."""

_PAGE_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What a request or an answer holds.

    Attributes:
        said: sentences about it.
        kind: type of the message, where it is JSON.
        others: media types in which it may come too, and sentences about each.
    """

    said: str
    kind: Any = None
    others: Mapping[str, str] = field(default_factory=dict)

    def to_json(self, schemas: Schemas, *, is_asked: bool) -> dict[str, Any]:
        """The description, of what a client sends where it is asked."""
        content: dict[str, Any] = {}
        if self.kind is not None:
            content["application/json"] = {"schema": schemas.of(self.kind, is_asked=is_asked)}
        for media, said in self.others.items():
            kind = {} if media.startswith("text/") else {"contentMediaType": media}
            about = {"description": said} if said else {}
            content[media] = {"schema": {"type": "string", **kind, **about}}
        return {"description": self.said, **({"content": content} if content else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A value in the address or the head of a request.

    Attributes:
        name: the name.
        place: ``path``, ``query`` or ``header``.
        said: sentence about it.
        kind: type of the value.
        is_needed: True if it must be there.
    """

    name: str
    place: str
    said: str
    kind: Any
    is_needed: bool = False

    def to_json(self, schemas: Schemas) -> dict[str, Any]:
        """The description."""
        is_needed = self.is_needed or self.place == "path"
        about = {"name": self.name, "in": self.place, "required": is_needed, "description": self.said}
        return {**about, "schema": schemas.of(self.kind)}


class ErrorAnswer(TypedDict):
    """A refusal, or a failure.

    Attributes:
        error: name of the error.
        message: one sentence to act on.
        retry_after_s: seconds to wait, where that is known.
    """

    error: Annotated[str, OneOf(tuple(sorted(kind.__name__ for kind in STATUS_OF_ERROR)))]
    message: str
    retry_after_s: NotRequired[Amount]


def first_of_page(request: Request, name: str) -> int:
    """The number of the first of some things that a page is to have, from 0, by the parameter of that name.

    Raises:
        BadRequest: The parameter is no such number.
    """
    number = request.query_params.get(name, "0")
    if not number.isascii() or not number.isdigit() or len(number) > _PAGE_DIGITS:
        raise BadRequest(f"{name} must be the number of the first one, counted from 0")
    return int(number)


def page_parameter(name: str, following: str) -> Parameter:
    """The description of that parameter; ``following`` is the field that says the first of the next page."""
    said = f"Number of the first of the {name} that are given, from 0; `{following}` of the page before says it."
    return Parameter(name=name, place="query", said=said, kind=Annotated[int, Within(0, 10**_PAGE_DIGITS - 1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What one method of a route does.

    Attributes:
        name: name of the operation, for programs that are made from the description.
        summary: one sentence.
        answers: bodies of answers where all is well, by HTTP status.
        body: body of the request; None where it has none.
        parameters: values in its address and its head.
        refusals: errors that it answers with beside those of every request.
        is_open: True if it answers everybody, whatever they send.
    """

    name: str
    summary: str
    answers: Mapping[int, Body]
    body: Body | None = None
    parameters: tuple[Parameter, ...] = ()
    refusals: tuple[type[FrostlineError], ...] = ()
    is_open: bool = False

    def to_json(self, schemas: Schemas, method: str) -> dict[str, Any]:
        """The description."""
        answers = {str(status): body.to_json(schemas, is_asked=False) for status, body in self.answers.items()}
        asked = () if self.is_open else (BadRequest, Unauthenticated)
        for status, kinds in _by_status((*asked, *self.refusals)).items():
            said = " ".join(f"`{kind.__name__}`: {(kind.__doc__ or '').strip()}" for kind in kinds)
            refusal = Body(said=said.replace("``", "`"), kind=None if method == "head" else ErrorAnswer)
            answers.setdefault(str(status), {**refusal.to_json(schemas, is_asked=False), **_headers(kinds)})
        made: dict[str, Any] = {"operationId": self.name, "summary": self.summary, "responses": answers}
        if self.body is not None:
            made["requestBody"] = {"required": True, **self.body.to_json(schemas, is_asked=True)}
        if self.parameters:
            made["parameters"] = [parameter.to_json(schemas) for parameter in self.parameters]
        return {**made, **({"security": [{}]} if self.is_open else {})}


class DescribedRoute(Route):
    """A route that says what it does.

    Args:
        path: path of its addresses.
        endpoint: function that answers.
        **operations: description of each method.
    """

    def __init__(self, path: str, endpoint: Any, **operations: Endpoint) -> None:
        super().__init__(path, endpoint, methods=[method.upper() for method in operations])
        self.operations = operations


def describe(title: str, routes: Iterable[BaseRoute], components: Mapping[str, Any]) -> dict[str, Any]:
    """The whole description.

    Args:
        title: name of the service.
        routes: routes of the service.
        components: schemas that messages refer to by name.
    """
    schemas = Schemas(dict(components))
    described = [route for route in routes if isinstance(route, DescribedRoute)]
    # Messages that clients send come first: what they and answers have in common is described as it may be sent.
    for body in (operation.body for route in described for operation in route.operations.values() if operation.body):
        body.to_json(schemas, is_asked=True)
    paths = {
        route.path: {method: operation.to_json(schemas, method) for method, operation in route.operations.items()}
        for route in described
    }
    info = {
        "title": title,
        "version": "1",
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        "description": "Bodies of requests announce their length with Content-Length. A service that was started with "
        "tenants asks for `Authorization: Bearer` and a tenant's token.",
    }
    return {
        "openapi": "3.1.0",
        "info": info,
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas.components},
    }


def openapi_route(describe_app: Callable[[Starlette], dict[str, Any]]) -> DescribedRoute:
    """The route that answers with the description of its application, which is made when it is first asked for.

    Args:
        describe_app: function that makes it.
    """
    made: list[bytes] = []

    async def answer(request: Request) -> Response:
        check_parameters(request)
        if not made:
            made.append(json.dumps(describe_app(request.app)).encode())
        return Response(made[0], media_type="application/json")

    said = Endpoint(
        name="description",
        summary="This description.",
        answers={200: Body(said="OpenAPI 3.1.", kind=dict[str, Any])},
        is_open=True,
    )
    return DescribedRoute("/v1/openapi.json", answer, get=said)


def _by_status(kinds: Sequence[type[FrostlineError]]) -> dict[int, list[type[FrostlineError]]]:
    found: dict[int, list[type[FrostlineError]]] = {}
    for kind in kinds:
        found.setdefault(STATUS_OF_ERROR[kind], []).append(kind)
    return found


def _headers(kinds: Sequence[type[FrostlineError]]) -> dict[str, Any]:
    if Unauthenticated in kinds:
        return {"headers": {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}}}
    if {Overloaded, Unavailable, StoreUnavailable} & set(kinds):
        seconds = {"type": "integer", "minimum": 1}
        return {"headers": {"Retry-After": {"description": "Whole seconds to wait.", "schema": seconds}}}
    return {}
