"""Drives a real browser over its debugging pipe: pages that are sent events have no end that it could wait for."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
# The browser reads descriptor 3 and writes 4, which a process of Python cannot give it by number.
_STARTER = """
import fcntl, os, sys
asked, told = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(asked, 3)
os.dup2(told, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_LONGEST_S = 200.0
_LOOK_S = 0.05


def browser_path():
    """The browser of this machine; None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("FROSTLINE_BROWSER") or "", *NAMES))), None)


class Browser:
    """One page of a browser.

    Attributes:
        errors: texts that its console has as errors, and exceptions.
    """

    def __init__(self, process, asked, told):
        self._process, self._asked, self._told = process, asked, told
        self._number, self._rest, self._session = 0, b"", None
        self.errors = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **arguments):
        """The result of a method of the debugging protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._asked, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + _LONGEST_S
        while True:
            answer = self._message(until_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def visit(self, address):
        """Open an address."""
        self.call("Page.navigate", url=address)

    def value(self, expression):
        """The value of an expression in the page, which its policy does not forbid."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression, longest_s=_LONGEST_S):
        """Wait until an expression is true, and return its value."""
        until_s = time.monotonic() + longest_s
        while not (found := self._value_or_none(expression)):
            assert time.monotonic() < until_s, f"{expression} stayed false; the console has {self.errors}"
            time.sleep(_LOOK_S)
        return found

    def press(self, *keys):
        """Press keys one after another: named ones, or characters."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        for key in keys:
            pressed = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
            text = {"Enter": "\r"}.get(key, key if key not in codes else None)
            self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def size(self, width, height, *, scale=1, is_dark=False):
        """Lay the page out as on a screen of that size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path):
        """Write what is seen to a file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def dom(self):
        """The page as it is now."""
        return self.value("document.documentElement.outerHTML")

    def _value_or_none(self, expression):
        """The value of an expression; None where it fails, as in a page that is not there yet."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return None if "exceptionDetails" in found else found["result"].get("value")

    def _message(self, until_s):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._told], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._told, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message):
        values = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(values["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if values["type"] == "error":
                self.errors.append(str(values["args"]))


@contextmanager
def a_browser(folder, *options):
    """A page of a browser that has its profile in a folder; the browser ends with the block."""
    (asked, to_ask), (to_tell, told) = os.pipe(), os.pipe()
    command = [browser_path(), *QUIET, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", *options]
    starter = [sys.executable, "-c", _STARTER, str(asked), str(told)]
    with subprocess.Popen(
        [*starter, *command], pass_fds=(asked, told), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        os.close(asked)
        os.close(told)
        try:
            yield Browser(process, to_ask, to_tell)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            os.close(to_ask)
            os.close(to_tell)
