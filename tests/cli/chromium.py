"""A page in a real browser, driven over the pipe of Chromium's own protocol: keys, sizes, colours, pictures."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

from tests.deadlines import HANG

needs_chromium = pytest.mark.skipif(
    os.environ.get("PADDLE_SHARD_BROWSER") != "1" or shutil.which("chromium") is None,
    reason="draws for a minute or more: make test-page, with Debian's chromium",
)

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


class Browser:
    """One Chromium with one tab."""

    def __init__(self, profile):
        (theirs, self._ours), (self._answers, answers) = os.pipe(), os.pipe()
        # The protocol is on the descriptors 3 and 4: the shell puts the pipes there.
        moved = f'exec chromium "$@" 3<&{theirs} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "chromium", *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"],
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._number, self._read, self.asked, self.errors = 0, b"", [], []
        target = self.call("Target.createTarget", url="about:blank", session=None)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True, session=None)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def close(self):
        for end in (self._ours, self._answers):
            os.close(end)
        try:
            self._process.wait(HANG)  # it ends when its pipe does
        finally:
            self._process.kill()
            self._process.wait()

    def call(self, method, session="own", **params):
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._ours, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + HANG
        while True:
            while b"\0" not in self._read:
                if not select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[0]:
                    raise TimeoutError(f"Chromium did not answer {method} in {HANG} s")
                more = os.read(self._answers, 1 << 20)
                assert more, f"Chromium ended at {method}"
                self._read += more
            one, _, self._read = self._read.partition(b"\0")
            found = json.loads(one)
            if found.get("method") == "Network.requestWillBeSent":
                self.asked.append(found["params"]["request"]["url"])
            if found.get("method") == "Runtime.exceptionThrown":
                self.errors.append(found["params"]["exceptionDetails"])
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]

    def run(self, expression):
        """Return the JSON value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, path, hash="", *, width=1280, height=900, dark=False):
        """Open a file, and wait until all is drawn."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"file://{path}#{hash}")
        self.settle()

    def settle(self):
        """Wait until the page has drawn everything."""
        until("the page is drawn", lambda: self.run("document.body && document.body.dataset.busy") == "no")
        self.run("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        until("the page is drawn", lambda: self.run("document.body.dataset.busy") == "no")

    def press(self, key, code=0):
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path):
        """Save a screenshot of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


def until(what, holds):
    deadline = time.monotonic() + HANG
    while not holds():
        assert time.monotonic() < deadline, f"not in {HANG} s: {what}"
        time.sleep(0.02)


@contextmanager
def chromium(profile):
    """A browser, which is closed at the end."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
