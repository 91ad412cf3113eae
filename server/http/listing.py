"""Lists in pages: ``?limit=``, and ``?after=`` with the cursor of the last item of the previous page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from fastapi import Depends, Query, Request, Response
from starlette.datastructures import URL

from ..core.api_model import ApiModel
from ..core.problems import Problem
from .rendering import make_json_response

T = TypeVar("T")
S = TypeVar("S")

# Members of groups in one response, or 1.5 MB: a group of 100,000 ranks repeats all of them for each
# rank.
MAX_MEMBERS_PER_PAGE = 1 << 18


class Page(ApiModel, Generic[T]):
    """Describes the responses; ``next`` is the URL of the next page."""

    items: list[T]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The page that a request wants: at most ``limit`` items after the one with the cursor ``after``."""

    url: URL
    limit: int
    after: str | None = None

    def make_response(
        self,
        rows: Iterable[S],
        make_cursor: Callable[[S], str],
        make_item: Callable[[S], object],
        count_members: Callable[[S], int] = lambda _: 0,
    ) -> Response:
        """The page of ``rows`` as JSON. It is shorter than ``limit`` if its items would have more than
        `MAX_MEMBERS_PER_PAGE` members by ``count_members``. Only the items of the page are built.
        Raises Problem for a stale cursor.
        """
        remaining = iter(rows)
        if self.after is not None and not any(make_cursor(row) == self.after for row in remaining):
            raise Problem(
                422,
                f"the list has no item {self.after!r} to continue after: start again without ?after=",
            )
        chosen: list[S] = []
        weight, next_url = 0, None
        for row in remaining:
            weight += count_members(row)
            if len(chosen) == self.limit or (chosen and weight > MAX_MEMBERS_PER_PAGE):
                url = self.url.include_query_params(after=make_cursor(chosen[-1]), limit=self.limit)
                next_url = f"{url.path}?{url.query}"
                break
            chosen.append(row)
        return make_json_response({"items": [make_item(row) for row in chosen], "next": next_url})


def _read_page_request(default_limit: int) -> Callable[..., Awaitable[PageRequest]]:
    async def read_page_request(
        request: Request,
        limit: Annotated[
            int, Query(ge=1, le=10_000, description="maximum number of items in one response")
        ] = default_limit,
        after: Annotated[
            str | None, Query(description="the cursor in `next` of the previous response")
        ] = None,
    ) -> PageRequest:
        return PageRequest(request.url, limit, after)

    return read_page_request


# Parameters of a route: pages of up to 100 large items, or 1000 small ones, unless requested otherwise.
PageOf100 = Annotated[PageRequest, Depends(_read_page_request(100))]
PageOf1000 = Annotated[PageRequest, Depends(_read_page_request(1000))]
