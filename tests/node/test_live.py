"""Answers that go on: what is sent is made once for all who may see the same, and viewers are few."""

import json
from contextlib import asynccontextmanager

import anyio
import pytest
from starlette.requests import Request

from frostline.core.errors import Overloaded
from frostline.node.http.pages import LiveAnswers

BOTH = "text/event-stream, application/json"


class Made:
    def __init__(self):
        self.count = 0

    async def __call__(self, rights):
        self.count += 1
        return {"rights": rights, "count": self.count}


class Viewer:
    """One viewer, without a socket."""

    def __init__(self):
        self.sent, self.gone, self.has_three = [], anyio.Event(), anyio.Event()

    async def send(self, message):
        self.sent.append(message)
        if len(self.events()) == 3:
            self.has_three.set()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def events(self):
        bodies = [message["body"] for message in self.sent if message.get("body")]
        return [json.loads(body.removeprefix(b"data: ")) for body in bodies]


def asked(accept):
    return Request({"type": "http", "headers": [(b"accept", accept.encode())]})


@asynccontextmanager
async def watching(live, rights, count):
    """Viewers that each have been sent three events."""
    viewers = [Viewer() for _ in range(count)]
    async with anyio.create_task_group() as group:
        for viewer in viewers:
            answer = await live.answer(asked(BOTH), rights)
            group.start_soon(answer, {}, viewer.receive, viewer.send)
        for viewer in viewers:
            await viewer.has_three.wait()
        yield viewers
        for viewer in viewers:
            viewer.gone.set()


def test_it_is_made_once_for_all_viewers_with_the_same_rights():
    async def run():
        made = Made()
        live = LiveAnswers(made, period_s=0.05)
        async with watching(live, "all", 5) as viewers:
            events = max((viewer.events() for viewer in viewers), key=len)
            assert made.count <= len(events) + 1
            assert live.viewers == 5
        assert live.viewers == 0

    anyio.run(run)


def test_too_many_viewers_are_given_it_once_or_refused_and_places_become_free():
    async def run():
        made = Made()
        live = LiveAnswers(made, max_viewers=1, period_s=0.01)
        async with watching(live, "all", 1):
            once = await live.answer(asked(BOTH), "all")
            assert once.media_type == "application/json"
            assert json.loads(once.body)["rights"] == "all"
            with pytest.raises(Overloaded, match="ask for JSON each second"):
                await live.answer(asked("text/event-stream"), "all")
        async with watching(live, "own", 1) as [viewer]:
            assert viewer.events()[0]["rights"] == "own"

    anyio.run(run)


def test_who_does_not_accept_events_is_given_json():
    async def run():
        answer = await LiveAnswers(Made()).answer(asked("*/*"), "all")
        assert json.loads(answer.body) == {"rights": "all", "count": 1}

    anyio.run(run)


def test_a_viewer_that_takes_nothing_is_left(monkeypatch):
    monkeypatch.setattr("frostline.node.http.pages._SILENCE_S", 0.02)

    async def run():
        live, viewer = LiveAnswers(Made(), period_s=0.01), Viewer()

        async def send(message):
            if message["type"] == "http.response.body":
                await anyio.sleep_forever()

        answer = await live.answer(asked(BOTH), "all")
        await answer({}, viewer.receive, send)
        assert live.viewers == 0

    anyio.run(run)
